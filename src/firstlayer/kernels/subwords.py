"""Mean rows of the character n-grams of words, as fastText defines them.

An n-gram is hashed to a row by 32-bit FNV-1a over its UTF-8 bytes, each extended with its
sign, as fastText's C++ code does (Bojanowski et al. 2017). N-grams of one character at
either end of a word (its brackets) are left out.
"""

import numpy as np

from .runtime.compile import internal, kernel
from .runtime.pool import grain_for, pieces, run

#: Minimum number of rows to read per thread.
GRAIN = 1 << 10
OFFSET, PRIME = np.uint32(2166136261), np.uint32(16777619)


def mean_subword_rows(
    text: np.ndarray,
    bounds: np.ndarray,
    own_rows: np.ndarray,
    table: np.ndarray,
    *,
    buckets: int,
    lengths: tuple[int, int],
    out: np.ndarray,
    counts: np.ndarray,
    bucket_rows: np.ndarray | None = None,
) -> None:
    """Write the mean row of each word and its n-grams, and the number of rows in it.

    Args:
        text: Words in UTF-8 with their brackets (``<word>``), one after the other, uint8.
        bounds: First byte of each word and end of the last, int64.
        own_rows: Row of each word itself, or -1, int64.
        table: float32 rows; the last ``buckets`` are those of n-grams.
        buckets: Number of rows of n-grams.
        lengths: Shortest and longest n-gram in characters.
        out: Mean of each word, zeros without a row.
        counts: Number of rows in each mean, int64.
        bucket_rows: Hashes modulo ``buckets`` that have a row, sorted, and these rows,
            int32; None if all have one, the last rows.
    """
    grain = grain_for(GRAIN, 16)
    rows = np.empty((2, 0), np.int32) if bucket_rows is None else bucket_rows
    args = text, bounds, own_rows, table, buckets, *lengths, out, counts, rows
    run(_mean_rows, len(out), *args, grain=grain)


@kernel()
def _mean_rows(
    ticket, text, bounds, own_rows, table, buckets, least, most, out, counts, bucket_rows
):
    rows, width = table.shape
    first_bucket = rows - buckets
    for lo, hi in pieces(ticket):
        for word in range(lo, hi):
            counts[word] = 0
            for d in range(width):
                out[word, d] = 0
            row = own_rows[word]
            if 0 <= row < rows:
                _add(table, row, out, word, counts)
            start, end = bounds[word], bounds[word + 1]
            for bucket in ngram_buckets(text, start, end, buckets, least, most):
                row = first_bucket + bucket
                if bucket_rows.shape[1] > 0:
                    row = _kept_row(bucket_rows, bucket)
                if row >= 0:
                    _add(table, row, out, word, counts)
            for d in range(width):
                out[word, d] /= np.float32(max(counts[word], 1))


@internal
def ngram_buckets(text, start, end, buckets, least, most):
    """Yield the number of each n-gram of the word in ``text[start:end]``, if any."""
    for at in range(start, end):
        # Bytes 0b10…… continue a character.
        if text[at] & 0xC0 == 0x80 or buckets == 0:
            continue
        hashed, next_ = OFFSET, at
        for length in range(1, most + 1):
            if next_ >= end:
                break
            while True:
                hashed = _hashed(hashed, text[next_])
                next_ += 1
                if next_ >= end or text[next_] & 0xC0 != 0x80:
                    break
            is_bracket = length == 1 and (at == start or next_ == end)
            if length >= least and not is_bracket:
                yield np.int64(hashed % np.uint32(buckets))


@internal
def _hashed(hashed, byte):
    signed = np.uint32(np.int32(byte) - (256 if byte >= 128 else 0))
    return np.uint32((hashed ^ signed) * PRIME)


@internal
def _kept_row(bucket_rows, bucket):
    """Return the row of a hash, or -1."""
    first, end = 0, bucket_rows.shape[1]
    while first < end:
        middle = (first + end) // 2
        if bucket_rows[0, middle] < bucket:
            first = middle + 1
        else:
            end = middle
    if first < bucket_rows.shape[1] and bucket_rows[0, first] == bucket:
        return np.int64(bucket_rows[1, first])
    return np.int64(-1)


@internal
def _add(table, row, out, word, counts):
    for d in range(table.shape[1]):
        out[word, d] += table[row, d]
    counts[word] += 1
