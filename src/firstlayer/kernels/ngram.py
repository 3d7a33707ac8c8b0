"""Rows of n-grams: the window of each position and all of its hashes in one pass.

A remainder needs no division. The quotient of an int64 ``x`` by a size ``p`` is computed in
float64, as ``x`` times the inverse of ``p``, and rounded to the nearest integer ``q``. Four
roundings, of ``x``, ``p``, the inverse and the product, change it by less than ``2**-50``
of its size and so by at most ``2**13 / p``, a quarter if ``p`` is at least ``2**15``. Then
``q`` differs from ``x / p`` by less than 1, so ``x - q * p``, whose value is exact although
the product wraps around, is between ``-p`` and ``p``, and ``p`` is added if it is negative.
For a smaller ``p``, ``x`` is first reduced by ``2**15 * p``, then by ``p``: the second
quotient is at most ``2**15`` and therefore wrong by less than ``2**-35``.
"""

import numpy as np

from .runtime.compile import inlined, kernel
from .runtime.lanes import (
    SHORT_LANES_BYTES,
    add_if_negative,
    as_float64,
    load,
    nearest_integer,
    short_zeros,
    store,
)
from .runtime.pool import grain_for, pieces, run

# Minimum number of hashes per thread.
GRAIN = 1 << 16
# Sizes from this on need one reduction.
LARGE_SIZE = 1 << 15
# Number of columns in a vector.
COUNT = SHORT_LANES_BYTES // 8


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
    sizes: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """Return the rows of all positions, ``(sequences, length, columns)``.

    Args:
        full: Ids of the history, one less than an n-gram has, then of the positions, int64,
            ``(sequences, span - 1 + length)``.
        documents: Document of each id, int64, or of the last ids of ``full``; the ids
            before are in the document of the first of these. None if there is only one.
        table: Number that is hashed for each id that is not negative, or None for the id.
        fill: Number that is hashed for an id that is not there.
        stop: Earlier id at which an n-gram ends, or None.
        negative: ``"dead"``, ``"fill"`` or ``"hashed"``.
        no_id: Id that is not there if negative ids are hashed.
        multipliers: ``(span,)`` for a xor of products, with the same number of columns for
            each order from 2 on; ``(columns, span)`` for a sum.
        sizes: Modulus of each column.
        offsets: First row of each column.

    Example:
        >>> ngram_rows(
        ...     np.array([[-1, 3, 4]]), None, None, fill=0, stop=None, negative="dead",
        ...     no_id=-1, multipliers=np.array([[1, 10]]), sizes=np.array([100]),
        ...     offsets=np.array([1000]),
        ... ).tolist()
        [[[1003], [1034]]]
    """
    # Clipped, because another thread may have changed ids after they were checked.
    numbers = full if table is None else table.take(full, mode="clip")
    if negative == "fill":
        full = numbers = np.where(full < 0, fill, numbers)
    elif negative == "hashed" and table is not None:
        numbers = np.where(full < 0, full, numbers)
    columns = np.empty((3, sizes.size), np.int64)
    columns[:2], columns[2] = sizes, offsets
    is_small = bool(sizes.min() < LARGE_SIZE)
    if is_small:
        columns[0, sizes < LARGE_SIZE] *= LARGE_SIZE
    options = [fill, stop or 0, stop is not None, negative == "hashed", no_id, is_small]
    span = multipliers.shape[-1]
    sequences, length = full.shape[0], full.shape[1] - span + 1
    out = np.empty((sequences, length, sizes.size), np.int64)
    run(
        _sum_rows if multipliers.ndim == 2 else _xor_rows,
        sequences * length,
        full,
        numbers,
        full[:, :0] if documents is None else documents,
        np.array(options, np.int64),
        np.ascontiguousarray(multipliers.T),
        columns,
        1 / columns[:2],
        out,
        grain=grain_for(GRAIN, sizes.size),
    )
    return out


@inlined
def _next_reach(reach, full, numbers, documents, options, row, place):
    """Return the number of ids before ``place`` that its n-grams read, -1 if it is dead.

    Args:
        reach: The same of the place before, or -1.
        full: Ids.
        numbers: Numbers that are hashed.
        documents: Documents of the last ids, or empty.
        options: As :func:`ngram_rows` makes them.
        row: Sequence.
        place: Index of an id in ``full``.
    """
    stop, has_stop, hashes_negative, no_id = options[1], options[2], options[3], options[4]
    token = full[row, place]
    if token < 0 and (not hashes_negative or token == no_id):
        return -1
    if reach >= 0 and has_stop and numbers[row, place - 1] == stop:
        return 0
    at = place - (full.shape[1] - documents.shape[1])
    if reach >= 0 and at > 0 and documents[row, at - 1] != documents[row, at]:
        return 0
    return reach + 1


