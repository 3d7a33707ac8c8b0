"""PyTorch front end: ``nn.Module`` layers, and the functions behind them.

``Embedding`` and ``EmbeddingBag`` are drop-in replacements for torch's.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "firstlayer.torch needs PyTorch: pip install firstlayer[torch]"
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
from .hf import HFRotary as HFRotary
from .hf import replace_rotary as replace_rotary
from .kerple import KerpleBias as KerpleBias
from .layer import EmbeddingLayer as EmbeddingLayer
from .learned import LearnedPositions as LearnedPositions
from .rotary import RotaryPositions as RotaryPositions
from .shaw import ShawScores as ShawScores
from .sinusoidal import SinusoidalPositions as SinusoidalPositions
from .t5 import T5Bias as T5Bias
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
    "FireBias",
    "FourierFeatures",
    "HFRotary",
    "KerpleBias",
    "LearnedPositions",
    "PartlyFrozenEmbedding",
    "RotaryPositions",
    "ShawScores",
    "SinusoidalPositions",
    "T5Bias",
    "Time2Vec",
    "TransformerXLScores",
    "XPosRotary",
    "functional",
    "load",
    "replace_rotary",
    "save",
]
