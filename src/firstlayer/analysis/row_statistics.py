"""One pass over a table's rows: how long they are, which are equal, how they spread."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

#: Above this many products the spread is taken from some of the rows.
MOST_PRODUCTS = 2 * 10**10
FEW_ROWS = 2048


@dataclass(frozen=True)
class Survey:
    """What a pass over a table found.

    Args:
        norms: The length of each row; NaN or infinite if the row is not finite.
        duplicate: Whether each row equals an earlier one to the bit, zeros left aside.
        effective_rank: The exponential of the entropy of the singular values, from those
            of the finite rows that were taken.
        rank_rows: How many rows that was taken from.
    """

    norms: Float64[np.ndarray, " rows"]
    duplicate: Bool[np.ndarray, " rows"]
    effective_rank: float
    rank_rows: int


def survey(chunks: Iterable[Float[np.ndarray, "rows width"]], *, rows: int) -> Survey:
    """Pass over a table once.

    Args:
        chunks: Its rows, some at a time, in any float dtype.
        rows: How many there are in all.

    Example:
        >>> table = np.diag([3.0, 3.0, 3.0, 0.0])[[0, 1, 2, 3, 0]]
        >>> found = survey([table], rows=5)
        >>> found.norms.tolist(), found.duplicate.tolist(), round(found.effective_rank, 1)
        ([3.0, 3.0, 3.0, 0.0, 3.0], [False, False, False, False, True], 3.0)
    """
    norms, duplicate, seen = np.empty(rows), np.zeros(rows, bool), set()
    spread, place = _Spread(rows), 0
    for chunk in chunks:
        here = slice(place, place + len(chunk))
        wide = chunk.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            norms[here] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
        for i in np.flatnonzero(norms[here]):
            # A hash of 16 bytes: rows are kept nowhere, and no two differ but agree in it.
            digest = hashlib.blake2b(chunk[i], digest_size=16).digest()
            duplicate[place + i] = digest in seen
            seen.add(digest)
        spread.add(wide[np.isfinite(norms[here])])
        place += len(chunk)
    return Survey(norms, duplicate, *spread.rank())


class _Spread:
    """The products of a table's rows, summed as they come, or some of the rows."""

    def __init__(self, rows: int) -> None:
        self.rows, self.taken = rows, 0
        self.products: np.ndarray | None = None
        self.some: list[np.ndarray] = []

    def add(self, chunk: Float64[np.ndarray, "rows width"]) -> None:
        width = chunk.shape[1]
        if self.rows * width**2 > MOST_PRODUCTS or self.rows < width:
            chunk = chunk[:: max(1, self.rows // FEW_ROWS)]
            self.some.append(chunk)
        else:
            products = chunk.T @ chunk
            self.products = products if self.products is None else self.products + products
        self.taken += len(chunk)

    def rank(self) -> tuple[float, int]:
        """Return the effective rank, and how many rows it was taken from."""
        products = self.products
        if self.some:
            sample = np.concatenate(self.some)
            is_wide = sample.shape[0] < sample.shape[1]
            products = sample @ sample.T if is_wide else sample.T @ sample
        if products is None or not products.any():
            return 0.0, self.taken
        values = np.sqrt(np.maximum(np.linalg.eigvalsh(products), 0))
        shares = values[values > 0] / values.sum()
        return float(np.exp(-(shares * np.log(shares)).sum())), self.taken
