"""Rows of n-grams: the window of each position and all of its hashes in one pass.

A remainder needs no division. With ``m = (2**64 - 1) // d``, the high 64 bits of ``u * m``
are the quotient of an unsigned 64-bit ``u`` by ``d``, or one less: ``m / 2**64`` is smaller
than ``1 / d`` by at most ``2**-64``. A signed number is its unsigned one less ``2**63``,
whose remainder is subtracted.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .runtime.compile import inlined, kernel
from .runtime.pool import grain_for, pieces, run

# Negative ids are dead, read as the fill, or are hashed.
NEGATIVE = ("dead", "fill", "hashed")
DEAD, FILL, HASHED = range(3)
# Minimum number of hashes per thread.
GRAIN = 1 << 16
MOST, SIGN_BIT = np.uint64(2**64 - 1), np.uint64(2**63)


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
        documents: Document of each id, int64, in the shape of ``full``, or None.
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
    span, columns = multipliers.shape[-1], sizes.size
    rows, length = full.shape[0], full.shape[1] - span + 1
    windows = np.empty((rows * length, span), np.int64)
    options = [fill, stop or 0, stop is not None, NEGATIVE.index(negative), no_id]
    run(
        _windows,
        len(windows),
        full,
        full[:, :0] if documents is None else documents,
        # Clipped, because another thread may have changed ids after they were checked.
        full if table is None else table.take(full, mode="clip"),
        np.array(options, np.int64),
        windows,
        grain=grain_for(GRAIN, span),
    )
    groups = 1 if multipliers.ndim == 2 else span - 1
    out = np.empty((len(windows), groups, columns // groups), np.int64)
    run(
        _sum_rows if multipliers.ndim == 2 else _xor_rows,
        len(windows),
        windows,
        multipliers,
        divisors_of(sizes, offsets, groups),
        out,
        grain=grain_for(GRAIN, columns),
    )
    return out.reshape(rows, length, columns)


def divisors_of(sizes: np.ndarray, offsets: np.ndarray, groups: int) -> np.ndarray:
    """Return four numbers of each column: size, inverse, remainder of 2**63, and offset.

    Args:
        sizes: Modulus of each column, at least 1.
        offsets: First row of each column.
        groups: Number of groups of columns that follow one another.

    Returns:
        uint64 array of shape ``(groups, 4, columns / groups)``.
    """
    numbers = np.empty((4, sizes.size), np.uint64)
    numbers[0], numbers[3] = sizes, offsets
    numbers[1], numbers[2] = MOST // numbers[0], SIGN_BIT % numbers[0]
    return np.ascontiguousarray(numbers.reshape(4, groups, -1).swapaxes(0, 1))


def _high_product(typing_context: Any, a: Any, b: Any) -> Any:
    """The high 64 bits of the product of two unsigned 64-bit numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        a, b = (builder.zext(x, wide) for x in arguments)
        high = builder.lshr(builder.mul(a, b), ir.Constant(wide, 64))
        return builder.trunc(high, ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


high_product: Any = intrinsic(_high_product)


@inlined
def _remainder(unsigned, size, inverse, of_sign):
    """Return the remainder of a number, given the number with its sign bit flipped."""
    rest = np.int64(unsigned - high_product(unsigned, inverse) * size - size)
    # The sign as a mask: a branch would often be predicted wrongly.
    rest += np.int64(size) & (rest >> 63)
    rest -= np.int64(of_sign)
    return rest + (np.int64(size) & (rest >> 63))


@kernel()
def _windows(ticket, full, documents, numbers, options, windows):
    """Write the numbers of the n-gram that ends at each position, newest first."""
    fill, stop, has_stop = options[0], options[1], options[2] != 0
    negative, no_id = options[3], options[4]
    span, has_documents = windows.shape[1], documents.size > 0
    length = full.shape[1] - span + 1
    for lo, hi in pieces(ticket):
        row, place = lo // length, lo % length + span - 1
        for i in range(lo, hi):
            if place == full.shape[1]:
                row, place = row + 1, span - 1
            is_open = True
            for s in range(span):
                token, number = full[row, place - s], numbers[row, place - s]
                if token < 0:
                    number = fill if negative == FILL else token
                    is_here = negative == FILL or (negative == HASHED and token != no_id)
                    is_open = is_open and is_here
                if is_open and s:
                    if has_stop and number == stop:
                        is_open = False
                    if has_documents and documents[row, place - s] != documents[row, place]:
                        is_open = False
                windows[i, s] = number if is_open else fill
            place += 1


@kernel()
def _xor_rows(ticket, windows, multipliers, divisors, out):
    span, heads = windows.shape[1], out.shape[2]
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            mix = windows[i, 0] * multipliers[0]
            for n in range(span - 1):
                mix ^= windows[i, n + 1] * multipliers[n + 1]
                unsigned = np.uint64(mix) ^ SIGN_BIT
                for c in range(heads):
                    size, of_sign = divisors[n, 0, c], divisors[n, 2, c]
                    rest = _remainder(unsigned, size, divisors[n, 1, c], of_sign)
                    out[i, n, c] = rest + np.int64(divisors[n, 3, c])


@kernel()
def _sum_rows(ticket, windows, multipliers, divisors, out):
    columns, span = multipliers.shape
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            for c in range(columns):
                total = 0
                for s in range(span):
                    total += windows[i, s] * multipliers[c, s]
                unsigned = np.uint64(total) ^ SIGN_BIT
                size, of_sign = divisors[0, 0, c], divisors[0, 2, c]
                rest = _remainder(unsigned, size, divisors[0, 1, c], of_sign)
                out[i, 0, c] = rest + np.int64(divisors[0, 3, c])
