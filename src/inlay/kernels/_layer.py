"""The complete layer in one pass over memory: look up, scale, add, normalise.

A row is put together in a scratch row that stays in the first cache, in float32 (float64
for float64), and written once.
"""

import numpy as np

from ._numba import bits_of, kernel, narrow, prefetch, widen
from ._pool import run

AHEAD = 4
# About how many entries of work are worth waking a second core for.
GRAIN = 1 << 16


def layer(
    token: tuple[np.ndarray, np.ndarray],
    added: tuple[tuple[np.ndarray, np.ndarray], ...],
    *,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray, float] | None,
    out: np.ndarray,
) -> None:
    """Write the layer's output rows to ``out``.

    Args:
        token: A table and the row of it that each output row begins with.
        added: Up to two more tables and rows, to be added: positions and segments.
        scale: What the token's row is multiplied by.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        out: ``(rows, embedding_dim)``. Rows must have been checked.
    """
    width = out.shape[1]
    nothing = (token[0][:0], token[1][:0])
    (second, second_rows), (third, third_rows) = (*added, nothing, nothing)[:2]
    gain, shift, eps = norm or (token[0][0, :0], token[0][0, :0], 0.0)
    work = np.float64 if out.dtype == np.float64 else np.float32
    arrays = [token[0], token[1], second, second_rows, third, third_rows]
    run(
        _rows,
        out.shape[0],
        *map(bits_of, arrays),
        bits_of(gain),
        bits_of(shift),
        work(scale),
        work(eps),
        bits_of(out),
        grain=max(1, GRAIN // max(1, width)),
    )


@kernel(reorder=True)
def _rows(lo, hi, token, ids, second, seconds, third, thirds, gain, shift, scale, eps, out):
    width = out.shape[1]
    # Every number below has the type of these two: an int would widen it to float64.
    one, zero = type(scale)(1), type(scale)(0)
    row = np.empty(width, type(scale))
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch(token, ids[i + AHEAD])
        # Named outside the loops: read inside, a store to the row might change it.
        first = ids[i]
        for d in range(width):
            row[d] = widen(token[first, d]) * scale
        if seconds.size:
            other = seconds[i]
            for d in range(width):
                row[d] += widen(second[other, d])
        if thirds.size:
            other = thirds[i]
            for d in range(width):
                row[d] += widen(third[other, d])
        if gain.size:
            mean = zero
            for d in range(width):
                mean += row[d]
            mean /= type(scale)(width)
            spread = zero
            for d in range(width):
                row[d] -= mean
                spread += row[d] * row[d]
            factor = one / np.sqrt(spread / type(scale)(width) + eps)
            for d in range(width):
                row[d] = row[d] * factor * widen(gain[d]) + widen(shift[d])
        for d in range(width):
            out[i, d] = narrow(row[d], out[i, d])
