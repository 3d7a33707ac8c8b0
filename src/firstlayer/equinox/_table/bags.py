"""Bags of rows in JAX: what :mod:`firstlayer.embeddings.bag` says, for ids as a matrix and with offsets.

Every operation has gradients of every order by itself. A bag with an id that is not a row,
where that cannot be refused, is NaN, and its other rows are not trained by it either: the
gradient of NaN would spoil them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from ..._check import FLOATS
from ...embeddings.bag import Mode, divide_or_zero, pool
from ...embeddings.ragged import bag_bounds, bag_indices
from .lookup import on_host, whole


def checked_offsets(
    shape: tuple[int, ...], offsets: Any, *, include_last_offset: bool
) -> Int32[Array, " ends"] | None:
    """Return where each bag begins and the end of the last, or None for 2-D ids.

    Args:
        shape: Of the ids.
        offsets: What the caller gave.
        include_last_offset: Whether the last offset is the end of the last bag.
    """
    if offsets is None and len(shape) == 2:
        return None
    values = None if offsets is None else on_host(offsets)
    if offsets is None or values is not None:
        bounds = bag_bounds(shape, values, include_last_offset=include_last_offset)
        return jnp.asarray(bounds.astype(np.int32))
    # Traced: the axes are looked at as ever, and offsets stand for those of one empty bag.
    bag_bounds(shape if len(shape) != 1 else (0,), [0])
    found = whole(offsets, name="offsets")
    if found.ndim != 1:
        raise ValueError(f"offsets must have 1 axis, got shape {found.shape}")
    # Narrowed once it is within reach, or 2 ** 32 would be 0; what was not is beyond all.
    found = jnp.where((found < 0) | (found > shape[0]), shape[0] + 1, found)
    found = found.astype(jnp.int32)
    if include_last_offset:
        return found
    return jnp.concatenate([found, jnp.full((1,), shape[0], jnp.int32)])


def checked_weights(shape: tuple[int, ...], weights: Any) -> Array | None:
    """Return ``per_sample_weights`` as an array of the shape of the ids, or None."""
    if weights is None:
        return None
    found = weights if isinstance(weights, jax.Array) else np.asarray(weights)
    if found.dtype.kind not in "iu" and found.dtype.name not in FLOATS:
        raise TypeError(
            f"per_sample_weights must be integers or reals, got {found.dtype.name}"
        )
    if found.shape != shape:
        raise ValueError(
            f"per_sample_weights must have the shape {shape} of ids, got {found.shape}"
        )
    return jnp.asarray(found)


def pool_matrix(
    rows: Float[Array, "bags length embedding_dim"],
    counted: Bool[Array, "bags length"],
    *,
    weights: Float[Array, "bags length"] | None,
    mode: Mode,
) -> Float[Array, "bags embedding_dim"]:
    """Pool the rows of each bag, as :func:`firstlayer.embeddings.bag.pool` does."""
    steps = jnp.arange(rows.shape[1])

    def one(rows: Array, counted: Array, weights: Array | None) -> Array:
        return pool(rows, counted, steps=steps, weights=weights, mode=mode)

    return jax.vmap(one, in_axes=(0, 0, None if weights is None else 0))(
        rows, counted, weights
    )


@dataclass(frozen=True, eq=False)
class Ragged:
    """Bags one after the other.

    Args:
        bounds: Where each begins, and the end of the last.
        size: How many ids there are. Those after the last bag are in none.
    """

    bounds: Int32[Array, " ends"]
    size: int

    @property
    def count(self) -> int:
        """How many bags there are."""
        return self.bounds.shape[0] - 1

    @property
    def numbers(self) -> Int[Array, " ids"]:
        """Which bag each id is in; ``count`` where it is in none."""
        return bag_indices(self.bounds, jnp.arange(self.size, dtype=jnp.int32))

    @property
    def valid(self) -> Bool[Array, ""]:
        """Whether the offsets begin with 0, do not decrease and end with the ids."""
        rises = jnp.all(self.bounds[1:] >= self.bounds[:-1])
        return (self.bounds[0] == 0) & rises & (self.bounds[-1] <= self.size)

    def pooled(
        self,
        rows: Float[Array, "ids embedding_dim"],
        counted: Bool[Array, " ids"],
        *,
        weights: Float[Array, " ids"] | None,
        mode: Mode,
    ) -> Float[Array, "bags embedding_dim"]:
        """Pool rows by bag, as :func:`firstlayer.embeddings.bag.pool` does along an axis."""
        ones = counted.astype(rows.dtype)
        factors = ones if weights is None else jnp.where(counted, weights, 0.0)
        terms = jnp.where(counted[:, None], rows * factors[:, None], 0.0)
        if mode == "max" and self.size:
            return self._largest(terms, counted)
        sums = self._summed(terms)
        if mode == "mean":
            return divide_or_zero(sums, self._summed(factors)[:, None])
        return sums

    def anywhere(self, flags: Bool[Array, " ids"]) -> Bool[Array, " bags"]:
        """Return for which bags a flag of theirs is True."""
        return self._summed(flags.astype(jnp.int32)) > 0

    def _summed(self, terms: Array) -> Array:
        return jax.ops.segment_sum(terms, self.numbers, self.count)

    def _largest(self, terms: Array, counted: Array) -> Array:
        """Return the largest of each bag's terms; the first of equals gets the gradient."""
        numbers, lots = self.numbers, self.count + 1
        seen = jnp.where(counted[:, None], jax.lax.stop_gradient(terms), -float("inf"))
        top = jax.ops.segment_max(seen, numbers, lots)[numbers]
        hit = counted[:, None] & ((seen == top) | (jnp.isnan(seen) & jnp.isnan(top)))
        steps = jnp.arange(self.size, dtype=jnp.int32)[:, None]
        first = jax.ops.segment_min(jnp.where(hit, steps, self.size), numbers, lots)
        first = first[: self.count]
        near = jnp.minimum(first, self.size - 1)
        largest = jnp.take_along_axis(terms, near, axis=0)
        return jnp.where(first >= self.size, 0.0, largest)
