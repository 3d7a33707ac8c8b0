"""Rows of 8-bit floats, e4m3fn: with one scale, or with a power of two for each 32."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._check import float_dtype, not_negative_number
from ...kernels.quantized_rows import GROUP, UE8M0, BlockFp8Rows, Fp8Rows
from ._quantized import QuantizedFormat
from .row_format import Parts, checked_rows

#: The largest e4m3fn number.
_LARGEST_CODE = 448.0
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Fp8(QuantizedFormat):
    """One e4m3fn number for each value, times one scale of the whole table.

    The scale is a shared part, an array of one number.

    Example:
        >>> format_, rows = Fp8(), np.array([[1.0, -448.0]], np.float32)
        >>> format_.encode(rows)["weight"].tolist()
        [[56, 254]]
    """

    shared_parts = ("scale",)

    @property
    def name(self) -> str:
        return "fp8"

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        return {"weight": (np.dtype(np.uint8), width)}

    def rows_of(self, parts: Parts, width: int) -> Fp8Rows:
        (weight,) = self.arrays_of(parts, width)
        return Fp8Rows(weight, _scale_in(parts))

    def encode(self, rows: Any, shared: Parts | None = None) -> Parts:
        if shared is None:
            rows = checked_rows(rows, limit=_FLOAT32_MAX, rule="fp8 holds finite numbers")
            shared = self.shared_for(float(np.abs(rows).max(initial=0)))
        scale = _scale_in(shared)
        limit = _LARGEST_CODE * scale
        rule = f"fp8 with the scale {scale:g} ends at {limit:g}"
        rows = checked_rows(rows, limit=limit, rule=rule)
        return {"weight": _codes(rows.astype(np.float64) / scale), **shared}

    def shared_for(self, largest: float) -> Parts:
        largest = not_negative_number("largest", largest)
        exact = largest / _LARGEST_CODE if largest else 1.0
        scale = np.array([[exact]]).astype(float_dtype("bfloat16"))
        if float(scale[0, 0]) < exact:
            scale = np.nextafter(scale, scale.dtype.type(np.inf))
        return {"scale": scale}


@dataclass(frozen=True)
class Fp8Block(QuantizedFormat):
    """One e4m3fn number for each value, then a ue8m0 power of two for each 32 of them.

    Example:
        >>> Fp8Block().row_bytes(256)
        264
    """

    @property
    def name(self) -> str:
        return "fp8_block"

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        if width % GROUP:
            raise ValueError(
                f"rows of format {self.name} must have a multiple of {GROUP} values, "
                f"got {width}"
            )
        code = np.dtype(np.uint8)
        return {"weight": (code, width), "scale": (code, width // GROUP)}

    def rows_of(self, parts: Parts, width: int) -> BlockFp8Rows:
        return BlockFp8Rows(*self.arrays_of(parts, width))

    def encode(self, rows: Any, shared: Parts | None = None) -> Parts:
        rule = f"{self.name} holds finite numbers"
        rows = checked_rows(rows, limit=_FLOAT32_MAX, rule=rule).astype(np.float64)
        self.part_shapes(rows.shape[1])
        blocks = rows.reshape(len(rows), rows.shape[1] // GROUP, GROUP)
        largest = np.abs(blocks).max(axis=-1, initial=0)
        # The smallest power of two that brings the block's largest number to 448 or less.
        mantissa, exponent = np.frexp(largest / _LARGEST_CODE)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale = np.clip(exponent + 127, 0, 254).astype(np.uint8)
        codes = _codes(blocks / UE8M0[scale].astype(np.float64)[..., None])
        return {"weight": codes.reshape(rows.shape), "scale": scale}


def _scale_in(parts: Parts) -> float:
    """Return the shared scale of a table."""
    if "scale" not in parts:
        raise ValueError(f"format fp8 needs a part 'scale', got {[*parts]}")
    scale = np.asarray(parts["scale"])
    if scale.size != 1:
        raise ValueError(f"part 'scale' must be one number, got shape {scale.shape}")
    return float(scale.reshape(-1)[0])


def _codes(numbers: np.ndarray) -> np.ndarray:
    """Return the nearest e4m3fn codes of numbers up to 448 in size."""
    import ml_dtypes

    return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
