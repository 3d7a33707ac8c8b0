"""Bytes of an undo journal: the headers of commits, and the records of rows.

A header is JSON text followed by arrays; a record is ids followed by the rows of each
array. Both have checksums, and both begin at a multiple of 64 bytes of their file, so that
the numbers in a record are aligned.
"""

import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels

MAGIC, RECORD_MAGIC = b"FLundo1\n", b"rows"
# Magic bytes, checksum, number of bytes of the JSON text and of the arrays after it.
_HEADER = struct.Struct("<8sIQQ")
# Magic bytes, checksum, number of rows.
_RECORD = struct.Struct("<4sIQ")
#: Bytes of a record before its ids.
RECORD_START = _RECORD.size
#: Headers and records begin at multiples of this many bytes.
ALIGNMENT = 64
#: Bytes that are summed for one number of a checksum.
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class ArrayFile:
    """Array in a file, with one entry of the first axis for each row of the table.

    Args:
        name: Name of the array.
        file: Path of the file, relative to the folder of the store.
        start: Offset of the first byte.
        dtype: Name of the dtype.
        shape: Shape.
    """

    name: str
    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the array."""
        if self.dtype == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.dtype)

    @cached_property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.numpy_dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class SavedState:
    """Part of an optimizer state that is not stored per row.

    Args:
        numbers: Values that JSON represents exactly.
        arrays: Small arrays.
    """

    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def has_stale_rows(self) -> bool:
        """Whether a row may have missed a step."""
        return self.numbers["base_step"] != self.numbers["event_count"]

    @property
    def has_stale_weights(self) -> bool:
        """Whether the weight of a row may be out of date, and not only its state."""
        return self.has_stale_rows and self.numbers["missed_moves"]


@dataclass(frozen=True)
class Commit:
    """Header of a segment.

    Args:
        store: Identifies the store, the same for all of its commits.
        number: Number of the commit.
        tag: Name given by the caller.
        arrays: Arrays of the store.
        state: Optimizer state, or None if no optimizer has trained the table.
        previous_bytes: Length of the segment before, when this commit was made.
    """

    store: str
    number: int
    tag: str | None
    arrays: tuple[ArrayFile, ...]
    state: SavedState | None = None
    previous_bytes: int = 0

    @cached_property
    def record_row_bytes(self) -> int:
        """Number of bytes that a record has for each row, its id included."""
        return 8 + sum(array.row_bytes for array in self.arrays)

    @cached_property
    def record_arrays(self) -> list[ArrayFile]:
        """Arrays in the order of a record."""
        return sorted(self.arrays, key=record_order)

    def __str__(self) -> str:
        return f"commit {self.number}" + (f" ({self.tag})" if self.tag is not None else "")


def record_order(array: ArrayFile) -> int:
    """Return the key of an array's place in a record: wide dtypes first, so all align."""
    return -array.numpy_dtype.itemsize


