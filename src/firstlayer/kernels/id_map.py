"""Map from 64-bit ids to rows, with the order in which rows are given to other ids.

``slots`` is a hash table with open addressing and linear probing, which holds row numbers.
``rows`` has what is known of each row, adjacent in memory. Erasing shifts later entries of
the hash table back, so there are no tombstones.

Rows are in one doubly linked list, the next one to evict first; row 0 is both ends. The
list is sorted by level, which is the number of uses, limited to ``len(tails) - 1``.
``tails[level]`` is the last row of a level, or 0. A use moves a row behind the last one of
the next level, so the rows of a level are in the order of their last use. With a single
level, that is the order of all rows (LRU); with many, rows that are used less come first
(LFU). Every operation on a row takes constant time.

Ids are uint64; ``rows`` has their bits as int64. Arithmetic on them wraps around, with a
warning if Numba's compiler is turned off and the functions run in Python. The arrays are
those of :class:`~.id_arrays.IdArrays`.
"""

import numpy as np

from .id_arrays import AFTER, BEFORE, BORN, ID, SEEN, USES
from .runtime.compile import internal, kernel

# Constants of SplitMix64; see embeddings/hashed.py.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
SHIFT_30, SHIFT_27, SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
# Indices of ``numbers``.
SIZE, BATCH = 0, 1


@internal
def _home(id_, slots):
    """Return the slot where the search for an id begins."""
    z = id_ + GAMMA
    z = (z ^ z >> SHIFT_30) * FIRST
    z = (z ^ z >> SHIFT_27) * SECOND
    z = z ^ z >> SHIFT_31
    return np.int64(z & np.uint64(slots.size - 1))


@internal
def _find_slot(arrays, id_):
    """Return the slot of an id, or the empty one where it would be put."""
    slots, rows, signed = arrays.slots, arrays.rows, np.int64(id_)
    slot = _home(id_, slots)
    while slots[slot] != 0 and rows[slots[slot], ID] != signed:
        slot = (slot + 1) & (slots.size - 1)
    return slot


@internal
def _erase(arrays, id_):
    """Remove an id from a hash table."""
    slots, hole = arrays.slots, _find_slot(arrays, id_)
    slot, last = hole, slots.size - 1
    while True:
        slot = (slot + 1) & last
        if slots[slot] == 0:
            break
        home = _home(np.uint64(arrays.rows[slots[slot], ID]), slots)
        # An entry may move back to the hole unless its search begins behind it.
        if (slot - home) & last >= (slot - hole) & last:
            slots[hole] = slots[slot]
            hole = slot
    slots[hole] = 0


@internal
def _unlink(arrays, row, level):
    before, after = arrays.rows[row, BEFORE], arrays.rows[row, AFTER]
    arrays.rows[before, AFTER] = after
    arrays.rows[after, BEFORE] = before
    if arrays.tails[level] == row:
        is_same = before != 0 and _level(arrays, before) == level
        arrays.tails[level] = before if is_same else 0


@internal
def _level(arrays, row):
    return max(1, min(arrays.rows[row, USES], arrays.tails.size - 1))


@internal
def _link(arrays, row, level):
    """Put a row at the end of its level."""
    lower = level
    while lower > 0 and arrays.tails[lower] == 0:
        lower -= 1
    # Level 0 has no rows, so its tail is the beginning of the list.
    before = arrays.tails[lower]
    after = arrays.rows[before, AFTER]
    arrays.rows[row, BEFORE], arrays.rows[row, AFTER] = before, after
    arrays.rows[before, AFTER] = row
    arrays.rows[after, BEFORE] = row
    arrays.tails[level] = row


@internal
def _use(arrays, row):
    """Count a use of a row."""
    level = _level(arrays, row)
    last = arrays.tails.size - 1
    if level < last and arrays.tails[level] == row and arrays.tails[level + 1] == 0:
        # The row is where it belongs.
        before = arrays.rows[row, BEFORE]
        is_same = before != 0 and _level(arrays, before) == level
        arrays.tails[level] = before if is_same else 0
        arrays.tails[level + 1] = row
        arrays.rows[row, USES] += 1
        return
    _unlink(arrays, row, level)
    arrays.rows[row, USES] += 1
    _link(arrays, row, min(level + 1, last))


@internal
def _put(arrays, row, id_, uses):
    """Give a row that is in no list to an id."""
    arrays.rows[row, ID], arrays.rows[row, USES] = np.int64(id_), uses
    arrays.slots[_find_slot(arrays, id_)] = row
    _link(arrays, row, _level(arrays, row))


@internal
def _evict(arrays, row):
    _unlink(arrays, row, _level(arrays, row))
    _erase(arrays, np.uint64(arrays.rows[row, ID]))


@kernel()
def find_rows(arrays, ids, rows):
    """Write the row of each id, or 0 if it has none, to ``rows``."""
    for i in range(ids.size):
        rows[i] = arrays.slots[_find_slot(arrays, ids[i])]


