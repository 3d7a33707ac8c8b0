"""Rows of 2- to 8-bit values in groups, each with a scale and a bias."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._check import float_dtype
from ...kernels.quantized_rows import GROUP, AffineRows
from ._quantized import LARGEST, QuantizedFormat
from .row_format import Parts, checked_rows


@dataclass(frozen=True)
class Affine(QuantizedFormat):
    """Values of a few bits, then a scale and a bias for each group: ``scale · q + bias``.

    The bits of a row are one little-endian number, so 3, 5 and 6 bits cross the borders of
    words, as in MLX.

    Args:
        bits: Bits of a value, 2 to 8.
        group_size: Values in a group, a multiple of 32.
        scale_dtype: Dtype of scales and biases: ``"bfloat16"``, ``"float16"`` or
            ``"float32"``.
    """

    bits: int = 4
    group_size: int = 64
    scale_dtype: str = "bfloat16"
    writable = False

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise ValueError(f"bits must be 2 to 8, got {self.bits}")
        if self.group_size < GROUP or self.group_size % GROUP:
            raise ValueError(
                f"group_size must be a positive multiple of {GROUP}, got {self.group_size}"
            )

    @property
    def name(self) -> str:
        suffix = "" if self.scale_dtype == "bfloat16" else f"_{self.scale_dtype}"
        return f"mlx{self.bits}_g{self.group_size}{suffix}"

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        groups = -(-width // self.group_size)
        number = float_dtype(self.scale_dtype)
        return {
            "weight": (np.dtype(np.uint8), groups * self.group_size * self.bits // 8),
            "scale": (number, groups),
            "bias": (number, groups),
        }

    def rows_of(self, parts: Parts, width: int) -> AffineRows:
        weight, scale, bias = self.arrays_of(parts, width)
        return AffineRows(weight, scale, bias, self.bits, self.group_size, width)


@dataclass(frozen=True)
class Int4(Affine):
    """Values of 4 bits in groups of 32, with bfloat16 scales and biases.

    The lower half of a byte is the first of its two values. The bits of a row are followed
    by its scales, then by its biases: 160 bytes for 256 values. A row's last group is
    filled up with zeros.

    The bias is at most the group's smallest number and 15 steps reach its largest, after
    rounding to bfloat16, so the error is at most half a step.

    Example:
        >>> Int4().row_bytes(256)
        160
    """

    bits: int = 4
    group_size: int = GROUP
    writable = True

    @property
    def name(self) -> str:
        return "int4"

    def encode(self, rows: Any, shared: Parts | None = None) -> Parts:
        rule = f"{self.name} holds numbers below 2**126 in size"
        rows = checked_rows(rows, limit=LARGEST, rule=rule)
        groups = -(-rows.shape[1] // GROUP)
        padding = groups * GROUP - rows.shape[1]
        # The last number again: zeros would widen the range of the last group.
        padded = np.pad(rows.astype(np.float64), ((0, 0), (0, padding)), mode="edge")
        values = padded.reshape(len(rows), groups, GROUP)
        bias = _rounded(values.min(axis=-1), -np.inf)
        offsets = values - bias.astype(np.float64)[..., None]
        scale = _rounded(offsets.max(axis=-1) / 15, np.inf)
        steps = scale.astype(np.float64)[..., None]
        q = np.rint(offsets / np.where(steps == 0, 1, steps)).astype(np.uint8)
        q = q.reshape(len(rows), groups * GROUP)
        q[:, rows.shape[1] :] = 0
        weight = q[:, 0::2] | q[:, 1::2] << 4
        return {"weight": weight, "scale": scale, "bias": bias}


def _rounded(numbers: np.ndarray, toward: float) -> np.ndarray:
    """Return float64 numbers as bfloat16, rounded toward an infinity."""
    nearest = numbers.astype(float_dtype("bfloat16"))
    past = nearest.astype(np.float64) < numbers
    if toward < 0:
        past = nearest.astype(np.float64) > numbers
    return np.where(past, np.nextafter(nearest, nearest.dtype.type(toward)), nearest)
