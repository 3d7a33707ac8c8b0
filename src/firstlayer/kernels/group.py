"""Grouping of equal ids.

A least-significant-digit radix sort in base 2048: one stable pass for each digit of the
largest id, usually two. An id and its index are sorted as one number if they fit into 63
bits, so that a pass reads memory in order.
"""

import numpy as np

from .runtime.compile import internal, kernel

# Bits of a digit.
BITS = 11
# Returned for ids that are too large for pairs.
DOES_NOT_FIT = -2


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
    # A copy: the sort reads ids several times, and another thread may change the original.
    ids = ids.copy()
    order, spare, unique = (np.empty(ids.size, np.int64) for _ in range(3))
    bounds = np.empty(ids.size + 1, np.int64)
    index_bits = ids.size.bit_length()
    count = _group_pairs(ids, index_bits, order, spare, bounds, unique)
    if count == DOES_NOT_FIT:
        count = group_tokens(ids, np.arange(ids.size), order, spare, bounds, unique)
    if count < 0:
        raise IndexError(f"ids must not be negative, got {ids.min()}")
    # Gradients keep their ids, and a view would keep the longer array alive.
    return order, bounds[: count + 1], unique[:count].copy()


@kernel()
def ascends(ids: np.ndarray) -> bool:
    """Return whether each id is larger than the one before it."""
    for i in range(ids.size - 1):
        if ids[i] >= ids[i + 1]:
            return False
    return True


@internal
def group_tokens(ids, tokens, order, spare, bounds, unique):
    """Group the ids of some tokens, given in ascending order; see :func:`group_by_id`.

    Args:
        ids: Id of each token.
        tokens: Indices of the tokens to group.
        order: The tokens, sorted by id.
        spare: Scratch memory of the size of ``tokens``.
        bounds: Bounds of the groups; at most one more than there are tokens.
        unique: Id of each group.

    Returns:
        Number of groups, or -1 if one of the ids is negative.
    """
    if not _sort(ids, tokens, order, spare):
        return -1
    count = 0
    for i in range(order.size):
        id_ = ids[order[i]]
        if count == 0 or id_ != unique[count - 1]:
            bounds[count], unique[count] = i, id_
            count += 1
    bounds[count] = order.size
    return count


@kernel()
def _group_pairs(ids, index_bits, order, spare, bounds, unique):
    """Group ids by sorting numbers of an id and its index; see :func:`group_by_id`.

    Args:
        ids: Private copy of the ids.
        index_bits: Bits of an index.
        order: Indices, sorted by id.
        spare: Scratch memory of the size of ``ids``.
        bounds: Bounds of the groups; at most one more than there are ids.
        unique: Id of each group.

    Returns:
        Number of groups, -1 if an id is negative, or ``DOES_NOT_FIT``.
    """
    least, most = 0, 0
    for id_ in ids:
        least, most = min(least, id_), max(most, id_)
    if least < 0:
        return -1
    id_bits = 0
    while id_bits < 63 and most >> id_bits:
        id_bits += 1
    if id_bits + index_bits > 63:
        return DOES_NOT_FIT
    passes = max(1, -(-id_bits // BITS))
    bits = -(-id_bits // passes)
    mask, starts = (1 << bits) - 1, np.zeros((passes, (1 << bits) + 1), np.int64)
    source, target = order, spare
    if passes % 2:
        source, target = spare, order
    for i in range(ids.size):
        id_ = ids[i]
        source[i] = id_ << index_bits | i
        for digit in range(passes):
            starts[digit, 1 + (id_ >> digit * bits & mask)] += 1
    for digit in range(passes):
        start, shift = starts[digit], index_bits + digit * bits
        for value in range(mask):
            start[value + 1] += start[value]
        for pair in source:
            value = pair >> shift & mask
            target[start[value]] = pair
            start[value] += 1
        source, target = target, source
    # The pairs are in ``order``.
    count, index_mask = 0, (1 << index_bits) - 1
    for i in range(order.size):
        id_ = order[i] >> index_bits
        order[i] &= index_mask
        if count == 0 or id_ != unique[count - 1]:
            bounds[count], unique[count] = i, id_
            count += 1
    bounds[count] = order.size
    return count


@internal
def _sort(ids, tokens, order, spare):
    """Write ``tokens``, sorted by id, to ``order``; return False if an id is negative."""
    least, most = 0, 0
    for token in tokens:
        least, most = min(least, ids[token]), max(most, ids[token])
    if least < 0:
        return False
    bits, passes = 0, 0
    while bits < BITS and most >> bits:
        bits += 1
    while passes * bits < 63 and most >> passes * bits:
        passes += 1
    if not passes:
        for i in range(tokens.size):
            order[i] = tokens[i]
    starts, mask = np.empty((1 << bits) + 1, np.int64), (1 << bits) - 1
    source, target, other = tokens, spare, order
    if passes % 2:
        target, other = order, spare
    for i in range(passes):
        shift = i * bits
        starts[:] = 0
        for token in source:
            starts[1 + (ids[token] >> shift & mask)] += 1
        for digit in range(mask):
            starts[digit + 1] += starts[digit]
        for token in source:
            digit = ids[token] >> shift & mask
            target[starts[digit]] = token
            starts[digit] += 1
        source, target, other = target, other, target
    return True
