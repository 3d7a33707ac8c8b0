"""Find the rows of a binary file of word2vec.

A file begins with the number of rows and their width as text. Each row is a word, a space
and the numbers, so its place depends on all words before it. The first reader scans the
file and writes the offset of each row to an index file, ``<name>.rows`` in the same folder,
or in the user's cache folder if that one is read-only. The index is used as long as the
file keeps its size and its time of modification.
"""

import contextlib
import hashlib
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .atomic import replacing
from .checkpoint import open_regular

#: Longest header, and longest word with its space.
MAX_HEADER_BYTES, MAX_WORD_BYTES = 64, 4096
#: A number in text, also one with a comma that readers of text refuse by name.
_NUMBER = re.compile(rb"[-+]?(\.?\d[\d.,]*(e[-+]?\d+)?|nan|inf|infinity)", re.IGNORECASE)
INDEX_MAGIC = b"firstlayer rows\1"
#: Magic bytes, size and time of modification of the file, rows and width.
INDEX_HEADER = struct.Struct("<16s4q")


@dataclass(frozen=True)
class Word2VecRows:
    """The rows of a binary word2vec file.

    Args:
        shape: Number of rows and width.
        offsets: Offset of the numbers of each row; mapped from the index file if there is
            one.
    """

    shape: tuple[int, int]
    offsets: np.ndarray


def read_word2vec(path: Path) -> Word2VecRows:
    """Return the shape of a file and the offset of each row, from its index or a scan."""
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        first = file.readline(MAX_HEADER_BYTES)
        rows, width = _header(first, path)
        # Smallest possible row: a one-byte word, a space and the numbers.
        if width and rows * (2 + 4 * width) > state.st_size:
            raise ValueError(
                f"{path} is cut short: {rows} rows of {width} numbers in "
                f"{state.st_size} bytes"
            )
        if not rows or not width:
            raise ValueError(f"{path} must have rows, got {rows} of width {width}")
        if is_text_row(file.readline(MAX_WORD_BYTES + 32 * width), width):
            raise ValueError(
                f"{path} is in word2vec's text format: rows are read in place from its "
                "binary format only"
            )
        stamp = INDEX_HEADER.pack(
            INDEX_MAGIC, state.st_size, state.st_mtime_ns, rows, width
        )
        for index in _index_paths(path):
            offsets = _read_index(index, stamp, rows)
            if offsets is not None:
                return Word2VecRows((rows, width), offsets)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offsets = _scan(data, len(first), rows, width, path)
    for index in _index_paths(path):
        # A folder that cannot be written to: the next one is tried.
        with contextlib.suppress(OSError):
            index.parent.mkdir(parents=True, exist_ok=True)
            with replacing(os.path.realpath(index)) as file:
                file.write(stamp + offsets.tobytes())
            written = _read_index(index, stamp, rows)
            return Word2VecRows((rows, width), offsets if written is None else written)
    return Word2VecRows((rows, width), offsets)


def is_word2vec(begin: bytes) -> bool:
    """Return whether a file may be word2vec's, by its first bytes."""
    fields = begin.partition(b"\n")[0].split()
    return b"\n" in begin and len(fields) == 2 and all(map(bytes.isdigit, fields))


def _header(line: bytes, path: Path) -> tuple[int, int]:
    if not is_word2vec(line):
        raise ValueError(f"{path} must begin with the number of rows and their width")
    rows, width = map(int, line.split())
    return rows, width


def is_text_row(line: bytes, width: int) -> bool:
    """Return whether a line is a word, which may contain spaces, and numbers in text.

    Args:
        line: The line. A word that is missing has left its space.
        width: Number of numbers.

    Example:
        >>> [is_text_row(line, 2) for line in (b"new york 1 nan", b" 1 2", b"king \\0 1")]
        [True, True, False]
    """
    fields = line.split()
    numbers = [field for field in fields[-width:] if _NUMBER.fullmatch(field)]
    return len(numbers) == width and (len(fields) > width or line[:1].isspace())


def check_end(left: int, rows: int, width: int, *, name: str) -> None:
    """Raise if more than a line end follows the rows that a header declares.

    Text whose first row does not fit its header would otherwise be read as binary rows.

    Args:
        left: Number of bytes after the last row.
        rows: Number of rows that the header declares.
        width: Width that the header declares.
        name: Name of the file.
    """
    if left > 2:
        raise ValueError(
            f"{name} declares {rows} rows of {width} numbers, but {left} bytes follow them"
        )


def _scan(data: mmap.mmap, start: int, rows: int, width: int, path: Path) -> np.ndarray:
    """Return the offset of the numbers of each row."""
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        data.madvise(mmap.MADV_SEQUENTIAL)
    offsets = np.empty(rows, np.int64)
    find, size, row_bytes = data.find, len(data), 4 * width
    for row in range(rows):
        space = find(b" ", start, start + MAX_WORD_BYTES)
        start = space + 1 + row_bytes
        if space < 0 or start > size:
            raise ValueError(f"{path} is cut short: it has {row} of {rows} rows")
        offsets[row] = space + 1
    check_end(size - start, rows, width, name=str(path))
    return offsets


def _index_paths(path: Path) -> list[Path]:
    """Return the places of an index, the preferred one first."""
    real = Path(os.path.realpath(path))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.path.expanduser("~"), ".cache"
    )
    name = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
    return [
        real.with_name(f"{real.name}.rows"),
        Path(cache) / "firstlayer" / f"{name}.rows",
    ]


def _read_index(index: Path, stamp: bytes, rows: int) -> np.ndarray | None:
    """Return mapped offsets if an index belongs to the file, or None."""
    try:
        with open_regular(index) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(stamp)) != stamp or size != len(stamp) + 8 * rows:
                return None
            return np.asarray(np.memmap(file, np.int64, "r", len(stamp), (rows,)))
    except (OSError, ValueError):
        return None
