"""In which order the layer's way back goes through its places, and where each writes.

A row of the token table's gradient whose id occurs once is written where it belongs at
once. An id that occurs several times has a row for each block that it occurs in, and these
are summed afterwards.

Places are gone through in blocks, which threads take one after the other. All places of a
row of the second table (positions) are in one block if that can be, in the order of memory:
its sums are then few enough to stay in a cache, and nobody else adds to them.
"""

from typing import Any, NamedTuple

import numpy as np

from ..group import grouped
from ..runtime.compile import kernel

# Blocks there are at most, and places to each row of their sums at least.
BLOCKS, SHARE = 32, 4
# A row of the second table is frequent if it has more than one in so many of all places.
FEW = 8


class BackwardPlan(NamedTuple):
    """The order of places, and where their gradients go.

    Args:
        slots: For each place the row of its token's gradient; -1 is none. There is a row
            for each id, and after them come those of ids that occur several times, one for
            each block they occur in. The first place of the block that has such a row
            writes it, and the others, which have ``-2 - row`` here, add to it.
        ids: The ids, ascending.
        several: Which of them occur several times.
        starts: Where the rows of each of those begin, and the end of the last.
        order: The places; those that are not in it are left out.
        bounds: Where in ``order`` each block begins, and the end of the last.
        rows: The rows of the second table, ascending.
        sums: For each place which of them is its own; None without that table.
        is_split: Whether one of them may be met in several blocks; each block then has sums
            of its own.
    """

    slots: np.ndarray
    ids: np.ndarray
    several: np.ndarray
    starts: np.ndarray
    order: np.ndarray
    bounds: np.ndarray
    rows: np.ndarray
    sums: np.ndarray | None
    is_split: bool


def plan_backward(
    ids: np.ndarray | None,
    seconds: np.ndarray | None,
    *,
    places: np.ndarray,
    size: int,
    skip: int | None,
    shared: int,
) -> BackwardPlan:
    """Return the way through ``places``.

    Args:
        ids: The token's row for each place; None writes a row for each place, in order.
        seconds: The second table's. Fewer than there are places begin again at their end.
        places: Those that give anybody a gradient, in order.
        size: How many places there are in all.
        skip: An id that gets no gradient.
        shared: How many rows of sums each block has beside those of the second table.

    Example:
        >>> ids, places = np.array([7, 3, 7]), np.arange(3)
        >>> route = route_of(ids, None, places=places, size=3, skip=None, shared=2)
        >>> route.ids.tolist(), route.several.tolist(), route.starts.tolist()
        ([3, 7], [1], [2, 3])
        >>> route.slots.tolist()
        [2, 0, -4]
    """
    none = places[:0]
    if seconds is None:
        count = _count(places.size, shared)
        order, bounds = places, np.arange(count + 1) * places.size // count
        rest: Any = none, None, False
    else:
        order, bounds, *rest = _blocks(seconds, size, places, shared)
    if ids is None:
        slots = unique = np.arange(size)
        several, starts = none, np.array([size])
    else:
        passed = -1 if skip is None else skip
        slots, unique, several, starts = _slots(ids, order, bounds, passed)
        if not starts.size:
            raise ValueError(f"ids must not be negative, got {ids.min()}")
    # Gradients keep their ids: in memory that NumPy knows of, and no more than they need.
    return BackwardPlan(slots, unique.copy(), several, starts, order, bounds, *rest)


@kernel()
def _slots(ids, places, cuts, skip):
    # Places come block after block, and so do those of each id.
    order, bounds, unique = grouped(ids, places)
    slots, count = np.full(ids.size, -1), 0
    if not bounds.size:
        return slots, unique, unique, bounds
    several, starts = np.empty_like(unique), np.empty_like(bounds)
    after, row = (unique != skip).sum(), 0
    starts[0], blocks = after, _block_of(places, cuts, ids.size)
    for group in range(unique.size):
        if unique[group] == skip:
            continue
        first, end = bounds[group], bounds[group + 1]
        unique[row] = unique[group]
        if end - first == 1:
            slots[order[first]] = row
        else:
            for i in range(first, end):
                if i > first and blocks[order[i]] == blocks[order[i - 1]]:
                    slots[order[i]] = -1 - after
                else:
                    slots[order[i]], after = after, after + 1
            several[count], count = row, count + 1
            starts[count] = after
        row += 1
    return slots, unique[:row], several[:count], starts[: count + 1]


@kernel()
def _block_of(places, cuts, size):
    blocks = np.empty(size, np.int64)
    for block in range(cuts.size - 1):
        for i in range(cuts[block], cuts[block + 1]):
            blocks[places[i]] = block
    return blocks


@kernel()
def _blocks(seconds, size, places, shared):
    sums, rows, counts = _ranked(seconds, size, places)
    if (FEW * counts > places.size).any() and places.size >= FEW * rows.size:
        # Few rows, met again and again: each block adds up its own.
        blocks = _count(places.size, shared + rows.size)
        bounds = np.arange(blocks + 1) * places.size // blocks
        return places, bounds, rows, sums, True
    blocks, bounds = _cut(counts, _count(places.size, shared), places.size)
    order, free = np.empty_like(places), bounds.copy()
    for place in places:
        block = blocks[sums[place]]
        order[free[block]] = place
        free[block] += 1
    return order, bounds, rows, sums, False


@kernel()
def _ranked(seconds, size, places):
    """Return which of the rows that occur each place has, the rows, and their places."""
    order, bounds, rows = grouped(seconds, np.arange(seconds.size))
    ranks, sums = np.empty_like(seconds), np.empty(size, np.int64)
    for rank in range(rows.size):
        for i in range(bounds[rank], bounds[rank + 1]):
            ranks[order[i]] = rank
    for first in range(0, size, max(1, seconds.size)):
        sums[first : first + seconds.size] = ranks[: size - first]
    counts, number = np.zeros_like(rows), 0
    for place in places:
        counts[sums[place]] += 1
    for rank in range(rows.size):
        rows[number], counts[number], ranks[rank] = rows[rank], counts[rank], number
        number += counts[number] > 0
    if number < rows.size:
        for place in places:
            sums[place] = ranks[sums[place]]
    return sums, rows[:number], counts[:number]


@kernel()
def _cut(counts, most, places):
    """Return the block of each row, with its places before it, and where blocks begin."""
    blocks, bounds = np.empty_like(counts), np.empty(most + 1, np.int64)
    number, before, last = 0, 0, 0
    bounds[0] = 0
    for row in range(counts.size):
        if before * most // places != last:
            last, number = before * most // places, number + 1
            bounds[number] = before
        blocks[row], before = number, before + counts[row]
    bounds[number + 1] = before
    return blocks, bounds[: number + 2]


@kernel()
def _count(places, sums):
    """Return of how many blocks the sums are fewer than the places."""
    return max(1, min(BLOCKS, places // (SHARE * sums)))
