"""Read fastText's binary format, versions 11 and 12, with the rows of n-grams.

The vector of a word is the mean of its own row and those of its character n-grams; that of
an unknown word is the mean of its n-grams alone.

Quantized models (``.ftz``) store a row as codes, one for each part of the row: the number
of one of 256 centroids of that part. The whole row may be multiplied by its norm, which is
a code too (Joulin et al. 2016). They may hold the rows of some n-grams only.
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
#: Number of entries, words, labels, tokens and kept n-grams (-1 if all are kept).
COUNTS = struct.Struct("<3i2q")
#: Count and type of an entry, after the zero that ends its word.
ENTRY_BYTES = 9
#: The end of a line, which has no n-grams.
END = b"</s>"
MAX_WORD_BYTES = 1 << 16
MAX_LENGTH = 64
#: Of a quantized table: whether norms are separate, rows, width, and bytes of codes.
QUANTIZED = struct.Struct("<?2qi")
#: Of a quantizer: width, parts, width of a part, and width of the last part.
QUANTIZER = struct.Struct("<4i")
CENTROIDS = 256
#: Largest size of a table in memory, as a multiple of the file.
MAX_EXPANSION = 32


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
                words, place, kept = _words(data, place, path)
                start, table = _matrix(data, place, header, path)
            except struct.error:
                raise ValueError(
                    f"{path} is cut short: it has {size} bytes of a header"
                ) from None
        if isinstance(table, int):
            table = np.memmap(file, "<f4", "c", start, (table, header.width))
    # Kernels need aligned arrays.
    table = np.array(table) if start % 4 else np.asarray(table)
    subwords = _subwords(table, header, len(words), kept, path)
    spelled = [b"" if word == END else word for word in words]
    weight, _ = subwords.means(spelled, np.arange(len(words)))
    has_subwords = subwords.lengths[1] > 0
    return VectorTable(
        [decoded(word) for word in words],
        weight,
        subwords=subwords if has_subwords else None,
    )


def _subwords(
    table: np.ndarray, header: _Header, words: int, kept: np.ndarray | None, path: Path
) -> Subwords:
    """Return the rows of n-grams.

    Args:
        table: All rows.
        header: Options of the model.
        words: Number of words, whose rows are the first ones.
        kept: Hashes of the n-grams that have a row, and the numbers of these rows; None if
            all have one.
        path: Path of the file in errors.
    """
    rows, buckets = len(table), header.buckets
    if rows < words:
        raise ValueError(f"{path} has {rows} rows, but {words} words")
    has_subwords = header.lengths[1] > 0
    if kept is not None:
        if has_subwords and kept.size:
            most = kept.max(axis=0)
            if kept.min() < 0 or most[0] >= buckets or most[1] >= rows - words:
                raise ValueError(
                    f"{path} has n-gram {most[0]} of {buckets} and its row {most[1]} of "
                    f"{rows - words}"
                )
            kept = kept[np.argsort(kept[:, 0], kind="stable")]
            bucket_rows = np.array([kept[:, 0], words + kept[:, 1]], np.int32)
            return Subwords(table, buckets, header.lengths, bucket_rows)
        return Subwords(table, 0, (1, 0))
    if rows != words + buckets and has_subwords:
        raise ValueError(
            f"{path} has {rows} rows, but {words} words and {buckets} rows of n-grams"
        )
    buckets = rows - words
    return Subwords(table, buckets, header.lengths if buckets else (1, 0))


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


def _words(
    data: mmap.mmap, place: int, path: Path
) -> tuple[list[bytes], int, np.ndarray | None]:
    """Return the words, the offset after the dictionary, and the kept n-grams or None."""
    entries, num_words, _, _, pruned = COUNTS.unpack_from(data, place)
    place += COUNTS.size
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
    if pruned < 0:
        return words, place, None
    if place + 8 * pruned > len(data):
        raise ValueError(f"{path} is cut short: {pruned} n-grams in {len(data)} bytes")
    kept = np.frombuffer(data[place : place + 8 * pruned], "<i4").reshape(-1, 2)
    return words, place + 8 * pruned, kept


def _matrix(
    data: mmap.mmap, place: int, header: _Header, path: Path
) -> tuple[int, int | np.ndarray]:
    """Return the offset of the first row and the number of rows, or 0 and decoded rows."""
    (is_quantized,) = struct.unpack_from("<?", data, place)
    if is_quantized:
        return 0, _decoded_rows(data, place + 1, header, path)
    rows, width = struct.unpack_from("<2q", data, place + 1)
    start = place + 17
    if width != header.width or rows < 0 or start + 4 * rows * width > len(data):
        raise ValueError(
            f"{path} is cut short: {rows} rows of {width} numbers in {len(data)} bytes"
        )
    return start, rows


def _decoded_rows(data: mmap.mmap, place: int, header: _Header, path: Path) -> np.ndarray:
    """Return the rows of a quantized table as float32."""
    has_norms, rows, width, num_codes = QUANTIZED.unpack_from(data, place)
    place += QUANTIZED.size
    # The quantizer and its centroids follow the codes.
    if num_codes < 0 or rows < 0 or place + num_codes + QUANTIZER.size > len(data):
        raise ValueError(f"{path} is cut short: {rows} quantized rows of {width} numbers")
    codes = np.frombuffer(data[place : place + num_codes], np.uint8)
    parts, place = _centroids(data, place + num_codes, width, path)
    if width != header.width or num_codes != rows * len(parts):
        raise ValueError(
            f"{path} has {num_codes} codes, but {rows} rows of {width} numbers in "
            f"{len(parts)} parts"
        )
    if 4 * rows * width > MAX_EXPANSION * len(data):
        raise ValueError(
            f"{path} has {rows} rows of {width} numbers in {len(data)} bytes, which is "
            f"more than {MAX_EXPANSION} times as much"
        )
    codes = codes.reshape(rows, len(parts))
    table = np.empty((rows, width), np.float32)
    at = 0
    for number, centroids in enumerate(parts):
        table[:, at : at + centroids.shape[1]] = centroids[codes[:, number]]
        at += centroids.shape[1]
    if has_norms:
        if place + rows > len(data):
            raise ValueError(f"{path} is cut short: {rows} norms in {len(data)} bytes")
        norm_codes = np.frombuffer(data[place : place + rows], np.uint8)
        (norms,), _ = _centroids(data, place + rows, 1, path)
        table *= norms[norm_codes]
    return table


def _centroids(
    data: mmap.mmap, place: int, width: int, path: Path
) -> tuple[list[np.ndarray], int]:
    """Return the centroids of each part of a row, and the offset after them."""
    found, count, each, last = QUANTIZER.unpack_from(data, place)
    place += QUANTIZER.size
    end = place + 4 * CENTROIDS * width
    if (
        found != width
        or min(count, each, last) <= 0
        or (count - 1) * each + last != width
        or end > len(data)
    ):
        raise ValueError(
            f"{path} is cut short: a quantizer of {found} numbers in {count} parts of "
            f"{each}, the last of {last}, for rows of {width}"
        )
    numbers = np.frombuffer(data[place:end], "<f4")
    parts = []
    for part in range(count):
        size = last if part == count - 1 else each
        start = CENTROIDS * each * part
        parts.append(numbers[start : start + CENTROIDS * size].reshape(CENTROIDS, size))
    return parts, end
