"""Ragged bags: checks the ids, offsets and weights of a call and flattens them.

Padding and ids after the last bag are dropped here; pooling gets only ids that count.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Int64, Integer, Real

from .._array import compute_dtype, namespace_of
from .._check import ids_in_range, integers, positions_array


@dataclass(frozen=True, eq=False)
class Bags:
    """Concatenated bags, without the ids that do not count.

    Args:
        ids: Ids that count. Bag ``b`` is ``ids[bounds[b]:bounds[b + 1]]``.
        bounds: Start of each bag, and the end of the last.
        weights: Factor of each row, or None for 1.
        kept: Index of each id in the caller's flattened ids; None if all count.
        is_mean: Bags that mode ``"mean"`` averages, the others are summed; None for all.
    """

    ids: Int64[np.ndarray, " counted"]
    bounds: Int64[np.ndarray, " ends"]
    weights: Float[np.ndarray, " counted"] | None
    kept: Int64[np.ndarray, " counted"] | None
    is_mean: Bool[np.ndarray, " bags"] | None = None


def flatten_bags(
    ids: Integer[Any, "*batch"] | list[Any],
    offsets: Integer[Any, " offsets"] | list[Any] | None = None,
    *,
    num_embeddings: int,
    weights: Real[Any, "*batch"] | list[Any] | None = None,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    dtype: Any = "float32",
) -> Bags:
    """Check the arguments of a call and return its bags.

    Args:
        ids: ``(bags, length)``, or ``(n,)`` with offsets. Any integer dtype, or lists.
        offsets: Start of each bag: 0 first, never decreasing.
        num_embeddings: Number of rows.
        weights: ``per_sample_weights``, in the shape of ``ids``.
        padding_idx: Id that does not count; not negative.
        include_last_offset: Whether the last offset is the end of the last bag. Ids after
            it are in no bag.
        dtype: Dtype of the table; weights are cast to its compute dtype.

    Example:
        >>> bags = flatten_bags([4, 0, 2, 2], [0, 3], num_embeddings=5, padding_idx=0)
        >>> bags.ids.tolist(), bags.bounds.tolist(), bags.kept.tolist()
        ([4, 2, 2], [0, 2, 3], [0, 2, 3])
    """
    ids = ids_in_range(ids, num_embeddings)
    bounds = bag_bounds(ids.shape, offsets, include_last_offset=include_last_offset)
    if weights is not None:
        weights = weights_like(ids, weights).astype(compute_dtype(dtype)).reshape(-1)
    flat = np.ascontiguousarray(ids).reshape(-1)
    return counted_bags(flat, bounds, weights, padding_idx=padding_idx)


def counted_bags(
    flat: Int64[np.ndarray, " n"],
    bounds: Int64[np.ndarray, " ends"],
    weights: Float[np.ndarray, " n"] | None,
    *,
    padding_idx: int | None,
) -> Bags:
    """Return bags without padding and without ids after the last bag.

    Args:
        flat: Ids, in range.
        bounds: Start of each bag, and the end of the last.
        weights: Factor of each row, or None.
        padding_idx: Id that does not count; not negative.
    """
    end = int(bounds[-1])
    if padding_idx is None and end == flat.size:
        return Bags(flat, bounds, weights, None)
    counted = np.arange(flat.size) < end
    if padding_idx is not None:
        counted &= flat != padding_idx
    counted_before = np.concatenate([[0], np.cumsum(counted)])
    kept = np.flatnonzero(counted)
    kept_weights = None if weights is None else weights[kept]
    return Bags(flat[kept], counted_before[bounds], kept_weights, kept)


def bag_bounds(
    shape: tuple[int, ...],
    offsets: Integer[Any, " offsets"] | list[Any] | None,
    *,
    include_last_offset: bool = False,
    name: str = "offsets",
) -> Int64[np.ndarray, " ends"]:
    """Return the start of each bag in the flat ids, and the end of the last.

    Args:
        shape: Shape of the ids.
        offsets: Start of each bag; None for 2-D ids.
        include_last_offset: Whether the last offset is the end of the last bag.
        name: Name of the offsets in error messages.

    Example:
        >>> bag_bounds((2, 3), None).tolist(), bag_bounds((6,), [0, 5]).tolist()
        ([0, 3, 6], [0, 5, 6])
    """
    if len(shape) == 2:
        if offsets is None:
            return np.arange(shape[0] + 1) * shape[1]
        raise ValueError(
            f"{name} must be None for ids of 2 axes, got shape {np.shape(offsets)}"
        )
    if len(shape) != 1:
        raise ValueError(f"ids must have 1 or 2 axes, got shape {shape}")
    if offsets is None:
        raise ValueError(f"{name} must be given for ids of 1 axis, got None")
    # A copy: another thread may change the offsets after the check.
    bounds = integers(offsets, name=name).copy()
    if include_last_offset and bounds.shape == (0,):
        raise ValueError(f"{name} must have an end with include_last_offset, got none")
    _check_offsets(bounds, shape[0], name)
    bounds = bounds.astype(np.int64, copy=False)
    return bounds if include_last_offset else np.append(bounds, shape[0])


def bag_indices(
    bounds: Int[Any, " ends"], steps: Int[Any, " counted"]
) -> Int[Any, " counted"]:
    """Return the index of each id's bag.

    Args:
        bounds: Start of each bag, and the end of the last.
        steps: ``0, 1, …`` for each id, of the same library.

    Example:
        >>> bag_indices(np.array([0, 2, 2, 3]), np.arange(3)).tolist()
        [0, 0, 2]
    """
    return namespace_of(bounds).searchsorted(bounds, steps, side="right") - 1


def weights_like(
    ids: Integer[np.ndarray, "*batch"], weights: Any, *, name: str = "per_sample_weights"
) -> Real[np.ndarray, "*batch"]:
    """Return weights as an array if they have the shape of the ids."""
    weights = positions_array(weights, name=name)
    if weights.shape != ids.shape:
        raise ValueError(
            f"{name} must have the shape {ids.shape} of ids, got {weights.shape}"
        )
    return weights


def _check_offsets(offsets: np.ndarray, size: int, name: str) -> None:
    if offsets.ndim != 1:
        raise ValueError(f"{name} must have 1 axis, got shape {offsets.shape}")
    if not offsets.size and size:
        raise ValueError(f"{name} must begin with 0, got none for {size} ids")
    if offsets.size and offsets[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {offsets[0]}")
    decreases = offsets[1:] < offsets[:-1]
    if decreases.any():
        at = int(np.argmax(decreases)) + 1
        raise ValueError(
            f"{name} must not decrease, got {offsets[at]} after {offsets[at - 1]}"
        )
    if offsets.size and int(offsets[-1]) > size:
        raise ValueError(
            f"{name} must be at most {size}, the number of ids, got {offsets[-1]}"
        )
