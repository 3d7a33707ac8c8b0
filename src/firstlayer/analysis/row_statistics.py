"""Statistics of a table's rows in one pass: norms, duplicates, effective rank."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

#: Above this many products, the effective rank is estimated from a sample of rows.
MAX_PRODUCTS = 2 * 10**10
SAMPLE_ROWS = 2048


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the rows of a table.

    Args:
        norms: Norm of each row; NaN or infinite if the row is not finite.
        duplicate: Whether each row equals an earlier one bit for bit; False for zero rows.
        effective_rank: Exponential of the entropy of the singular values of finite rows.
        rank_rows: Number of rows used for the effective rank.
    """

    norms: Float64[np.ndarray, " rows"]
    duplicate: Bool[np.ndarray, " rows"]
    effective_rank: float
    rank_rows: int


def row_statistics(
    chunks: Iterable[Float[np.ndarray, "rows width"]], *, rows: int
) -> RowStatistics:
    """Return the statistics of a table that is read in chunks.

    Args:
        chunks: Consecutive rows of the table, in any float dtype.
        rows: Number of rows of the table.

    Example:
        >>> table = np.diag([3.0, 3.0, 3.0, 0.0])[[0, 1, 2, 3, 0]]
        >>> found = row_statistics([table], rows=5)
        >>> found.norms.tolist(), found.duplicate.tolist(), round(found.effective_rank, 1)
        ([3.0, 3.0, 3.0, 0.0, 3.0], [False, False, False, False, True], 3.0)
    """
    norms, duplicate, digests = np.empty(rows), np.zeros(rows, bool), set()
    rank, first = _EffectiveRank(rows), 0
    for chunk in chunks:
        here = slice(first, first + len(chunk))
        with np.errstate(over="ignore", invalid="ignore"):
            upcast = chunk.astype(np.float64)
            norms[here] = np.sqrt(np.einsum("ij,ij->i", upcast, upcast))
        for i in np.flatnonzero(norms[here]):
            # 16 bytes instead of the row: collisions are too unlikely to matter.
            digest = hashlib.blake2b(chunk[i], digest_size=16).digest()
            duplicate[first + i] = digest in digests
            digests.add(digest)
        rank.add(upcast[np.isfinite(norms[here])])
        first += len(chunk)
    return RowStatistics(norms, duplicate, *rank.compute())


class _EffectiveRank:
    """Effective rank from the Gram matrix of all rows, or of a sample of a large table."""

    def __init__(self, rows: int) -> None:
        self.rows, self.used = rows, 0
        self.gram: np.ndarray | None = None
        self.sample: list[np.ndarray] = []

    def add(self, chunk: Float64[np.ndarray, "rows width"]) -> None:
        width = chunk.shape[1]
        if self.rows * width**2 > MAX_PRODUCTS or self.rows < width:
            chunk = chunk[:: max(1, self.rows // SAMPLE_ROWS)]
            self.sample.append(chunk)
        else:
            gram = chunk.T @ chunk
            self.gram = gram if self.gram is None else self.gram + gram
        self.used += len(chunk)

    def compute(self) -> tuple[float, int]:
        """Return the effective rank and the number of rows used for it."""
        gram = self.gram
        if self.sample:
            sample = np.concatenate(self.sample)
            is_wide = sample.shape[0] < sample.shape[1]
            gram = sample @ sample.T if is_wide else sample.T @ sample
        if gram is None or not gram.any():
            return 0.0, self.used
        values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0))
        shares = values[values > 0] / values.sum()
        return float(np.exp(-(shares * np.log(shares)).sum())), self.used
