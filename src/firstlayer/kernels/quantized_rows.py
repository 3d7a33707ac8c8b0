"""Tables of quantized rows: the arrays that hold them, and their values by NumPy.

A table is one array per field, with one row for each row of the table. The fields may be
views of one array, whose rows then hold a row's fields one after the other. ``take`` of
each class is the definition of its format; ``quantized`` has the compiled version.

Vectors are float32. A product and a sum are rounded once, together, as by a fused
multiply-add.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

#: Values that the kernels decode at a time. Groups of all formats are multiples of it.
GROUP = 32
#: Numbers of the dtypes of scales and biases, for the kernels.
SCALE_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


class Fields(NamedTuple):
    """Addresses of a table's fields and the distances between their rows, in bytes.

    The subclass tells the format: kernels are compiled for each. A format without a scale
    or bias of its own has the address of the weight there, which can be prefetched.
    """

    weight: int
    weight_stride: int
    weight_bytes: int
    scale: int
    scale_stride: int
    bias: int
    bias_stride: int
    scale_kind: int
    bits: int
    group_size: int
    table_scale: Any


class Int8Fields(Fields):
    """Addresses of :class:`Int8Rows`."""


class AffineFields(Fields):
    """Addresses of :class:`AffineRows`, but those of 4 bits."""


class Int4Fields(Fields):
    """Addresses of :class:`AffineRows` of 4 bits."""


class Fp8Fields(Fields):
    """Addresses of :class:`Fp8Rows`."""


class BlockFp8Fields(Fields):
    """Addresses of :class:`BlockFp8Rows`."""


class Q8Fields(Fields):
    """Addresses of :class:`Q8Rows`."""


class Q4Fields(Fields):
    """Addresses of :class:`Q4Rows`."""


class Q4KFields(Fields):
    """Addresses of :class:`Q4KRows`."""


class _Rows:
    """Base class of tables of quantized rows."""

    def _fields(
        self,
        kind: type[Fields],
        weight: np.ndarray,
        *,
        scale: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        bits: int = 8,
        group_size: int = GROUP,
        table_scale: float = 1.0,
    ) -> Fields:
        scale = weight if scale is None else scale
        return kind(
            *_address(weight),
            weight.shape[1],
            *_address(scale),
            *_address(weight if bias is None else bias),
            SCALE_KINDS.get(scale.dtype.name, 0),
            bits,
            group_size,
            np.float32(table_scale),
        )


@dataclass(frozen=True, eq=False)
class Int8Rows(_Rows):
    """Unsigned bytes with a scale and a bias for each row: ``scale · q + bias``.

    Args:
        weight: One byte for each value.
        scale: One for each row.
        bias: One for each row.
    """

    weight: UInt8[np.ndarray, "rows width"]
    scale: Float32[np.ndarray, "rows 1"]
    bias: Float32[np.ndarray, "rows 1"]

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1]

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(Int8Fields, self.weight, scale=self.scale, bias=self.bias)

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width - GROUP

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        return _multiply_add(self.scale[ids], self.weight[ids], self.bias[ids])


@dataclass(frozen=True, eq=False)
class AffineRows(_Rows):
    """Values of 2 to 8 bits with a scale and a bias for each group of a row.

    Value ``i`` of a row is in bits ``[i · bits, (i + 1) · bits)`` of the row's bytes, read
    as one little-endian number. A row's last group is filled up.

    Args:
        weight: The bits.
        scale: One for each group, in float32, float16 or bfloat16.
        bias: One for each group, in the dtype of ``scale``.
        bits: Bits of a value.
        group_size: Values in a group, a multiple of 32.
        width: Values in a row.
    """

    weight: UInt8[np.ndarray, "rows bytes"]
    scale: Float[np.ndarray, "rows groups"]
    bias: Float[np.ndarray, "rows groups"]
    bits: int
    group_size: int
    width: int

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(
            Int4Fields if self.bits == 4 else AffineFields,
            self.weight,
            scale=self.scale,
            bias=self.bias,
            bits=self.bits,
            group_size=self.group_size,
        )

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        bits = np.unpackbits(self.weight[ids], axis=1, bitorder="little")
        bits = bits.reshape(len(bits), self.scale.shape[1], self.group_size, self.bits)
        values = np.packbits(bits, axis=-1, bitorder="little")[..., 0]
        scale, bias = (
            x[ids].astype(np.float32)[..., None] for x in (self.scale, self.bias)
        )
        rows = _multiply_add(scale, values, bias)
        return rows.reshape(len(bits), bits.shape[1] * self.group_size)[:, : self.width]


@dataclass(frozen=True, eq=False)
class Fp8Rows(_Rows):
    """e4m3fn numbers times one scale of the whole table.

    Args:
        weight: One code for each value.
        scale: The scale.
    """

    weight: UInt8[np.ndarray, "rows width"]
    scale: float

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1]

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(Fp8Fields, self.weight, table_scale=self.scale)

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width - GROUP

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        with np.errstate(over="ignore"):
            return E4M3[self.weight[ids]] * np.float32(self.scale)


@dataclass(frozen=True, eq=False)
class BlockFp8Rows(_Rows):
    """e4m3fn numbers times a power of two, ue8m0, for each 32 values of a row.

    Args:
        weight: One code for each value.
        scale: One code for each block of 32.
    """

    weight: UInt8[np.ndarray, "rows width"]
    scale: UInt8[np.ndarray, "rows blocks"]

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1]

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(BlockFp8Fields, self.weight, scale=self.scale)

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        scale = np.repeat(UE8M0[self.scale[ids]], GROUP, axis=1)
        with np.errstate(over="ignore"):
            return E4M3[self.weight[ids]] * scale


@dataclass(frozen=True, eq=False)
class Q8Rows(_Rows):
    """GGUF's Q8_0: blocks of a float16 scale and 32 signed bytes.

    Args:
        weight: The blocks, 34 bytes each.
    """

    weight: UInt8[np.ndarray, "rows bytes"]

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1] // 34 * 32

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(Q8Fields, self.weight)

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        blocks = self.weight[ids].reshape(len(ids), self.width // 32, 34)
        rows = _float16(blocks[..., :2]) * blocks[..., 2:].view(np.int8)
        return rows.reshape(len(ids), self.width)


@dataclass(frozen=True, eq=False)
class Q4Rows(_Rows):
    """GGUF's Q4_0: blocks of a float16 scale and 32 values ``q - 8`` of 4 bits.

    The lower halves of the 16 bytes hold the first 16 values, the upper halves the others.

    Args:
        weight: The blocks, 18 bytes each.
    """

    weight: UInt8[np.ndarray, "rows bytes"]

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1] // 18 * 32

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(Q4Fields, self.weight)

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        blocks = self.weight[ids].reshape(len(ids), self.width // 32, 18)
        values = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
        rows = _float16(blocks[..., :2]) * (values.astype(np.float32) - np.float32(8))
        return rows.reshape(len(ids), self.width)


@dataclass(frozen=True, eq=False)
class Q4KRows(_Rows):
    """GGUF's Q4_K: blocks of 256 values of 4 bits in 8 groups with 6-bit scales.

    A block is ``d`` and ``dmin`` in float16, 12 bytes of scales and minima, and 128 bytes
    of values. Group ``j`` is ``d · scale_j · q - dmin · min_j``. Bytes 32k to 32k + 31 hold
    group 2k in their lower and group 2k + 1 in their upper halves.

    Args:
        weight: The blocks, 144 bytes each.
    """

    weight: UInt8[np.ndarray, "rows bytes"]

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1] // 144 * 256

    @cached_property
    def fields(self) -> Fields:
        """Addresses for the kernels."""
        return self._fields(Q4KFields, self.weight)

    @property
    def last_start(self) -> int:
        """The largest column at which 32 values can be decoded."""
        return self.width

    def take(self, ids: Int[np.ndarray, " ids"]) -> Float32[np.ndarray, "ids width"]:
        """Return the rows of ``ids``, which must be in range."""
        blocks = self.weight[ids].reshape(len(ids), self.width // 256, 144)
        d, dmin = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
        first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
        scales = [first & 63, (third & 15) | first >> 6 << 4]
        minima = [second & 63, third >> 4 | second >> 6 << 4]
        scale = d * np.concatenate(scales, axis=-1)
        least = dmin * np.concatenate(minima, axis=-1)
        pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
        values = np.concatenate([pairs & 15, pairs >> 4], axis=-2)
        values = values.reshape(*blocks.shape[:2], 8, 32)
        rows = scale[..., None] * values - least[..., None]
        return rows.reshape(len(ids), self.width)


QuantizedRows = Int8Rows | AffineRows | Fp8Rows | BlockFp8Rows | Q8Rows | Q4Rows | Q4KRows


def _address(array: np.ndarray) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.strides[0]


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return ``a · b + c`` rounded once, for float32 ``a`` and ``c`` and bytes ``b``."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    with np.errstate(invalid="ignore"):
        total = product + c
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
    # Rounded to odd: a second rounding, to float32, then gives the same as one rounding.
    odd = (total.view(np.int64) & 1).astype(bool)
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    inexact = (error != 0) & ~odd & np.isfinite(total)
    with np.errstate(over="ignore"):
        return np.where(inexact, nudged, total).astype(np.float32)


def _float16(pairs: np.ndarray) -> np.ndarray:
    """Return pairs of bytes as float16 numbers in float32."""
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)


def _e4m3() -> np.ndarray:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)
    ).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])


def _ue8m0() -> np.ndarray:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


#: Value of each e4m3fn code: sign, 4 bits of exponent, 3 of mantissa; no infinity.
E4M3: Float32[np.ndarray, "256"] = _e4m3()
#: Value of each ue8m0 code ``s``: ``2 ** (s - 127)``, NaN for 255.
UE8M0: Float32[np.ndarray, "256"] = _ue8m0()
