"""Kernels of maps: the nearest rows of each row, and forces between points of the plane."""

import numpy as np

from .runtime.compile import internal, kernel
from .runtime.pool import pieces, run

# Minimum number of rows or points per thread.
GRAIN = 64
# Largest move of a point in one step, in units of the map.
LONGEST_MOVE = np.float32(4)
# Points that coincide are pushed apart by a finite force.
LEAST_SQUARE = np.float32(1e-3)


def nearest_in(
    cosines: np.ndarray, first: int, *, ids: np.ndarray, values: np.ndarray
) -> None:
    """Write the largest entries of each row of ``cosines``, largest first.

    Args:
        cosines: Similarities of some rows to all rows, ``(rows, all)``, float32. Row ``i``
            is row ``first + i`` of the table, and is not its own neighbor.
        first: Number of the first row.
        ids: Output, ``(rows, count)``, int32: the rows of the largest entries.
        values: Output, ``(rows, count)``, float32: the entries.
    """
    run(_nearest, len(cosines), cosines, first, ids, values, grain=GRAIN)


def move_points(
    points: np.ndarray,
    graph: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    rate: float,
    negatives: int,
    repulsion: float,
    key: int,
    out: np.ndarray,
) -> None:
    """Write the points after one step: towards their neighbors and away from others.

    Every point moves by the forces at the old points, so the result does not depend on the
    number of threads.

    Args:
        points: Points of the plane, ``(n, 2)``, float32.
        graph: Weighted neighbors of each point: the neighbors of ``i`` are
            ``ids[bounds[i]:bounds[i + 1]]``, with ``weights`` of the same slice.
        rate: Size of the step.
        negatives: Number of random points that repel a point in this step.
        repulsion: Weight of all repelling points together, relative to the neighbors.
        key: Key of the random draws.
        out: The moved points.
    """
    bounds, ids, weights = graph
    push = np.float32(repulsion / negatives)
    run(
        _move,
        len(points),
        points,
        bounds,
        ids,
        weights,
        np.float32(rate),
        negatives,
        push,
        np.uint64(key),
        out,
        grain=GRAIN,
    )


@kernel()
def _nearest(ticket, cosines, first, ids, values):
    count = ids.shape[1]
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            filled, least = 0, np.float32(-np.inf)
            for j in range(cosines.shape[1]):
                value = cosines[i, j]
                if filled == count and not value > least:
                    continue
                if j == first + i or np.isnan(value):
                    continue
                # Insert after all entries that are at least as large.
                place = min(filled, count - 1)
                while place > 0 and values[i, place - 1] < value:
                    values[i, place] = values[i, place - 1]
                    ids[i, place] = ids[i, place - 1]
                    place -= 1
                values[i, place], ids[i, place] = value, j
                filled = min(filled + 1, count)
                if filled == count:
                    least = values[i, count - 1]


@internal
def _random(key, point, which):
    """Return the random 32-bit draw number ``which`` of a point."""
    x = key + (np.uint64(point) * np.uint64(64) + np.uint64(which)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(32)


@kernel()
def _move(ticket, points, bounds, ids, weights, rate, negatives, push, key, out):
    count, one, two = points.shape[0], np.float32(1), np.float32(2)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            x, y = points[i, 0], points[i, 1]
            total, right, up = np.float32(0), np.float32(0), np.float32(0)
            for k in range(bounds[i], bounds[i + 1]):
                j, weight = np.int64(ids[k]), weights[k]
                dx, dy = points[j, 0] - x, points[j, 1] - y
                pull = two * weight / (one + dx * dx + dy * dy)
                right += pull * dx
                up += pull * dy
                total += weight
            if total > 0:
                right, up = right / total, up / total
            for which in range(negatives):
                j = np.int64(_random(key, i, which) * np.uint64(count) >> np.uint64(32))
                dx, dy = points[j, 0] - x, points[j, 1] - y
                square = dx * dx + dy * dy
                force = two * push / ((LEAST_SQUARE + square) * (one + square))
                right -= force * dx
                up -= force * dy
            out[i, 0] = x + rate * max(-LONGEST_MOVE, min(LONGEST_MOVE, right))
            out[i, 1] = y + rate * max(-LONGEST_MOVE, min(LONGEST_MOVE, up))
