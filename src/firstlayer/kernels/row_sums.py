"""Sums of rows. One thread adds the rows of a sum, in order."""

import numpy as np

from .runtime.aligned import aligned_empty
from .runtime.compile import bits_of, kernel, prefetch_row, upcast
from .runtime.lanes import LANES_BYTES, load, store, zeros
from .runtime.pool import grain_for, pieces, run

# Number of rows between the one that is added and the one that is prefetched.
AHEAD = 4
# Minimum number of entries per thread.
GRAIN = 1 << 16


def sum_groups(
    values: np.ndarray, order: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return the sum of ``values[order[starts[g]:ends[g]]]`` for each group ``g``.

    Sums are float64 for float64, else float32.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    sums = aligned_empty((starts.size, values.shape[1]), dtype)
    grain = grain_for(GRAIN, values.shape[1])
    run(_sum_groups, starts.size, bits_of(values), order, starts, ends, sums, grain=grain)
    return sums


def sum_runs(values: np.ndarray, starts: np.ndarray, *, into: np.ndarray) -> None:
    """Write the sum of ``values[starts[g]:starts[g + 1]]`` to ``values[into[g]]``.

    Args:
        values: Contiguous float32 or float64.
        starts: First row of each run, and the end of the last.
        into: Row for the sum of each run; it is in none of the runs.

    Example:
        >>> values = np.array([[0.0], [2.0], [3.0], [4.0]])
        >>> sum_runs(values, np.array([1, 4]), into=np.array([0]))
        >>> values[0].tolist()
        [9.0]
    """
    entries = int(starts[-1] - starts[0]) * values.shape[1]
    grain = grain_for(GRAIN, entries, into.size)
    run(_sum_runs, into.size, values, starts, into, values.dtype.type(0), grain=grain)


def sum_words(words: np.ndarray) -> np.ndarray:
    """Return the sum of each row of uint64 numbers, modulo 2 ** 64.

    Example:
        >>> sum_words(np.array([[1, 2], [2**64 - 1, 3]], np.uint64)).tolist()
        [3, 2]
    """
    sums = np.empty(len(words), np.uint64)
    run(_sum_words, len(words), words, sums, grain=grain_for(GRAIN, words.shape[1]))
    return sums


@kernel()
def _sum_groups(ticket, values, order, starts, ends, sums):
    final = order.size - 1
    for lo, hi in pieces(ticket):
        for group in range(lo, hi):
            first = starts[group]
            prefetch_row(values, order[min(first + AHEAD, final)])
            row = order[first]
            for d in range(values.shape[1]):
                sums[group, d] = upcast(values[row, d])
            for i in range(first + 1, ends[group]):
                prefetch_row(values, order[min(i + AHEAD, final)])
                row = order[i]
                for d in range(values.shape[1]):
                    sums[group, d] += upcast(values[row, d])


@kernel()
def _sum_runs(ticket, values, starts, into, zero):
    width, lanes = values.shape[1], zeros(zero)
    block = LANES_BYTES // values.itemsize
    whole = width - width % block
    for lo, hi in pieces(ticket):
        for group in range(lo, hi):
            first, end = starts[group] * width, starts[group + 1] * width
            to = into[group] * width
            for d in range(0, whole, block):
                sums = lanes
                for row in range(first, end, width):
                    sums = sums + load(lanes, values, row + d)
                store(sums, values, to + d)
            for d in range(whole, width):
                rest = zero
                for row in range(first, end, width):
                    rest = rest + load(zero, values, row + d)
                store(rest, values, to + d)


@kernel()
def _sum_words(ticket, words, sums):
    for lo, hi in pieces(ticket):
        for row in range(lo, hi):
            total = np.uint64(0)
            for d in range(words.shape[1]):
                total += words[row, d]
            sums[row] = total
