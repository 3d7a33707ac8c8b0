"""Rows of a table in the memory of XLA: read, written in place, or summed.

Rows are float32. Ids are int32, and those out of range stand for no row.
"""

import numpy as np
from numba import types

from .runtime.aligned import LINE
from .runtime.compile import is_row, kernel, prefetch_row
from .runtime.lanes import (
    LANES_BYTES,
    SHORT_LANES_BYTES,
    add_to,
    load,
    short_zeros,
    store,
    store_or_stream,
    zeros,
)
from .runtime.pool import pieces
from .runtime.xla import Range, xla_function

# Number of ids between the row that is copied and the one that is prefetched.
AHEAD = 4
# Minimum number of entries per thread.
GRAIN = 1 << 16
# Minimum number of columns per thread: two cache lines.
LEAST_COLUMNS = 32

_TABLE, _IDS = types.Array(types.float32, 2, "C"), types.Array(types.int32, 1, "C")


def read_rows_function() -> int:
    """Return the address of ``rows = read(table, ids)``; zeros for no row."""
    return xla_function(
        _read_rows, (_TABLE, _IDS, _TABLE), results=1, shared=Range(2, GRAIN)
    )


def write_rows_function() -> int:
    """Return the address of ``table = write(table, ids, rows)``, in place."""
    return xla_function(
        _write_rows, (_TABLE, _IDS, _TABLE, _TABLE), results=1, shared=Range(2, GRAIN)
    )


def sum_rows_function() -> int:
    """Return the address of ``sums = sum(rows, ids)``: the sum of the rows of each id."""
    # Threads share the columns, so that each sum is taken in order by one of them.
    shared = Range(0, GRAIN, axis=1, least=LEAST_COLUMNS, pieces=1)
    return xla_function(_sum_rows, (_TABLE, _IDS, _TABLE), results=1, shared=shared)


@kernel()
def _read_rows(ticket, table, ids, out):
    num_rows, width = table.shape
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            later, row = np.int64(ids[min(i + AHEAD, ids.size - 1)]), np.int64(ids[i])
            prefetch_row(table, later)
            if is_row(row, num_rows):
                for d in range(width):
                    out[i, d] = table[row, d]
            else:
                for d in range(width):
                    out[i, d] = 0


@kernel()
def _write_rows(ticket, table, ids, rows, out):
    (num_rows, width), zero = table.shape, np.float32(0)
    lanes, block = zeros(zero), LANES_BYTES // 4
    whole = width - width % block
    # Streaming stores: the rows are not read again before the next step. Not for rows that
    # share cache lines.
    streams = (out.ctypes.data | 4 * width) % LINE == 0
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            row = np.int64(ids[i])
            if is_row(row, num_rows):
                source, target = i * width, row * width
                for d in range(0, whole, block):
                    part = load(lanes, rows, source + d)
                    store_or_stream(part, out, target + d, streams)
                for d in range(whole, width):
                    store(load(zero, rows, source + d), out, target + d)


@kernel()
def _sum_rows(ticket, rows, ids, sums):
    (num_rows, width), zero = sums.shape, np.float32(0)
    lanes, block = short_zeros(zero), SHORT_LANES_BYTES // 4
    for lo, hi in pieces(ticket):
        whole = hi - (hi - lo) % block
        for start in range(0, num_rows * width, width):
            for d in range(lo, whole, block):
                store(lanes, sums, start + d)
            for d in range(whole, hi):
                store(zero, sums, start + d)
        for i in range(ids.size):
            row = np.int64(ids[i])
            if is_row(row, num_rows):
                source, target = i * width, row * width
                for d in range(lo, whole, block):
                    add_to(load(lanes, rows, source + d), sums, target + d)
                for d in range(whole, hi):
                    add_to(load(zero, rows, source + d), sums, target + d)
