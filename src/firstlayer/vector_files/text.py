"""Read word2vec's and GloVe's text formats, fastText's ``.vec`` and TSV.

Each line is a word and its numbers, separated by spaces or tabs. The numbers are the last
fields of a line, because some words of GloVe contain spaces. word2vec and fastText begin
with a line of two counts, GloVe and TSV do not.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from .. import kernels
from .table import VectorTable

#: Bytes that are parsed at a time, the first time and at most.
FIRST_BYTES, CHUNK_BYTES = 1 << 18, 1 << 24
#: Longest line: a row of 65,536 numbers of 24 characters is shorter.
MAX_LINE_BYTES = 1 << 21
_NUMBER = re.compile(
    rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE
)
_COUNTS = re.compile(rb"\s*([-+]?\d+)[ \t]+([-+]?\d+)\s*")


def counts_in(line: bytes) -> tuple[int, int] | None:
    """Return the two counts of a header, or None if a line is none."""
    match = _COUNTS.fullmatch(line)
    # Python refuses to parse numbers of thousands of digits.
    if match is None or len(line) > 64:
        return None
    return int(match[1]), int(match[2])


def number_of(field: bytes) -> np.float32 | None:
    """Return a number in text as float32, or None if it is none.

    Example:
        >>> number_of(b"-1.5e1"), number_of(b"king")
        (np.float32(-15.0), None)
    """
    if _NUMBER.fullmatch(field) is None:
        return None
    with np.errstate(over="ignore"):
        return np.float32(float(field))


def is_row(line: bytes) -> bool:
    """Return whether a line is a word and any number of numbers."""
    fields = line.split()[1:]
    return bool(fields) and all(number_of(field) is not None for field in fields)


def read_text(
    file: BinaryIO,
    width: int,
    *,
    name: str,
    line_number: int,
    begin: bytes = b"",
    num_rows: int | None = None,
    has_words: bool = True,
) -> VectorTable:
    """Read lines up to the end of a file.

    Args:
        file: The file, at the first row or after ``begin``.
        width: Number of numbers in a line.
        name: Name of the file in errors.
        line_number: Number of the first line.
        begin: Bytes of the first row that were read already.
        num_rows: Number of rows that the header declares, or None.
        has_words: Whether each line begins with a word. Words are ``""`` otherwise.
    """
    words: list[str] = []
    parts = []
    for chunk in _chunks(file, begin, name):
        if not has_words:
            # A word that is dropped afterwards, in front of each line.
            chunk = b"- " + chunk.rstrip(b"\n").replace(b"\n", b"\n- ") + b"\n"
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
        # More rows than this do not fit in the bytes; the first that is too short is an
        # error.
        ends = ends[: len(chunk) // (2 * width + 1) + 1]
        bounds = np.append(0, ends).astype(np.int64)
        rows = np.empty((len(ends), width), np.float32)
        first = line_number + len(words)
        words += _parse(chunk, bounds, rows, name=name, line_number=first)
        parts.append(rows)
        if num_rows is not None and len(words) > num_rows:
            break
    if num_rows is not None and len(words) != num_rows:
        at_least = "" if len(words) < num_rows else "at least "
        raise ValueError(f"{name} declares {num_rows} rows, but has {at_least}{len(words)}")
    weight = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return VectorTable(words if has_words else [""] * len(words), weight)


def _chunks(file: BinaryIO, begin: bytes, name: str) -> Iterator[bytes]:
    """Yield whole lines, several at a time; blank lines at the end are left out."""
    rest, size = begin, min(FIRST_BYTES, CHUNK_BYTES)
    while block := file.read(size):
        # A read allocates its size, however short the file is.
        size = min(2 * size, CHUNK_BYTES)
        block = rest + block
        cut = block.rstrip(b"\r\n \t").rfind(b"\n") + 1
        rest = block[cut:]
        if len(rest) > max(MAX_LINE_BYTES, CHUNK_BYTES):
            raise ValueError(f"{name} has a line of more than {MAX_LINE_BYTES} bytes")
        if cut:
            yield block[:cut]
    if rest := rest.rstrip(b"\r\n \t"):
        yield rest + b"\n"


def _parse(
    chunk: bytes, bounds: np.ndarray, rows: np.ndarray, *, name: str, line_number: int
) -> list[str]:
    """Return the words of lines, and write their numbers to ``rows``."""
    word_ends = np.empty(len(rows), np.int64)
    text = np.frombuffer(chunk, np.uint8)
    kernels.parse_text_rows(text, bounds, rows, word_ends)
    starts, ends = bounds.tolist(), word_ends.tolist()
    words = []
    for i, end in enumerate(ends):
        if end >= 0:
            words.append(decoded(chunk[starts[i] : end].lstrip(b" \t")))
            continue
        width = rows.shape[1]
        fields = chunk[starts[i] : starts[i + 1]].strip().rsplit(None, width)
        numbers = [number_of(field) for field in fields[1:]]
        if len(fields) != width + 1 or None in numbers:
            raise ValueError(
                f"{name} must have a word and {width} numbers in line {line_number + i}"
            )
        rows[i] = numbers
        words.append(decoded(fields[0]))
    return words


def decoded(spelling: bytes) -> str:
    """Return a word. Published files contain words truncated inside a character."""
    return spelling.decode(errors="backslashreplace")