@inlined
def _rows(x, real, like, columns, inverses, is_small, column):
    """Return the rows of numbers, one for each lane of ``like``.

    Args:
        x: int64, lanes or a number.
        real: The same as float64.
        like: int64, lanes or a number.
        columns: Modulus, size and offset of each column.
        inverses: Inverses of modulus and size.
        is_small: Whether modulus and size differ in any column.
        column: First column.
    """
    num_columns, real_like = columns.shape[1], as_float64(like)
    size = load(like, columns, column)
    quotient = nearest_integer(real * load(real_like, inverses, column))
    rest = add_if_negative(x - quotient * size, size)
    if is_small:
        size = load(like, columns, num_columns + column)
        inverse = load(real_like, inverses, num_columns + column)
        quotient = nearest_integer(as_float64(rest) * inverse)
        rest = add_if_negative(rest - quotient * size, size)
    return rest + load(like, columns, 2 * num_columns + column)


@inlined
def _sum_of_products(like, fill, reach, numbers, row, place, multipliers, column):
    """Return the sum of an n-gram's numbers times the multipliers of columns, as ``like``.

    Args:
        like: Zeros, lanes or a number.
        fill: Number in place of those that the n-gram does not read.
        reach: Number of earlier ids that it reads.
        numbers: Numbers that are hashed.
        row: Sequence.
        place: Index of its last number.
        multipliers: ``(span, columns)``.
        column: First column.
    """
    total = like
    for s in range(multipliers.shape[0]):
        number = numbers[row, place - s] if reach >= s else fill
        factor = load(like, multipliers, s * multipliers.shape[1] + column)
        total = total + number * factor
    return total


@kernel()
def _xor_rows(
    ticket, full, numbers, documents, options, multipliers, columns, inverses, out
):
    fill, is_small = options[0], options[5] != 0
    span, length, num_columns = multipliers.size, out.shape[1], out.shape[2]
    heads, zero = num_columns // (span - 1), np.int64(0)
    zeros = short_zeros(zero)
    for lo, hi in pieces(ticket):
        at = lo * num_columns
        for row in range(lo // length, (hi - 1) // length + 1):
            first, last = max(lo - row * length, 0), min(hi - row * length, length)
            reach = -1
            for place in range(first, last + span - 1):
                reach = _next_reach(reach, full, numbers, documents, options, row, place)
                if place < first + span - 1:
                    continue
                x = (numbers[row, place] if reach >= 0 else fill) * multipliers[0]
                for s in range(1, span):
                    x ^= (numbers[row, place - s] if reach >= s else fill) * multipliers[s]
                    real = as_float64(x)
                    column, end = (s - 1) * heads, s * heads
                    while column + COUNT <= end:
                        rows = _rows(x, real, zeros, columns, inverses, is_small, column)
                        store(rows, out, at)
                        column, at = column + COUNT, at + COUNT
                    while column < end:
                        number = _rows(x, real, zero, columns, inverses, is_small, column)
                        store(number, out, at)
                        column, at = column + 1, at + 1


@kernel()
def _sum_rows(
    ticket, full, numbers, documents, options, multipliers, columns, inverses, out
):
    fill, is_small = options[0], options[5] != 0
    span, length, num_columns = multipliers.shape[0], out.shape[1], out.shape[2]
    zero = np.int64(0)
    zeros = short_zeros(zero)
    for lo, hi in pieces(ticket):
        at = lo * num_columns
        for row in range(lo // length, (hi - 1) // length + 1):
            first, last = max(lo - row * length, 0), min(hi - row * length, length)
            reach = -1
            for place in range(first, last + span - 1):
                reach = _next_reach(reach, full, numbers, documents, options, row, place)
                if place < first + span - 1:
                    continue
                column = 0
                while column + COUNT <= num_columns:
                    x = _sum_of_products(
                        zeros, fill, reach, numbers, row, place, multipliers, column
                    )
                    rows = _rows(
                        x, as_float64(x), zeros, columns, inverses, is_small, column
                    )
                    store(rows, out, at)
                    column, at = column + COUNT, at + COUNT
                while column < num_columns:
                    y = _sum_of_products(
                        zero, fill, reach, numbers, row, place, multipliers, column
                    )
                    number = _rows(
                        y, as_float64(y), zero, columns, inverses, is_small, column
                    )
                    store(number, out, at)
                    column, at = column + 1, at + 1
