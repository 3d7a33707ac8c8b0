"""A table of vectors with words, as every reader of a file returns it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64

from .. import kernels


@dataclass(frozen=True)
class Subwords:
    """Rows of character n-grams, which give vectors to unknown words (fastText).

    Args:
        table: The rows; those of n-grams are the last ones.
        buckets: Number of hashes of n-grams.
        lengths: Shortest and longest n-gram, in characters.
        bucket_rows: Hashes of n-grams that have a row, sorted, and these rows; None if all
            have one, the last ``buckets`` rows.
    """

    table: np.ndarray
    buckets: int
    lengths: tuple[int, int]
    bucket_rows: Int32[np.ndarray, "2 kept"] | None = None

    def means(
        self, words: list[bytes], own_rows: np.ndarray
    ) -> tuple[Float32[np.ndarray, "words width"], Int64[np.ndarray, " words"]]:
        """Return the mean row of each word and its n-grams, and the number of rows in it.

        Args:
            words: Words in UTF-8; an empty one has no n-grams.
            own_rows: Row of each word itself, or -1.
        """
        text, bounds = bracketed(words)
        out = np.empty((len(words), self.table.shape[1]), np.float32)
        counts = np.empty(len(words), np.int64)
        kernels.mean_subword_rows(
            text,
            bounds,
            own_rows.astype(np.int64),
            self.table,
            buckets=self.buckets,
            lengths=self.lengths,
            out=out,
            counts=counts,
            bucket_rows=self.bucket_rows,
        )
        return out, counts


def bracketed(words: list[bytes]) -> tuple[np.ndarray, Int64[np.ndarray, " words+1"]]:
    """Return words as ``<word>``, one after the other, and the first byte of each.

    Example:
        >>> text, bounds = bracketed([b"a", b"", b"bc"])
        >>> text.tobytes(), bounds.tolist()
        (b'<a><bc>', [0, 3, 3, 7])
    """
    marked = [b"<" + word + b">" if word else b"" for word in words]
    bounds = np.append(0, np.cumsum([len(word) for word in marked]))
    return np.frombuffer(b"".join(marked), np.uint8), bounds.astype(np.int64)


@dataclass(frozen=True)
class VectorTable:
    """Words and their rows in a file.

    Args:
        words: Words as spelled in the vocabulary; ``""`` for a row without one.
        weight: The rows, float32; mapped if the file holds them so.
        tokenizer_json: Content of ``tokenizer.json``, or None.
        normalize: Whether text vectors are scaled to unit length.
        mapping: Row of each word; None if word ``i`` has row ``i``.
        scale: Factor of each word; None for ones.
        subwords: Rows of character n-grams, or None.
        phrases_json: Content of ``phrases.json``, or None.
    """

    words: list[str]
    weight: Float32[np.ndarray, "rows width"]
    tokenizer_json: bytes | None = None
    normalize: bool = False
    mapping: Int64[np.ndarray, " words"] | None = None
    scale: Float32[np.ndarray, " words"] | None = None
    subwords: Subwords | None = None
    phrases_json: bytes | None = None

    def take(self, numbers: Any) -> Float32[np.ndarray, "n width"]:
        """Return the vectors of words by their numbers."""
        numbers = np.asarray(numbers, np.int64)
        rows = self.weight[numbers if self.mapping is None else self.mapping[numbers]]
        return rows if self.scale is None else rows * self.scale[numbers, None]

    def rows(self) -> Float32[np.ndarray, "words width"]:
        """Return one row for each word."""
        if self.mapping is None and self.scale is None:
            return self.weight
        return self.take(np.arange(len(self.words)))
