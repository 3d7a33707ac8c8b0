"""Nearest neighbors of a word or of a sum of words: ``king - man + woman``.

Similarity is the cosine. Sums add rows of unit length, so that the longer rows of frequent
words do not dominate (Mikolov, Yih and Zweig 2013). Query words are excluded.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from .._check import positive
from .vectors import Vectors, WordVector


@dataclass(frozen=True)
class Neighbor:
    """A word and its similarity to the query.

    Args:
        word: The word.
        cosine: Cosine similarity.
    """

    word: str
    cosine: float


@dataclass(frozen=True)
class Neighbors:
    """Neighbors of a query.

    Args:
        query: The query, such as ``king - man + woman``.
        found: Neighbors, nearest first.
        notes: Sentences about words whose vectors were made of several rows.
    """

    query: str
    found: list[Neighbor]
    notes: list[str]


Terms = list[tuple[int, str]]
#: A plus or minus between spaces.
SIGN = r"(?<!\S)([-+])(?!\S)"


def parse(words: Sequence[str]) -> list[Terms]:
    """Parse queries into signed words. ``+`` and ``-`` join words into one query.

    A string with spaces is one word, which may be a phrase or several pieces.

    Example:
        >>> parse(["king", "-", "man + woman", "new york"])
        [[(1, 'king'), (-1, 'man'), (1, 'woman')], [(1, 'new york')]]
    """
    queries: list[Terms] = []
    sign = None
    parts = (part for text in words for part in re.split(SIGN, text))
    for word in (" ".join(part.split()) for part in parts):
        if not word:
            continue
        if word in ("+", "-"):
            if sign is not None or not queries:
                raise ValueError(f"{word!r} must stand between two words")
            sign = 1 if word == "+" else -1
        elif sign is None:
            queries.append([(1, word)])
        else:
            queries[-1].append((sign, word))
            sign = None
    if not queries:
        raise ValueError("a query must have a word")
    if sign is not None:
        raise ValueError(f"{'+' if sign > 0 else '-'!r} must stand between two words")
    return queries


def neighbors(
    vectors: Vectors, queries: Sequence[Terms], *, count: int = 10
) -> list[Neighbors]:
    """Return the words nearest to each query.

    Args:
        vectors: Words and rows.
        queries: Signed words; see :func:`parse`. An unknown word is a ValueError.
        count: Number of neighbors per query.

    Example:
        >>> rows = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]] + np.float32(0.1)
        >>> table = Vectors(["a", "b", "c", "A"], rows)
        >>> neighbors(table, parse(["a"]), count=1)[0].found[0].word
        'A'
    """
    positive("count", count)
    unit = units(vectors.weight)
    # Rows of zeros have no direction, so they are near to nothing.
    unit[~unit.any(axis=1)] = np.nan
    return [_neighbors(vectors, unit, terms, count) for terms in queries]


def _neighbors(vectors: Vectors, unit: np.ndarray, terms: Terms, count: int) -> Neighbors:
    words = [_directed(vectors.find(word)) for _, word in terms]
    rows = sorted({number for word in words for number in word.numbers})
    signs = np.array([sign for sign, _ in terms], np.float32)
    direction = signs @ units(np.stack([word.vector for word in words]))
    if not np.abs(direction).max(initial=0) > 1e-6:
        raise ValueError(f"{_query_text(terms)!r} has no direction: its vectors add to 0")
    cosines = unit @ units(direction[None])[0]
    if vectors.mapping is not None:
        cosines = cosines[vectors.mapping]
    if vectors.scale is not None:
        cosines *= np.sign(vectors.scale)
    excluded = rows if vectors.unknown is None else [*rows, vectors.unknown]
    cosines[[*excluded, *vectors.nameless]] = -np.inf
    cosines[np.isnan(cosines)] = -np.inf
    # argpartition avoids sorting the whole table.
    top = np.argpartition(-cosines, min(count, cosines.size - 1))[:count]
    top = sorted(top[np.isfinite(cosines[top])], key=lambda row: (-cosines[row], row))
    found = [Neighbor(vectors.shown(row), float(cosines[row])) for row in top]
    notes = [word.note for word in words if word.note]
    return Neighbors(_query_text(terms), found, notes)


def _directed(word: WordVector) -> WordVector:
    """Return a word whose vector has a direction; another one is a ValueError."""
    if not np.isfinite(word.vector).all():
        raise ValueError(f"{word.word!r} has a vector that is not finite")
    if not word.vector.any():
        raise ValueError(f"{word.word!r} has a vector of zeros, which has no direction")
    return word


def _query_text(terms: Terms) -> str:
    signed = (f"{'+' if sign > 0 else '-'} {word}" for sign, word in terms)
    return " ".join(signed).removeprefix("+ ")


@dataclass(frozen=True)
class Similarities:
    """Cosines of words.

    Args:
        words: The words.
        cosines: Cosine of every pair.
        notes: Sentences about words whose vectors were made of several rows.
    """

    words: list[str]
    cosines: Float32[np.ndarray, "n n"]
    notes: list[str]


def similarities(vectors: Vectors, words: Sequence[str]) -> Similarities:
    """Return the cosine of every pair of words.

    Args:
        vectors: Words and rows.
        words: Words to compare. An unknown word is a ValueError.
    """
    found = [_directed(vectors.find(word)) for word in words]
    unit = units(np.stack([word.vector for word in found]))
    notes = [word.note for word in found if word.note]
    return Similarities(list(words), np.clip(unit @ unit.T, -1, 1), notes)


def units(rows: Float32[np.ndarray, "rows width"]) -> Float32[np.ndarray, "rows width"]:
    """Return the rows scaled to unit length; zero rows stay zero."""
    # Rows of infinities and NaN have no direction and become NaN.
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))[:, None]
        return rows / np.where(norms > 0, norms, 1).astype(np.float32)
