"""Batches of ids: uniform, and distributed like words (Zipf's law over shuffled rows)."""

import numpy as np

from .timing import BATCHES

DISTRIBUTIONS = ("uniform", "zipf")


def batches(distribution: str, rows: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return twelve batches of int64 ids below ``rows``."""
    rng = np.random.default_rng(0)
    if distribution == "uniform":
        return [rng.integers(0, rows, shape) for _ in range(BATCHES)]
    # Inverse of the cumulative weight 1/rank, by bisection.
    cumulative = np.cumsum(1.0 / np.arange(1, rows + 1))
    shuffled = rng.permutation(rows)
    return [
        shuffled[np.searchsorted(cumulative, rng.random(shape) * cumulative[-1])]
        for _ in range(BATCHES)
    ]
