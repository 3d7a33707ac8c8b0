"""Tables in files, read in place."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from .._check import changed_ids, not_negative
from .formats import RowFormat
from .prefetch import Prefetcher
from .reading import BLOCK_ROWS, MappedFile, MappedRows
from .row_cache import CacheInfo, RowCache
from .row_store import RowStore
from .table_files import INTERLEAVED, TableFile, find_table

#: Bytes of stored rows that are copied before they are decoded.
STAGED_BYTES = 1 << 21


class FileStore(RowStore):
    """A table in files, read in place; :func:`~firstlayer.stores.open_store` opens it.

    The files are mapped: only pages that were read take memory, and processes share them. A
    file must not be cut short while it is open; replacing it by a rename is safe. Reading
    from several threads is safe. A pickled store is opened again where it is unpickled.

    Args:
        path: Path of the table; see :func:`~firstlayer.stores.open_store`.
        tensor: Name of the table.
        format: Format of the rows, if the file does not say it.
        cache_rows: Number of decoded rows to keep in memory.

    Example:
        >>> import tempfile
        >>> from firstlayer.stores import MemoryStore, open_store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     MemoryStore(np.eye(3, dtype=np.float32)).save(folder + "/a.safetensors")
        ...     with open_store(folder + "/a.safetensors", cache_rows=8) as store:
        ...         store.prefetch([2, 1])
        ...         rows = store.read([2, 1]), store.read([2])
        ...         print(store.cache_info())
        CacheInfo(hits=1, misses=2, maxsize=8, currsize=2)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensor: str | None = None,
        *,
        format: str | RowFormat | None = None,
        cache_rows: int = 0,
    ) -> None:
        cache_rows = not_negative("cache_rows", cache_rows)
        table = find_table(Path(path), tensor, format)
        super().__init__((table.rows, table.width), table.format, "r")
        self._arguments = os.path.abspath(path), tensor, format, cache_rows
        self._table = table
        files: dict[Path, MappedFile] = {}
        self._mapped = {name: MappedRows(part, files) for name, part in table.parts.items()}
        self._arrays = _arrays(table, self._mapped)
        self._bound = (
            None if self._arrays is None else table.format.bind(self._arrays, table.width)
        )
        # Rows that are the vectors themselves are copied without decoding.
        self._is_plain = (
            table.format.part_shapes(table.width)
            == {"weight": (table.format.dtype, table.width)}
            and not table.format.shared_parts
        )
        self._cache_rows = cache_rows
        self._start_over()
        _open_stores.add(self)

    def _start_over(self) -> None:
        """Create what a forked child does not share with its parent."""
        width = self._shape[1]
        self._prefetcher = Prefetcher(self._fetch)
        self._cache = (
            RowCache(self._cache_rows, width, self.dtype) if self._cache_rows else None
        )

    @property
    def path(self) -> Path:
        """The file, or the index of several."""
        return self._table.path

    @property
    def file(self) -> Path | None:
        """The only file of the table, or None if it is in several."""
        segments = {
            segment.path for part in self._table.parts.values() for segment in part.segments
        }
        return segments.pop() if len(segments) == 1 else None

    @property
    def is_interleaved(self) -> bool:
        """Whether the parts of a row are next to each other."""
        return self._table.is_interleaved

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Arrays that hold the table as its format stores it, mapped and not copied.

        A table in several files, of word2vec, or not aligned has none: a ValueError.
        """
        self._check_open()
        if self._arrays is None:
            raise ValueError(
                f"{self} is not one aligned array in its file: read its rows, or open "
                "the file that convert writes"
            )
        return dict(self._arrays)

    @property
    def array(self) -> np.ndarray:
        """The table as one mapped array of floats, read-only."""
        if not self._is_plain:
            raise ValueError(
                f"{self} has no array of vectors: convert it to a float format"
            )
        return self.parts["weight"]

    def cache_info(self) -> CacheInfo:
        """Return hits, misses, capacity and size of the cache of rows."""
        return CacheInfo(0, 0, 0, 0) if self._cache is None else self._cache.info()

    def prefetch(self, ids: Any) -> None:
        """Start reading the rows of ``ids`` on another thread, and return at once.

        A later :meth:`read` finds the rows in memory. If more than 32 calls wait, the
        oldest is dropped. An id out of range is an IndexError; an error on the thread is
        raised by the next call.
        """
        checked = self._checked_ids(ids)
        self._prefetcher.raise_error()
        if checked.size:
            # A copy: the caller may change its ids.
            self._prefetcher.submit(np.array(checked, np.int64).reshape(-1))

    def close(self) -> None:
        """Release the files. Arrays that were handed out stay valid."""
        if not self._closed:
            self._prefetcher.close()
            super().close()
            self._mapped, self._arrays, self._bound, self._cache = {}, None, None, None
            self._prefetcher.raise_error()

    @property
    def _shared(self) -> dict[str, np.ndarray] | None:
        return self._table.shared or None

    def _read(self, ids: np.ndarray, out: np.ndarray) -> None:
        self._prefetcher.raise_error()
        if self._cache is None:
            self._read_rows(ids, out)
            return
        # A copy: another thread may change the ids between the two calls below.
        ids = ids.copy()
        missing = self._cache.find(ids, out)
        if missing.any():
            unique, places = np.unique(ids[missing], return_inverse=True)
            rows = np.empty((unique.size, out.shape[1]), out.dtype)
            self._read_rows(unique, rows)
            out[missing] = rows[places]
            self._cache.insert(unique, rows)

    def _read_rows(self, ids: np.ndarray, out: np.ndarray) -> None:
        mapped, bound = self._mapped, self._bound
        for lo in range(0, ids.size, BLOCK_ROWS):
            block = ids[lo : lo + BLOCK_ROWS]
            addresses = _requested(mapped, block)
            rows = out[lo : lo + BLOCK_ROWS]
            if self._is_plain:
                (name,) = mapped
                mapped[name].copy(addresses[name], rows)
            elif bound is not None:
                if not bound.gather(block, rows):
                    raise changed_ids(self._shape[0])
            else:
                self._decode(mapped, addresses, rows)

    def _sum_bags(
        self,
        ids: np.ndarray,
        bounds: np.ndarray,
        weights: np.ndarray | None,
        divisors: np.ndarray | None,
    ) -> np.ndarray:
        mapped, bound = self._mapped, self._bound
        if bound is None or self._cache is not None:
            return super()._sum_bags(ids, bounds, weights, divisors)
        self._prefetcher.raise_error()
        for lo in range(0, ids.size, BLOCK_ROWS):
            _requested(mapped, ids[lo : lo + BLOCK_ROWS])
        sums = bound.sum_bags(ids, bounds, weights=weights, divisors=divisors)
        if sums is None:
            raise changed_ids(self._shape[0])
        return sums

    def _decode(
        self,
        mapped: dict[str, MappedRows],
        addresses: dict[str, np.ndarray],
        out: np.ndarray,
    ) -> None:
        """Copy stored rows and decode them, a few megabytes at a time."""
        step = max(1, STAGED_BYTES // self._format.row_bytes(self._shape[1]))
        for lo in range(0, len(out), step):
            some = {name: found[lo : lo + step] for name, found in addresses.items()}
            parts = self._copied(mapped, some)
            self._format.decode({**parts, **self._table.shared}, out[lo : lo + step])

    def _copied(
        self, mapped: dict[str, MappedRows], addresses: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return stored rows, by part."""
        width = self._shape[1]
        shapes = self._format.part_shapes(width)
        if INTERLEAVED in mapped:
            shapes = {INTERLEAVED: (np.dtype(np.uint8), mapped[INTERLEAVED].row_bytes)}
        copies = {}
        for name, (dtype, columns) in shapes.items():
            copies[name] = np.empty((addresses[name].size, columns), dtype)
            mapped[name].copy(addresses[name], copies[name])
        if INTERLEAVED in mapped:
            return self._format.split(copies[INTERLEAVED], width)
        return copies

    def _read_parts(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        mapped = self._mapped
        parts = self._copied(mapped, _requested(mapped, ids))
        return {**parts, **self._table.shared}

    def _fetch(self, ids: np.ndarray) -> None:
        for lo in range(0, ids.size, BLOCK_ROWS):
            for part in self._mapped.values():
                part.fetch(part.locate(ids[lo : lo + BLOCK_ROWS]))

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return _opened, self._arguments

    def __repr__(self) -> str:
        rows, width = self._shape
        return f"FileStore({self._table.path.name}: {rows} × {width}, {self._format.name})"


def _opened(path: str, tensor: str | None, format: Any, cache_rows: int) -> FileStore:
    return FileStore(path, tensor, format=format, cache_rows=cache_rows)


def _requested(mapped: dict[str, MappedRows], ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the addresses of rows, by part, after requesting those not in memory."""
    addresses = {name: part.locate(ids) for name, part in mapped.items()}
    for name, part in mapped.items():
        part.request(addresses[name])
    return addresses


def _arrays(
    table: TableFile, mapped: dict[str, MappedRows]
) -> dict[str, np.ndarray] | None:
    """Return the arrays of all parts, or None if a part is not one array."""
    arrays = {}
    for name, part in mapped.items():
        array = part.array()
        if array is None:
            return None
        arrays[name] = array
    if table.is_interleaved:
        arrays = table.format.split(arrays[INTERLEAVED], table.width)
    return {**arrays, **table.shared}


_open_stores: "weakref.WeakSet[FileStore]" = weakref.WeakSet()


def _start_over_in_child() -> None:
    # The threads of the parent do not exist here, and may have held a lock.
    for store in list(_open_stores):
        store._start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over_in_child)
