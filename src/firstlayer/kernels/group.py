"""Grouping of equal ids.

A least-significant-digit radix sort in base 2048: one stable pass for each digit of the
largest id, usually two. An id and its index or label are sorted as one number if they fit
into 63 bits, so that a pass reads memory in order; there is no pass if the ids are sorted.
"""

import numpy as np

from .runtime.compile import kernel

# Bits of a digit.
BITS = 11
# Room for the starts of all values of each digit of a number of 63 bits.
STARTS = 6 * ((1 << BITS) + 1)
# Returned for ids that are too large for pairs.
DOES_NOT_FIT = -2


def group_by_id(
    ids: np.ndarray, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an order that brings equal ids together, the groups' bounds, and their ids.

    Groups are in ascending order of their ids, each in the original order. There is one
    more bound than there are groups.

    Args:
        ids: Contiguous int64, ``(n,)``, not negative.
        labels: A number for each id, contiguous int64, not negative. Returned in the new
            order, in place of the order itself.

    Example:
        >>> order, bounds, unique = group_by_id(np.array([7, 3, 7]))
        >>> order.tolist(), bounds.tolist(), unique.tolist()
        ([1, 0, 2], [0, 1, 3], [3, 7])
    """
    # A copy: the sort reads ids several times, and another thread may change the original.
    order, bounds, unique = group_private(ids.copy(), labels)
    # Gradients keep their ids, and a view would keep the longer array alive.
    return order, bounds, unique.copy()


def group_private(
    ids: np.ndarray, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same as :func:`group_by_id` for ids that no other thread can change.

    The last array is a view of a longer one.
    """
    order, spare, unique = (np.empty(ids.size, np.int64) for _ in range(3))
    bounds, starts = np.empty(ids.size + 1, np.int64), np.empty(STARTS, np.int64)
    work = order, spare, bounds, unique, starts
    if labels is None:
        count = _group_pairs(ids, ids[:0], ids.size.bit_length(), *work)
    else:
        count = _group_pairs(ids, labels, int(labels.max(initial=0)).bit_length(), *work)
    if count == DOES_NOT_FIT:
        count = _group_large(ids, *work)
        order = order if labels is None else labels[order]
    if count < 0:
        raise IndexError(f"ids must not be negative, got {ids.min()}")
    return order, bounds[: count + 1], unique[:count]


def ascends(ids: np.ndarray) -> bool:
    """Return whether each id is larger than the one before it."""
    # Between other kernels, three operators of NumPy would take 20 µs longer.
    return _ascends(ids)


@kernel()
def _ascends(ids):
    for i in range(1, ids.size):
        if ids[i] <= ids[i - 1]:
            return False
    return True


@kernel()
def _group_pairs(ids, labels, label_bits, order, spare, bounds, unique, starts):
    """Group ids by sorting numbers of an id and its label; see :func:`group_by_id`.

    Args:
        ids: Private copy of the ids.
        labels: Label of each id; its index if empty.
        label_bits: Bits of a label.
        order: Labels, sorted by id.
        spare: Scratch memory of the size of ``ids``.
        bounds: Bounds of the groups; at most one more than there are ids.
        unique: Id of each group.
        starts: Scratch memory of ``STARTS`` numbers.

    Returns:
        Number of groups, -1 if an id is negative, or ``DOES_NOT_FIT``.
    """
    # The bits of a negative id are above those of every other.
    used, before, is_sorted = np.int64(0), np.int64(0), True
    for id_ in ids:
        used |= id_
        is_sorted &= before <= id_
        before = id_
    if used < 0:
        return -1
    id_bits = 0
    while id_bits < 63 and used >> id_bits:
        id_bits += 1
    if id_bits + label_bits > 63:
        return DOES_NOT_FIT
    passes = 0 if is_sorted else -(-id_bits // BITS)
    bits = -(-id_bits // max(passes, 1))
    mask = (1 << bits) - 1
    for i in range(passes * (mask + 2)):
        starts[i] = 0
    source, target = order, spare
    if passes % 2:
        source, target = spare, order
    for i in range(ids.size):
        id_ = ids[i]
        source[i] = id_ << label_bits | (labels[i] if labels.size else i)
        for digit in range(passes):
            starts[digit * (mask + 2) + 1 + (id_ >> digit * bits & mask)] += 1
    for digit in range(passes):
        first, shift = digit * (mask + 2), label_bits + digit * bits
        for value in range(first, first + mask):
            starts[value + 1] += starts[value]
        for i in range(ids.size):
            value = first + (source[i] >> shift & mask)
            target[starts[value]] = source[i]
            starts[value] += 1
        source, target = target, source
    # The pairs are in ``order``.
    count, label_mask = 0, (1 << label_bits) - 1
    for i in range(order.size):
        id_ = order[i] >> label_bits
        order[i] &= label_mask
        if count == 0 or id_ != unique[count - 1]:
            bounds[count], unique[count] = i, id_
            count += 1
    bounds[count] = order.size
    return count


@kernel()
def _group_large(ids, order, spare, bounds, unique, starts):
    """Group ids of up to 63 bits by sorting indices; arguments as in ``_group_pairs``."""
    used = np.int64(0)
    for id_ in ids:
        used |= id_
    if used < 0:
        return -1
    passes = 0
    while passes * BITS < 63 and used >> passes * BITS:
        passes += 1
    mask = (1 << BITS) - 1
    # An even number of passes ends in the first array.
    source, target = (spare, order) if passes % 2 else (order, spare)
    for i in range(ids.size):
        source[i] = i
    for digit in range(passes):
        shift = digit * BITS
        for i in range(mask + 2):
            starts[i] = 0
        for i in range(ids.size):
            starts[1 + (ids[source[i]] >> shift & mask)] += 1
        for value in range(mask):
            starts[value + 1] += starts[value]
        for i in range(ids.size):
            value = ids[source[i]] >> shift & mask
            target[starts[value]] = source[i]
            starts[value] += 1
        source, target = target, source
    count = 0
    for i in range(order.size):
        id_ = ids[order[i]]
        if count == 0 or id_ != unique[count - 1]:
            bounds[count], unique[count] = i, id_
            count += 1
    bounds[count] = order.size
    return count
