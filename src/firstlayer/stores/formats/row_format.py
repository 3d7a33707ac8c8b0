"""Interface of the formats of rows.

A table in a format is a dict of arrays, its *parts*: 2-D arrays with one row for each row
of the table, such as the values, scales and biases. Some formats also have *shared* parts,
which hold numbers of the whole table. The parts of a row may also be stored one after the
other in one row of bytes, *interleaved*, so that reading a row touches one place:
:meth:`RowFormat.split` returns the parts as views of such bytes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int64, UInt8

from ..._check import float_dtype, host_array, is_float

Parts = dict[str, np.ndarray]
# Number of values encoded at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RowFormat(ABC):
    """Bytes that hold a row of numbers."""

    #: Whether :meth:`encode` works.
    writable: ClassVar[bool] = True
    #: Parts that hold numbers of the whole table, in an array of one number.
    shared_parts: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for :func:`format_by_name`."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the vectors."""
        return np.dtype(np.float32)

    @abstractmethod
    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        """Return the dtype and number of columns of each part but the shared ones.

        The order is that of interleaved parts.

        Args:
            width: Number of values in a row. A width that the format cannot hold is a
                ValueError.
        """

    @abstractmethod
    def bind(self, parts: Parts, width: int) -> "BoundTable":
        """Return a table whose rows can be read, with all checks done.

        Args:
            parts: The arrays, with shared ones if the format has any. They may be mapped
                files; the last axis is contiguous.
            width: Number of values in a row.
        """

    def gather(
        self,
        parts: Parts,
        ids: Int64[np.ndarray, " ids"],
        out: Float[np.ndarray, "ids width"],
    ) -> bool:
        """Write the rows of ``ids`` to ``out``; see :meth:`BoundTable.gather`."""
        return self.bind(parts, out.shape[1]).gather(ids, out)

    def encode(self, rows: Float[Any, "rows width"], shared: Parts | None = None) -> Parts:
        """Return the parts that hold ``rows``.

        Args:
            rows: Numbers to store. A number that the format cannot hold is a ValueError.
            shared: Shared parts of the table that the rows belong to; None computes them
                for these rows. See :meth:`shared_for`.
        """
        raise TypeError(f"rows of format {self.name} can be read but not written")

    def shared_for(self, largest: float) -> Parts:
        """Return the shared parts for numbers of at most ``largest`` in size."""
        return {}

    def decode(self, parts: Parts, out: Float[np.ndarray, "rows width"]) -> None:
        """Write all rows of ``parts`` to ``out``, in order."""
        if not self.gather(parts, np.arange(len(out)), out):
            raise ValueError(
                f"parts must have {len(out)} rows, as out, got {len(parts['weight'])}"
            )

    def row_bytes(self, width: int) -> int:
        """Return the number of bytes of a row, without shared parts."""
        shapes = self.part_shapes(width).values()
        return sum(dtype.itemsize * columns for dtype, columns in shapes)

    def split(self, encoded: UInt8[np.ndarray, "rows row_bytes"], width: int) -> Parts:
        """Return the parts in interleaved rows, as views.

        Example:
            >>> from firstlayer.stores.formats import format_by_name
            >>> parts = format_by_name("int8").split(np.zeros((3, 5 + 8), np.uint8), 5)
            >>> {name: part.shape for name, part in parts.items()}
            {'weight': (3, 5), 'scale': (3, 1), 'bias': (3, 1)}
        """
        if encoded.ndim != 2 or encoded.shape[1] != self.row_bytes(width):
            raise ValueError(
                f"rows of {width} values in format {self.name} must have shape "
                f"(rows, {self.row_bytes(width)}), got {encoded.shape}"
            )
        parts, end = {}, 0
        for name, (dtype, columns) in self.part_shapes(width).items():
            start, end = end, end + dtype.itemsize * columns
            parts[name] = encoded[:, start:end].view(dtype)
        return parts

    def join(self, parts: Parts) -> UInt8[np.ndarray, "rows row_bytes"]:
        """Return interleaved rows of bytes that hold ``parts``, without the shared ones."""
        arrays = [
            np.ascontiguousarray(part).view(np.uint8)
            for name, part in parts.items()
            if name not in self.shared_parts
        ]
        return np.concatenate(arrays, axis=1)

    def encode_table(
        self, table: Float[Any, "rows width"], *, first_row: int = 0
    ) -> UInt8[np.ndarray, "rows row_bytes"]:
        """Return the interleaved rows of a table, encoded in chunks of little memory.

        Args:
            table: The table, or some of its rows.
            first_row: Number of the first row in error messages.
        """
        if self.shared_parts:
            raise TypeError(
                f"a table in format {self.name} has parts that rows do not hold"
            )
        rows, width = table.shape
        encoded = np.empty((rows, self.row_bytes(width)), np.uint8)
        step = max(1, _CHUNK // max(1, width))
        for lo in range(0, rows, step):
            try:
                encoded[lo : lo + step] = self.join(self.encode(table[lo : lo + step]))
            except _BadNumber as error:
                raise error.at_row(first_row + lo) from None
        return encoded

    def arrays_of(self, parts: Parts, width: int) -> list[np.ndarray]:
        """Return the parts in the order of :meth:`part_shapes`, checked and as its dtypes.

        Args:
            parts: Arrays by name. One of another dtype is viewed as the dtype of its part,
                such as words as bytes.
            width: Number of values in a row.
        """
        arrays, rows = [], None
        for name, (dtype, columns) in self.part_shapes(width).items():
            if name not in parts:
                raise ValueError(
                    f"format {self.name} needs a part {name!r}, got {[*parts]}"
                )
            array = np.asarray(parts[name])
            if array.dtype != dtype and array.ndim == 2:
                array = array.view(dtype)
            rows = array.shape[0] if rows is None and array.ndim else rows
            if array.shape != (rows, columns):
                raise ValueError(
                    f"part {name!r} of rows of {width} values in format {self.name} must "
                    f"have shape {(rows, columns)}, got {array.shape}"
                )
            if array.size and columns > 1 and array.strides[1] != array.itemsize:
                raise ValueError(f"part {name!r} must be contiguous along its last axis")
            arrays.append(array)
        return arrays


class BoundTable(ABC):
    """A table in a format, ready to be read."""

    @abstractmethod
    def gather(
        self, ids: Int64[np.ndarray, " ids"], out: Float[np.ndarray, "ids width"]
    ) -> bool:
        """Write the rows of ``ids`` to ``out``, and return whether all are in range.

        If one is not, ``out`` is unspecified.

        Args:
            ids: Rows to read.
            out: Contiguous array of the vectors' dtype.
        """

    @abstractmethod
    def sum_bags(
        self,
        ids: Int64[np.ndarray, " ids"],
        bounds: Int64[np.ndarray, " bounds"],
        *,
        weights: Float[np.ndarray, " ids"] | None = None,
        divisors: Float[np.ndarray, " bags"] | None = None,
    ) -> Float[np.ndarray, "bags width"] | None:
        """Return the sum of each bag's rows, or None if an id is out of range.

        Args:
            ids: Rows of the table, bag after bag.
            bounds: Start of each bag in ``ids``, and the end of the last.
            weights: Factor of each id, in float32.
            divisors: Divisor of each bag's sum, in float32.
        """


class _BadNumber(ValueError):
    """A number that a format cannot hold."""

    def __init__(self, index: tuple[int, int], value: object, rule: str) -> None:
        super().__init__(f"rows[{index[0]}, {index[1]}] is {value}, but {rule}")
        self.index, self.value, self.rule = index, value, rule

    def at_row(self, first: int) -> "_BadNumber":
        """Return the error for rows that begin at row ``first`` of a table."""
        return _BadNumber((self.index[0] + first, self.index[1]), self.value, self.rule)


def checked_rows(rows: Any, *, limit: float, rule: str) -> Float[np.ndarray, "rows width"]:
    """Return rows in native byte order, if every number is at most ``limit`` in size.

    Args:
        rows: Numbers to store.
        limit: Largest magnitude. NaN is refused.
        rule: The rule as the end of the error message.
    """
    rows = host_array(rows, name="rows")
    if not is_float(rows.dtype) or rows.ndim != 2:
        raise TypeError(
            f"rows must be a 2-D array of floats, got {rows.dtype} of shape {rows.shape}"
        )
    rows = rows.astype(float_dtype(rows.dtype.name), copy=False)
    # As float64: the limit may not be a number of the rows' dtype.
    bad = ~(np.abs(rows.astype(np.float64)) <= limit)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise _BadNumber((row, column), rows[row, column], rule)
    return rows
