"""Sums of rows that share an id, each made by one thread, in the order they came."""

import numpy as np

from ._numba import bits_of, kernel, prefetch, widen
from ._pool import run
from ._share import pieces

AHEAD = 4


def sum_groups(values: np.ndarray, order: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the sum of ``values[order[bounds[g]:bounds[g + 1]]]`` for each group ``g``.

    Sums are float32, for half precision too, and float64 for float64.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    sums = np.empty((bounds.size - 1, values.shape[1]), dtype)
    grain = max(1, (1 << 16) // max(1, values.shape[1]))
    run(_sum, bounds.size - 1, bits_of(values), order, bounds, sums, grain=grain)
    return sums


@kernel()
def _sum(ticket, values, order, bounds, sums):
    last = bounds[-1]
    for lo, hi in pieces(ticket):
        for group in range(lo, hi):
            first = bounds[group]
            row = order[first]
            for d in range(values.shape[1]):
                sums[group, d] = widen(values[row, d])
            for place in range(first + 1, bounds[group + 1]):
                row = order[place]
                if place + AHEAD < last:
                    prefetch(values, order[place + AHEAD])
                for d in range(values.shape[1]):
                    sums[group, d] += widen(values[row, d])
