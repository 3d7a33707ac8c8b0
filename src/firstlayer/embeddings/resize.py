"""Growing and shrinking a table when the vocabulary changes."""

from dataclasses import dataclass

import numpy as np

from .._check import not_negative
from .init import Init, Seed, initial_table

# Rows of a table that are converted to float64 at a time.
CHUNK = 4096


@dataclass(frozen=True)
class Resized:
    """Ids that a resize kept, added and dropped.

    Args:
        kept: Ids whose rows are unchanged.
        added: New ids.
        dropped: Removed ids.
    """

    kept: range
    added: range
    dropped: range


def resize_table(
    weight: np.ndarray,
    num_embeddings: int,
    *,
    init: Init | np.ndarray = "mean",
    rng: Seed = None,
    padding_idx: int | None = None,
) -> tuple[np.ndarray, Resized]:
    """Return a table of ``num_embeddings`` rows that starts with the rows of ``weight``.

    Args:
        weight: Current table.
        num_embeddings: New number of rows.
        init: Values of new rows. ``"mean"`` sets each to the mean of the old rows, so that
            a tied head does not favor new tokens; ``"gaussian"`` draws them with the mean
            and covariance of the old rows; an array holds them; other values are those of
            :func:`firstlayer.embeddings.init.initial_table`.
        rng: Seed or generator for drawn rows.
        padding_idx: Padding row. It is excluded from the mean and cannot be dropped.

    Example:
        >>> table, changes = resize_table(np.array([[1.0], [3.0]]), 3)
        >>> table.ravel().tolist(), changes.added
        ([1.0, 3.0, 2.0], range(2, 3))
    """
    old, new = weight.shape[0], not_negative("num_embeddings", num_embeddings)
    if padding_idx is not None and padding_idx >= new:
        raise ValueError(
            f"num_embeddings must leave the padding row {padding_idx} in place, got {new}"
        )
    table = np.empty((new, weight.shape[1]), weight.dtype)
    table[:old] = weight[:new]
    if new > old:
        rng = np.random.default_rng(rng)
        table[old:] = _new_rows(new - old, weight, init, rng, padding_idx=padding_idx)
    # Empty ranges begin and end at the same id.
    added, dropped = range(old, max(old, new)), range(new, max(old, new))
    return table, Resized(range(min(old, new)), added, dropped)


def _new_rows(
    count: int,
    weight: np.ndarray,
    init: Init | np.ndarray,
    rng: np.random.Generator,
    *,
    padding_idx: int | None,
) -> np.ndarray:
    shape = (count, weight.shape[1])
    if isinstance(init, np.ndarray):
        if init.shape != shape:
            raise ValueError(f"init must have shape {shape}, got {init.shape}")
        return init
    if init not in ("mean", "gaussian"):
        return initial_table(shape, init=init, rng=rng, dtype=weight.dtype)
    tokens = weight if padding_idx is None else np.delete(weight, padding_idx, axis=0)
    if not len(tokens):
        raise ValueError(f"init must not be {init!r} for a table without rows")
    mean = tokens.mean(axis=0, dtype=np.float64)
    if init == "mean":
        return np.broadcast_to(mean, shape)
    factor = _covariance_factor(tokens, mean)
    return mean + rng.standard_normal((count, len(factor))) @ factor


def _covariance_factor(tokens: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return a matrix ``f`` such that ``f.T @ f`` is the covariance of the rows.

    It has as many rows as the smaller of the number of rows and the width.
    """
    rows, width = tokens.shape
    if rows <= width:
        return (tokens - mean) / np.sqrt(rows)
    # In chunks, because a float64 copy of the table may be large.
    covariance = np.zeros((width, width))
    for start in range(0, rows, CHUNK):
        centered = tokens[start : start + CHUNK] - mean
        covariance += centered.T @ centered
    # The symmetric square root exists for every rank. Unlike eigenvectors, it is unique,
    # so a seed draws the same rows, within rounding, with any version of LAPACK.
    values, vectors = np.linalg.eigh(covariance / rows)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
