"""Tables in memory, as arrays of any format."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64

from .._check import check_table, out_of_range
from .formats import RowFormat, format_by_name
from .formats.row_format import BoundTable
from .row_store import RowStore, checked_mode


class ArrayStore(RowStore):
    """A table whose parts are arrays.

    Args:
        parts: Arrays of the parts, with shared parts if the format has some.
        width: Width of a vector.
        format: Format of the rows.
        mode: ``"r"`` or ``"r+"``.
    """

    def __init__(
        self, parts: dict[str, np.ndarray], width: int, format: RowFormat, mode: str
    ) -> None:
        rows = len(parts[next(iter(format.part_shapes(width)))])
        super().__init__((rows, width), format, checked_mode(mode))
        self._parts = dict(parts)
        self._bound: BoundTable | None = format.bind(self._parts, width)

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Arrays that hold the table as its format stores it, not copied."""
        self._check_open()
        return dict(self._parts)

    @property
    def _shared(self) -> dict[str, np.ndarray] | None:
        names = self._format.shared_parts
        return {name: self._parts[name] for name in names} or None

    def read(self, ids: Int[np.ndarray, "*batch"] | Any) -> Float[np.ndarray, "*batch d"]:
        if not _is_int64(ids):
            return super().read(ids)
        # The kernels check int64 ids while they read them.
        table, width = self._open_table(), self._shape[1]
        out = np.empty((ids.size, width), self.dtype)
        if not table.gather(ids.ravel(), out):
            raise out_of_range(ids, self._shape[0])
        return out.reshape(*ids.shape, width)

    def sum_bags(
        self,
        ids: Int64[np.ndarray, " ids"],
        bounds: Int64[np.ndarray, " bounds"],
        *,
        weights: Float[np.ndarray, " ids"] | None = None,
        divisors: Float[np.ndarray, " bags"] | None = None,
    ) -> Float[np.ndarray, "bags d"]:
        if not _is_int64(ids):
            return super().sum_bags(ids, bounds, weights=weights, divisors=divisors)
        return self._sum_bags(ids, bounds, weights, divisors)

    def _read(self, ids: np.ndarray, out: np.ndarray) -> None:
        if not self._open_table().gather(ids, out):
            raise out_of_range(ids, self._shape[0])

    def _sum_bags(
        self,
        ids: np.ndarray,
        bounds: np.ndarray,
        weights: np.ndarray | None,
        divisors: np.ndarray | None,
    ) -> np.ndarray:
        table = self._open_table()
        sums = table.sum_bags(ids, bounds, weights=weights, divisors=divisors)
        if sums is None:
            raise out_of_range(ids, self._shape[0])
        return sums

    def _open_table(self) -> BoundTable:
        # Read once: another thread may close the store.
        table = self._bound
        if table is None:
            raise ValueError(f"{self} is closed")
        return table

    def _read_parts(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: part if name in self._format.shared_parts else part[ids]
            for name, part in self._parts.items()
        }

    def _write(self, ids: np.ndarray, parts: dict[str, np.ndarray]) -> None:
        for name in self._format.part_shapes(self._shape[1]):
            self._parts[name][ids] = parts[name]

    def close(self) -> None:
        """Release the arrays. Those that were handed out stay valid."""
        super().close()
        self._parts, self._bound = {}, None

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        return {key: value for key, value in self.__dict__.items() if key != "_bound"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Of these arrays: a pickled view of them would be a second copy.
        self._bound = self._format.bind(self._parts, self._shape[1])


class MemoryStore(ArrayStore):
    """A table in the memory of this process.

    Args:
        array: Table of shape ``(rows, width)`` in float32, float16 or bfloat16.
        format: Format to hold it in. None keeps the dtype and uses the array itself,
            without a copy; any other format encodes a copy.
        mode: ``"r+"`` to write rows, ``"r"`` to refuse that.

    Example:
        >>> table = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
        >>> store = MemoryStore(table, format="int8")
        >>> store, store.nbytes
        (MemoryStore(2 × 32, int8), 80)
        >>> bool(abs(store.read([1, 0]) - table[[1, 0]]).max() < 0.002)
        True
    """

    def __init__(
        self,
        array: Float[Any, "rows width"],
        *,
        format: str | RowFormat | None = None,
        mode: str = "r+",
    ) -> None:
        table = check_table(array, name="array")
        chosen = format_by_name(table.dtype.name if format is None else format)
        if format is None:
            parts = {"weight": np.ascontiguousarray(table)}
        elif chosen.shared_parts:
            parts = chosen.encode(table)
        else:
            parts = chosen.split(chosen.encode_table(table), table.shape[1])
        super().__init__(parts, table.shape[1], chosen, mode)

    @classmethod
    def from_parts(
        cls,
        parts: dict[str, np.ndarray],
        width: int,
        format: str | RowFormat,
        *,
        mode: str = "r+",
    ) -> "MemoryStore":
        """Return a store over arrays that hold a table in a format, not copied.

        Args:
            parts: Arrays of the parts, as :attr:`parts` returns them.
            width: Width of a vector.
            format: Format of the rows.
            mode: ``"r+"`` to write rows, ``"r"`` to refuse that.

        Example:
            >>> one = MemoryStore(np.eye(2, 32, dtype=np.float32), format="int4")
            >>> other = MemoryStore.from_parts(one.parts, 32, "int4")
            >>> bool((other.read([0, 1]) == one.read([0, 1])).all())
            True
        """
        store = cls.__new__(cls)
        ArrayStore.__init__(store, parts, width, format_by_name(format), mode)
        return store


def _is_int64(ids: Any) -> bool:
    return type(ids) is np.ndarray and ids.dtype == np.int64
