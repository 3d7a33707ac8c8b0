"""List stale rows, run loops over rows, and read and write half-precision rows."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from ..runtime.compile import bits_of, kernel, narrow, widen
from ..runtime.pool import run
from ..runtime.share import pieces
from .row_slice import RowSlice

# Number of entries that justify a second thread.
GRAIN = 1 << 16


def stale_rows(
    ids: np.ndarray, row_steps: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows among ``ids`` that are not at ``step``, and the step each is at.

    Each row is listed once, and marked in ``row_steps`` as being at ``step``. Ids out of
    range are skipped; the lookup reports them.
    """
    rows, from_step = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    count = _stale_rows(0, ids.size, ids, row_steps, step, rows, from_step)
    return rows[:count], from_step[:count]


def stale_range(
    lo: int, hi: int, row_steps: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as :func:`stale_rows` for the ids from ``lo`` up to ``hi``."""
    rows, from_step = np.empty(hi - lo, np.int64), np.empty(hi - lo, np.int64)
    count = _stale_range(lo, hi, row_steps, step, rows, from_step)
    return rows[:count], from_step[:count]


def upcast_rows(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return rows of a half-precision table as float32."""
    out = np.empty((rows.size, table.shape[1]), np.float32)
    run(_widen_rows, rows.size, bits_of(table), rows, out, grain=grain_of(table))
    return out


def store_rows(
    values: np.ndarray, table: np.ndarray, rows: np.ndarray, *, noise: int | None
) -> None:
    """Write rows to a table, float32 ones to one in half precision too.

    Args:
        values: What to write.
        table: Where.
        rows: Which rows.
        noise: None rounds to nearest. A number rounds up or down at random, up the more
            often the nearer that is; the same number, row and column round the same way.
            For bfloat16.
    """
    if noise is None:
        run(_narrow_rows, rows.size, values, rows, bits_of(table), grain=grain_of(table))
        return
    bits, key = values.view(np.uint32), np.uint32(noise & 0xFFFFFFFF)
    run(_dither_rows, rows.size, bits, key, rows, bits_of(table), grain=grain_of(table))


def run_on_rows(loop: Callable[..., None], rows: RowSlice, *args: Any) -> None:
    """Run a kernel loop over rows, on several threads if there are enough of them."""
    size, grain = rows.state_rows.size, grain_of(rows.weight)
    run(loop, size, rows.weight_rows, rows.state_rows, *args, grain=grain)


def grain_of(table: np.ndarray) -> int:
    """Return the number of rows of a table that justify a second thread."""
    return max(1, GRAIN // max(1, table.shape[1]))


@kernel()
def _stale_rows(lo, hi, ids, row_steps, step, rows, from_step):
    count = 0
    for i in range(lo, hi):
        row = ids[i]
        if 0 <= row < row_steps.size and row_steps[row] != step:
            rows[count], from_step[count] = row, row_steps[row]
            row_steps[row] = step
            count += 1
    return count


@kernel()
def _stale_range(lo, hi, row_steps, step, rows, from_step):
    count = 0
    for row in range(lo, hi):
        if row_steps[row] != step:
            rows[count], from_step[count] = row, row_steps[row]
            row_steps[row] = step
            count += 1
    return count


@kernel()
def _widen_rows(ticket, table, rows, out):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            row = rows[i]
            for d in range(out.shape[1]):
                out[i, d] = widen(table[row, d])


@kernel()
def _narrow_rows(ticket, values, rows, table):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            row = rows[i]
            for d in range(values.shape[1]):
                table[row, d] = narrow(values[i, d], table[row, d])


@numba.njit(inline="always")
def _mixed(x):
    """Return 32 bits of which each depends on every bit of ``x`` (Murmur3's finish)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@kernel()
def _dither_rows(ticket, bits, key, rows, table):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            row = rows[i]
            start = _mixed(np.uint32(row) ^ _mixed(key))
            for d in range(bits.shape[1]):
                noise = _mixed(np.uint32(start + np.uint32(d))) & np.uint32(0xFFFF)
                x = bits[i, d]
                # Noise would turn some NaNs into infinities; a quiet one keeps no payload.
                is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                up = np.uint32(0x7FC0) if is_nan else np.uint32(x + noise) >> np.uint32(16)
                table[row, d] = np.uint16(up)
