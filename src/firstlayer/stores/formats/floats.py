"""Rows of float32, float16 or bfloat16 numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import kernels
from ..._check import float_dtype, host_array
from .row_format import BoundTable, Parts, RowFormat, checked_rows


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
        is_native = self.dtype_name != "bfloat16"
        return np.dtype(self.dtype_name) if is_native else float_dtype("bfloat16")

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        return {"weight": (self.dtype, width)}

    def bind(self, parts: Parts, width: int) -> BoundTable:
        return _FloatTable(*self.arrays_of(parts, width))

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


class _FloatTable(BoundTable):
    """A table of numbers that are copied."""

    def __init__(self, weight: np.ndarray) -> None:
        self._weight = weight

    def gather(self, ids: np.ndarray, out: np.ndarray) -> bool:
        return kernels.gather_rows(self._weight, ids, out=out) is not None

    def sum_bags(
        self,
        ids: np.ndarray,
        bounds: np.ndarray,
        *,
        weights: np.ndarray | None = None,
        divisors: np.ndarray | None = None,
    ) -> np.ndarray | None:
        table = np.ascontiguousarray(self._weight)
        return kernels.sum_bags(table, ids, bounds, weights=weights, divisors=divisors)
