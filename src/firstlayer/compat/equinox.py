"""Drop-in replacements for ``equinox.nn.Embedding`` and ``RotaryPositionalEmbedding``.

Differences from Equinox: rotary modules with different ``theta`` do not share a cache, and
an id out of range is an IndexError (NaN under tracing) instead of the first or last row.
The trees have the same leaves, so files written by ``eqx.tree_serialise_leaves`` load in
either.
"""

# Imported first: raises the error that names the package to install without JAX.
from ..equinox import Embedding as _Embedding
from ..equinox import RotaryPositions

# isort: split

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._array import compute_dtype
from .._check import not_negative
from ..equinox._module import is_concrete
from ..equinox._parameters import Key, table_dtype
from ..equinox._positions import Offset, check_reach, positions_argument
from ..positions.rotary import rotate

__all__ = ["Embedding", "RotaryPositionalEmbedding"]


class Embedding(_Embedding):
    """Look up rows of a table, for one id or an array of any shape.

    Args:
        num_embeddings: Number of rows. Taken from ``weight`` if None.
        embedding_size: Width of each row. Taken from ``weight`` if None.
        weight: Table to use instead of drawing one.
        dtype: Dtype of the table. None is JAX's default, or the dtype of ``weight``.
        key: PRNG key for drawing the table from N(0, 1).

    Shape:
        - x: integers of any shape, scalars under ``jax.vmap`` as in Equinox; negative ones
          count from the end
        - output: ``(*x.shape, embedding_size)``

    Example:
        >>> import jax
        >>> embedding = Embedding(5, 3, key=jax.random.key(0))
        >>> jax.vmap(embedding)(jnp.array([4, 0])).shape
        (2, 3)
        >>> embedding(jnp.array(7))
        Traceback (most recent call last):
        ...
        IndexError: ids is 7, but num_embeddings is 5
    """

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: Float[Any, "num_embeddings embedding_size"] | None = None,
        dtype: Any = None,
        *,
        key: Key | None = None,
    ) -> None:
        if weight is not None:
            shape = np.shape(weight)
            if len(shape) != 2:
                raise ValueError(
                    f"weight must have shape (num_embeddings, embedding_size), got {shape}"
                )
            num_embeddings = shape[0] if num_embeddings is None else num_embeddings
            embedding_size = shape[1] if embedding_size is None else embedding_size
        if num_embeddings is None or embedding_size is None:
            raise ValueError("give num_embeddings and embedding_size, or weight")
        super().__init__(
            num_embeddings, embedding_size, weight=weight, dtype=dtype, key=key
        )

    def __call__(
        self, x: Any, *, key: Key | None = None
    ) -> Float[Array, "*batch embedding_size"]:
        """Return the rows of ``x``.

        Args:
            x: One id or an array of ids; -1 is the last row.
            key: Ignored, as in Equinox.
        """
        return super().__call__(_from_the_front(x, self.num_embeddings))

    @property
    def embedding_size(self) -> int:
        """Width of each row."""
        return self.embedding_dim


class RotaryPositionalEmbedding(eqx.Module):
    """Rotate vectors by their positions, pairing feature ``i`` with ``i + size / 2``.

    Args:
        embedding_size: Width of each vector. Even and non-negative.
        theta: Base of the frequencies.
        dtype: Dtype that cosines and sines are rounded to. None is JAX's default.

    Shape:
        - x: ``(..., length, embedding_size)``, reals
        - output: as ``x``, in the dtype of ``x``

    Example:
        >>> x = jnp.ones((2, 2))
        >>> np.asarray(RotaryPositionalEmbedding(2)(x), np.float64)[1].round(4).tolist()
        [-0.3012, 1.3818]
    """

    embedding_size: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    rotary: RotaryPositions | None

    def __init__(
        self, embedding_size: int, theta: float = 10_000.0, dtype: Any = None
    ) -> None:
        if not_negative("embedding_size", embedding_size) % 2:
            raise ValueError(f"embedding_size must be even, got {embedding_size}")
        self.embedding_size, self.theta = int(embedding_size), float(theta)
        self.dtype = table_dtype(dtype)
        self.rotary = (
            RotaryPositions(embedding_size, base=theta) if embedding_size else None
        )

    @staticmethod
    def rotate_half(
        x: Float[Array, "*lead embedding_size"],
    ) -> Float[Array, "*lead embedding_size"]:
        """Return ``x`` with its halves exchanged and the new first half negated.

        Example:
            >>> RotaryPositionalEmbedding.rotate_half(jnp.array([1.0, 2.0])).tolist()
            [-2.0, 1.0]
        """
        half = x.shape[-1] // 2
        return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)

    @staticmethod
    def precompute_freqs_cis(
        embedding_size: int, end: int, theta: float, dtype: Any
    ) -> tuple[Float[Array, "end pairs"], Float[Array, "end pairs"]]:
        """Return the cosines and sines of the first positions, one column per pair.

        Args:
            embedding_size: Width of each vector. Even and non-negative.
            end: Number of positions.
            theta: Base of the frequencies.
            dtype: Dtype of the result.

        Example:
            >>> cos, sin = RotaryPositionalEmbedding.precompute_freqs_cis(
            ...     4, 3, 10_000.0, jnp.float32
            ... )
            >>> np.asarray(sin, np.float64).round(4).tolist()
            [[0.0, 0.0], [0.8415, 0.01], [0.9093, 0.02]]
        """
        layer = RotaryPositionalEmbedding(embedding_size, theta, dtype)
        return layer._phases(np.arange(not_negative("end", end)))

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*lead length embedding_size"],
        *,
        offset: Offset = 0,
        key: Key | None = None,
    ) -> Float[Array, "*lead length embedding_size"]:
        """Return ``x`` rotated by its positions.

        Args:
            x: Queries or keys.
            offset: Number of preceding positions, for decoding with a cache.
            key: Ignored, as in Equinox.
        """
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x must be real, got {x.dtype.name}")
        if x.ndim < 2 or x.shape[-1] != self.embedding_size:
            raise ValueError(
                f"x must have shape (..., length, {self.embedding_size}), got {x.shape}"
            )
        if self.rotary is None:
            return x
        length = x.shape[-2]
        argument = positions_argument(
            length, positions=None, offset=offset, check=check_reach
        )
        cos, sin = self._phases(argument.count(length))
        return rotate(x, cos, sin, layout="half").astype(x.dtype)

    def _phases(self, positions: Any) -> tuple[Array, Array]:
        """Return cosines and sines in the dtype of the module."""
        if self.rotary is None:
            empty = jnp.zeros((*np.shape(positions), 0), self.dtype)
            return empty, empty
        phases = self.rotary.phases(positions, dtype=compute_dtype(self.dtype))
        cos, sin = (part.astype(self.dtype) for part in phases)
        return cos, sin


def _from_the_front(ids: Any, num_embeddings: int) -> Any:
    """Return ids with those from ``-num_embeddings`` to -1 counted from the front."""
    if is_concrete(ids):
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        return ids
    where = np.where if isinstance(ids, np.ndarray) else jnp.where
    # num_embeddings may not fit into int8.
    ids = ids.astype(jnp.promote_types(ids.dtype, np.int32))
    is_from_end = (ids < 0) & (ids >= -num_embeddings)
    return where(is_from_end, ids + num_embeddings, ids)
