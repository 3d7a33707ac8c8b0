"""Encode texts as the mean of their token rows."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float32

from ..numpy import EmbeddingBag
from .neighbors import units
from .vectors import Vectors, WordVector, encoded_words

#: Texts per batch.
BATCH = 1024


def encode(
    vectors: Vectors, texts: Iterable[str]
) -> Iterator[Float32[np.ndarray, "n dim"]]:
    """Yield the vectors of texts in batches.

    A text without known words gets zeros. Vectors have unit length if
    ``vectors.normalize``.

    Args:
        vectors: Words and rows. Without a tokenizer, words are separated by spaces.
            Unknown words are made of their n-grams in tables that have them.
        texts: Texts to encode.

    Example:
        >>> table = Vectors(["red", "blue"], np.array([[1, 0], [0, 1]], np.float32))
        >>> [rows.tolist() for rows in encode(table, ["red blue", "green"])]
        [[[0.5, 0.5], [0.0, 0.0]]]
    """
    bag = EmbeddingBag(*vectors.weight.shape, mode="sum", weight=vectors.weight)
    texts = iter(texts)
    while batch := list(itertools.islice(texts, BATCH)):
        ids, others = _ids(vectors, batch)
        counts = np.array([len(row) for row in ids])
        offsets = np.append(0, np.cumsum(counts))[:-1]
        flat = np.array(list(itertools.chain.from_iterable(ids)), np.int64)
        scale = None if vectors.scale is None else vectors.scale[flat]
        rows = flat if vectors.mapping is None else vectors.mapping[flat]
        sums = bag(rows, offsets=offsets, per_sample_weights=scale)
        for text, vector in others:
            sums[text] += vector
            counts[text] += 1
        means = sums / np.maximum(counts, 1)[:, None].astype(np.float32)
        yield units(means) if vectors.normalize else means


def _ids(
    vectors: Vectors, texts: list[str]
) -> tuple[list[list[int]], list[tuple[int, np.ndarray]]]:
    """Return the words of each text, and vectors of words that have no row of their own.

    The latter come with the number of their text.
    """
    if vectors.tokenizer is None:
        return _whole_words(vectors, texts)
    if vectors.subwords is not None:
        return _words_and_ngrams(vectors, texts)
    ids, unknown = vectors.encoded(texts), vectors.unknown
    return [[i for i in one if i != unknown] for one in ids], []


def _words_and_ngrams(
    vectors: Vectors, texts: list[str]
) -> tuple[list[list[int]], list[tuple[int, np.ndarray]]]:
    others, unknown = [], vectors.unknown
    encoded = encoded_words(vectors.tokenizer, texts)
    ids = vectors.joined([[number for number, _ in tokens] for tokens in encoded])
    ids = [[number for number in one if number != unknown] for one in ids]
    # Unknown words are looked up once.
    found: dict[str, np.ndarray | None] = {}
    for text, tokens in enumerate(encoded):
        for word in (word for number, word in tokens if number == unknown):
            if word not in found:
                found[word] = vectors.find(word).vector if word in vectors else None
            vector = found[word]
            if vector is not None:
                others.append((text, vector))
    return ids, others


def _whole_words(
    vectors: Vectors, texts: list[str]
) -> tuple[list[list[int]], list[tuple[int, np.ndarray]]]:
    ids, others, rows = [], [], vectors.rows
    # Words that are not spelled as in the table are looked up once.
    found: dict[str, WordVector | None] = {}
    for text, words in enumerate(map(str.split, texts)):
        ids.append([])
        for word in words:
            if word in rows and not vectors.mark:
                ids[-1].append(rows[word])
                continue
            if word not in found:
                found[word] = vectors.find(word) if word in vectors else None
            one = found[word]
            if one is not None and len(one.numbers) == 1:
                ids[-1] += one.numbers
            elif one is not None:
                others.append((text, one.vector))
    return ids, others
