"""Rows of a table in the memory of XLA: read, or written in place.

Rows are float32. Ids are int32, and those out of range stand for no row.
"""

import numpy as np
from numba import types

from .runtime.compile import is_row, kernel, prefetch_row
from .runtime.xla import xla_function

# Number of ids between the row that is copied and the one that is prefetched.
AHEAD = 4

_TABLE, _IDS = types.Array(types.float32, 2, "C"), types.Array(types.int32, 1, "C")


def read_rows_function() -> int:
    """Return the address of ``rows = read(table, ids)``; zeros for no row."""
    return xla_function(_read_rows, (_TABLE, _IDS, _TABLE), 1)


def write_rows_function() -> int:
    """Return the address of ``table = write(table, ids, rows)``, in place."""
    return xla_function(_write_rows, (_TABLE, _IDS, _TABLE, _TABLE), 1)


@kernel()
def _read_rows(table, ids, out):
    num_rows, width = table.shape
    for i in range(ids.size):
        later, row = np.int64(ids[min(i + AHEAD, ids.size - 1)]), np.int64(ids[i])
        prefetch_row(table, later)
        if is_row(row, num_rows):
            for d in range(width):
                out[i, d] = table[row, d]
        else:
            for d in range(width):
                out[i, d] = 0


@kernel()
def _write_rows(table, ids, rows, out):
    num_rows, width = table.shape
    for i in range(ids.size):
        later, row = np.int64(ids[min(i + AHEAD, ids.size - 1)]), np.int64(ids[i])
        prefetch_row(out, later)
        if is_row(row, num_rows):
            for d in range(width):
                out[row, d] = rows[i, d]
