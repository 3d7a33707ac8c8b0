"""Tables that one call of the complete layer reads."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from ... import kernels
from ..._check import all_in_range, changed_ids, out_of_range
from ...embeddings.row_gradient import RowGradient

Norm = tuple[np.ndarray, np.ndarray]


class TableRows(NamedTuple):
    """A table and the row of it that each token reads.

    Args:
        table: The table.
        rows: Flat row numbers. Fewer rows than tokens are repeated from the first.
        padding_idx: Row that gets no gradient, or None.
        ids: If ``table`` is a copy of some rows of a parameter, their ids.
    """

    table: Float[np.ndarray, "rows embedding_dim"]
    rows: Int64[np.ndarray, " tokens"]
    padding_idx: int | None = None
    ids: Int64[np.ndarray, " rows"] | None = None

    def copy_rows(self) -> "TableRows":
        """Return a table of copies of the rows that are read."""
        ids, rows = np.unique(self.rows, return_inverse=True)
        padding = np.flatnonzero(ids == self.padding_idx)
        table = kernels.gather_rows(self.table, ids)
        if table is None:
            raise out_of_range(ids, len(self.table))
        return TableRows(table, rows, int(padding[0]) if padding.size else None, ids)

    def row_gradient(self, gradient: RowGradient) -> RowGradient:
        """Return the gradient of the parameter, given that of ``table``."""
        if self.ids is None:
            return gradient
        return RowGradient(self.ids[gradient.ids], gradient.values)


class LayerTables(NamedTuple):
    """Tables whose rows are added up.

    Args:
        token: Token table, or a table with one row per token.
        position: Position table, or encoded positions, or None.
        segment: Segment table, or None.
        scale: Factor of the token rows.
    """

    token: TableRows
    position: TableRows | None
    segment: TableRows | None
    scale: float

    def forward(
        self,
        out: Float[np.ndarray, "*batch embedding_dim"],
        *,
        norm: Norm | None,
        eps: float,
        statistics: np.ndarray | None = None,
    ) -> None:
        """Write the sums of rows to ``out``, normalized if there is a norm."""
        if not out.size:
            return
        in_range = kernels.layer_forward(
            self.token[:2],
            position=self.position and self.position[:2],
            segment=self.segment and self.segment[:2],
            scale=self.scale,
            norm=norm and (*norm, eps),
            out=out.reshape(-1, out.shape[-1]),
            statistics=statistics,
        )
        if not in_range:
            # The arguments were checked against the tables, and then copied.
            for name, pair in (("positions", self.position), ("segments", self.segment)):
                if pair is not None and not all_in_range(pair.rows, len(pair.table)):
                    bound = "the number of rows"
                    raise changed_ids(len(pair.table), name=name, bound=bound)
            raise changed_ids(len(self.token.table))
