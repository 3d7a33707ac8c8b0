"""Read fastText's binary format, versions 11 and 12, with the rows of n-grams.

The vector of a word is the mean of its own row and those of its character n-grams; that of
an unknown word is the mean of its n-grams alone.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files.checkpoint import open_regular
from .table import Subwords, VectorTable
from .text import decoded

MAGIC = struct.pack("<i", 793712314)
VERSIONS = (11, 12)
#: Sizes and options: dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn,
#: maxn, lrUpdateRate, t.
OPTIONS = struct.Struct("<12id")
SUPERVISED = 3
#: Number of entries, words, labels, tokens and pruned n-grams.
COUNTS = struct.Struct("<3i2q")
#: Count and type of an entry, after the zero that ends its word.
ENTRY_BYTES = 9
#: The end of a line, which has no n-grams.
END = b"</s>"
MAX_WORD_BYTES = 1 << 16
MAX_LENGTH = 64


@dataclass(frozen=True)
class _Header:
    """Options of a model that define its vectors."""

    width: int
    buckets: int
    lengths: tuple[int, int]


def read_fasttext(path: Path) -> VectorTable:
    """Return the words of a model, their vectors, and the rows of n-grams."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header, place = _header(data, path)
                words, place = _words(data, place, path)
                start, rows = _matrix(data, place, header, path)
            except struct.error:
                raise ValueError(
                    f"{path} is cut short: it has {size} bytes of a header"
                ) from None
        expected = len(words) + header.buckets
        if rows != expected and header.lengths[1] > 0:
            raise ValueError(
                f"{path} has {rows} rows, but {len(words)} words and {header.buckets} "
                "rows of n-grams"
            )
        if rows < len(words):
            raise ValueError(f"{path} has {rows} rows, but {len(words)} words")
        table = np.memmap(file, "<f4", "c", start, (rows, header.width))
    # Kernels need aligned arrays.
    table = np.array(table) if start % 4 else np.asarray(table)
    buckets = rows - len(words)
    lengths = header.lengths if buckets else (1, 0)
    subwords = Subwords(table, buckets, lengths)
    spelled = [b"" if word == END else word for word in words]
    weight, _ = subwords.means(spelled, np.arange(len(words)))
    has_subwords = lengths[1] > 0
    return VectorTable(
        [decoded(word) for word in words],
        weight,
        subwords=subwords if has_subwords else None,
    )


def _header(data: mmap.mmap, path: Path) -> tuple[_Header, int]:
    (version,) = struct.unpack_from("<i", data, 4)
    if data[:4] != MAGIC or version not in VERSIONS:
        raise ValueError(f"{path} must have fastText's version 11 or 12, got {version}")
    width, *_, model, buckets, least, most, _, _ = OPTIONS.unpack_from(data, 8)
    if version == 11 and model == SUPERVISED:
        # That version did not use n-grams of characters in classifiers.
        most = 0
    if width <= 0 or buckets < 0 or not 0 <= most <= MAX_LENGTH or least < 0:
        raise ValueError(
            f"{path} has vectors of width {width}, {buckets} rows of n-grams, and n-grams "
            f"of {least} to {most} characters"
        )
    return _Header(width, buckets, (max(least, 1), most)), 8 + OPTIONS.size


def _words(data: mmap.mmap, place: int, path: Path) -> tuple[list[bytes], int]:
    """Return the words, and the offset after the dictionary."""
    entries, num_words, _, _, pruned = COUNTS.unpack_from(data, place)
    place += COUNTS.size
    if pruned >= 0:
        raise ValueError(f"{path} is a quantized model (.ftz), which is not read")
    if not 0 <= num_words <= entries <= len(data) // (1 + ENTRY_BYTES):
        raise ValueError(f"{path} is cut short: {entries} words in {len(data)} bytes")
    words = []
    for number in range(entries):
        end = data.find(b"\0", place, place + MAX_WORD_BYTES)
        if end < 0 or end + 1 + ENTRY_BYTES > len(data):
            raise ValueError(f"{path} is cut short: it has {number} of {entries} words")
        # Labels of classifiers follow the words.
        if number < num_words:
            words.append(data[place:end])
        place = end + 1 + ENTRY_BYTES
    return words, place


def _matrix(data: mmap.mmap, place: int, header: _Header, path: Path) -> tuple[int, int]:
    """Return the offset of the first row, and the number of rows."""
    is_quantized, rows, width = struct.unpack_from("<?2q", data, place)
    start = place + 17
    if is_quantized:
        raise ValueError(f"{path} is a quantized model (.ftz), which is not read")
    if width != header.width or rows < 0 or start + 4 * rows * width > len(data):
        raise ValueError(
            f"{path} is cut short: {rows} rows of {width} numbers in {len(data)} bytes"
        )
    return start, rows
