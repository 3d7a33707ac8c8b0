"""The Equinox face: layers as ``eqx.Module``s, for JAX.

Ids may have any shape; one id under ``jax.vmap``, as Equinox has it, is one of them. What
changes a layer returns another. :mod:`firstlayer.equinox.rows` trains large tables at the cost
of a batch.
"""

try:
    import equinox as _equinox  # noqa: F401
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in {"equinox", "jax", "jaxlib"}:
        raise
    raise ImportError(
        "firstlayer.equinox needs JAX and Equinox: pip install firstlayer[equinox]"
    ) from error

from . import rows as rows
from .alibi import AlibiBias as AlibiBias
from .bag import EmbeddingBag as EmbeddingBag
from .files import load as load
from .files import save as save
from .fire import FireBias as FireBias
from .fourier import FourierFeatures as FourierFeatures
from .kerple import KerpleBias as KerpleBias
from .layer import EmbeddingLayer as EmbeddingLayer
from .learned import LearnedPositions as LearnedPositions
from .rotary import RotaryPositions as RotaryPositions
from .shaw import ShawScores as ShawScores
from .sinusoidal import SinusoidalPositions as SinusoidalPositions
from .t5 import T5Bias as T5Bias
from .token import Embedding as Embedding

__all__ = [
    "AlibiBias",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingLayer",
    "FireBias",
    "FourierFeatures",
    "KerpleBias",
    "LearnedPositions",
    "RotaryPositions",
    "ShawScores",
    "SinusoidalPositions",
    "T5Bias",
    "load",
    "rows",
    "save",
]
