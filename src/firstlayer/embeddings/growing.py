"""Initial values of rows that are given to ids as they are seen, and their gradients.

The initial value of a row follows from the seed and the id alone. In the notation of
:mod:`firstlayer.embeddings.hashed`, draw ``k`` of an id is the number::

    u(k) = (mix(mix(id + G) ^ key(k)) >> 11) / 2**53        in [0, 1)

Column ``j`` of a row of ``width`` columns is ``(2 u(j) - 1) limit`` for a uniform
distribution, and for a normal one, with attempt ``a = 0``::

    z(j, a) = sqrt(-2 ln(1 - u(k))) cos(2 pi u(k + 1)),     k = 2 (a width + j)

A truncated normal distribution takes the first attempt within two standard deviations.
Values are computed in float64 and rounded once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from .._check import not_negative, one_of
from .hashed import hash_bits
from .id_map import IdMap
from .init import INITS
from .row_gradient import RowGradient


@dataclass(frozen=True, kw_only=True)
class InitialRows:
    """Initial values of the rows of ids.

    Args:
        width: Width of a row.
        init: Name of a distribution; see :func:`firstlayer.embeddings.init.initial_table`.
        seed: Seed.
        capacity: Number of rows of the table, for ``"xavier"``.

    Example:
        >>> initial = InitialRows(width=3, init="uniform", seed=0, capacity=10)
        >>> initial(np.array([7])).round(4).tolist()
        [[-0.0464, -0.0302, -0.0317]]
    """

    width: int
    init: str
    seed: int
    capacity: int

    def __post_init__(self) -> None:
        not_negative("embedding_dim", self.width)
        one_of("init", self.init, tuple(INITS))
        if not_negative("seed", self.seed) >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")

    def __call__(self, ids: Int64[np.ndarray, " n"]) -> Float[np.ndarray, "n width"]:
        """Return the initial value of the row of each id, float64."""
        if self.init == "zeros" or not ids.size or not self.width:
            return np.zeros((ids.size, self.width))
        if self.init in ("uniform", "xavier"):
            rows = self.capacity + self.width
            limit = 0.05 if self.init == "uniform" else float(np.sqrt(6.0 / rows))
            return (2 * self._draws(ids, 0, self.width) - 1) * limit
        rows = self._normal(ids, 0)
        if self.init == "normal":
            return rows
        attempt = 0
        while (beyond := np.abs(rows) > 2).any():
            attempt += 1
            again = np.flatnonzero(beyond.any(1))
            drawn = self._normal(ids[again], attempt)
            rows[again] = np.where(beyond[again], drawn, rows[again])
        return rows * 0.02

    def _normal(self, ids: np.ndarray, attempt: int) -> np.ndarray:
        u = self._draws(ids, 2 * attempt * self.width, 2 * self.width)
        return np.sqrt(-2 * np.log1p(-u[:, ::2])) * np.cos(2 * np.pi * u[:, 1::2])

    def _draws(self, ids: np.ndarray, first: int, count: int) -> np.ndarray:
        """Return draws ``first``, ``first + 1``, … of each id, in [0, 1)."""
        bits = hash_bits(ids, seed=self.seed, first=first, count=count).view(np.uint64)
        return (bits >> np.uint64(11)) * 2.0**-53


def check_new_rows(
    id_map: IdMap, ids: Int64[np.ndarray, "*batch"], state: Any | None
) -> None:
    """Raise an error if ids need new rows while averages replace the weights.

    Args:
        id_map: Map of the ids.
        ids: Ids of a batch in training.
        state: State of the table's row optimizer, or None.
    """
    if state is not None and state.is_swapped and not id_map.find(ids).all():
        state.check_reset()


class GrowingArguments:
    """Arguments of ``GrowingEmbedding`` as properties, for every front end."""

    id_map: IdMap
    initial: InitialRows

    @property
    def capacity(self) -> int:
        """Number of rows, without the unknown row."""
        return self.id_map.capacity

    @property
    def embedding_dim(self) -> int:
        """Width of each vector."""
        return self.initial.width

    @property
    def evict(self) -> str | None:
        """Which id loses its row to a new one."""
        return self.id_map.evict

    @property
    def min_count(self) -> int:
        """Number of times that an id must have been seen to get a row."""
        return self.id_map.min_count

    @property
    def init(self) -> str:
        """Distribution of new rows."""
        return self.initial.init

    @property
    def seed(self) -> int:
        """Seed of the initial values."""
        return self.initial.seed


class OwnedGradient(RowGradient):
    """Row gradient of ids that may lose their rows before it is used.

    Args:
        ids: Rows that have a gradient, ascending, each once.
        values: Gradient of each of those rows.
        id_map: Map of the ids.
        batch: Number of the batch in which the rows were looked up.
    """

    id_map: IdMap
    batch: int

    def __init__(
        self, ids: np.ndarray, values: np.ndarray, id_map: IdMap, batch: int
    ) -> None:
        super().__init__(ids, values)
        # The dataclass is frozen.
        vars(self).update(id_map=id_map, batch=batch)

    def current(self) -> RowGradient:
        is_kept = self.id_map.keeps(self.ids, self.batch)
        if is_kept is None:
            return RowGradient(self.ids, self.values)
        return RowGradient(self.ids[is_kept], self.values[is_kept])

    def renewed(self) -> "OwnedGradient":
        """Return the gradient without lost rows, as one of the current batch."""
        kept, batch = self.current(), self.id_map.batch
        return OwnedGradient(kept.ids, kept.values, self.id_map, batch)

    def __add__(self, other: RowGradient) -> RowGradient:
        total, batch = self.current() + other.current(), self.id_map.batch
        return OwnedGradient(total.ids, total.values, self.id_map, batch)
