"""Equal ids brought together.

Ids are sorted digit by digit in base 2048, from the last digit to the first, each time
keeping the order of equals: as many passes as the largest id has digits, mostly two.
"""

import numpy as np

from .runtime.compile import kernel

BITS = 11


def group_by_id(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an order that brings equal ids together, where each group begins, and its id.

    Groups are in ascending order of their ids, and what is in one in the order it came.
    Where they begin has one more entry than there are groups.

    Args:
        ids: Contiguous int64, ``(n,)``, not negative.

    Example:
        >>> order, bounds, unique = group_by_id(np.array([7, 3, 7]))
        >>> order.tolist(), bounds.tolist(), unique.tolist()
        ([1, 0, 2], [0, 1, 3], [3, 7])
    """
    order, bounds, unique = grouped(ids, np.arange(ids.size))
    if not bounds.size:
        raise ValueError(f"ids must not be negative, got {ids.min()}")
    # Gradients keep their ids: in memory that NumPy knows of, and no more than they need.
    return order, bounds, unique.copy()


@kernel()
def ascends(ids):
    """Tell whether each of the ids is larger than the one before it."""
    for i in range(ids.size - 1):
        if ids[i] >= ids[i + 1]:
            return False
    return True


@kernel()
def grouped(ids, places):
    """Return what :func:`group_by_id` does, of the ids at some places, given in order.

    No bounds at all if one of the ids is negative.
    """
    order, spare = places.copy(), np.empty_like(places)
    bounds, unique = np.empty(places.size + 1, np.int64), np.empty(places.size, np.int64)
    swaps = _sort(ids, order, spare)
    if swaps < 0:
        return order, bounds[:0], unique[:0]
    if swaps % 2:
        order = spare
    count = 0
    for i in range(order.size):
        id_ = ids[order[i]]
        if count == 0 or id_ != unique[count - 1]:
            bounds[count], unique[count] = i, id_
            count += 1
    bounds[count] = order.size
    return order, bounds[: count + 1], unique[:count]


@kernel()
def _sort(ids, order, spare):
    """Sort ``order`` by id, and return how often it changed its place with ``spare``.

    -1 if there is an id that is negative.
    """
    least, most, swaps = 0, 0, 0
    for place in order:
        least, most = min(least, ids[place]), max(most, ids[place])
    if least < 0:
        return -1
    bits, shift = 0, 0
    while bits < BITS and most >> bits:
        bits += 1
    starts, last = np.empty((1 << bits) + 1, np.int64), (1 << bits) - 1
    while shift < 63 and most >> shift:
        starts[:] = 0
        for place in order:
            starts[1 + (ids[place] >> shift & last)] += 1
        for digit in range(last):
            starts[digit + 1] += starts[digit]
        for place in order:
            digit = ids[place] >> shift & last
            spare[starts[digit]] = place
            starts[digit] += 1
        order, spare = spare, order
        shift, swaps = shift + bits, swaps + 1
    return swaps
