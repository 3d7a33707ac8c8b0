"""Equal ids brought together, and where the rows of each go.

Ids are sorted digit by digit in base 2048, from the last digit to the first, each time
keeping the order of equals: as many passes as the largest id has digits, mostly two.
"""

import numpy as np

from ._numba import kernel

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
    order, spare = np.arange(ids.size), np.empty(ids.size, np.int64)
    swaps = _sort(ids, order, spare)
    if swaps < 0:
        raise ValueError(f"ids must not be negative, got {ids.min()}")
    order = spare if swaps % 2 else order
    bounds, unique = np.empty(ids.size + 1, np.int64), np.empty(ids.size, np.int64)
    count = _groups(ids, order, bounds, unique)
    return order, bounds[: count + 1].copy(), unique[:count].copy()


def slots_of(order: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Return which row each place writes to: groups of one first, then all the others.

    A group of one has the row of its own number. Rows of groups of several follow after the
    number of groups, those of one group together. -1 is a place that is in no group.

    Args:
        order: The places, group after group.
        counts: How many of them each group has.
        size: How many places there are.

    Example:
        >>> slots_of(np.array([1, 0, 2]), np.array([1, 2]), 4).tolist()
        [2, 0, 3, -1]
    """
    slots = np.full(size, -1)
    _slots(order, counts, slots)
    return slots


@kernel()
def _sort(ids, order, spare):
    """Sort ``order`` by id, and return how often it changed its place with ``spare``.

    -1 if there is an id that is negative.
    """
    least, most, swaps = 0, 0, 0
    for i in range(ids.size):
        least, most = min(least, ids[i]), max(most, ids[i])
    if least < 0:
        return -1
    starts, shift = np.empty((1 << BITS) + 1, np.int64), 0
    while shift < 63 and most >> shift:
        starts[:] = 0
        for i in range(ids.size):
            starts[1 + (ids[i] >> shift & (1 << BITS) - 1)] += 1
        for digit in range(1 << BITS):
            starts[digit + 1] += starts[digit]
        for i in range(ids.size):
            place = order[i]
            digit = ids[place] >> shift & (1 << BITS) - 1
            spare[starts[digit]] = place
            starts[digit] += 1
        order, spare = spare, order
        shift, swaps = shift + BITS, swaps + 1
    return swaps


@kernel()
def _groups(ids, order, bounds, unique):
    count = 0
    for place in range(order.size):
        id_ = ids[order[place]]
        if count == 0 or id_ != unique[count - 1]:
            bounds[count], unique[count] = place, id_
            count += 1
    bounds[count] = order.size
    return count


@kernel()
def _slots(order, counts, slots):
    place, after = 0, counts.size
    for group in range(counts.size):
        if counts[group] == 1:
            slots[order[place]] = group
            place += 1
            continue
        for _ in range(counts[group]):
            slots[order[place]] = after
            place, after = place + 1, after + 1
