"""Write a table to a safetensors file in another format, row chunk by row chunk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ..files.atomic import replacing
from ..files.checkpoint import CHUNK_BYTES, DTYPES
from .file import FileStore
from .formats import RowFormat, format_by_name
from .row_store import Progress, RowStore
from .table_files import INTERLEAVED, METADATA_KEY, VERSION

#: The rows begin at a multiple of this many bytes: rows of 256 bytes then never lie on two
#: pages.
ALIGNMENT = 4096
CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: its name, dtype, shape and offset after the header."""

    name: str
    dtype: np.dtype
    shape: tuple[int, int]
    start: int

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def entry(self) -> dict[str, Any]:
        """Return the entry of the header."""
        offsets = [self.start, self.start + self.nbytes]
        code = CODES[self.dtype.name]
        return {"dtype": code, "shape": list(self.shape), "data_offsets": offsets}


def convert(
    store: RowStore,
    path: str | os.PathLike[str],
    *,
    format: str | RowFormat | None,
    interleave: bool,
    progress: Progress | None,
) -> FileStore:
    """Write the rows of a store to a file and open it; see :meth:`RowStore.convert`."""
    target = store.format if format is None else format_by_name(format)
    if not os.fspath(path).endswith(".safetensors"):
        raise ValueError(f"path must end in .safetensors, got {os.fspath(path)!r}")
    check_writable_format(store, target)
    shared = shared_parts(store, target)
    rows, width = store.shape
    interleave = interleave and len(target.part_shapes(width)) > 1
    tensors = _layout(target, rows, width, shared, interleave=interleave)
    header = _header(tensors, target, width)
    with replacing(os.path.realpath(path)) as file:
        file.write(header)
        for name, part in shared.items():
            _write_at(file, len(header) + tensors[name].start, part)
        for lo, parts in encoded_chunks(store, target, shared):
            parts = {INTERLEAVED: target.join(parts)} if interleave else parts
            done = lo
            for name in tensors.keys() - shared.keys():
                start, row_bytes = tensors[name].start, tensors[name].nbytes // rows
                _write_at(file, len(header) + start + lo * row_bytes, parts[name])
                done = lo + len(parts[name])
            if progress is not None:
                progress(done, rows)
        # A table without rows ends with its header.
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
    return FileStore(path)


def check_writable_format(store: RowStore, target: RowFormat) -> None:
    """Raise unless the rows of a store can be written in a format."""
    if target != store.format and not target.writable:
        raise TypeError(f"rows of format {target.name} can be read but not written")
    target.part_shapes(store.shape[1])


def shared_parts(store: RowStore, target: RowFormat) -> dict[str, np.ndarray]:
    """Return the numbers of the whole table in a format, which may need all rows."""
    if not target.shared_parts:
        return {}
    if target == store.format:
        parts = store.read_parts(np.zeros(0, np.int64))
        return {name: parts[name].reshape(1, 1) for name in target.shared_parts}
    largest = 0.0
    for _, rows in _vector_chunks(store):
        # A NaN is refused by the format when its row is encoded.
        largest = max(largest, float(np.abs(rows).astype(np.float32).max(initial=0)))
    return target.shared_for(largest)


def encoded_chunks(
    store: RowStore, target: RowFormat, shared: dict[str, np.ndarray]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the first row and the parts of one chunk after the other in a format."""
    if target == store.format:
        yield from _stored_chunks(store)
        return
    for lo, rows in _vector_chunks(store):
        try:
            yield lo, target.encode(rows, shared or None)
        except ValueError as error:
            last = lo + len(rows) - 1
            raise ValueError(f"in rows {lo} to {last} of {store}, {error}") from None


def _stored_chunks(store: RowStore) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    rows, width = store.shape
    row_bytes = max(store.format.row_bytes(width), width * store.dtype.itemsize, 1)
    step = max(1, CHUNK_BYTES // row_bytes)
    for lo in range(0, rows, step):
        yield lo, store.read_parts(np.arange(lo, min(rows, lo + step)))


def _vector_chunks(store: RowStore) -> Iterator[tuple[int, np.ndarray]]:
    for lo, parts in _stored_chunks(store):
        first = next(iter(store.format.part_shapes(store.shape[1])))
        rows = np.empty((len(parts[first]), store.shape[1]), store.dtype)
        store.format.decode(parts, rows)
        yield lo, rows


def _layout(
    target: RowFormat,
    rows: int,
    width: int,
    shared: dict[str, np.ndarray],
    *,
    interleave: bool,
) -> dict[str, _Tensor]:
    """Return the tensors of the file in order, the widest dtype first to align them all."""
    shapes = target.part_shapes(width)
    if interleave:
        shapes = {INTERLEAVED: (np.dtype(np.uint8), target.row_bytes(width))}
    tensors, start = {}, 0
    for name, (dtype, columns) in sorted(shapes.items(), key=lambda x: -x[1][0].itemsize):
        tensors[name] = _Tensor(name, dtype, (rows, columns), start)
        start += tensors[name].nbytes
    for name, part in shared.items():
        tensors[name] = _Tensor(name, part.dtype, (1, part.size), start)
        start += tensors[name].nbytes
    return tensors


def _header(tensors: dict[str, _Tensor], target: RowFormat, width: int) -> bytes:
    about = {"version": VERSION, "format": target.name, "width": width}
    entries: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(about)}}
    entries |= {name: tensor.entry() for name, tensor in tensors.items()}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_at(file: BinaryIO, place: int, part: np.ndarray) -> None:
    if file.tell() != place:
        file.seek(place)
    file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
