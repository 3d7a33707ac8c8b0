"""Rows of float32, float16 or bfloat16 numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import kernels
from ..._check import float_dtype, host_array
from .row_format import Parts, RowFormat, checked_rows


@dataclass(frozen=True)
class Floats(RowFormat):
    """Numbers of a float dtype, returned as they are.

    Args:
        dtype_name: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """

    dtype_name: str

    @property
    def name(self) -> str:
        return self.dtype_name

    @property
    def dtype(self) -> np.dtype:
        return float_dtype(self.dtype_name)

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        return {"weight": (self.dtype, width)}

    def gather(self, parts: Parts, ids: np.ndarray, out: np.ndarray) -> bool:
        (weight,) = self.arrays_of(parts, out.shape[1])
        return kernels.gather_rows(weight, ids, out=out) is not None

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
        (weight,) = self.arrays_of(parts, width)
        return kernels.sum_bags(weight, ids, bounds, weights=weights, divisors=divisors)

    def encode(self, rows: Any, shared: Parts | None = None) -> Parts:
        with np.errstate(over="ignore"):
            encoded = host_array(rows, name="rows").astype(self.dtype)
        # NaN and infinity are kept, but no finite number becomes infinite.
        if not np.array_equal(np.isinf(encoded), np.isinf(rows)):
            import ml_dtypes

            limit = float(ml_dtypes.finfo(self.dtype).max)
            finite = np.where(np.isfinite(rows), rows, 0)
            checked_rows(finite, limit=limit, rule=f"{self.name} ends at {limit:g}")
        return {"weight": encoded}
