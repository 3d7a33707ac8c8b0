"""Rows of bytes with a scale and a bias: ``scale · q + bias``."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.quantized_rows import Int8Rows
from ._quantized import LARGEST, QuantizedFormat
from .row_format import Parts, checked_rows

# Torch adds this to the divisor, so that a constant row is not divided by zero.
_EPSILON = np.float32(1e-8)
# For rows that span less than this, it would cost more than a thousandth of a step.
_NARROW = np.float32(2**-8)


@dataclass(frozen=True)
class Int8(QuantizedFormat):
    """One byte for each value, then a float32 scale and a float32 bias for the row.

    Interleaved rows have the layout of ``torch.ops.quantized.embedding_bag_byte_prepack``,
    and the same bytes if the row spans at least ``2 ** -8``. Torch encodes rows that span
    less with an error of several steps; here it is half a step in any row.

    Example:
        >>> rows = np.array([[-1.0, 0.0, 1.55]], np.float32)
        >>> Int8().encode(rows)["weight"].tolist()
        [[0, 100, 255]]
    """

    @property
    def name(self) -> str:
        return "int8"

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        number = np.dtype(np.float32)
        return {
            "weight": (np.dtype(np.uint8), width),
            "scale": (number, 1),
            "bias": (number, 1),
        }

    def rows_of(self, parts: Parts, width: int) -> Int8Rows:
        return Int8Rows(*self.arrays_of(parts, width))

    def encode(self, rows: Any, shared: Parts | None = None) -> Parts:
        rule = f"{self.name} holds numbers below 2**126 in size"
        rows = checked_rows(rows, limit=LARGEST, rule=rule).astype(np.float32, copy=False)
        if not rows.size:
            bias = span = np.zeros((len(rows), 1), np.float32)
        else:
            bias = rows.min(axis=1, keepdims=True)
            span = rows.max(axis=1, keepdims=True) - bias
        scale, inverse = span / np.float32(255), np.float32(255) / (span + _EPSILON)
        weight = np.rint((rows - bias) * inverse).astype(np.uint8)
        narrow = ((span < _NARROW) & (span > 0))[:, 0]
        if narrow.any():
            weight[narrow], scale[narrow] = _encode_exactly(rows[narrow], bias[narrow])
        return {"weight": weight, "scale": scale, "bias": bias}


def _encode_exactly(rows: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and scales of rows, with the largest value at most 255 steps."""
    offsets = rows.astype(np.float64) - bias
    steps = offsets.max(axis=1, keepdims=True) / 255
    scale = steps.astype(np.float32)
    # A scale rounded down, to zero in the extreme, would cut off the largest values.
    scale = np.where(scale < steps, np.nextafter(scale, np.float32(np.inf)), scale)
    return np.rint(offsets / scale).astype(np.uint8), scale
