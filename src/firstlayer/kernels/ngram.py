"""Rows of n-grams: the window of each position and all of its hashes in one pass."""

import numpy as np

from .runtime.compile import inlined, kernel
from .runtime.pool import grain_for, pieces, run

# Negative ids are dead, read as the fill, or are hashed.
NEGATIVE = ("dead", "fill", "hashed")
DEAD, FILL, HASHED = range(3)
# Minimum number of hashes per thread.
GRAIN = 1 << 16
# From this modulus on, float64 quotients of 64-bit numbers are less than 2**47. Their
# relative error is less than 2**-51, so that their floor is wrong by at most 1.
FLOAT_QUOTIENTS = 1 << 16


def ngram_rows(
    full: np.ndarray,
    documents: np.ndarray | None,
    table: np.ndarray | None,
    *,
    fill: int,
    stop: int | None,
    negative: str,
    no_id: int,
    multipliers: np.ndarray,
    heads: int,
    sizes: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """Return the rows of all positions, ``(sequences, length, columns)``.

    Args:
        full: Ids of the history, one less than an n-gram has, then of the positions, int64,
            ``(sequences, span - 1 + length)``.
        documents: Document of each id, int64, in the shape of ``full``, or None.
        table: Number that is hashed for each id that is not negative, or None for the id.
        fill: Number that is hashed for an id that is not there.
        stop: Earlier id at which an n-gram ends, or None.
        negative: ``"dead"``, ``"fill"`` or ``"hashed"``.
        no_id: Id that is not there if negative ids are hashed.
        multipliers: ``(span,)`` for a xor of products, ``(columns, span)`` for a sum.
        heads: Number of columns for each order of a xor.
        sizes: Modulus of each column.
        offsets: First row of each column.

    Example:
        >>> ngram_rows(
        ...     np.array([[-1, 3, 4]]), None, None, fill=0, stop=None, negative="dead",
        ...     no_id=-1, multipliers=np.array([[1, 10]]), heads=1, sizes=np.array([100]),
        ...     offsets=np.array([1000]),
        ... ).tolist()
        [[[1003], [1034]]]
    """
    span, has_stop = multipliers.shape[-1], stop is not None
    length = full.shape[1] - span + 1
    out = np.empty((full.shape[0], length, sizes.size), np.int64)
    inverses = 1.0 / sizes
    negative_code = NEGATIVE.index(negative)
    is_large = sizes.min() >= FLOAT_QUOTIENTS
    options = [fill, stop or 0, has_stop, negative_code, no_id, heads, is_large]
    empty = np.empty(0, np.int64)
    run(
        _xor_rows if multipliers.ndim == 1 else _sum_rows,
        out.shape[0] * length,
        full,
        full[:, :0] if documents is None else documents,
        empty if table is None else table,
        np.array(options, np.int64),
        multipliers,
        sizes,
        inverses,
        offsets,
        out.reshape(-1, sizes.size),
        grain=grain_for(GRAIN, sizes.size),
    )
    return out


@inlined
def _read_window(window, full, documents, table, options, i):
    """Write the numbers of the n-gram that ends at position ``i``, newest first."""
    fill, stop, has_stop = options[0], options[1], options[2]
    negative, no_id = options[3], options[4]
    span = window.size
    length = full.shape[1] - span + 1
    row, place = i // length, i % length + span - 1
    is_open = True
    for s in range(span):
        number = full[row, place - s]
        if is_open and number < 0:
            if negative == FILL:
                number = fill
            else:
                is_open = negative == HASHED and number != no_id
        elif is_open and table.size:
            number = table[number]
        if is_open and s:
            if has_stop and number == stop:
                is_open = False
            if documents.size and documents[row, place - s] != documents[row, place]:
                is_open = False
        window[s] = number if is_open else fill


@inlined
def _remainder(number, size, inverse):
    """Return ``number % size`` for a size of at least ``FLOAT_QUOTIENTS``."""
    rest = number - np.int64(np.floor(np.float64(number) * inverse)) * size
    rest = rest + size if rest < 0 else rest
    return rest - size if rest >= size else rest


@kernel()
def _xor_rows(
    ticket, full, documents, table, options, multipliers, sizes, inverses, offsets, out
):
    window, heads = np.empty(multipliers.size, np.int64), options[5]
    is_large = options[6] != 0
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            _read_window(window, full, documents, table, options, i)
            mix = window[0] * multipliers[0]
            for n in range(1, window.size):
                mix ^= window[n] * multipliers[n]
                part = slice((n - 1) * heads, n * heads)
                rows, moduli, firsts = out[i, part], sizes[part], offsets[part]
                if is_large:
                    for c in range(heads):
                        local = _remainder(mix, moduli[c], inverses[part][c])
                        rows[c] = local + firsts[c]
                else:
                    for c in range(heads):
                        rows[c] = mix % moduli[c] + firsts[c]


@kernel()
def _sum_rows(
    ticket, full, documents, table, options, multipliers, sizes, inverses, offsets, out
):
    columns, span = multipliers.shape
    is_large = options[6] != 0
    window = np.empty(span, np.int64)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            _read_window(window, full, documents, table, options, i)
            for c in range(columns):
                total = 0
                for s in range(span):
                    total += window[s] * multipliers[c, s]
                if is_large:
                    out[i, c] = _remainder(total, sizes[c], inverses[c]) + offsets[c]
                else:
                    out[i, c] = total % sizes[c] + offsets[c]
