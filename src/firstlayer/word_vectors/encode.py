"""Encode texts as the mean of their token rows."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float32

from ..numpy import EmbeddingBag
from .neighbors import units
from .vectors import Vectors

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
        texts: Texts to encode.

    Example:
        >>> table = Vectors(["red", "blue"], np.array([[1, 0], [0, 1]], np.float32))
        >>> [rows.tolist() for rows in encode(table, ["red blue", "green"])]
        [[[0.5, 0.5], [0.0, 0.0]]]
    """
    bag = EmbeddingBag(*vectors.weight.shape, mode="sum", weight=vectors.weight)
    texts = iter(texts)
    while batch := list(itertools.islice(texts, BATCH)):
        ids = _ids(vectors, batch)
        counts = np.array([len(row) for row in ids])
        offsets = np.append(0, np.cumsum(counts))[:-1]
        flat = np.array(list(itertools.chain.from_iterable(ids)), np.int64)
        scale = None if vectors.scale is None else vectors.scale[flat]
        rows = flat if vectors.mapping is None else vectors.mapping[flat]
        sums = bag(rows, offsets=offsets, per_sample_weights=scale)
        means = sums / np.maximum(counts, 1)[:, None].astype(np.float32)
        yield units(means) if vectors.normalize else means


def _ids(vectors: Vectors, texts: list[str]) -> list[list[int]]:
    if vectors.tokenizer is None:
        rows = vectors.rows
        return [[rows[w] for w in text.split() if w in rows] for text in texts]
    # tokenizers raises a bare Exception.
    try:
        encoded = vectors.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:
        raise ValueError(f"the tokenizer cannot read the text: {error}") from None
    unknown = vectors.unknown
    return [[i for i in one.ids if i != unknown] for one in encoded]
