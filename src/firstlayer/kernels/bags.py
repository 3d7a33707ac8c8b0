"""Sums and maxima of rows over ragged bags.

Bag ``b`` holds ``ids[bounds[b]:bounds[b + 1]]``. One thread processes a bag and takes its
ids in order, so that results have the same bits for any number of threads. The compute
dtype is float64 for float64, else float32.

Another thread may change the ids during a call, so an id is read once, into a variable that
is checked and then used. Bounds are not checked: they must be in range and not be shared
with another thread.
"""

import numpy as np

from .runtime.compile import bits_of, downcast, inlined, is_row, kernel, prefetch, upcast
from .runtime.lanes import (
    LANES_BYTES,
    is_streamed,
    load,
    prefetch_lanes,
    store_or_stream,
    zeros,
)
from .runtime.pool import grain_for, pieces, run
from .runtime.scratch import free_row, is_allocated, scratch_row

# Number of ids between the row that is read and the one that is prefetched.
AHEAD = 32
# Minimum number of entries per thread.
GRAIN = 1 << 17


def sum_bags(
    table: np.ndarray,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    divisors: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the sum of each bag's rows, in the dtype of ``table``.

    None if an id is out of range.

    Args:
        table: Contiguous table.
        ids: Rows of the table, bag after bag.
        bounds: Start of each bag in ``ids``, and the end of the last.
        weights: Factor of each id, in the compute dtype.
        divisors: Divisor of each bag's sum, in the compute dtype.
        out: Contiguous array of the result's shape and dtype to write to; None allocates.
    """
    if out is None:
        out = np.empty((bounds.size - 1, table.shape[1]), table.dtype)
    absent, has_bad_id = _absent(table), np.zeros(1, np.int64)
    block = LANES_BYTES // absent.itemsize
    run(
        _sum_wide if table.shape[1] >= block else _sum_narrow,
        bounds.size - 1,
        bits_of(table).reshape(-1),
        table.shape[0],
        ids,
        bounds,
        absent if weights is None else weights,
        absent if divisors is None else divisors,
        block,
        bits_of(out),
        is_streamed(out, has_rest=False),  # the last lanes of a row overlap others
        has_bad_id,
        grain=_grain(ids, out),
    )
    return None if has_bad_id[0] else out


def max_bags(
    table: np.ndarray,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the maximum of each bag by column, and its index in ``ids``.

    Of equal entries the first is taken, and the first NaN if there is one. An empty bag
    gives zeros and the index -1. None if an id is out of range.

    Args:
        table: Contiguous table.
        ids: Rows of the table, bag after bag.
        bounds: Start of each bag in ``ids``, and the end of the last.
        weights: Factor of each id, in the compute dtype.
    """
    out = np.empty((bounds.size - 1, table.shape[1]), table.dtype)
    indices = np.empty(out.shape, np.int64)
    weights = _absent(table) if weights is None else weights
    has_bad_id = np.zeros(1, np.int64)
    args = bits_of(table), ids, bounds, weights, bits_of(out), indices, has_bad_id
    run(_max, bounds.size - 1, *args, grain=_grain(ids, out))
    return None if has_bad_id[0] else (out, indices)


def dot_bags(
    table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, *, others: np.ndarray
) -> np.ndarray | None:
    """Return the dot product of each id's row with its bag's row in ``others``.

    None if an id is out of range.

    Args:
        table: Contiguous table.
        ids: Rows of the table, bag after bag.
        bounds: Start of each bag in ``ids``, and the end of the last.
        others: One row for each bag, in the compute dtype.
    """
    dots, has_bad_id = np.empty(ids.size, others.dtype), np.zeros(1, np.int64)
    args = bits_of(table), ids, bounds, others, dots, has_bad_id
    run(_dot, bounds.size - 1, *args, grain=_grain(ids, others))
    return None if has_bad_id[0] else dots


def _absent(table: np.ndarray) -> np.ndarray:
    """Return an empty array in the compute dtype, for an optional argument."""
    return np.empty(0, np.float64 if table.dtype == np.float64 else np.float32)


def _grain(ids: np.ndarray, out: np.ndarray) -> int:
    return grain_for(GRAIN, max(ids.size * out.shape[1], out.size), out.shape[0])


@inlined
def _added(sums, table, start, weights, factor):
    """Return ``sums`` plus the lanes of ``table`` at ``start``, times ``factor``."""
    part = load(sums, table, start)
    return sums + (factor * part if weights.size else part)


@kernel()
def _sum_wide(
    ticket, table, num_rows, ids, bounds, weights, divisors, block, out, streams, has_bad_id
):
    width, end = out.shape[1], ids.size
    one = type(weights[0])(1)
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            first, last = bounds[bag], bounds[bag + 1]
            # Two blocks at a time: a row of 128 float32 is read once, and not in halves
            # that are prefetched separately.
            for column in range(0, width, 2 * block):
                # The last block of a width that is no multiple overlaps the one before it.
                a = min(column, width - block)
                b = min(column + block, width - block)
                is_pair = b > a
                sums, more = zeros(one), zeros(one)
                for i in range(first, last):
                    if i + AHEAD < end:
                        later = ids[i + AHEAD] * width
                        prefetch_lanes(sums, table, later + a)
                        if is_pair:
                            prefetch_lanes(more, table, later + b)
                        # Rows that are not aligned to cache lines end in one more.
                        prefetch_lanes(one, table, later + max(a, b) + block - 1)
                    id_ = ids[i]
                    if not is_row(id_, num_rows):
                        # Every thread that writes here writes the same value.
                        has_bad_id[0] = 1
                        continue
                    row, factor = id_ * width, weights[i] if weights.size else one
                    sums = _added(sums, table, row + a, weights, factor)
                    if is_pair:
                        more = _added(more, table, row + b, weights, factor)
                if divisors.size:
                    sums, more = sums / divisors[bag], more / divisors[bag]
                store_or_stream(sums, out, bag * width + a, streams)
                if is_pair:
                    store_or_stream(more, out, bag * width + b, streams)


@kernel()
def _sum_narrow(
    ticket, table, num_rows, ids, bounds, weights, divisors, block, out, streams, has_bad_id
):
    width = out.shape[1]
    one = type(weights[0])(1)
    total = scratch_row(width, one)
    if not is_allocated(total):
        raise MemoryError
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            for d in range(width):
                total[d] = 0
            for i in range(bounds[bag], bounds[bag + 1]):
                factor, id_ = weights[i] if weights.size else one, ids[i]
                if not is_row(id_, num_rows):
                    has_bad_id[0] = 1
                    continue
                start = id_ * width
                for d in range(width):
                    total[d] += factor * upcast(table[start + d])
            divisor = divisors[bag] if divisors.size else one
            for d in range(width):
                out[bag, d] = downcast(total[d] / divisor, out[bag, d])
    free_row(total)


@kernel()
def _max(ticket, table, ids, bounds, weights, out, indices, has_bad_id):
    factor = type(weights[0])(1)
    best = scratch_row(table.shape[1], factor)
    if not is_allocated(best):
        raise MemoryError
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            first = bounds[bag]
            best[:] = 0
            indices[bag] = -1
            for i in range(first, bounds[bag + 1]):
                if i + AHEAD < ids.size:
                    prefetch(table, ids[i + AHEAD])
                if weights.size:
                    factor = weights[i]
                row = ids[i]
                if not is_row(row, table.shape[0]):
                    has_bad_id[0] = 1
                    continue
                for d in range(best.size):
                    value, so_far = factor * upcast(table[row, d]), best[d]
                    # Also true if the maximum so far is NaN; false if only the value is.
                    stays = (value <= so_far or so_far != so_far) and i > first
                    best[d] = so_far if stays else value
                    indices[bag, d] = indices[bag, d] if stays else i
            for d in range(best.size):
                out[bag, d] = downcast(best[d], out[bag, d])
    free_row(best)


@kernel(reorder=True)
def _dot(ticket, table, ids, bounds, others, dots, has_bad_id):
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            for i in range(bounds[bag], bounds[bag + 1]):
                if i + AHEAD < ids.size:
                    prefetch(table, ids[i + AHEAD])
                row = ids[i]
                if not is_row(row, table.shape[0]):
                    has_bad_id[0] = 1
                    continue
                dot = type(others[0, 0])(0)
                for d in range(others.shape[1]):
                    dot += upcast(table[row, d]) * others[bag, d]
                dots[i] = dot
