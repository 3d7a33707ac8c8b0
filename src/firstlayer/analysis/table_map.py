"""A table as a map of the plane, with clusters: the data of the page that shows it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from .._check import positive
from ..word_vectors.neighbors import units
from ..word_vectors.vectors import Vectors
from .plane import nearest_rows, neighbor_map, principal_components

#: Number of neighbors that the layout keeps near, and most clusters.
NEIGHBORS, MOST_CLUSTERS = 15, 40
#: Words that name a cluster, and the number of rows near its center they are taken from.
NAMES, CANDIDATES = 3, 60
#: Fewest rows that are read at a time.
FEWEST = 1024

#: Called with the name of a part of the work and the completed share of it.
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class TableMap:
    """Rows of a table as points of the plane.

    Args:
        words: Words without the marks of word starts.
        places: Number of each word in the table.
        rows: Number of rows of the table.
        unit: Vectors of unit length.
        norms: Norm of each vector.
        neighbors: Points at which near rows are near; see
            :func:`firstlayer.analysis.plane.neighbor_map`.
        pca: Points along the two directions of largest variance.
        clusters: Cluster of each word.
        labels: A few words of each cluster.
    """

    words: list[str]
    places: Int64[np.ndarray, " n"]
    rows: int
    unit: Float32[np.ndarray, "n width"]
    norms: Float32[np.ndarray, " n"]
    neighbors: Float32[np.ndarray, "n 2"]
    pca: Float32[np.ndarray, "n 2"]
    clusters: UInt8[np.ndarray, " n"]
    labels: list[list[str]]


def table_map(
    vectors: Vectors, *, max_rows: int = 30_000, seed: int = 0, report: Report | None = None
) -> TableMap:
    """Return the map of the first rows of a table.

    Rows that are zero or not finite have no direction, and are left out.

    Args:
        vectors: Words and rows.
        max_rows: Largest number of rows.
        seed: Seed of the layout and of the clusters.
        report: Called with the progress.
    """
    positive("max_rows", max_rows)
    say = report or (lambda part, share: None)
    places, rows, norms = _first_rows(vectors, max_rows)
    if len(places) < 2:
        raise ValueError(f"a map needs at least 2 rows with a direction, got {len(places)}")
    unit = units(rows)
    count = min(NEIGHBORS, len(unit) - 1)
    ids, cosines = nearest_rows(unit, count, report=lambda share: say("neighbors", share))
    points = neighbor_map(
        unit, ids, cosines, seed=seed, report=lambda share: say("layout", share)
    )
    words = [vectors.shown(int(place)) for place in places]
    clusters, centers = _clusters(unit, seed=seed)
    return TableMap(
        words,
        places,
        len(vectors.words),
        unit,
        norms.astype(np.float32),
        points,
        principal_components(unit),
        clusters,
        [_names(words, unit, clusters == c, centers[c]) for c in range(len(centers))],
    )


def _first_rows(
    vectors: Vectors, count: int
) -> tuple[
    Int64[np.ndarray, " n"], Float32[np.ndarray, "n width"], Float64[np.ndarray, " n"]
]:
    """Return the first rows that have a word and a direction: numbers, rows and norms.

    No further rows are read: the table may be a mapped file that is larger than memory.
    """
    named = (number for number, word in enumerate(vectors.words) if word)
    places, norms = np.zeros(0, np.int64), np.zeros(0)
    rows = np.zeros((0, vectors.weight.shape[1]), np.float32)
    while len(rows) < count:
        numbers = np.fromiter(islice(named, max(count - len(rows), FEWEST)), np.int64)
        if not len(numbers):
            break
        taken = vectors.take(numbers)
        lengths = np.sqrt(np.einsum("ij,ij->i", taken, taken, dtype=np.float64))
        shown = np.flatnonzero(np.isfinite(lengths) & (lengths > 0))[: count - len(rows)]
        places = np.append(places, numbers[shown])
        norms = np.append(norms, lengths[shown])
        rows = np.concatenate([rows, taken[shown]])
    return places, rows, norms


def _clusters(
    unit: Float32[np.ndarray, "n width"], *, seed: int
) -> tuple[UInt8[np.ndarray, " n"], Float32[np.ndarray, "k width"]]:
    """Return the cluster of each row and the centers: k-means on the sphere.

    The first centers are rows far from each other (k-means++).
    """
    rng = np.random.default_rng(seed)
    count = min(MOST_CLUSTERS, max(2, round(len(unit) ** 0.5 / 4)))
    centers = unit[[rng.integers(len(unit))]]
    while len(centers) < count:
        distances = np.maximum(1 - (unit @ centers.T).max(1), 0).astype(np.float64)
        if not distances.any():
            break  # fewer different rows than clusters
        centers = np.append(
            centers, unit[[rng.choice(len(unit), p=distances / distances.sum())]], 0
        )
    for _ in range(20):
        clusters = (unit @ centers.T).argmax(1)
        sums = np.zeros_like(centers)
        np.add.at(sums, clusters, unit)
        is_used = np.bincount(clusters, minlength=len(centers))[:, None] > 0
        centers = units(np.where(is_used, sums, centers))
    order = np.argsort(-np.bincount(clusters, minlength=len(centers)), kind="stable")
    order = order[np.isin(order, clusters)]
    places = np.zeros(len(centers), np.uint8)
    places[order] = np.arange(len(order))
    return places[clusters], centers[order]


def _names(
    words: list[str],
    unit: Float32[np.ndarray, "n width"],
    is_member: Bool[np.ndarray, " n"],
    center: Float32[np.ndarray, " width"],
) -> list[str]:
    """Return words near the center of a cluster, those early in the table first."""
    members = np.flatnonzero(is_member)
    near = members[np.argsort(-(unit[members] @ center), kind="stable")[:CANDIDATES]]
    near = np.sort(near)
    spelled = [words[i] for i in near if len(words[i]) > 2 and words[i].isalpha()]
    names = list(dict.fromkeys(spelled + [words[i] for i in near]))
    return names[:NAMES]
