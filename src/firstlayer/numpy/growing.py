"""Embedding of ids that get a row when they are first seen, on NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int64, Integer

from .._check import float_dtype
from .._interrupts import held_interrupts
from ..embeddings.growing import (
    GrowingArguments,
    InitialRows,
    OwnedGradient,
    check_new_rows,
)
from ..embeddings.hashed import int64_bits
from ..embeddings.id_map import Assigned, IdMap
from ..embeddings.row_gradient import RowGradient
from ..files.layer_configs import ID_MAP, config_of
from ._module import Module
from .token import Embedding

Ids = Integer[Any, "*batch"] | Sequence[Any] | int


class GrowingEmbedding(GrowingArguments, Module):
    """Vectors of any 64-bit ids: an id gets a row when training first sees it.

    When all rows are taken, the id that was used least recently or least frequently
    loses its row, and its optimizer state with it: an id that comes back starts again.
    :meth:`vjp` gives rows to new ids; a call changes nothing. Ids without a row read the
    unknown row, row 0 of ``table.weight``, which starts at zero and is trained like any
    other.

    Args:
        capacity: Number of rows, without the unknown row.
        embedding_dim: Width of each vector.
        evict: Which id loses its row to a new one: ``"lru"`` (least recently used),
            ``"lfu"`` (least frequently used), or None: once all rows are taken, new
            ids read the unknown row.
        min_count: Number of times that an id must have been seen to get a row. The counts
            of the last ``capacity`` ids without a row are kept.
        init: Distribution of new rows: ``"normal"`` (standard deviation 1), ``"uniform"``
            (within 0.05), ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02) or
            ``"zeros"``.
        seed: Seed of the initial values. The initial row of an id follows from the seed
            and the id alone; see :mod:`firstlayer.embeddings.growing`.
        dtype: float64, float32 (the default), float16 or bfloat16.

    Shape:
        - ids: any shape, any integer dtype, or lists; negative ids too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    A batch with more different ids than ``capacity`` is a ValueError. A gradient of an id
    that has lost its row in the meantime is dropped.

    Example:
        >>> embedding = GrowingEmbedding(2, 4, evict="lru")
        >>> y, pull = embedding.vjp([2**40, -1, 2**40])
        >>> embedding.rows([2**40, -1, 5]).tolist()
        [1, 2, 0]
        >>> y, pull = embedding.vjp([5, 2**40])
        >>> embedding.rows([2**40, -1, 5]).tolist()
        [1, 0, 2]
    """

    def __init__(
        self,
        capacity: int,
        embedding_dim: int,
        *,
        evict: str | None = "lru",
        min_count: int = 1,
        init: str = "normal",
        seed: int = 0,
        dtype: Any = None,
    ) -> None:
        self.id_map = IdMap(capacity, evict=evict, min_count=min_count)
        self.initial = InitialRows(
            width=embedding_dim, init=init, seed=seed, capacity=capacity
        )
        shape = capacity + 1, embedding_dim
        self.table = Embedding(weight=np.zeros(shape, float_dtype(dtype)))

    @property
    def ids(self) -> Int64[np.ndarray, " ids"]:
        """Ids that have a row, in the order of their rows, from row 1 on."""
        return self.id_map.ids

    def rows(self, ids: Ids) -> Int64[np.ndarray, "*batch"]:
        """Return the row of each id, 0 for ids without one; change nothing."""
        return self.id_map.find(_bits(ids))

    def assign(self, ids: Ids) -> Int64[np.ndarray, "*batch"]:
        """Return the row of each id of a batch in training; new ids get a row.

        Example:
            >>> layer = GrowingEmbedding(10, 4)
            >>> layer.assign([2**40, -7, 2**40]).tolist()
            [1, 2, 1]
        """
        return self._assign(ids).rows

    def __call__(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the vectors of the ids; ids without a row of their own read row 0.

        Args:
            ids: Ids of any shape and any integer dtype.
        """
        return self.table(self.rows(ids))

    def vjp(
        self, ids: Ids
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, RowGradient]]]:
        """Give rows to new ids; return the output and its pullback.

        The pullback returns the row gradient of the table.
        """
        assigned, id_map = self._assign(ids), self.id_map
        rows = assigned.rows

        def pull(dy: np.ndarray) -> dict[str, RowGradient]:
            gradient = self.table.row_gradient(rows, dy)
            owned = OwnedGradient(gradient.ids, gradient.values, id_map, assigned.batch)
            return {"table.weight": owned.renewed()}

        return self.table(rows), pull

    def parameters(self) -> dict[str, np.ndarray]:
        return {"table.weight": self.table.parameters()["weight"]}

    def buffers(self) -> dict[str, np.ndarray]:
        """Return the ids, their counts and the order of eviction, by name."""
        return {ID_MAP + name: array for name, array in self.id_map.state().items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        restored = None
        if all(ID_MAP + name in state for name in self.id_map.state_names):
            parts = {name.removeprefix(ID_MAP): array for name, array in state.items()}
            restored = self.id_map.restored(parts)
        # Raises if a name is missing.
        super().load_state_dict(state)
        if restored is not None:
            self.id_map.take_over(restored)

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.table.dtype.name)

    def _assign(self, ids: Ids) -> Assigned:
        table, bits = self.table, _bits(ids)
        check_new_rows(self.id_map, bits, table.optimizer_state)
        with held_interrupts():
            assigned = self.id_map.assign(bits)
            new_rows = assigned.new_rows
            if new_rows.size:
                table.catch_up(new_rows)
                table.stored_weight[new_rows] = self.initial(assigned.new_ids)
                if table.optimizer_state is not None:
                    table.optimizer_state.reset_rows(new_rows)
        return assigned


def _bits(ids: Ids) -> Int64[np.ndarray, "*batch"]:
    return int64_bits(ids)
