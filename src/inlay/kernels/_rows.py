"""Sums of rows that share an id, each made by one thread, in the order they came."""

import numpy as np

from ._numba import bits_of, kernel, prefetch_row, widen
from ._pool import run
from ._share import pieces

AHEAD = 4


def sum_groups(
    values: np.ndarray, order: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return the sum of ``values[order[starts[g]:ends[g]]]`` for each group ``g``.

    Sums are float32, for half precision too, and float64 for float64.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    sums = np.empty((starts.size, values.shape[1]), dtype)
    grain = max(1, (1 << 16) // max(1, values.shape[1]))
    run(_sum, starts.size, bits_of(values), order, starts, ends, sums, grain=grain)
    return sums


@kernel()
def _sum(ticket, values, order, starts, ends, sums):
    final = order.size - 1
    for lo, hi in pieces(ticket):
        for group in range(lo, hi):
            first = starts[group]
            prefetch_row(values, order[min(first + AHEAD, final)])
            row = order[first]
            for d in range(values.shape[1]):
                sums[group, d] = widen(values[row, d])
            for place in range(first + 1, ends[group]):
                prefetch_row(values, order[min(place + AHEAD, final)])
                row = order[place]
                for d in range(values.shape[1]):
                    sums[group, d] += widen(values[row, d])
