"""Arrays that the kernels of id maps read and write."""

from typing import NamedTuple

import numpy as np

# Columns of ``IdArrays.rows``.
ID, USES, BEFORE, AFTER, SEEN, BORN = range(6)


class IdArrays(NamedTuple):
    """Arrays of a map, which change together.

    Args:
        slots: Row in each slot of the hash table, or 0. A power of two of them.
        rows: For each row: its id, its number of uses, the row before and the row after it
            in the order of eviction, the number of the last batch with its id, and that of
            the batch in which it got its id.
        tails: Last row of each level, or 0.
        numbers: Number of rows in use, and of batches.
    """

    slots: np.ndarray
    rows: np.ndarray
    tails: np.ndarray
    numbers: np.ndarray


class MissingIds(NamedTuple):
    """Scratch memory for the distinct ids of a batch that have no row.

    Args:
        slots: Hash table of places in ``ids``, counted from 1. A power of two of them.
        ids: The ids, in the order of their first occurrence.
        counts: Number of times that each occurs.
        rows: Row that each of them gets, or 0.
    """

    slots: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
