"""Sums of rows that share an id, each made by one thread, in the order they came."""

import numpy as np

from ._numba import bits_of, kernel, prefetch_row, widen
from ._pool import run
from ._share import pieces

AHEAD = 4


def sum_groups(
    values: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    into: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Return the sum of ``values[order[starts[g]:ends[g]]]`` for each group ``g``.

    Sums are float32, for half precision too, and float64 for float64.

    Args:
        values: Where the rows are.
        order: Which rows, group after group.
        starts: Where in ``order`` each group begins.
        ends: Where it ends.
        into: An array to write to and the row of it for each group, none of ``values``
            that is summed; None makes a new one.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    if into is None:
        into = np.empty((starts.size, values.shape[1]), dtype), np.arange(starts.size)
    grain = max(1, (1 << 16) // max(1, values.shape[1]))
    run(_sum, starts.size, bits_of(values), order, starts, ends, *into, grain=grain)
    return into[0]


@kernel()
def _sum(ticket, values, order, starts, ends, sums, rows):
    final = order.size - 1
    for lo, hi in pieces(ticket):
        for group in range(lo, hi):
            first, to = starts[group], rows[group]
            prefetch_row(values, order[min(first + AHEAD, final)])
            row = order[first]
            for d in range(values.shape[1]):
                sums[to, d] = widen(values[row, d])
            for place in range(first + 1, ends[group]):
                prefetch_row(values, order[min(place + AHEAD, final)])
                row = order[place]
                for d in range(values.shape[1]):
                    sums[to, d] += widen(values[row, d])
