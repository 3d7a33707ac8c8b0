"""PyTorch front end: ``nn.Module`` layers, and the functions behind them.

``Embedding`` and ``EmbeddingBag`` are drop-in replacements for torch's. :func:`install`
makes ``torch.nn.Embedding(...)`` build them; :func:`to_torch` does the opposite in a model.

Every layer can be exported with ``torch.export`` and ``torch.onnx.export`` (opset 18 or
later; torch's default is 20) and recorded with ``torch.jit.trace``, with dynamic batch and
length. Recorded graphs hold precomputed tables as float constants, which later casts of the
layer do not change. In these graphs:

- An id out of range, also a negative one, is an error of the runtime: an IndexError in
  torch, ``indices element out of data bounds`` in ONNX Runtime.
- Positions out of range give NaN.
- Half-precision gradients of repeated ids are summed by torch, in half precision.

The older exporter, ``torch.onnx.export(dynamo=False)``, passes all arguments by position:
call a layer with keyword-only arguments from a module of your own. It also requires
``requires_grad_(False)`` for ``PartlyFrozenEmbedding``.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "firstlayer.torch needs PyTorch: pip install 'firstlayer[torch]'"
    ) from error

from . import functional as functional
from .alibi import AlibiBias as AlibiBias
from .bag import EmbeddingBag as EmbeddingBag
from .cope import CopeBias as CopeBias
from .files import load as load
from .files import save as save
from .fire import FireBias as FireBias
from .fourier import FourierFeatures as FourierFeatures
from .frozen import PartlyFrozenEmbedding as PartlyFrozenEmbedding
from .frozen_rows import FrozenRowsEmbedding as FrozenRowsEmbedding
from .gates import EngramGate as EngramGate
from .gates import NgramAverage as NgramAverage
from .gates import ShortConvGate as ShortConvGate
from .growing import GrowingEmbedding as GrowingEmbedding
from .hashed import FrequencyEmbedding as FrequencyEmbedding
from .hashed import HashedEmbedding as HashedEmbedding
from .hashed import QuotientRemainderEmbedding as QuotientRemainderEmbedding
from .hf import HFRotary as HFRotary
from .hf import replace_rotary as replace_rotary
from .hf_embeddings import replace_embeddings as replace_embeddings
from .installation import install as install
from .installation import to_torch as to_torch
from .kerple import KerpleBias as KerpleBias
from .layer import EmbeddingLayer as EmbeddingLayer
from .learned import LearnedPositions as LearnedPositions
from .ngram import NgramEmbedding as NgramEmbedding
from .rotary import RotaryPositions as RotaryPositions
from .shaw import ShawScores as ShawScores
from .sinusoidal import SinusoidalPositions as SinusoidalPositions
from .t5 import T5Bias as T5Bias
from .table_group import Table as Table
from .table_group import TableGroup as TableGroup
from .time2vec import Time2Vec as Time2Vec
from .token import Embedding as Embedding
from .transformer_xl import TransformerXLScores as TransformerXLScores
from .xpos import XPosRotary as XPosRotary

__all__ = [
    "AlibiBias",
    "CopeBias",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingLayer",
    "EngramGate",
    "FireBias",
    "FourierFeatures",
    "FrequencyEmbedding",
    "FrozenRowsEmbedding",
    "HFRotary",
    "GrowingEmbedding",
    "HashedEmbedding",
    "KerpleBias",
    "LearnedPositions",
    "NgramAverage",
    "NgramEmbedding",
    "PartlyFrozenEmbedding",
    "QuotientRemainderEmbedding",
    "RotaryPositions",
    "ShawScores",
    "ShortConvGate",
    "SinusoidalPositions",
    "T5Bias",
    "Table",
    "TableGroup",
    "Time2Vec",
    "TransformerXLScores",
    "XPosRotary",
    "functional",
    "install",
    "load",
    "replace_embeddings",
    "replace_rotary",
    "save",
    "to_torch",
]
