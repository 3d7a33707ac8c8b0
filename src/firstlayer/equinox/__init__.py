"""Equinox front end: layers as ``eqx.Module``s, for JAX.

Ids may have any shape, including a single id under ``jax.vmap``. Methods that change a
layer return a new one. :mod:`firstlayer.equinox.optim` trains large tables at the cost of a
batch, exactly; :mod:`firstlayer.equinox.rows` does so lazily, with any optax optimizer.
"""

try:
    import equinox as _equinox  # noqa: F401
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in {"equinox", "jax", "jaxlib"}:
        raise
    raise ImportError(
        "firstlayer.equinox needs JAX and Equinox: pip install 'firstlayer[equinox]'"
    ) from error

from ..embeddings.hashed import split_ids as split_ids
from . import rows as rows
from .alibi import AlibiBias as AlibiBias
from .bag import EmbeddingBag as EmbeddingBag
from .cope import CopeBias as CopeBias
from .files import load as load
from .files import save as save
from .fire import FireBias as FireBias
from .fourier import FourierFeatures as FourierFeatures
from .gates import EngramGate as EngramGate
from .gates import NgramAverage as NgramAverage
from .gates import ShortConvGate as ShortConvGate
from .growing import GrowingEmbedding as GrowingEmbedding
from .hashed import FrequencyEmbedding as FrequencyEmbedding
from .hashed import HashedEmbedding as HashedEmbedding
from .hashed import QuotientRemainderEmbedding as QuotientRemainderEmbedding
from .kerple import KerpleBias as KerpleBias
from .layer import EmbeddingLayer as EmbeddingLayer
from .learned import LearnedPositions as LearnedPositions
from .leaves import load_leaves as load_leaves
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
    "GrowingEmbedding",
    "HashedEmbedding",
    "KerpleBias",
    "LearnedPositions",
    "NgramAverage",
    "NgramEmbedding",
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
    "load",
    "load_leaves",
    "rows",
    "save",
    "split_ids",
]
