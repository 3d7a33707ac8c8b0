"""Batches of ids: spread evenly, and as words are (Zipf's law over shuffled rows)."""

import numpy as np

from .timing import BATCHES

KINDS = ("uniform", "zipf")


def batches(kind: str, rows: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return a dozen batches of int64 ids below ``rows``."""
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return [rng.integers(0, rows, shape) for _ in range(BATCHES)]
    # The inverse of the cumulative weight 1/rank, found by bisection.
    cumulative = np.cumsum(1.0 / np.arange(1, rows + 1))
    shuffled = rng.permutation(rows)
    return [
        shuffled[np.searchsorted(cumulative, rng.random(shape) * cumulative[-1])]
        for _ in range(BATCHES)
    ]
