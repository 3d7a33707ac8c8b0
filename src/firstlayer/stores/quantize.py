"""Quantized tables of layers: encoding with a report, and errors for other uses."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from .._check import one_of
from .formats import RowFormat, format_by_name
from .memory import MemoryStore
from .row_store import RowStore

#: Formats of quantized layers. Their interleaved rows are one array of bytes.
LAYER_FORMATS = ("int8", "int4")
# Number of values encoded and compared at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class QuantizationReport:
    """Size and error of a quantized table.

    Args:
        format: Name of the format.
        nbytes: Bytes of the quantized table.
        original_nbytes: Bytes of the table before.
        largest_error: Largest absolute difference of a number.
        relative_error: Norm of all differences, divided by the norm of the table.

    Example:
        >>> _, report = quantize_table(np.eye(64, dtype=np.float32), "int8")
        >>> print(report)
        int8: 4,608 bytes instead of 16,384, largest error 0, relative error 0
    """

    format: str
    nbytes: int
    original_nbytes: int
    largest_error: float
    relative_error: float

    def __str__(self) -> str:
        return (
            f"{self.format}: {self.nbytes:,} bytes instead of {self.original_nbytes:,}, "
            f"largest error {self.largest_error:.2g}, "
            f"relative error {self.relative_error:.2g}"
        )


def layer_format(name: str) -> RowFormat:
    """Return a format that layers can be quantized to."""
    return format_by_name(one_of("format", name, LAYER_FORMATS))


def quantize_table(
    table: Float[Any, "rows width"], format: str
) -> tuple[UInt8[np.ndarray, "rows row_bytes"], QuantizationReport]:
    """Return the interleaved rows of a table and a report, with little memory beside them.

    Args:
        table: Table in any float dtype.
        format: ``"int8"`` or ``"int4"``.
    """
    chosen, (rows, width) = layer_format(format), table.shape
    encoded = np.empty((rows, chosen.row_bytes(width)), np.uint8)
    largest = squares = total = 0.0
    step = max(1, _CHUNK // max(1, width))
    for lo in range(0, rows, step):
        chunk = table[lo : lo + step]
        encoded[lo : lo + step] = chosen.encode_table(chunk, first_row=lo)
        decoded = np.empty(chunk.shape, np.float32)
        chosen.decode(chosen.split(encoded[lo : lo + step], width), decoded)
        exact = chunk.astype(np.float64)
        error = np.abs(decoded - exact)
        largest = max(largest, float(error.max(initial=0)))
        squares += float((error * error).sum())
        total += float((exact * exact).sum())
    report = QuantizationReport(
        chosen.name,
        encoded.nbytes,
        rows * width * table.dtype.itemsize,
        largest,
        (squares / total) ** 0.5 if total else 0.0,
    )
    return encoded, report


def quantized_store(
    encoded: UInt8[np.ndarray, "rows row_bytes"], width: int, format: str
) -> MemoryStore:
    """Return a read-only store over interleaved rows, which are not copied."""
    chosen = layer_format(format)
    parts = chosen.split(encoded, width)
    return MemoryStore.from_parts(parts, width, chosen, mode="r")


def weight_error(store: RowStore) -> TypeError:
    """Return the error for reading ``weight`` of a layer over a store."""
    return TypeError(
        f"a layer over {store!r} has no weight to read or train: look rows up by id, or "
        'train a float table opened by open_store with mode="r+"'
    )
