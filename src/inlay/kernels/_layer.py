"""The complete layer in one pass over memory: look up, scale, add, normalise.

A row is put together in a scratch row that stays in the first cache, in float32 (float64
for float64), and written once.
"""

import numpy as np

from ._lanes import WIDTH, load, total, zeros
from ._numba import bits_of, inlined, kernel, narrow, prefetch_row, widen
from ._pool import run
from ._share import pieces

# Rows are asked for this many ids before they are needed.
AHEAD = 2
# About how many entries of work are worth waking a second core for.
GRAIN = 1 << 16

Rows = tuple[np.ndarray, np.ndarray]
# What is not there is None: Numba compiles a loop of its own without it.
_NOTHING = (None, None)


def layer(
    token: Rows,
    added: tuple[Rows, ...],
    *,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray, float] | None,
    out: np.ndarray,
) -> None:
    """Write the layer's output rows to ``out``.

    Args:
        token: A table and the row of it that each output row begins with.
        added: Up to two more tables and rows, to be added: positions and segments.
            ``(None, None)`` is one that is not there.
        scale: What the token's row is multiplied by.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        out: ``(rows, embedding_dim)``. Rows must have been checked.
    """
    gain, shift, eps = norm or (None, None, 0.0)
    work = np.float64 if out.dtype == np.float64 else np.float32
    run(
        _rows,
        out.shape[0],
        *three_of(token, added),
        gain if gain is None else bits_of(gain),
        shift if shift is None else bits_of(shift),
        work(scale),
        work(eps),
        bits_of(out),
        grain=max(1, GRAIN // max(1, out.shape[1])),
    )


def three_of(token: Rows, added: tuple[Rows, ...]) -> tuple[np.ndarray | None, ...]:
    """Return three tables and the rows of each; None twice for one that is not there."""
    pairs = (token, *added, _NOTHING, _NOTHING)[:3]
    return tuple(
        array if array is None else bits_of(array) for pair in pairs for array in pair
    )


@inlined
def put_together(row, i, token, ids, second, seconds, third, thirds, scale):
    """Write to ``row`` what the tables have for place ``i``."""
    # Named outside the loops: read inside, a store to the row might change it.
    first = ids[i]
    if seconds is not None:
        other = seconds[i]
        for d in range(row.size):
            row[d] = widen(token[first, d]) * scale + widen(second[other, d])
    else:
        for d in range(row.size):
            row[d] = widen(token[first, d]) * scale
    if thirds is not None:
        other = thirds[i]
        for d in range(row.size):
            row[d] += widen(third[other, d])


@inlined
def mean_of(row, zero):
    """Return the mean of the row's numbers, which have the type of ``zero``."""
    block = WIDTH // row.itemsize
    whole, sums = row.size - row.size % block, zeros(zero)
    for d in range(0, whole, block):
        sums = sums + load(zero, row, d)
    mean = total(sums)
    for d in range(whole, row.size):
        mean += row[d]
    return mean / type(zero)(row.size)


@inlined
def factor_of(row, mean, eps):
    """Return what the row, less its mean, is multiplied by to have a variance of 1."""
    # Every number here has the type of eps: an int would widen it to float64.
    block = WIDTH // row.itemsize
    whole, sums = row.size - row.size % block, zeros(eps)
    for d in range(0, whole, block):
        off = load(eps, row, d) - mean
        sums = sums + off * off
    spread = total(sums)
    for d in range(whole, row.size):
        spread += (row[d] - mean) * (row[d] - mean)
    return type(eps)(1) / np.sqrt(spread / type(eps)(row.size) + eps)


@kernel(reorder=True)
def _rows(ticket, token, ids, second, seconds, third, thirds, gain, shift, scale, eps, out):
    width = out.shape[1]
    row = np.empty(width, type(scale))
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            prefetch_row(token, ids[min(i + AHEAD, hi - 1)])
            put_together(row, i, token, ids, second, seconds, third, thirds, scale)
            if gain is not None:
                mean = mean_of(row, type(scale)(0))
                factor = factor_of(row, mean, eps)
                for d in range(width):
                    value = (row[d] - mean) * factor * widen(gain[d]) + widen(shift[d])
                    out[i, d] = narrow(value, out[i, d])
            else:
                for d in range(width):
                    out[i, d] = narrow(row[d], out[i, d])
