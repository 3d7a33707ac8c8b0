"""Ragged bags: how the ids, offsets and weights of a call become flat, checked arrays.

Bags come as 2-D ids, a row each, or as 1-D ids with ``offsets``, where each bag begins.
What does not count (padding, ids after the last bag) is left out here, so that nothing
that follows needs to know of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64, Integer, Real

from .._array import compute_dtype, namespace_of
from .._check import ids_in_range, integers, positions_array


@dataclass(frozen=True, eq=False)
class Bags:
    """Bags one after the other, without what does not count.

    Args:
        ids: The ids that count. Bag ``b`` is ``ids[bounds[b]:bounds[b + 1]]``.
        bounds: Where each bag begins, and the end of the last.
        weights: What each row is multiplied by, or None for 1.
        places: Where each id was among the ids given, flattened; None if all count.
    """

    ids: Int64[np.ndarray, " counted"]
    bounds: Int64[np.ndarray, " ends"]
    weights: Float[np.ndarray, " counted"] | None
    places: Int64[np.ndarray, " counted"] | None


def bags_of(
    ids: Integer[Any, "*batch"] | list[Any],
    offsets: Integer[Any, " offsets"] | list[Any] | None = None,
    *,
    num_embeddings: int,
    weights: Real[Any, "*batch"] | list[Any] | None = None,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    dtype: Any = "float32",
) -> Bags:
    """Check what a call was given and return the bags it means.

    Args:
        ids: ``(bags, length)``, or ``(n,)`` with offsets. Any integer dtype, lists too.
        offsets: Where each bag begins: 0 first, never decreasing.
        num_embeddings: How many rows there are.
        weights: ``per_sample_weights``, in the shape of ``ids``.
        padding_idx: The id that does not count, from the front.
        include_last_offset: Whether the last offset is the end of the last bag. Ids after
            it are in no bag.
        dtype: Of the table, which says what weights are worked on in.

    Example:
        >>> bags = bags_of([4, 0, 2, 2], [0, 3], num_embeddings=5, padding_idx=0)
        >>> bags.ids.tolist(), bags.bounds.tolist(), bags.places.tolist()
        ([4, 2, 2], [0, 2, 3], [0, 2, 3])
    """
    ids = ids_in_range(ids, num_embeddings)
    bounds = bounds_of(ids.shape, offsets, include_last_offset=include_last_offset)
    if weights is not None:
        weights = _weights_like(ids, weights).astype(compute_dtype(dtype)).reshape(-1)
    flat, end = np.ascontiguousarray(ids).reshape(-1), int(bounds[-1])
    if padding_idx is None and end == flat.size:
        return Bags(flat, bounds, weights, None)
    counts = np.arange(flat.size) < end
    if padding_idx is not None:
        counts &= flat != padding_idx
    before = np.concatenate([[0], np.cumsum(counts)])
    places = np.flatnonzero(counts)
    kept = None if weights is None else weights[places]
    return Bags(flat[places], before[bounds], kept, places)


def bounds_of(
    shape: tuple[int, ...],
    offsets: Integer[Any, " offsets"] | list[Any] | None,
    *,
    include_last_offset: bool = False,
) -> Int64[np.ndarray, " ends"]:
    """Return where each bag begins in the flat ids, and the end of the last.

    Args:
        shape: Of the ids.
        offsets: Where each bag begins; None for 2-D ids.
        include_last_offset: Whether the last offset is the end of the last bag.

    Example:
        >>> bounds_of((2, 3), None).tolist(), bounds_of((6,), [0, 5]).tolist()
        ([0, 3, 6], [0, 5, 6])
    """
    if len(shape) == 2:
        if offsets is None:
            return np.arange(shape[0] + 1) * shape[1]
        raise ValueError(
            f"offsets must be None for ids of 2 axes, got shape {np.shape(offsets)}"
        )
    if len(shape) != 1:
        raise ValueError(f"ids must have 1 or 2 axes, got shape {shape}")
    if offsets is None:
        raise ValueError("offsets must be given for ids of 1 axis, got None")
    bounds = integers(offsets, name="offsets")
    if include_last_offset and bounds.shape == (0,):
        raise ValueError("offsets must have an end with include_last_offset, got none")
    _check_offsets(bounds, shape[0])
    bounds = bounds.astype(np.int64)
    return bounds if include_last_offset else np.append(bounds, shape[0])


def bag_numbers(
    bounds: Int[Any, " ends"], steps: Int[Any, " counted"]
) -> Int[Any, " counted"]:
    """Return which bag each id is in.

    Args:
        bounds: Where each bag begins, and the end of the last.
        steps: ``0, 1, …`` for each id, of the same library.

    Example:
        >>> bag_numbers(np.array([0, 2, 2, 3]), np.arange(3)).tolist()
        [0, 0, 2]
    """
    return namespace_of(bounds).searchsorted(bounds, steps, side="right") - 1


def _weights_like(ids: np.ndarray, weights: Any) -> np.ndarray:
    weights = positions_array(weights, name="per_sample_weights")
    if weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights must have the shape {ids.shape} of ids, "
            f"got {weights.shape}"
        )
    return weights


def _check_offsets(offsets: np.ndarray, size: int) -> None:
    if offsets.ndim != 1:
        raise ValueError(f"offsets must have 1 axis, got shape {offsets.shape}")
    if not offsets.size and size:
        raise ValueError(f"offsets must begin with 0, got none for {size} ids")
    if offsets.size and offsets[0] != 0:
        raise ValueError(f"offsets must begin with 0, got {offsets[0]}")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        at = int(np.argmax(falls)) + 1
        raise ValueError(
            f"offsets must not decrease, got {offsets[at]} after {offsets[at - 1]}"
        )
    if offsets.size and int(offsets[-1]) > size:
        raise ValueError(
            f"offsets must be at most {size}, the number of ids, got {offsets[-1]}"
        )
