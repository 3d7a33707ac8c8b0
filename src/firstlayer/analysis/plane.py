"""Rows of a table as points of the plane, by principal components and by neighbors.

The map of neighbors follows UMAP (McInnes, Healy and Melville 2018): a graph of the nearest
rows by cosine, with weights that give each row the same effective number of neighbors, and
points that neighbors attract and random others repel. Neighbors are exact. All points move
at once, by the forces at the points of the step before, so that the same seed gives the
same map for any number of threads.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int32

from .. import kernels

#: Rows whose cosines are computed in one matrix product.
BLOCK = 512
#: Steps of the layout, the size of the first one, and what repels a point in each.
STEPS, FIRST_RATE, NEGATIVES, REPULSION = 1000, 0.5, 12, 20.0

#: Called with the completed share of the work.
Report = Callable[[float], None]


def principal_components(
    unit: Float32[np.ndarray, "rows width"], count: int = 2
) -> Float32[np.ndarray, "rows {count}"]:
    """Return the coordinates of rows along the directions of largest variance.

    The sign of a direction is the one that makes its largest entry positive.

    Args:
        unit: Rows; they are centered here.
        count: Number of directions.

    Example:
        >>> rows = np.array([[3, 0, 1], [-3, 0, 1], [0, 1, 1], [0, -1, 1]], np.float32)
        >>> principal_components(rows).tolist()
        [[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    """
    centered = unit - unit.mean(0, dtype=np.float64).astype(np.float32)
    _, directions = np.linalg.eigh((centered.T @ centered).astype(np.float64))
    directions = directions[:, ::-1][:, :count]
    if directions.shape[1] < count:
        directions = np.pad(directions, ((0, 0), (0, count - directions.shape[1])))
    largest = np.take_along_axis(directions, np.abs(directions).argmax(0)[None], 0)
    directions = directions * np.where(largest < 0, -1, 1)
    return centered @ directions.astype(np.float32)


def nearest_rows(
    unit: Float32[np.ndarray, "rows width"], count: int, *, report: Report | None = None
) -> tuple[Int32[np.ndarray, "rows {count}"], Float32[np.ndarray, "rows {count}"]]:
    """Return the nearest other rows of each row by cosine, and the cosines.

    Every pair is compared.

    Args:
        unit: Rows of unit length.
        count: Number of neighbors, less than the number of rows.
        report: Called with the completed share.

    Example:
        >>> ids, cosines = nearest_rows(np.eye(3, dtype=np.float32)[[0, 0, 1, 2]], 1)
        >>> ids[:2, 0].tolist(), cosines[:2, 0].tolist()
        ([1, 0], [1.0, 1.0])
    """
    rows = len(unit)
    ids, cosines = np.zeros((rows, count), np.int32), np.zeros((rows, count), np.float32)
    for first in range(0, rows, BLOCK):
        part = slice(first, min(rows, first + BLOCK))
        products = unit[part] @ unit.T
        kernels.nearest_in(products, first, ids=ids[part], values=cosines[part])
        if report is not None:
            report(part.stop / rows)
    return ids, cosines


def neighbor_map(
    unit: Float32[np.ndarray, "rows width"],
    ids: Int32[np.ndarray, "rows count"],
    cosines: Float32[np.ndarray, "rows count"],
    *,
    seed: int = 0,
    report: Report | None = None,
) -> Float32[np.ndarray, "rows 2"]:
    """Return points of the plane at which near rows are near.

    Args:
        unit: Rows of unit length, which are placed by principal components first.
        ids: The nearest rows of each row.
        cosines: Their cosines.
        seed: Seed of the random draws.
        report: Called with the completed share.
    """
    if len(unit) < 3:
        return principal_components(unit)
    start = principal_components(unit)
    spread = start.std(0).max() or 1.0
    # Rows that coincide need a direction to separate in.
    noise = np.random.default_rng(seed).normal(scale=1e-2, size=start.shape)
    points = (start / spread * 5 + noise).astype(np.float32)
    graph = _symmetric(ids, _weights(cosines))
    moved, keys = (
        np.empty_like(points),
        np.random.default_rng(seed).integers(2**62, size=STEPS),
    )
    for step in range(STEPS):
        kernels.move_points(
            points,
            graph,
            rate=FIRST_RATE * (1 - step / STEPS),
            negatives=NEGATIVES,
            repulsion=REPULSION,
            key=int(keys[step]),
            out=moved,
        )
        points, moved = moved, points
        if report is not None:
            report((step + 1) / STEPS)
    return points - np.median(points, axis=0)


def _weights(
    cosines: Float32[np.ndarray, "rows count"],
) -> Float32[np.ndarray, "rows count"]:
    """Return the weight of each neighbor: 1 for the nearest, less with the distance.

    The scale of a row's distances is chosen so that its weights add up to log2 of the
    number of neighbors, whatever the density of the table around it.
    """
    distances = np.maximum(1 - cosines.astype(np.float64), 0)
    beyond = distances - distances.min(1, keepdims=True)
    goal = np.log2(max(cosines.shape[1], 2))
    low, high = np.zeros(len(beyond)), np.full(len(beyond), np.inf)
    scale = np.maximum(beyond.mean(1), 1e-6)
    for _ in range(48):
        sums = np.exp(-beyond / scale[:, None]).sum(1)
        is_wide = sums > goal
        high, low = np.where(is_wide, scale, high), np.where(is_wide, low, scale)
        scale = np.where(np.isinf(high), scale * 2, (low + high) / 2)
        scale = np.maximum(scale, 1e-9)
    return np.exp(-beyond / scale[:, None]).astype(np.float32)


def _symmetric(
    ids: Int32[np.ndarray, "rows count"], weights: Float32[np.ndarray, "rows count"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the graph with every edge in both directions.

    Two weights ``a`` and ``b`` of a pair become ``a + b - a * b``.
    """
    rows, count = ids.shape
    here, there = np.repeat(np.arange(rows), count), ids.reshape(-1).astype(np.int64)
    keys = np.concatenate([here * rows + there, there * rows + here])
    order = np.argsort(keys, kind="stable")
    keys, both = keys[order], np.concatenate([weights.reshape(-1)] * 2)[order]
    edges, first = np.unique(keys, return_index=True)
    # One minus a weight is a factor: an edge that occurs once is 1 - (1 - a).
    left = np.multiply.reduceat(1 - both, first)
    bounds = np.searchsorted(edges // rows, np.arange(rows + 1))
    return bounds, (edges % rows).astype(np.int32), (1 - left).astype(np.float32)
