"""Reading rows of half-precision tables as float32, and storing rows in any table."""

import numpy as np

from .runtime.compile import bits_of, downcast, inlined, kernel, prefetch_row, upcast
from .runtime.pool import grain_for, pieces, run

# Number of rows between the one that is converted and the one that is prefetched.
AHEAD = 8
# Minimum number of entries per thread.
GRAIN = 1 << 16


def upcast_rows(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return rows of a half-precision table as float32. Rows must be in range."""
    out = np.empty((rows.size, table.shape[1]), np.float32)
    run(_upcast_rows, rows.size, bits_of(table), rows, out, grain=grain_of(table))
    return out


def store_rows(
    values: np.ndarray,
    table: np.ndarray,
    rows: np.ndarray,
    *,
    noise: int | None,
    noise_rows: np.ndarray | None = None,
) -> None:
    """Write ``values`` to ``table[rows]`` in the dtype of the table.

    Args:
        values: One row for each of ``rows``, in the table's dtype or float32.
        table: Table to write to.
        rows: Row numbers in range, each once. No other thread may change them.
        noise: Seed of stochastic rounding from float32 to bfloat16, which also depends on
            row and column. None rounds to nearest.
        noise_rows: Numbers that the noise depends on instead of ``rows``, for rows that
            were copied from another table.
    """
    if noise is None:
        run(_store_rows, rows.size, values, rows, bits_of(table), grain=grain_of(table))
        return
    bits, seed = values.view(np.uint32), np.uint32(noise & 0xFFFFFFFF)
    run(
        _store_rows_stochastically,
        rows.size,
        bits,
        seed,
        rows if noise_rows is None else noise_rows,
        rows,
        bits_of(table),
        grain=grain_of(table),
    )


def grain_of(table: np.ndarray) -> int:
    """Return the minimum number of a table's rows per thread."""
    return grain_for(GRAIN, table.shape[1])


@kernel()
def _upcast_rows(ticket, table, rows, out):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            prefetch_row(table, rows[min(i + AHEAD, hi - 1)])
            row = rows[i]
            for d in range(out.shape[1]):
                out[i, d] = upcast(table[row, d])


@kernel()
def _store_rows(ticket, values, rows, table):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            prefetch_row(table, rows[min(i + AHEAD, hi - 1)])
            row = rows[i]
            for d in range(values.shape[1]):
                table[row, d] = downcast(values[i, d], table[row, d])


@inlined
def _hash(x):
    """Return 32 bits each of which depends on every bit of ``x`` (Murmur3's finalizer)."""
    y = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    z = (y ^ (y >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return z ^ (z >> np.uint32(16))


@kernel()
def _store_rows_stochastically(ticket, bits, seed, noise_rows, rows, table):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            prefetch_row(table, rows[min(i + AHEAD, hi - 1)])
            row = rows[i]
            start = _hash(np.uint32(noise_rows[i]) ^ _hash(seed))
            for d in range(bits.shape[1]):
                noise = _hash(np.uint32(start + np.uint32(d))) & np.uint32(0xFFFF)
                x = bits[i, d]
                # Noise would turn some NaNs into infinities; NaN becomes the quiet NaN.
                is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                up = np.uint16(np.uint32(x + noise) >> np.uint32(16))
                table[row, d] = np.uint16(0x7FC0) if is_nan else up
