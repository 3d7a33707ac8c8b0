"""Words whose vector is the mean of several rows: their own and those of their n-grams.

A part trains the mean of a word as if it were one row. Each row of the word gets the change
of the mean, as in fastText (Bojanowski et al. 2017). A row that many words and parts change
gets a multiple of their mean change: words that share n-grams do not see the changes of
each other within a part, so their sum would overshoot.
"""

from typing import NamedTuple

import numpy as np

from ..runtime.compile import inlined, internal, kernel, prefetch_row
from ..runtime.pool import pieces
from ..subwords import ngram_buckets
from .workspace import CLASS_BITS


class WordRows(NamedTuple):
    """Rows of a table whose mean is the vector of each word.

    Args:
        bounds: Start of the rows of each word in ``rows``, and the end of the last, int64.
        rows: The rows, int32. A word's own row comes first.
    """

    bounds: np.ndarray
    rows: np.ndarray

    @classmethod
    def none(cls) -> "WordRows":
        """Return no rows, the argument of kernels for words with one row each."""
        return cls(np.zeros(1, np.int64), np.empty(0, np.int32))


def subword_rows(
    text: np.ndarray, bounds: np.ndarray, *, buckets: int, lengths: tuple[int, int]
) -> WordRows:
    """Return the rows of each word and its n-grams, in a table with those of n-grams last.

    Args:
        text: Words in UTF-8 with their brackets (``<word>``), one after the other, uint8.
        bounds: First byte of each word and end of the last, int64.
        buckets: Number of rows of n-grams.
        lengths: Shortest and longest n-gram in characters.
    """
    counts = np.empty(bounds.size - 1, np.int64)
    args = text, bounds, buckets, *lengths
    _list_rows(*args, counts, np.empty(0, np.int32))
    found = WordRows(np.append(0, np.cumsum(counts)), np.empty(counts.sum(), np.int32))
    _list_rows(*args, found.bounds, found.rows)
    return found


@kernel()
def _list_rows(text, bounds, buckets, least, most, places, rows):
    """Write the rows of words to ``rows`` from ``places``; or, if empty, their counts."""
    words = bounds.size - 1
    for word in range(words):
        count = 1
        if rows.size:
            rows[places[word]] = word
        for bucket in ngram_buckets(
            text, bounds[word], bounds[word + 1], buckets, least, most
        ):
            if rows.size:
                rows[places[word] + count] = words + bucket
            count += 1
        if not rows.size:
            places[word] = count


@internal
def mean_rows(table, word_rows, copies, part, before):
    """Write the means of the words of a part to its copies and to ``before``."""
    width = table.shape[1]
    for slot in range(copies.counts[part]):
        word = copies.ids[part, slot]
        _prefetch_next(table, word_rows, copies, part, slot, 0, 0)
        start, end = word_rows.bounds[word], word_rows.bounds[word + 1]
        for d in range(width):
            before[part, slot, d] = 0
        for i in range(start, end):
            row = word_rows.rows[i]
            for d in range(width):
                before[part, slot, d] += table[row, d]
        share = np.float32(1) / np.float32(end - start)
        for d in range(width):
            before[part, slot, d] *= share
            copies.rows[part, slot, d] = before[part, slot, d]


@inlined
def _prefetch_next(table, word_rows, copies, part, slot, mask, class_):
    """Prefetch the rows of a class of the word in the slot after ``slot``."""
    if slot + 1 < copies.counts[part]:
        word = copies.ids[part, slot + 1]
        for i in range(word_rows.bounds[word], word_rows.bounds[word + 1]):
            if word_rows.rows[i] >> CLASS_BITS & mask == class_:
                prefetch_row(table, np.int64(word_rows.rows[i]))


@kernel()
def add_to_rows(ticket, table, work, word_rows, parts, classes, max_sum):
    """Add the changes of words to each of their rows.

    One thread writes the rows of a class; the number of classes is a power of two.
    """
    width, mask, copies = table.shape[1], classes - 1, work.inputs
    bounds, rows, repeats = word_rows.bounds, word_rows.rows, copies.repeats
    for lo, hi in pieces(ticket):
        for class_ in range(lo, hi):
            for part in range(parts):
                for slot in range(copies.counts[part]):
                    word = copies.ids[part, slot]
                    for i in range(bounds[word], bounds[word + 1]):
                        if rows[i] >> CLASS_BITS & mask == class_:
                            repeats[rows[i]] += 1
            for part in range(parts):
                for slot in range(copies.counts[part]):
                    word = copies.ids[part, slot]
                    _prefetch_next(table, word_rows, copies, part, slot, mask, class_)
                    for i in range(bounds[word], bounds[word + 1]):
                        row = rows[i]
                        if row >> CLASS_BITS & mask != class_:
                            continue
                        scale = min(np.float32(1), max_sum / np.float32(repeats[row]))
                        for d in range(width):
                            old = work.before[part, slot, d]
                            table[row, d] += scale * (copies.rows[part, slot, d] - old)
            for part in range(parts):
                for slot in range(copies.counts[part]):
                    word = copies.ids[part, slot]
                    for i in range(bounds[word], bounds[word + 1]):
                        if rows[i] >> CLASS_BITS & mask == class_:
                            repeats[rows[i]] = 0
