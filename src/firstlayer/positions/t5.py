"""How far each key is from each query, and T5's learned bias for it.

A relative scheme adds a number to an attention score that depends on the distance between
key and query alone. T5 learns it: distances fall into buckets, one for each short distance
and then ever wider ones, and every head has a number for each bucket (Raffel et al. 2019,
https://arxiv.org/abs/1910.10683). A distance is the key's position minus the query's, so
that left padding, packed documents and cached keys are a matter of positions alone, and
one query's bias is one row of the whole.

Where a bucket begins is found on the host in whole numbers, and what is looked up at run
time is a table by distance: no logarithm is taken on a device, so that no two libraries or
devices can disagree about a bucket. Apart from the two that make
tables, these functions create no arrays and run unchanged on NumPy, torch and JAX.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int32, Int64, Shaped

from .._array import cast, is_real, move_axis, namespace_of, take_columns
from .._check import positive


def relative_positions(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
) -> Shaped[Any, "*batch q_length k_length"]:
    """Return the position of each key minus that of each query.

    Whole numbers are subtracted as whole numbers of at least 32 bits, reals in float32 or
    float64, never in half precision.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Likewise. A side without a batch serves every row of the other.

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
    batches = {side.shape[0] for side in pair.values() if side.ndim == 2} - {1}
    if len(batches) > 1:
        raise ValueError(
            "q_positions and k_positions must have the same batch, "
            f"got {q_positions.shape[0]} and {k_positions.shape[0]}"
        )
    dtype = _difference_dtype(q_positions, k_positions)
    return cast(k_positions, dtype)[..., None, :] - cast(q_positions, dtype)[..., :, None]


def distances(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    dtype: str,
) -> Float[Any, "*batch q_length k_length"]:
    """Return how far apart each query and key are, whichever comes first.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Likewise.
        dtype: The name of the result's dtype, to which it is rounded last.

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

    What is farther away has the first or the last row; a real counts as its whole part.

    Args:
        relative: From :func:`relative_positions`.
        left: How many rows are for keys before the query.
        right: How many rows are for keys after it.

    Example:
        >>> clipped_index(np.array([-9, -1, 0, 5]), left=2, right=1).tolist()
        [0, 1, 2, 3]
    """
    xp = namespace_of(relative)
    near = xp.clip(relative, -left, right)
    if is_real(relative):
        near = cast(xp.trunc(xp.where(near == near, near, 0.0)), "int32")
    return near + left


def t5_edges(num_buckets: int, *, max_distance: int = 128) -> Int64[np.ndarray, " buckets"]:
    """Return the shortest distance in each of the buckets of one direction.

    The first half hold one distance each. The others divide the way from there to
    ``max_distance`` evenly on a logarithmic scale, and the last has no end. T5's formula is
    compared in whole numbers here. Where it falls on an edge exactly (27 and 17 buckets, at
    18; none of the published settings), float32 can be one bucket off.

    Args:
        num_buckets: Buckets of one direction, at least 2.
        max_distance: Greater than ``num_buckets // 2``. A small one leaves buckets that no
            distance is in.

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
    wide = num_buckets - exact
    edges = list(range(exact + 1))
    for step in range(1, wide):
        # The least d with (d / exact) ** wide >= (max_distance / exact) ** step.
        place = exact * (max_distance / exact) ** (step / wide)
        edge = round(place)
        if abs(place - edge) > 1e-9 * place:
            edge = math.ceil(place)
        elif edge**wide * exact**step < max_distance**step * exact**wide:
            edge += 1
        edges.append(edge)
    return np.array(edges, np.int64)


def t5_buckets(
    num_buckets: int = 32, *, max_distance: int = 128, bidirectional: bool = True
) -> Int32[np.ndarray, " distances"]:
    """Return the bucket of each relative position, from the farthest before to that after.

    Args:
        num_buckets: How many there are. Even and at least 4 if ``bidirectional``, when the
            first half is for keys up to the query and the second for those after it;
            otherwise at least 2.
        max_distance: From here on all distances share the last bucket of their direction.
        bidirectional: Whether keys after the query are told apart. If not, they are all in
            bucket 0, the query's own.

    Example:
        >>> t5_buckets(4, max_distance=2).tolist()
        [1, 0, 3]
    """
    _check_buckets(num_buckets, max_distance, bidirectional)
    each = num_buckets // 2 if bidirectional else num_buckets
    edges = t5_edges(each, max_distance=max_distance)
    bucket = np.searchsorted(edges, np.arange(edges[-1] + 1), side="right") - 1
    after = each + bucket[1:] if bidirectional else bucket[:0]
    return np.concatenate([bucket[::-1], after]).astype(np.int32)


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
        k_positions: Likewise.
        weight: A number for each bucket and head. The bias has its dtype.
        buckets: What :func:`t5_buckets` made, as an array of the same library.
        bidirectional: As ``buckets`` were made.

    Example:
        >>> weight, buckets = np.arange(4.0)[:, None], t5_buckets(4, max_distance=2)
        >>> t5_bias(np.arange(3), np.arange(3), weight=weight, buckets=buckets).tolist()
        [[[0.0, 3.0, 3.0], [1.0, 0.0, 3.0], [1.0, 1.0, 0.0]]]
    """
    xp = namespace_of(weight)
    relative = relative_positions(q_positions, k_positions)
    left, right = reach(buckets, bidirectional=bidirectional)
    index = clipped_index(relative, left=left, right=right)
    bias = move_axis(take_columns(weight[buckets].T, index), 0, -3)
    if is_real(relative):
        bias = xp.where((relative == relative)[..., None, :, :], bias, float("nan"))
    return bias


def reach(buckets: Int[Any, " distances"], *, bidirectional: bool) -> tuple[int, int]:
    """Return how far before and how far after the query ``buckets`` reach.

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
    # Signed, for unsigned differences wrap; 64 bits only where the caller has them.
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
