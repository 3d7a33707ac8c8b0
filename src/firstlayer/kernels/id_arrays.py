"""Arrays that the kernels of id maps read and write."""

from typing import NamedTuple

import numpy as np


class IdArrays(NamedTuple):
    """Arrays of a map, which change together.

    Args:
        slots: Row in each slot of the hash table, or 0. A power of two of them.
        ids: Id of each row.
        uses: Number of uses of each row.
        links: Row before and row after each row in the order of eviction.
        tails: Last row of each level, or 0.
        seen: Number of the last batch with the row's id.
        born: Number of the batch in which the row got its id.
        numbers: Number of rows in use, and of batches.
    """

    slots: np.ndarray
    ids: np.ndarray
    uses: np.ndarray
    links: np.ndarray
    tails: np.ndarray
    seen: np.ndarray
    born: np.ndarray
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
