"""Kernels of the quantized formats."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...kernels.quantized_rows import QuantizedRows
from .row_format import BoundTable, Parts, RowFormat

#: Largest magnitude in rows with a scale and a bias: no sum on the way to it overflows.
LARGEST = 2.0**126


@dataclass(frozen=True)
class QuantizedFormat(RowFormat):
    """Format whose rows are decoded by the kernels."""

    @abstractmethod
    def rows_of(self, parts: Parts, width: int) -> QuantizedRows:
        """Return the arrays that the kernels read, checked."""

    def bind(self, parts: Parts, width: int) -> BoundTable:
        return _QuantizedTable(self.rows_of(parts, width))


class _QuantizedTable(BoundTable):
    """A table that the kernels decode."""

    def __init__(self, rows: QuantizedRows) -> None:
        self._rows = rows

    def gather(self, ids: np.ndarray, out: np.ndarray) -> bool:
        return kernels.gather_quantized(self._rows, ids, out)

    def sum_bags(
        self,
        ids: np.ndarray,
        bounds: np.ndarray,
        *,
        weights: np.ndarray | None = None,
        divisors: np.ndarray | None = None,
    ) -> np.ndarray | None:
        return kernels.sum_quantized_bags(
            self._rows, ids, bounds, weights=weights, divisors=divisors
        )
