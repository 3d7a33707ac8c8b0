"""What the quantized formats share: their kernels."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...kernels.quantized_rows import QuantizedRows
from .row_format import Parts, RowFormat

#: Largest magnitude in rows with a scale and a bias: no sum on the way to it overflows.
LARGEST = 2.0**126


@dataclass(frozen=True)
class QuantizedFormat(RowFormat):
    """Format whose rows are decoded by the kernels."""

    @abstractmethod
    def rows_of(self, parts: Parts, width: int) -> QuantizedRows:
        """Return the arrays that the kernels read, checked."""

    def gather(self, parts: Parts, ids: np.ndarray, out: np.ndarray) -> bool:
        return kernels.gather_quantized(self.rows_of(parts, out.shape[1]), ids, out)

    def sum_bags(
        self,
        parts: Parts,
        ids: np.ndarray,
        bounds: np.ndarray,
        *,
        width: int,
        weights: np.ndarray | None = None,
        divisors: np.ndarray | None = None,
    ) -> np.ndarray | None:
        rows = self.rows_of(parts, width)
        return kernels.sum_quantized_bags(
            rows, ids, bounds, weights=weights, divisors=divisors
        )
