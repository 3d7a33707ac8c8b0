"""Relative positions of keys and queries, and T5's learned bias.

A relative scheme adds a bias to an attention score that depends on the distance between
key and query only. T5 learns it: distances are grouped into buckets, one for each short
distance and then wider and wider ones, and every head has a bias for each bucket (Raffel et
al. 2019, https://arxiv.org/abs/1910.10683). A relative position is the key's position minus
the query's, so left padding, packed documents and cached keys only change the positions,
and the bias of one query is one row of the whole matrix.

Bucket boundaries are computed on the host in integers, and a table maps distances to
buckets at run time. No logarithm is computed on a device, so all libraries and devices
agree on every bucket. Apart from the two that build tables, these functions create no
arrays and run unchanged on NumPy, torch and JAX.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int32, Int64, Shaped

from .._array import (
    cast,
    is_real,
    move_axis,
    namespace_of,
    take_columns,
    take_rows,
    trunc,
)
from .._check import positive


def relative_positions(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
) -> Shaped[Any, "*batch q_length k_length"]:
    """Return the position of each key minus that of each query.

    Integers are subtracted as int32 or int64, reals in float32 or float64, never in half
    precision.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``. Positions
            without a batch apply to every row.

    Example:
        >>> relative_positions(np.array([1, 2]), np.array([0, 1, 2])).tolist()
        [[-1, 0, 1], [-2, -1, 0]]
    """
    pair = {"q_positions": q_positions, "k_positions": k_positions}
    for name, positions in pair.items():
        if positions.ndim not in (1, 2):
            raise ValueError(
                f"{name} must have shape (length,) or (batch, length), "
                f"got {tuple(positions.shape)}"
            )
    if q_positions.ndim == k_positions.ndim == 2:
        q_batch, k_batch = q_positions.shape[0], k_positions.shape[0]
        # Not a set: the symbolic sizes of exporters have no hash.
        if q_batch != k_batch and 1 not in (q_batch, k_batch):
            raise ValueError(
                "q_positions and k_positions must have the same batch, "
                f"got {q_batch} and {k_batch}"
            )
    dtype = _difference_dtype(q_positions, k_positions)
    return cast(k_positions, dtype)[..., None, :] - cast(q_positions, dtype)[..., :, None]


def distances(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    dtype: str,
) -> Float[Any, "*batch q_length k_length"]:
    """Return the absolute distance of each query and key.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        dtype: Name of the dtype of the result, rounded to at the end.

    Example:
        >>> distances(np.array([2]), np.array([0, 3]), dtype="float32")
        array([[2., 1.]], dtype=float32)
    """
    relative = relative_positions(q_positions, k_positions)
    return cast(namespace_of(relative).abs(relative), dtype)


def clipped_index(
    relative: Shaped[Any, "*pairs"], *, left: int, right: int
) -> Int[Any, "*pairs"]:
    """Return the row of each relative position in a table from ``-left`` to ``right``.

    Larger distances use the first or the last row. Reals are truncated.

    Args:
        relative: From :func:`relative_positions`.
        left: Number of rows for keys before the query.
        right: Number of rows for keys after it.

    Example:
        >>> clipped_index(np.array([-9, -1, 0, 5]), left=2, right=1).tolist()
        [0, 1, 2, 3]
    """
    xp = namespace_of(relative)
    clipped = xp.clip(relative, -left, right)
    if is_real(relative):
        clipped = cast(trunc(xp.where(clipped == clipped, clipped, 0.0)), "int32")
    return clipped + left


def t5_edges(num_buckets: int, *, max_distance: int = 128) -> Int64[np.ndarray, " buckets"]:
    """Return the shortest distance in each bucket of one direction.

    The first half of the buckets hold one distance each. The others divide the range up to
    ``max_distance`` evenly on a logarithmic scale, and the last one is unbounded. T5's
    formula is evaluated exactly, in integers. T5's own float32 can be one bucket off where
    the formula falls exactly on an edge (27 and 17 buckets, at 18; none of the published
    settings).

    Args:
        num_buckets: Number of buckets of one direction, at least 2.
        max_distance: Greater than ``num_buckets // 2``. If it is small, some buckets are
            empty.

    Example:
        >>> t5_edges(8, max_distance=64).tolist()
        [0, 1, 2, 3, 4, 8, 16, 32]
    """
    exact = num_buckets // 2
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must be greater than {exact}, the number of distances with a "
            f"bucket of their own, got {max_distance}"
        )
    steps = num_buckets - exact
    edges = list(range(exact + 1))
    for step in range(1, steps):
        # The smallest d with (d / exact) ** steps >= (max_distance / exact) ** step.
        estimate = exact * (max_distance / exact) ** (step / steps)
        edge = round(estimate)
        if abs(estimate - edge) > 1e-9 * estimate:
            edge = math.ceil(estimate)
        elif edge**steps * exact**step < max_distance**step * exact**steps:
            edge += 1
        edges.append(edge)
    return np.array(edges, np.int64)


def t5_buckets(
    num_buckets: int = 32, *, max_distance: int = 128, bidirectional: bool = True
) -> Int32[np.ndarray, " distances"]:
    """Return the bucket of each relative position, from the most negative upwards.

    Args:
        num_buckets: Number of buckets. Even and at least 4 if ``bidirectional``, where the
            first half is for keys up to the query and the second for those after it;
            otherwise at least 2.
        max_distance: Distance from which on all share the last bucket of their direction.
        bidirectional: Whether keys after the query have their own buckets. If False, they
            are all in bucket 0.

    Example:
        >>> t5_buckets(4, max_distance=2).tolist()
        [1, 0, 3]
    """
    _check_buckets(num_buckets, max_distance, bidirectional)
    per_direction = num_buckets // 2 if bidirectional else num_buckets
    edges = t5_edges(per_direction, max_distance=max_distance)
    before = np.searchsorted(edges, np.arange(edges[-1] + 1), side="right") - 1
    after = per_direction + before[1:] if bidirectional else before[:0]
    return np.concatenate([before[::-1], after]).astype(np.int32)


def t5_bias(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    weight: Float[Any, "num_buckets num_heads"],
    buckets: Int[Any, " distances"],
    bidirectional: bool = True,
) -> Float[Any, "*batch num_heads q_length k_length"]:
    """Return T5's bias of every query and key, NaN where a position is NaN.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        weight: Bias of each bucket and head. The result has its dtype.
        buckets: From :func:`t5_buckets`, as an array of the same library.
        bidirectional: Same as in the call of :func:`t5_buckets`.

    Example:
        >>> weight, buckets = np.arange(4.0)[:, None], t5_buckets(4, max_distance=2)
        >>> t5_bias(np.arange(3), np.arange(3), weight=weight, buckets=buckets).tolist()
        [[[0.0, 3.0, 3.0], [1.0, 0.0, 3.0], [1.0, 1.0, 0.0]]]
    """
    xp = namespace_of(weight)
    relative = relative_positions(q_positions, k_positions)
    left, right = reach(buckets, bidirectional=bidirectional)
    index = clipped_index(relative, left=left, right=right)
    bias = move_axis(take_columns(take_rows(weight, buckets).T, index), 0, -3)
    if is_real(relative):
        bias = xp.where((relative == relative)[..., None, :, :], bias, float("nan"))
    return bias


def reach(buckets: Int[Any, " distances"], *, bidirectional: bool) -> tuple[int, int]:
    """Return the largest distance before and after the query in ``buckets``.

    Example:
        >>> reach(t5_buckets(8, bidirectional=False), bidirectional=False)
        (54, 0)
    """
    last = buckets.shape[0] - 1
    return (last // 2, last // 2) if bidirectional else (last, 0)


def _difference_dtype(*positions: Any) -> str:
    real = [str(side.dtype) for side in positions if is_real(side)]
    if real:
        return "float64" if any("float64" in name for name in real) else "float32"
    # Signed, because unsigned differences wrap. int64 only if an input is 64-bit.
    return "int64" if any(side.dtype.itemsize == 8 for side in positions) else "int32"


def _check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    positive("num_buckets", num_buckets)
    positive("max_distance", max_distance)
    if bidirectional and (num_buckets < 4 or num_buckets % 2):
        raise ValueError(
            f"num_buckets must be even and at least 4 if bidirectional, got {num_buckets}"
        )
    if num_buckets < 2:
        raise ValueError(f"num_buckets must be at least 2, got {num_buckets}")
