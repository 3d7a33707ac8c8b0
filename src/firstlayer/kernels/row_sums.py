"""Sums of rows that share an id, each made by one thread, in the order they came."""

import numpy as np

from .runtime.compile import bits_of, kernel, prefetch_row, widen
from .runtime.lanes import WIDTH, load, store, zeros
from .runtime.pool import run
from .runtime.share import pieces

AHEAD = 4
# About how many entries of sums are worth waking a second core for.
GRAIN = 1 << 16


def sum_groups(
    values: np.ndarray, order: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return the sum of ``values[order[starts[g]:ends[g]]]`` for each group ``g``.

    Sums are float32, for half precision too, and float64 for float64.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    sums = np.empty((starts.size, values.shape[1]), dtype)
    grain = max(1, GRAIN // max(1, values.shape[1]))
    run(_sum, starts.size, bits_of(values), order, starts, ends, sums, grain=grain)
    return sums


def sum_runs(values: np.ndarray, starts: np.ndarray, *, into: np.ndarray) -> None:
    """Write the sum of ``values[starts[g]:starts[g + 1]]`` to ``values[into[g]]``.

    Args:
        values: Contiguous float32 or float64.
        starts: Where each run of rows begins, and the end of the last.
        into: For each run a row that is in none.

    Example:
        >>> values = np.array([[0.0], [2.0], [3.0], [4.0]])
        >>> sum_runs(values, np.array([1, 4]), into=np.array([0]))
        >>> values[0].tolist()
        [9.0]
    """
    rows = (starts[-1] - starts[0]) / max(1, into.size)
    grain = max(1, int(GRAIN / max(1, rows * values.shape[1])))
    run(_sum_runs, into.size, values, starts, into, values.dtype.type(0), grain=grain)


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


@kernel()
def _sum_runs(ticket, values, starts, into, zero):
    width, lanes = values.shape[1], zeros(zero)
    block = WIDTH // values.itemsize
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
                left = zero
                for row in range(first, end, width):
                    left = left + load(zero, values, row + d)
                store(left, values, to + d)
