"""Pooling of bags in JAX, for 2-D ids and for ids with offsets.

The rules are in :mod:`firstlayer.embeddings.bag`. A bag with a traced id out of range is
NaN and passes no gradient to any of its rows, because the gradient of NaN is NaN.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Integer, Real

from .._check import FLOATS, all_in_range, dtype_text, host_array
from ..embeddings import ragged
from ..embeddings.bag import Mode, divide_or_zero, pool
from ..embeddings.token import mask_out_of_range
from ._ids import call_values, host_values, traced_integers
from ._module import native


def checked_offsets(
    shape: tuple[int, ...], offsets: Any, *, include_last_offset: bool
) -> Integer[Any, " offsets"] | None:
    """Return the offsets of a call, checked if the host can read them; None for 2-D ids.

    Args:
        shape: Shape of the ids.
        offsets: The caller's offsets, or None.
        include_last_offset: Whether the last offset is the end of the last bag.
    """
    if offsets is None and len(shape) == 2:
        return None
    values = None if offsets is None else call_values(offsets)
    if offsets is None or values is not None:
        ragged.bag_bounds(shape, values, include_last_offset=include_last_offset)
        if isinstance(offsets, jax.Array):
            return offsets
        return np.asarray(offsets).astype(np.int32)
    # Check the axes of the ids against offsets that are known to be right.
    ragged.bag_bounds(shape if len(shape) != 1 else (0,), [0])
    offsets = traced_offsets(offsets, shape[0])
    if offsets.ndim != 1:
        raise ValueError(f"offsets must have 1 axis, got shape {offsets.shape}")
    if include_last_offset and not offsets.size:
        raise ValueError("offsets must have an end with include_last_offset, got none")
    return offsets


def traced_offsets(
    offsets: Integer[Array, "*offsets"], size: int, *, name: str = "offsets"
) -> Integer[Array, "*offsets"]:
    """Return traced offsets if their dtype is an integer dtype.

    Those of an eager ``vmap`` of a NumPy array are checked, because the first operation
    would truncate 64 bits to 32.

    Args:
        offsets: The caller's offsets.
        size: Number of ids.
        name: Name of the offsets in error messages.
    """
    offsets, values = traced_integers(offsets, name=name), host_values(offsets)
    if values is not None and not all_in_range(values, size + 1):
        wrong = values[(values < 0) | (values > size)].flat[0]
        raise ValueError(
            f"{name} must be between 0 and {size}, the number of ids, got {wrong}"
        )
    return offsets


def bag_bounds(
    offsets: Integer[Array, " offsets"], size: int, *, include_last: bool
) -> Int32[Array, " bounds"]:
    """Return the start of each bag and the end of the last, within a compiled function.

    Args:
        offsets: From :func:`checked_offsets`. Those out of range become ``size + 1``.
        size: Number of ids.
        include_last: Whether the last offset is the end of the last bag.
    """
    # Checked before the cast to int32, which would turn 2 ** 32 into 0.
    valid, offsets = mask_out_of_range(offsets, last=size)
    offsets = jnp.where(valid, offsets, size + 1)
    if include_last:
        return offsets
    return jnp.concatenate([offsets, jnp.full((1,), size, jnp.int32)])


def checked_weights(
    shape: tuple[int, ...], weights: Any, *, name: str = "per_sample_weights"
) -> Real[Any, "*ids"] | None:
    """Return ``per_sample_weights`` as an array of the shape of the ids, or None."""
    if weights is None:
        return None
    if not isinstance(weights, jax.Array):
        weights = native(host_array(weights, name=name))
    if weights.dtype.kind not in "iu" and weights.dtype.name not in FLOATS:
        raise TypeError(
            f"{name} must be integers or reals, got {dtype_text(weights.dtype)}"
        )
    if weights.shape != shape:
        raise ValueError(f"{name} must have the shape {shape} of ids, got {weights.shape}")
    return weights


@dataclass(frozen=True)
class MatrixBags:
    """Bags of 2-D ids, one in each row.

    Args:
        count: Number of bags.
    """

    count: int

    def pool(
        self,
        rows: Float[Array, "bags length embedding_dim"],
        counted: Bool[Array, "bags length"],
        *,
        weights: Float[Array, "bags length"] | None,
        mode: Mode,
    ) -> Float[Array, "bags embedding_dim"]:
        """Pool rows by bag with :func:`firstlayer.embeddings.bag.pool`."""
        steps = jnp.arange(rows.shape[1])

        def pool_one(rows: Array, counted: Array, weights: Array | None) -> Array:
            return pool(rows, counted, steps=steps, weights=weights, mode=mode)

        return jax.vmap(pool_one, in_axes=(0, 0, None if weights is None else 0))(
            rows, counted, weights
        )


@dataclass(frozen=True, eq=False)
class RaggedBags:
    """Bags of different lengths, stored one after the other.

    Args:
        bounds: Start of each bag, and the end of the last one.
        size: Number of ids. Ids after the last bag belong to no bag.
    """

    bounds: Int32[Array, " bounds"]
    size: int

    @property
    def count(self) -> int:
        """Number of bags."""
        return self.bounds.shape[0] - 1

    @property
    def numbers(self) -> Int[Array, " ids"]:
        """Bag number of each id; ``count`` for ids in no bag."""
        return ragged.bag_indices(self.bounds, jnp.arange(self.size, dtype=jnp.int32))

    @property
    def valid(self) -> Bool[Array, ""]:
        """Whether the bounds start at 0, do not decrease and stay within the ids."""
        ascending = jnp.all(self.bounds[1:] >= self.bounds[:-1])
        return (self.bounds[0] == 0) & ascending & (self.bounds[-1] <= self.size)

    def pool(
        self,
        rows: Float[Array, "ids embedding_dim"],
        counted: Bool[Array, " ids"],
        *,
        weights: Float[Array, " ids"] | None,
        mode: Mode,
    ) -> Float[Array, "bags embedding_dim"]:
        """Pool rows by bag, with the rules of :func:`firstlayer.embeddings.bag.pool`."""
        ones = counted.astype(rows.dtype)
        factors = ones if weights is None else jnp.where(counted, weights, 0.0)
        terms = jnp.where(counted[:, None], rows * factors[:, None], 0.0)
        if mode == "max" and self.size:
            return self._max(terms, counted)
        sums = self._sum(terms)
        if mode == "mean":
            return divide_or_zero(sums, self._sum(factors)[:, None])
        return sums

    def any(self, flags: Bool[Array, " ids"]) -> Bool[Array, " bags"]:
        """Return which bags have an id whose flag is True."""
        return self._sum(flags.astype(jnp.int32)) > 0

    def _sum(self, terms: Array) -> Array:
        return jax.ops.segment_sum(terms, self.numbers, self.count)

    def _max(self, terms: Array, counted: Array) -> Array:
        """Return the largest term of each bag; the first of equals gets the gradient."""
        numbers, segments = self.numbers, self.count + 1
        values = jnp.where(counted[:, None], jax.lax.stop_gradient(terms), -float("inf"))
        top = jax.ops.segment_max(values, numbers, segments)[numbers]
        is_top = (values == top) | (jnp.isnan(values) & jnp.isnan(top))
        steps = jnp.arange(self.size, dtype=jnp.int32)[:, None]
        steps = jnp.where(counted[:, None] & is_top, steps, self.size)
        first = jax.ops.segment_min(steps, numbers, segments)[: self.count]
        index = jnp.minimum(first, self.size - 1)
        largest = jnp.take_along_axis(terms, index, axis=0)
        return jnp.where(first >= self.size, 0.0, largest)
