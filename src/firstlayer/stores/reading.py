"""Rows of mapped files: where they are, whether they are in memory, and reading them.

Files are mapped without readahead, so that the memory in use follows the rows that were
read, and all processes share one copy in the page cache. Before rows are copied, a sample
of them is looked up in the page table. If one is missing, the pages of all rows are
requested first, in order and each once: the disk then works on many requests at a time. If
none is missing, the rows are copied right away, because a request costs more than the copy
of a row in memory.
"""

import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels
from .._check import changed_ids
from ..files.atomic import check_regular

#: Rows that are requested and read at a time, which bounds the memory of their addresses.
BLOCK_ROWS = 1 << 18


@dataclass(frozen=True)
class Segment:
    """Consecutive rows in a file.

    Args:
        path: The file.
        start: Offset of the first row in the file.
        rows: Number of rows.
    """

    path: Path
    start: int
    rows: int


@dataclass(frozen=True)
class StoredRows:
    """One part of a table in files: an array of rows, perhaps in several segments.

    Args:
        segments: Files and offsets of the rows, in order.
        dtype: Dtype of an element.
        columns: Elements of a row.
        offsets: Offset of each row in the file of the only segment, if rows do not follow
            each other directly.
    """

    segments: tuple[Segment, ...]
    dtype: np.dtype
    columns: int
    offsets: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(segment.rows for segment in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * self.dtype.itemsize


class MappedFile:
    """A file mapped into memory.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        # Without this flag, opening a pipe would wait for its writer.
        nonblock, binary = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, os.O_RDONLY | nonblock | binary)
        try:
            state = os.fstat(descriptor)
            check_regular(path, state.st_mode)
            self.size = state.st_size
            self.memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, **_UNTRACKED)
        finally:
            os.close(descriptor)
        if hasattr(mmap, "MADV_RANDOM"):
            self.memory.madvise(mmap.MADV_RANDOM)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.address = self.bytes.ctypes.data
        # Linux reports every page of a file as being in memory to those who may not write
        # to it.
        owner = getattr(os, "geteuid", lambda: state.st_uid)() in (0, state.st_uid)
        self.shows_residency = owner or os.access(path, os.W_OK)


# A mapping of Python before 3.13 keeps a descriptor of its file open.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class MappedRows:
    """One part of a table, mapped.

    Args:
        stored: Where the rows are.
        files: Mapped files by path, extended by those of this part.
    """

    def __init__(self, stored: StoredRows, files: dict[Path, MappedFile]) -> None:
        self.stored, self.row_bytes = stored, stored.row_bytes
        self.files, bases, starts = [], [], [0]
        for segment in stored.segments:
            starts.append(starts[-1] + segment.rows)
            if segment.path not in files and segment.rows:
                files[segment.path] = MappedFile(segment.path)
            file = files.get(segment.path)
            if file is None:
                bases.append(0)
                continue
            # The header was read from another descriptor: the file may have been replaced.
            if stored.offsets is None:
                end = segment.start + segment.rows * self.row_bytes
                if end > file.size:
                    raise ValueError(
                        f"{segment.path} must have at least {end} bytes, got {file.size}"
                    )
            self.files.append(file)
            bases.append(file.address + segment.start)
        if stored.offsets is not None:
            bases = [self.files[0].address, self.files[0].size] if self.files else [0, 0]
        self.bases, self.starts = np.array(bases, np.int64), np.array(starts, np.int64)
        empty = np.empty(0, np.int64)
        self.offsets = empty if stored.offsets is None else stored.offsets
        self.shows_residency = all(file.shows_residency for file in self.files)

    def locate(self, ids: np.ndarray) -> np.ndarray:
        """Return the addresses of the rows of flat int64 ids."""
        addresses = kernels.locate_rows(
            ids, self.starts, self.bases, self.row_bytes, self.offsets
        )
        if addresses is None:
            if self.offsets.size and 0 <= ids.min() and ids.max() < self.offsets.size:
                raise ValueError(
                    f"the index of {self.stored.segments[0].path} does not fit the file"
                )
            raise changed_ids(int(self.starts[-1]))
        return addresses

    def request(self, addresses: np.ndarray) -> None:
        """Start reading rows, unless a sample of them is in memory."""
        if not self.shows_residency or kernels.rows_missing(addresses, self.row_bytes):
            kernels.request_rows(addresses, self.row_bytes)

    def fetch(self, addresses: np.ndarray) -> None:
        """Read the pages of rows, and map them."""
        kernels.request_rows(addresses, self.row_bytes, wait=True)

    def copy(self, addresses: np.ndarray, out: np.ndarray) -> None:
        """Copy rows from their addresses to ``out``."""
        kernels.copy_rows_at(addresses, out)

    def array(self) -> np.ndarray | None:
        """Return all rows as one aligned array that is not copied, or None."""
        if len(self.stored.segments) != 1 or self.stored.offsets is not None:
            return None
        segment = self.stored.segments[0]
        shape, dtype = (segment.rows, self.stored.columns), self.stored.dtype
        if not self.files:
            return np.empty(shape, dtype)
        memory = self.files[0].memory
        array = np.ndarray(shape, dtype, memory, segment.start)
        return array if array.flags.aligned else None
