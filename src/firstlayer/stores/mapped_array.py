"""Arrays over mapped files: only pages in use take memory, and writes go to the file."""

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels
from .journal_format import ArrayFile

#: Codes of safetensors for the dtypes of the arrays.
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "bool": "BOOL",
}
#: First byte of an array in its file. Rows that divide a page do not straddle two.
ARRAY_START = 4096
#: Rows of fewer bytes are gathered by NumPy, which has a smaller overhead.
MIN_KERNEL_BYTES = 64


class MappedArray:
    """Array over a mapped file, writable.

    Args:
        folder: Folder of the store.
        file: The array.
    """

    def __init__(self, folder: Path, file: ArrayFile) -> None:
        self.file, path = file, folder / file.file
        #: The file.
        self.path = path
        if not path.is_file() or os.path.getsize(path) < file.start + file.nbytes:
            raise ValueError(
                f"{path} must have {file.start + file.nbytes} bytes for {file.name}, but "
                "it is missing or shorter"
            )
        self._map: mmap.mmap | None = None
        #: The array.
        self.array = np.empty(file.shape, file.numpy_dtype)
        if file.nbytes:
            self._map = _mapping(path, file.start + file.nbytes)
            flat = np.frombuffer(self._map, np.uint8, file.nbytes, file.start)
            self.array = flat.view(file.numpy_dtype).reshape(file.shape)
        self._bytes = self.array.reshape(-1).view(np.uint8)
        self._bytes = self._bytes.reshape(file.shape[0], file.row_bytes)

    def copy_rows(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy rows to a buffer of bytes."""
        rows = out.view(self.array.dtype).reshape(ids.size, *self.array.shape[1:])
        if rows.ndim == 1 or self.file.row_bytes < MIN_KERNEL_BYTES:
            rows[...] = self.array[ids]
        elif kernels.gather_rows(self.array, ids, out=rows) is None:
            raise IndexError(f"rows must be smaller than {len(self.array)}")

    def write_bytes(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Write rows that are given as bytes."""
        self._bytes[ids] = rows

    def will_need(self, rows: np.ndarray) -> None:
        """Ask the system to read rows, given in order."""
        if self._map is None or not rows.size:
            return
        page = mmap.ALLOCATIONGRANULARITY
        start = self.file.start + rows * self.file.row_bytes
        first, last = start // page, (start + max(1, self.file.row_bytes) - 1) // page
        # Neighbouring pages are requested together.
        breaks = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
        begins = first[np.concatenate([[0], breaks])]
        ends = np.maximum.accumulate(last)[np.concatenate([breaks - 1, [rows.size - 1]])]
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            length = min((end + 1) * page, len(self._map)) - begin * page
            self._map.madvise(mmap.MADV_WILLNEED, begin * page, length)

    def sync(self) -> None:
        """Write changed pages to the disk and wait for it."""
        if self._map is not None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                sync_mapping(self._map, descriptor)
            finally:
                os.close(descriptor)


def create_array(
    folder: Path,
    name: str,
    file: str,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    fill: float = 0.0,
) -> ArrayFile:
    """Create the safetensors file of an array, with all of its disk space allocated.

    Writing to a mapped page for which the disk has no space would end the process.
    """
    dtype = np.dtype(dtype)
    array = ArrayFile(name, file, ARRAY_START, dtype.name, shape)
    entry = {"dtype": CODES[dtype.name], "shape": shape, "data_offsets": [0, array.nbytes]}
    text = json.dumps({name: entry}).encode().ljust(ARRAY_START - 8)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(folder / file, flags, 0o666)
    try:
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        if array.nbytes:
            allocate(descriptor, ARRAY_START + array.nbytes)
    except BaseException:
        os.unlink(folder / file)
        raise
    finally:
        os.close(descriptor)
    if fill:
        mapped = MappedArray(folder, array)
        mapped.array[...] = fill
    return array


def sync_mapping(mapping: mmap.mmap, descriptor: int) -> None:
    """Write changed pages of a mapped file to the disk and wait for it."""
    # On Linux, fsync also writes the pages that were changed through a mapping.
    if sys.platform != "linux":
        mapping.flush()
    os.fsync(descriptor)


def _mapping(path: Path, length: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)
    if hasattr(mmap, "MADV_RANDOM"):
        # Rows are read in no order; reading ahead would fill memory with other rows.
        mapping.madvise(mmap.MADV_RANDOM)
    return mapping


def allocate(descriptor: int, size: int) -> None:
    """Make a file at least ``size`` bytes long, with all of its disk space allocated."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(1 << 20)
    for position in range(os.fstat(descriptor).st_size, size, len(zeros)):
        os.pwrite(descriptor, zeros[: size - position], position)
