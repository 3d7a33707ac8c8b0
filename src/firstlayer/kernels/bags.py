"""Sums and maxima of rows over ragged bags.

Bag ``b`` holds ``ids[bounds[b]:bounds[b + 1]]``. One thread works on a bag and takes its
ids in order, so that results are the same bits for any number of threads. Work is in
float32 (float64 for float64); ids must have been checked.
"""

import numpy as np

from .runtime.compile import bits_of, kernel, narrow, prefetch, widen
from .runtime.lanes import WIDTH, fetch, load, store, zeros
from .runtime.pool import run
from .runtime.share import pieces

# Rows are asked for this many ids before they are needed, about as long as memory takes.
AHEAD = 16
# About how many entries of work are worth waking a second core for.
GRAIN = 1 << 17


def sum_bags(
    table: np.ndarray,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    divisors: np.ndarray | None = None,
) -> np.ndarray:
    """Return the sum of each bag's rows, in the dtype of ``table``.

    Args:
        table: Where the rows are.
        ids: Which rows, bag after bag.
        bounds: Where each bag begins, and the end of the last.
        weights: What each row is multiplied by, in the dtype of the work.
        divisors: What each bag's sum is divided by, likewise.
    """
    out = np.empty((bounds.size - 1, table.shape[1]), table.dtype)
    none = _none(table)
    block = WIDTH // none.itemsize
    run(
        _sum_wide if table.shape[1] >= block else _sum_narrow,
        bounds.size - 1,
        bits_of(table).reshape(-1),
        ids,
        bounds,
        none if weights is None else weights,
        none if divisors is None else divisors,
        block,
        bits_of(out),
        grain=_grain(ids, out),
    )
    return out


def max_bags(
    table: np.ndarray,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest of each bag's entries, column by column, and its place in ``ids``.

    The first of equals is taken, and the first NaN if there is one. A bag without ids gives
    zeros and the place -1.

    Args:
        table: Where the rows are.
        ids: Which rows, bag after bag.
        bounds: Where each bag begins, and the end of the last.
        weights: What each row is multiplied by first, in the dtype of the work.
    """
    out = np.empty((bounds.size - 1, table.shape[1]), table.dtype)
    places = np.empty(out.shape, np.int64)
    weights = _none(table) if weights is None else weights
    args = bits_of(table), ids, bounds, weights, bits_of(out), places
    run(_max, bounds.size - 1, *args, grain=_grain(ids, out))
    return out, places


def dot_bags(
    table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, *, others: np.ndarray
) -> np.ndarray:
    """Return the product of each id's row with its bag's row in ``others``.

    Args:
        table: Where the rows are.
        ids: Which rows, bag after bag.
        bounds: Where each bag begins, and the end of the last.
        others: One row for each bag, in the dtype of the work.
    """
    dots = np.empty(ids.size, others.dtype)
    args = bits_of(table), ids, bounds, others, dots
    run(_dot, bounds.size - 1, *args, grain=_grain(ids, others))
    return dots


def _none(table: np.ndarray) -> np.ndarray:
    return np.empty(0, np.float64 if table.dtype == np.float64 else np.float32)


def _grain(ids: np.ndarray, out: np.ndarray) -> int:
    entries = max(ids.size * out.shape[1], out.size, 1)
    return max(1, GRAIN * out.shape[0] // entries)


@kernel()
def _sum_wide(ticket, numbers, ids, bounds, weights, divisors, block, out):
    width, end = out.shape[1], ids.size
    total = np.empty(width, weights.dtype)
    one = type(total[0])(1)
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            first, last = bounds[bag], bounds[bag + 1]
            for column in range(0, width, block):
                # The last block of a width that is no multiple overlaps the one before it.
                start = min(column, width - block)
                sums = zeros(one)
                for place in range(first, last):
                    if place + AHEAD < end:
                        fetch(sums, numbers, ids[place + AHEAD] * width + start)
                    row = ids[place] * width + start
                    if weights.size:
                        sums = sums + weights[place] * load(sums, numbers, row)
                    else:
                        sums = sums + load(sums, numbers, row)
                store(sums, total, start)
            if divisors.size:
                divisor = divisors[bag]
                for d in range(width):
                    total[d] /= divisor
            for d in range(width):
                out[bag, d] = narrow(total[d], out[bag, d])


@kernel()
def _sum_narrow(ticket, numbers, ids, bounds, weights, divisors, block, out):
    width = out.shape[1]
    total = np.empty(width, weights.dtype)
    one = type(weights[0])(1)
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            for d in range(width):
                total[d] = 0
            for place in range(bounds[bag], bounds[bag + 1]):
                factor = weights[place] if weights.size else one
                start = ids[place] * width
                for d in range(width):
                    total[d] += factor * widen(numbers[start + d])
            divisor = divisors[bag] if divisors.size else one
            for d in range(width):
                out[bag, d] = narrow(total[d] / divisor, out[bag, d])


@kernel()
def _max(ticket, table, ids, bounds, weights, out, places):
    best = np.empty(table.shape[1], weights.dtype)
    factor = type(best[0])(1)
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            first = bounds[bag]
            best[:] = 0
            places[bag] = -1
            for place in range(first, bounds[bag + 1]):
                if place + AHEAD < ids.size:
                    prefetch(table, ids[place + AHEAD])
                if weights.size:
                    factor = weights[place]
                row = ids[place]
                for d in range(best.size):
                    value, so_far = factor * widen(table[row, d]), best[d]
                    # Written so that NaN wins against numbers, and against a later NaN.
                    stays = (value <= so_far or so_far != so_far) and place > first
                    best[d] = so_far if stays else value
                    places[bag, d] = places[bag, d] if stays else place
            for d in range(best.size):
                out[bag, d] = narrow(best[d], out[bag, d])


@kernel(reorder=True)
def _dot(ticket, table, ids, bounds, others, dots):
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            for place in range(bounds[bag], bounds[bag + 1]):
                if place + AHEAD < ids.size:
                    prefetch(table, ids[place + AHEAD])
                row = ids[place]
                dot = type(others[0, 0])(0)
                for d in range(others.shape[1]):
                    dot += widen(table[row, d]) * others[bag, d]
                dots[place] = dot
