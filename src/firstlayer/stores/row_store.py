"""The interface of a store: rows of a table by id, wherever the table is."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from jaxtyping import Float, Int, Int64, Shaped

from .. import kernels
from .._check import changed_ids, ids_in_range
from .formats import RowFormat

if TYPE_CHECKING:
    from .file import FileStore

#: Called with the number of rows done and the number of rows in all.
Progress = Callable[[int, int], None]


def check_store(store: Any) -> None:
    """Raise TypeError unless ``store`` is a :class:`RowStore`.

    Example:
        >>> check_store(np.ones((2, 2)))
        Traceback (most recent call last):
        ...
        TypeError: store must be a RowStore, got ndarray; call MemoryStore or open_store
    """
    if not isinstance(store, RowStore):
        name = type(store).__name__
        raise TypeError(
            f"store must be a RowStore, got {name}; call MemoryStore or open_store"
        )


class RowStore:
    """A table of vectors that is read by rows: in memory, in shared memory or in a file.

    Use :class:`~firstlayer.stores.MemoryStore`, :class:`~firstlayer.stores.SharedStore` or
    :func:`~firstlayer.stores.open_store`.

    Args:
        shape: Number of rows, and width of a vector.
        format: How a row is stored.
        mode: ``"r"`` to read, ``"r+"`` to read and write.

    Shape:
        - ``ids``: any shape ``*batch``, integers in ``[0, len(store))``.
        - rows: ``(*batch, width)`` in the dtype of the store.

    Example:
        >>> from firstlayer.stores import MemoryStore, RowStore
        >>> store = MemoryStore(np.eye(3, 2, dtype=np.float32))
        >>> isinstance(store, RowStore), store.shape, len(store)
        (True, (3, 2), 3)
        >>> store.read([[1, 0]])
        array([[[0., 1.],
                [1., 0.]]], dtype=float32)
    """

    def __init__(self, shape: tuple[int, int], format: RowFormat, mode: str) -> None:
        self._shape, self._format, self._mode = shape, format, mode
        self._closed = False

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and width of a vector."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the vectors that :meth:`read` returns."""
        return self._format.dtype

    @property
    def format(self) -> RowFormat:
        """How a row is stored."""
        return self._format

    @property
    def mode(self) -> str:
        """``"r"`` if the store is read-only, ``"r+"`` if rows can be written."""
        return self._mode

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take where they are stored."""
        return self._shape[0] * self._format.row_bytes(self._shape[1])

    @property
    def _shared(self) -> dict[str, np.ndarray] | None:
        """Numbers of the whole table, if the format has any."""
        return None

    @property
    def parts(self) -> dict[str, Shaped[np.ndarray, "rows columns"]]:
        """Arrays that hold the table as its format stores it, not copied."""
        raise NotImplementedError

    def read(self, ids: Int[np.ndarray, "*batch"] | Any) -> Float[np.ndarray, "*batch d"]:
        """Return the rows of ``ids`` as a new array.

        An id out of range is an IndexError.
        """
        checked = self._checked_ids(ids)
        out = np.empty((checked.size, self._shape[1]), self.dtype)
        if checked.size:
            self._read(np.ascontiguousarray(checked).reshape(-1), out)
        return out.reshape(*checked.shape, self._shape[1])

    def sum_bags(
        self,
        ids: Int64[np.ndarray, " ids"],
        bounds: Int64[np.ndarray, " bounds"],
        *,
        weights: Float[np.ndarray, " ids"] | None = None,
        divisors: Float[np.ndarray, " bags"] | None = None,
    ) -> Float[np.ndarray, "bags d"]:
        """Return the sum of the rows of each bag, in the dtype of the store.

        Args:
            ids: Rows to add up, bag after bag.
            bounds: Start of each bag in ``ids``, and the end of the last.
            weights: Factor of each row, in float32.
            divisors: Divisor of each sum, in float32.

        Example:
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.eye(3, 2, dtype=np.float32))
            >>> store.sum_bags(np.array([0, 1, 1]), np.array([0, 2, 3])).tolist()
            [[1.0, 1.0], [0.0, 1.0]]
        """
        return self._sum_bags(self._checked_ids(ids), bounds, weights, divisors)

    def write(self, ids: Int[np.ndarray, "*batch"] | Any, rows: Any) -> None:
        """Replace the rows of ``ids``. If an id is repeated, its last row is written.

        Args:
            ids: Rows to replace.
            rows: Vectors of shape ``(*batch, width)``, rounded to the format of the store.

        Example:
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.zeros((3, 2), np.float32), mode="r+")
            >>> store.write([1], np.ones((1, 2)))
            >>> store.read([1, 2]).tolist()
            [[1.0, 1.0], [0.0, 0.0]]
        """
        checked = self._checked_ids(ids)
        if self._mode == "r":
            raise ValueError(f'{self} is read-only: open it with mode="r+" to write')
        values = np.asarray(rows)
        if values.shape != (*checked.shape, self._shape[1]):
            raise ValueError(
                f"rows must have shape {(*checked.shape, self._shape[1])}, "
                f"got {values.shape}"
            )
        if checked.size:
            flat = np.ascontiguousarray(checked).reshape(-1)
            vectors = _as_float(values).reshape(flat.size, -1)
            self._write(flat, self._format.encode(vectors, self._shared))

    def prefetch(self, ids: Int[np.ndarray, "*batch"] | Any) -> None:
        """Start reading the rows of ``ids`` in the background, and return at once.

        An id out of range is an IndexError. Stores in memory have nothing to do.
        """
        self._checked_ids(ids)

    def read_parts(
        self, ids: Int[np.ndarray, " rows"] | Any
    ) -> dict[str, Shaped[np.ndarray, "rows columns"]]:
        """Return the rows of ``ids`` as the format stores them, one array for each part."""
        checked = self._checked_ids(ids)
        return self._read_parts(np.ascontiguousarray(checked).reshape(-1))

    def flush(self) -> None:
        """Write changed rows to the disk, if the store is a file.

        Example:
            >>> import tempfile
            >>> from firstlayer.stores import create_store
            >>> with create_store(tempfile.mkdtemp() + "/table", (3, 2)) as store:
            ...     store.write([1], np.ones((1, 2)))
            ...     store.flush()
        """
        self._check_open()

    def close(self) -> None:
        """Release what the store holds. Arrays that were handed out stay valid.

        Example:
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.zeros((3, 2), np.float32))
            >>> store.close()
            >>> store.closed
            True
        """
        self._closed = True

    def convert(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | RowFormat | None = None,
        interleave: bool = True,
        progress: Progress | None = None,
    ) -> FileStore:
        """Write the table to a safetensors file in another format, and open that file.

        The file replaces what was at ``path`` once it is complete and synced to the disk.
        Rows are converted in chunks of a few megabytes. Rows that keep their format keep
        their bytes.

        Args:
            path: Path of the file; its name must end in ``.safetensors``.
            format: Format of the new rows; that of the store if None.
            interleave: Store the parts of a row next to each other, so that a row with
                scales is on one page and not on two or three.
            progress: Called with the number of rows done and the number of rows in all.

        Example:
            >>> import tempfile
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.eye(3, 32, dtype=np.float32))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with store.convert(folder + "/a.safetensors", format="int8") as small:
            ...         print(store.nbytes, small.nbytes, small.read(1)[:3])
            384 120 [0. 1. 0.]
        """
        from .convert import convert

        self._check_open()
        return convert(self, path, format=format, interleave=interleave, progress=progress)

    def save(
        self, path: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> None:
        """Write the table to a safetensors file in its own format; see :meth:`convert`.

        Example:
            >>> import tempfile
            >>> from firstlayer.stores import MemoryStore, open_store
            >>> path = tempfile.mkdtemp() + "/table.safetensors"
            >>> MemoryStore(np.eye(3, dtype=np.float32)).save(path)
            >>> with open_store(path) as store:
            ...     store.prefetch([2])
            ...     store.read([2]).tolist()
            [[0.0, 0.0, 1.0]]
        """
        self.convert(path, interleave=False, progress=progress).close()

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        rows, width = self._shape
        return f"{type(self).__name__}({rows} × {width}, {self._format.name})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Write the rows of flat int64 ids, checked but perhaps changing, to ``out``."""
        raise NotImplementedError

    def _sum_bags(
        self,
        ids: np.ndarray,
        bounds: np.ndarray,
        weights: np.ndarray | None,
        divisors: np.ndarray | None,
    ) -> np.ndarray:
        """Return the sums of the rows of flat int64 ids, checked but perhaps changing."""
        unique, index = np.unique(ids, return_inverse=True)
        rows = self.read(unique)
        sums = kernels.sum_bags(rows, index, bounds, weights=weights, divisors=divisors)
        if sums is None:
            raise changed_ids(self._shape[0])
        return sums

    def _read_parts(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the stored rows of flat int64 ids."""
        raise NotImplementedError

    def _write(self, ids: np.ndarray, parts: dict[str, np.ndarray]) -> None:
        """Replace the stored rows of flat int64 ids."""
        raise NotImplementedError

    def _checked_ids(self, ids: Any) -> np.ndarray:
        self._check_open()
        return ids_in_range(ids, self._shape[0])

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self} is closed")


def checked_mode(mode: str) -> str:
    """Return ``mode`` if it is ``"r"`` or ``"r+"``."""
    if mode not in ("r", "r+"):
        raise ValueError(f'mode must be "r" or "r+", got {mode!r}')
    return mode


def _as_float(values: np.ndarray) -> np.ndarray:
    """Return real numbers in a float dtype that formats encode."""
    from .._check import check_real

    check_real(values, name="rows")
    return values.astype(np.float32) if values.dtype.kind in "iu" else values
