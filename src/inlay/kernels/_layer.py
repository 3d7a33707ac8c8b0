"""The complete layer in one pass over memory: look up, scale, add, normalise; and back.

A row is put together in a scratch row that stays in the first cache, in float32 (float64
for float64), and written once. The way back puts it together again instead of reading it
from a second large array.
"""

import numba
import numpy as np

from ._numba import bits_of, kernel, narrow, prefetch, widen
from ._pool import run

AHEAD = 4
# About how many entries of work are worth waking a second core for.
GRAIN = 1 << 16
# Rows whose share in the norm's gradients is summed together, and how many such sums.
BLOCK, BLOCKS = 64, 256

Rows = tuple[np.ndarray, np.ndarray]

# Called as functions, these loops would be a fifth slower: what is known of the arrays'
# memory does not reach into a call.
inlined = numba.njit(inline="always")


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
        scale: What the token's row is multiplied by.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        out: ``(rows, embedding_dim)``. Rows must have been checked.
    """
    gain, shift, eps = norm or (token[0][0, :0], token[0][0, :0], 0.0)
    work = np.float64 if out.dtype == np.float64 else np.float32
    run(
        _rows,
        out.shape[0],
        *_three(token, added),
        bits_of(gain),
        bits_of(shift),
        work(scale),
        work(eps),
        bits_of(out),
        grain=max(1, GRAIN // max(1, out.shape[1])),
    )


def layer_pull(
    token: Rows,
    added: tuple[Rows, ...],
    *,
    scale: float,
    norm: tuple[np.ndarray, float],
    dy: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of the sums of rows, of the norm's weight and of its bias.

    Those of the norm are summed over fixed blocks of rows, so that they do not depend on
    the number of threads.

    Args:
        token: As in :func:`layer`.
        added: Likewise.
        scale: Likewise.
        norm: Weight and epsilon of the LayerNorm.
        dy: Gradient of the output, ``(rows, embedding_dim)``.
    """
    rows, width = dy.shape
    work = np.float64 if dy.dtype == np.float64 else np.float32
    dx = np.empty(dy.shape, work)
    block = max(BLOCK, -(-rows // BLOCKS))
    sums = np.zeros((-(-rows // block), 2, width), work)
    gain, eps = norm
    run(
        _rows_pull,
        len(sums),
        *_three(token, added),
        bits_of(gain),
        work(scale),
        work(eps),
        bits_of(dy),
        dx,
        sums,
        block,
        grain=max(1, GRAIN // max(1, block * width)),
    )
    dgain, dshift = sums.sum(0)
    return dx, dgain, dshift


def _three(token: Rows, added: tuple[Rows, ...]) -> tuple[np.ndarray, ...]:
    """Return three tables and the rows of each; those that are not there have none."""
    nothing = (token[0][:0], token[1][:0])
    pairs = (token, *added, nothing, nothing)[:3]
    return tuple(bits_of(array) for pair in pairs for array in pair)


@inlined
def _sum(row, i, token, ids, second, seconds, third, thirds, scale):
    """Put the row together and return the sum of its numbers."""
    # Named outside the loops: read inside, a store to the row might change it.
    first, total = ids[i], type(scale)(0)
    if seconds.size:
        other = seconds[i]
        for d in range(row.size):
            value = widen(token[first, d]) * scale + widen(second[other, d])
            row[d] = value
            total += value
    else:
        for d in range(row.size):
            value = widen(token[first, d]) * scale
            row[d] = value
            total += value
    if thirds.size:
        other = thirds[i]
        for d in range(row.size):
            value = widen(third[other, d])
            row[d] += value
            total += value
    return total


@inlined
def _factor(row, mean, eps):
    """Return what the row, less its mean, is multiplied by to have a variance of 1."""
    # Every number here has the type of eps: an int would widen it to float64.
    spread = type(eps)(0)
    for d in range(row.size):
        off = row[d] - mean
        spread += off * off
    return type(eps)(1) / np.sqrt(spread / type(eps)(row.size) + eps)


@kernel(reorder=True)
def _rows(lo, hi, token, ids, second, seconds, third, thirds, gain, shift, scale, eps, out):
    width = out.shape[1]
    row = np.empty(width, type(scale))
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch(token, ids[i + AHEAD])
        total = _sum(row, i, token, ids, second, seconds, third, thirds, scale)
        if gain.size:
            mean = total / type(scale)(width)
            factor = _factor(row, mean, eps)
            for d in range(width):
                value = (row[d] - mean) * factor * widen(gain[d]) + widen(shift[d])
                out[i, d] = narrow(value, out[i, d])
        else:
            for d in range(width):
                out[i, d] = narrow(row[d], out[i, d])


@kernel(reorder=True)
def _rows_pull(
    lo,
    hi,
    token,
    ids,
    second,
    seconds,
    third,
    thirds,
    gain,
    scale,
    eps,
    dy,
    dx,
    sums,
    block,
):
    rows, width = dx.shape
    row = np.empty(width, type(scale))
    for part in range(lo, hi):
        for i in range(part * block, min(rows, (part + 1) * block)):
            if i + AHEAD < rows:
                prefetch(token, ids[i + AHEAD])
            total = _sum(row, i, token, ids, second, seconds, third, thirds, scale)
            centre = total / type(scale)(width)
            factor = _factor(row, centre, eps)
            mean, along = type(scale)(0), type(scale)(0)
            for d in range(width):
                row[d] = (row[d] - centre) * factor
                up = widen(dy[i, d])
                sums[part, 0, d] += up * row[d]
                sums[part, 1, d] += up
                up *= widen(gain[d])
                mean += up
                along += up * row[d]
            mean /= type(scale)(width)
            along /= type(scale)(width)
            for d in range(width):
                up = widen(dy[i, d]) * widen(gain[d])
                dx[i, d] = factor * (up - mean - row[d] * along)
