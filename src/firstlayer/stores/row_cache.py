"""A bounded cache of the rows that were read last, with counts of hits and misses."""

import threading
from typing import NamedTuple

import numpy as np

#: Rows that share one place of the hash table. The least recently read of them is replaced.
WAYS = 8
# Multiplicative hashing: the fraction of the golden ratio, in 64 bits.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class CacheInfo(NamedTuple):
    """Counts of a cache, by the names of :func:`functools.lru_cache`."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class RowCache:
    """Rows by id, at most ``max_rows`` of them.

    Ids are hashed to sets of eight rows. Within a set, the row that was not read for the
    longest time is replaced. All methods work on whole batches.

    Args:
        max_rows: Largest number of rows, rounded up to a multiple of eight.
        width: Width of a row.
        dtype: Dtype of a row.

    Example:
        >>> cache = RowCache(8, 2, np.dtype(np.float32))
        >>> cache.insert(np.array([5]), np.array([[1, 2]], np.float32))
        >>> out = np.zeros((2, 2), np.float32)
        >>> cache.find(np.array([7, 5]), out)
        array([ True, False])
        >>> out[1], cache.info()
        (array([1., 2.], dtype=float32), CacheInfo(hits=1, misses=1, maxsize=8, currsize=1))
    """

    def __init__(self, max_rows: int, width: int, dtype: np.dtype) -> None:
        self.num_sets = -(-max_rows // WAYS)
        self.ids = np.full((self.num_sets, WAYS), -1, np.int64)
        self.last_read = np.zeros((self.num_sets, WAYS), np.int64)
        self.rows = np.empty((self.num_sets * WAYS, width), dtype)
        self.hits = self.misses = self.clock = 0
        self.lock = threading.Lock()

    def find(self, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the rows that are cached to ``out``; return which ids are missing."""
        sets = self._sets(ids)
        with self.lock:
            self.clock += 1
            is_way = self.ids[sets] == ids[:, None]
            missing = ~is_way.any(axis=1)
            found = np.flatnonzero(~missing)
            ways = is_way[found].argmax(axis=1)
            out[found] = self.rows[sets[found] * WAYS + ways]
            self.last_read[sets[found], ways] = self.clock
            self.hits += found.size
            self.misses += ids.size - found.size
        return missing

    def insert(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Keep rows of distinct ids in place of those read least recently."""
        sets = self._sets(ids)
        order = np.argsort(sets, kind="stable")
        in_order = sets[order]
        # The k-th id of a set replaces the row that was read k-th longest ago.
        rank = np.arange(ids.size) - np.searchsorted(in_order, in_order)
        order = order[rank < WAYS]
        rank, sets = rank[rank < WAYS], sets[order]
        with self.lock:
            # Another thread may have inserted the same ids in the meantime.
            new = ~(self.ids[sets] == ids[order][:, None]).any(axis=1)
            order, rank, sets = order[new], rank[new], sets[new]
            oldest = np.argsort(self.last_read[sets], axis=1, kind="stable")
            ways = np.take_along_axis(oldest, rank[:, None], axis=1)[:, 0]
            self.ids[sets, ways] = ids[order]
            self.rows[sets * WAYS + ways] = rows[order]
            self.last_read[sets, ways] = self.clock

    def info(self) -> CacheInfo:
        """Return the counts of hits and misses, the capacity and the number of rows."""
        with self.lock:
            current = int((self.ids >= 0).sum())
            return CacheInfo(self.hits, self.misses, len(self.rows), current)

    def _sets(self, ids: np.ndarray) -> np.ndarray:
        mixed = (ids.astype(np.uint64) * MULTIPLIER) >> np.uint64(32)
        return (mixed % np.uint64(self.num_sets)).astype(np.int64)