@kernel()
def list_missing(arrays, candidates, ids, rows, missing, min_count, totals):
    """Find the rows of a batch and the ids without one; number the batch.

    Args:
        arrays: The map.
        candidates: Map of the ids that were seen but have no row.
        ids: Ids of the batch.
        rows: Row of each; if it has none, minus the place among the missing ids, from 1.
        missing: The ids that have none.
        min_count: Number of times that an id must have been seen to get a row.
        totals: Number of rows found, of missing ids, and of those among them that may get
            a row, whose ``missing.rows`` is 1.
    """
    arrays.numbers[BATCH] += 1
    batch = arrays.numbers[BATCH]
    found, count, entitled = 0, 0, 0
    for i in range(ids.size):
        id_ = ids[i]
        row = arrays.slots[_find_slot(arrays, id_)]
        if row:
            if arrays.rows[row, SEEN] != batch:
                arrays.rows[row, SEEN] = batch
                found += 1
            rows[i] = row
            continue
        slot = _home(id_, missing.slots)
        while missing.slots[slot] != 0 and missing.ids[missing.slots[slot] - 1] != id_:
            slot = (slot + 1) & (missing.slots.size - 1)
        if missing.slots[slot] == 0:
            missing.ids[count], missing.counts[count] = id_, 0
            count += 1
            missing.slots[slot] = count
        place = missing.slots[slot]
        missing.counts[place - 1] += 1
        rows[i] = -place
    for k in range(count):
        total = missing.counts[k]
        if min_count > 1:
            slot = _find_slot(candidates, missing.ids[k])
            row = candidates.slots[slot]
            if row:
                total += candidates.rows[row, USES]
        missing.rows[k] = 1 if total >= min_count else 0
        entitled += missing.rows[k]
    totals[0], totals[1], totals[2] = found, count, entitled


@kernel()
def assign_rows(arrays, candidates, rows, missing, count, room, min_count):
    """Count the uses of a batch and give rows to its new ids, after :func:`list_missing`.

    Args:
        arrays: The map.
        candidates: Map of the ids that were seen but have no row.
        rows: As :func:`list_missing` has written them; becomes the row of each id.
        missing: The ids that have no row.
        count: Number of missing ids.
        room: Number of ids that may get a row.
        min_count: Number of times that an id must have been seen to get a row.

    Returns:
        Number of ids that got a row; ``missing.rows`` has the rows.
    """
    numbers, capacity = arrays.numbers, len(arrays.rows) - 1
    for i in range(rows.size):
        if rows[i] > 0:
            _use(arrays, rows[i])
    given, victim = 0, arrays.rows[0, AFTER]
    for k in range(count):
        total = missing.counts[k]
        if min_count > 1:
            total = _count_candidate(candidates, missing.ids[k], total, missing.rows[k])
        if missing.rows[k] == 0 or given == room:
            missing.rows[k] = 0
            continue
        if numbers[SIZE] < capacity:
            numbers[SIZE] += 1
            row = numbers[SIZE]
        else:
            while arrays.rows[victim, SEEN] == numbers[BATCH]:
                victim = arrays.rows[victim, AFTER]
            row, victim = victim, arrays.rows[victim, AFTER]
            _evict(arrays, row)
        _put(arrays, row, missing.ids[k], total)
        arrays.rows[row, SEEN] = arrays.rows[row, BORN] = numbers[BATCH]
        missing.rows[k] = row
        given += 1
    for i in range(rows.size):
        if rows[i] < 0:
            rows[i] = missing.rows[-rows[i] - 1]
    return given


@internal
def _count_candidate(candidates, id_, count, is_entitled):
    """Add to the count of an id without a row, and return its count.

    The count of an id that gets a row starts again at 0.
    """
    numbers = candidates.numbers
    row = candidates.slots[_find_slot(candidates, id_)]
    if row == 0:
        if is_entitled:
            return count
        if numbers[SIZE] < len(candidates.rows) - 1:
            numbers[SIZE] += 1
            row = numbers[SIZE]
        else:
            row = candidates.rows[0, AFTER]
            _evict(candidates, row)
        _put(candidates, row, id_, count)
        return count
    total = candidates.rows[row, USES] + count
    # To the end of the list, where the most recent are.
    _unlink(candidates, row, _level(candidates, row))
    candidates.rows[row, USES] = 0 if is_entitled else total
    _link(candidates, row, 1)
    return total


@kernel()
def restore_rows(arrays, ids, uses, order):
    """Give rows to ids, from the first row on, in an empty map.

    Args:
        arrays: The map.
        ids: Id of each row.
        uses: Number of uses of each.
        order: Places of the rows, the next one to evict first.

    Returns:
        Number of rows given; less than there are ids if one occurs twice.
    """
    for place in order:
        id_, row = ids[place], place + 1
        if arrays.slots[_find_slot(arrays, id_)] != 0:
            return arrays.numbers[SIZE]
        _put(arrays, row, id_, uses[place])
        arrays.numbers[SIZE] += 1
    return arrays.numbers[SIZE]


@kernel()
def eviction_order(arrays, order):
    """Write the place of each row in the order of eviction, from 1, to ``order``."""
    row, place = arrays.rows[0, AFTER], 0
    while row:
        place += 1
        order[row] = place
        row = arrays.rows[row, AFTER]
