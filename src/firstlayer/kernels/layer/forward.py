"""The complete layer in one pass over memory: look up, scale, add, normalise.

A row is put together in a scratch row that stays in the first cache, in float32 (float64
for float64), and written once.
"""

import numpy as np

from ..runtime.compile import bits_of, inlined, kernel
from ..runtime.lanes import WIDTH, fetch, is_streamed, load, store, total, write, zeros
from ..runtime.pool import run
from ..runtime.share import pieces

# TableRows are asked for this many ids before they are needed.
AHEAD = 2
# About how many entries of work are worth waking a second core for.
GRAIN = 1 << 16

TableRows = tuple[np.ndarray, np.ndarray]
# What is not there is None: Numba compiles a loop of its own without it.
_NOTHING = (None, None)


def layer_forward(
    token: TableRows,
    *,
    position: TableRows | None = None,
    segment: TableRows | None = None,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray, float] | None,
    out: np.ndarray,
) -> bool:
    """Write the layer's output rows to ``out``, and tell whether every id is in range.

    Args:
        token: A table and the row of it that each output row begins with, an id. Where that
            is not a row of the table nothing is written.
        position: A table and the row of it that is added to each output row, or None.
            Fewer rows than the output has are repeated from the first.
        segment: Likewise.
        scale: What the token's row is multiplied by.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        out: ``(rows, embedding_dim)``. Rows of added tables must have been checked.
    """
    gain, shift, eps = norm or (None, None, 0.0)
    work = np.float64 if out.dtype == np.float64 else np.float32
    faults = np.zeros(1, np.int64)
    run(
        _rows,
        out.shape[0],
        *flat_pairs(token, position, segment),
        flat(gain),
        flat(shift),
        work(scale),
        work(eps),
        is_streamed(out),
        bits_of(out),
        faults,
        grain=max(1, GRAIN // max(1, out.shape[1])),
    )
    return not faults[0]


def flat_pairs(*pairs: TableRows | None) -> tuple[np.ndarray | None, ...]:
    """Return the table and the rows of each pair, as kernels read them."""
    return tuple(flat(array) for pair in pairs for array in pair or _NOTHING)


def flat(array: np.ndarray | None) -> np.ndarray | None:
    """Return an array as lanes are read from it, contiguous; None stays None."""
    return None if array is None else bits_of(np.ascontiguousarray(array))


@inlined
def _sum(like, d, token, first, second, other, third, another, scale):
    """Return what the tables have, added up, as lanes or one number like ``like``."""
    value = load(like, token, first + d) * scale
    if second is not None:
        value = value + load(like, second, other + d)
    if third is not None:
        value = value + load(like, third, another + d)
    return value


@inlined
def put_together(row, i, ahead, token, ids, second, seconds, third, thirds, scale):
    """Write to ``row`` what the tables have for place ``i``, and return its mean.

    The token's row for the place ``ahead`` is asked for meanwhile.
    """
    width, zero = row.size, type(scale)(0)
    block = WIDTH // row.itemsize
    whole, sums, rest = width - width % block, zeros(zero), zero
    # Named outside the loops: read inside, a store to the row might change it.
    first, later = ids[i] * width, ids[ahead] * width
    other = 0 if seconds is None else seconds[i % seconds.size] * width
    another = 0 if thirds is None else thirds[i % thirds.size] * width
    for d in range(0, whole, block):
        fetch(sums, token, later + d)
        part = _sum(sums, d, token, first, second, other, third, another, scale)
        store(part, row, d)
        sums = sums + part
    if whole < width:
        fetch(rest, token, later + whole)
    for d in range(whole, width):
        row[d] = _sum(rest, d, token, first, second, other, third, another, scale)
        rest = rest + row[d]
    return (total(sums) + rest) / type(scale)(width)


@inlined
def factor_of(row, mean, eps):
    """Return what the row, less its mean, is multiplied by to have a variance of 1."""
    # Every number here has the type of eps: an int would widen it to float64.
    block = WIDTH // row.itemsize
    whole, sums = row.size - row.size % block, zeros(eps)
    for d in range(0, whole, block):
        off = load(sums, row, d) - mean
        sums = sums + off * off
    spread = total(sums)
    for d in range(whole, row.size):
        spread += (row[d] - mean) * (row[d] - mean)
    return type(eps)(1) / np.sqrt(spread / type(eps)(row.size) + eps)


@inlined
def _normal(like, row, d, mean, factor, gain, shift):
    """Return lanes or one number of the output, as ``like`` is."""
    value = load(like, row, d)
    if gain is not None:
        value = (value - mean) * factor * load(like, gain, d) + load(like, shift, d)
    return value


@kernel(reorder=True)
def _rows(
    ticket,
    token,
    ids,
    second,
    seconds,
    third,
    thirds,
    gain,
    shift,
    scale,
    eps,
    streams,
    out,
    faults,
):
    count = token.shape[0]
    width, zero = out.shape[1], type(scale)(0)
    row, lanes = np.empty(width, type(scale)), zeros(zero)
    block = WIDTH // row.itemsize
    whole = width - width % block
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            if ids[i] < 0 or ids[i] >= count:
                # Whoever finds one writes the same.
                faults[0] = 1
                continue
            ahead, factor = min(i + AHEAD, hi - 1), zero
            mean = put_together(
                row, i, ahead, token, ids, second, seconds, third, thirds, scale
            )
            if gain is not None:
                factor = factor_of(row, mean, eps)
            at = i * width
            for d in range(0, whole, block):
                part = _normal(lanes, row, d, mean, factor, gain, shift)
                write(part, out, at + d, streams)
            for d in range(whole, width):
                store(_normal(zero, row, d, mean, factor, gain, shift), out, at + d)