def aligned(position: int) -> int:
    """Return the first place for a record at or after a position."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def finish_record(record: np.ndarray, count: int, commit: Commit) -> None:
    """Write the first bytes of a record whose ids and rows are in place.

    It is no record before: the checksum is wrong.

    Args:
        record: All bytes of the record.
        count: Number of rows.
        commit: Commit of the segment.
    """
    checksum = _checksum(record[RECORD_START:], count, commit)
    _RECORD.pack_into(record.data, 0, RECORD_MAGIC, checksum, count)


def _checksum(body: np.ndarray, count: int, commit: Commit) -> int:
    """Return the checksum of a record: CRC-32 of the sums of the words of each block.

    CRC-32 of the bytes themselves would take longer than writing them. A page that is
    missing, old or changed changes the sum of its words. The checksum depends on the
    commit, so that records of other segments are never taken for its own.

    Args:
        body: Ids and rows, as bytes.
        count: Number of rows.
        commit: Commit of the segment.
    """
    checksum = zlib.crc32(f"{commit.store} {commit.number} {count}".encode())
    whole = body.size - body.size % BLOCK_BYTES
    if whole:
        words = body[:whole].view(np.uint64).reshape(-1, BLOCK_BYTES // 8)
        checksum = zlib.crc32(kernels.sum_words(words).data, checksum)
    return zlib.crc32(body[whole:].data, checksum)


def header_of(commit: Commit) -> bytes:
    """Return the bytes of a header."""
    about = {
        "store": commit.store,
        "number": commit.number,
        "tag": commit.tag,
        "arrays": [asdict(array) for array in commit.arrays],
        "previous_bytes": commit.previous_bytes,
        "state": None,
    }
    content = b""
    if commit.state is not None:
        arrays = {
            name: np.ascontiguousarray(array) for name, array in commit.state.arrays.items()
        }
        content = b"".join(array.tobytes() for array in arrays.values())
        about["state"] = {
            "numbers": commit.state.numbers,
            "arrays": {
                name: {"dtype": array.dtype.name, "shape": array.shape}
                for name, array in arrays.items()
            },
            "checksum": zlib.crc32(content),
        }
    text = json.dumps(about).encode()
    prefix = _HEADER.pack(MAGIC, zlib.crc32(text), len(text), len(content))
    header = prefix + text + content
    return header.ljust(aligned(len(header)), b"\0")


def read_header(path: Path, *, whole: bool) -> tuple[Commit, int]:
    """Return the header of a segment and its length.

    Args:
        path: The file.
        whole: Read the optimizer state too.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_HEADER.size)
        if len(prefix) == _HEADER.size:
            magic, checksum, text_bytes, content_bytes = _HEADER.unpack(prefix)
            length = _HEADER.size + text_bytes + content_bytes
            if magic == MAGIC and length <= size:
                text = file.read(text_bytes)
                content = file.read(content_bytes) if whole else None
                if zlib.crc32(text) == checksum:
                    return _parse_header(path, text, content), aligned(length)
    raise ValueError(f"{path} is damaged: its header is incomplete or was changed")


def _parse_header(path: Path, text: bytes, content: bytes | None) -> Commit:
    about = json.loads(text)
    arrays = (
        ArrayFile(**{**array, "shape": tuple(array["shape"])}) for array in about["arrays"]
    )
    state = about["state"]
    if state is not None and content is not None:
        if zlib.crc32(content) != state["checksum"]:
            raise ValueError(f"{path} is damaged: its optimizer state was changed")
        start, values = 0, {}
        for name, array in state["arrays"].items():
            dtype, shape = np.dtype(array["dtype"]), array["shape"]
            count = int(np.prod(shape, dtype=np.int64))
            values[name] = np.frombuffer(content, dtype, count, start).reshape(shape)
            start += count * dtype.itemsize
        state = SavedState(state["numbers"], values)
    return Commit(**{
        **about,
        "arrays": tuple(arrays),
        "state": state if content is not None else None,
    })


def read_record(
    content: mmap.mmap, position: int, end: int, commit: Commit
) -> tuple[np.ndarray, list[np.ndarray], int] | None:
    """Return ids and rows of a record and the next place, or None if it is incomplete."""
    start = position + _RECORD.size
    if start > end:
        return None
    magic, checksum, count = _RECORD.unpack_from(content, position)
    stop = start + count * commit.record_row_bytes
    if magic != RECORD_MAGIC or not count or stop > end:
        return None
    body = np.frombuffer(content, np.uint8, stop - start, start)
    if _checksum(body, count, commit) != checksum:
        return None
    ids = np.frombuffer(content, np.int64, count, start)
    start += ids.nbytes
    rows = []
    for array in commit.record_arrays:
        nbytes = count * array.row_bytes
        part = np.frombuffer(content, np.uint8, nbytes, start)
        rows.append(part.reshape(count, array.row_bytes))
        start += nbytes
    return ids, rows, aligned(stop)
