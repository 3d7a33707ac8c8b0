"""The Equinox face: layers as ``eqx.Module``s, for JAX.

Ids may have any shape; one id under ``jax.vmap``, as Equinox has it, is one of them. What
changes a layer returns another. :mod:`inlay.equinox.rows` trains large tables at the cost
of a batch.
"""

try:
    import equinox as _equinox  # noqa: F401
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in {"equinox", "jax", "jaxlib"}:
        raise
    raise ImportError(
        "inlay.equinox needs JAX and Equinox: pip install inlay[equinox]"
    ) from error

from . import rows as rows
from .bag import EmbeddingBag as EmbeddingBag
from .token import Embedding as Embedding
