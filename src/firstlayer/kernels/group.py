"""Grouping of equal ids.

A least-significant-digit radix sort in base 2048: one stable pass for each digit of the
largest id, usually two.
"""

import numpy as np

from .runtime.compile import kernel

# Bits of a digit.
BITS = 11


def group_by_id(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an order that brings equal ids together, the groups' bounds, and their ids.

    Groups are in ascending order of their ids, each in the original order. There is one
    more bound than there are groups.

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
    # Gradients keep their ids, and a view would keep Numba's longer array alive.
    return order, bounds, unique.copy()


@kernel()
def ascends(ids: np.ndarray) -> bool:
    """Return whether each id is larger than the one before it."""
    for i in range(ids.size - 1):
        if ids[i] >= ids[i + 1]:
            return False
    return True


@kernel()
def grouped(ids, tokens):
    """Group the ids of some tokens, given in ascending order; see :func:`group_by_id`.

    There are no bounds at all if one of the ids is negative.
    """
    order, spare = tokens.copy(), np.empty_like(tokens)
    bounds, unique = np.empty(tokens.size + 1, np.int64), np.empty(tokens.size, np.int64)
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
    """Sort ``order`` by id, and return the number of passes; -1 if an id is negative.

    Each pass swaps ``order`` and ``spare``: after an odd number the result is in ``spare``.
    """
    least, most, swaps = 0, 0, 0
    for token in order:
        least, most = min(least, ids[token]), max(most, ids[token])
    if least < 0:
        return -1
    bits, shift = 0, 0
    while bits < BITS and most >> bits:
        bits += 1
    starts, mask = np.empty((1 << bits) + 1, np.int64), (1 << bits) - 1
    while shift < 63 and most >> shift:
        starts[:] = 0
        for token in order:
            starts[1 + (ids[token] >> shift & mask)] += 1
        for digit in range(mask):
            starts[digit + 1] += starts[digit]
        for token in order:
            digit = ids[token] >> shift & mask
            spare[starts[digit]] = token
            starts[digit] += 1
        order, spare = spare, order
        shift, swaps = shift + bits, swaps + 1
    return swaps
