"""Which words are near a word, or near a sum of words: ``king - man + woman``.

Nearness is the cosine. A sum adds rows of unit length, so that a frequent word's long row
does not drown the others (Mikolov, Yih and Zweig 2013); its own words are no neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from .._check import positive
from .vectors import Vectors


@dataclass(frozen=True)
class Neighbor:
    """A word and how near it is.

    Args:
        word: The word.
        cosine: 1 is the same direction, 0 a right angle.
    """

    word: str
    cosine: float


@dataclass(frozen=True)
class Neighbors:
    """What is near to what was asked for.

    Args:
        query: What was asked, ``king - man + woman``.
        found: The nearest first.
    """

    query: str
    found: list[Neighbor]


Terms = list[tuple[int, str]]


def parse(words: Sequence[str]) -> list[Terms]:
    """Return queries as signed words. ``+`` and ``-`` join, anything else begins a new one.

    Example:
        >>> parse(["king", "-", "man + woman", "red"])
        [[(1, 'king'), (-1, 'man'), (1, 'woman')], [(1, 'red')]]
    """
    queries: list[Terms] = []
    sign = None
    for word in " ".join(words).split():
        if word in ("+", "-"):
            if sign is not None or not queries:
                raise ValueError(f"{word!r} must stand between two words")
            sign = 1 if word == "+" else -1
        elif sign is None:
            queries.append([(1, word)])
        else:
            queries[-1].append((sign, word))
            sign = None
    if sign is not None:
        raise ValueError(f"{'+' if sign > 0 else '-'!r} must stand between two words")
    return queries


def neighbors(
    vectors: Vectors, queries: Sequence[Terms], *, count: int = 10
) -> list[Neighbors]:
    """Return the words nearest to each query.

    Args:
        vectors: The words and their rows.
        queries: Signed words, see :func:`parse`. One that is not in the table is a
            ValueError.
        count: How many to return.

    Example:
        >>> rows = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]] + np.float32(0.1)
        >>> table = Vectors(["a", "b", "c", "A"], rows)
        >>> neighbors(table, parse(["a"]), count=1)[0].found[0].word
        'A'
    """
    positive("count", count)
    unit = units(vectors.weight)
    return [_neighbors(vectors, unit, terms, count) for terms in queries]


def _neighbors(vectors: Vectors, unit: np.ndarray, terms: Terms, count: int) -> Neighbors:
    rows = [vectors.row(word) for _, word in terms]
    signs = np.array([sign for sign, _ in terms], np.float32)
    cosines = unit @ units((signs @ unit[rows])[None])[0]
    left_out = rows if vectors.unknown is None else [*rows, vectors.unknown]
    cosines[left_out] = -np.inf
    cosines[np.isnan(cosines)] = -np.inf
    # Two passes: all of a large table need not be sorted for ten of its words.
    top = np.argpartition(-cosines, min(count, cosines.size - 1))[:count]
    top = sorted(top[np.isfinite(cosines[top])], key=lambda row: (-cosines[row], row))
    found = [Neighbor(vectors.shown(row), float(cosines[row])) for row in top]
    return Neighbors(_spelled(terms), found)


def _spelled(terms: Terms) -> str:
    signed = (f"{'+' if sign > 0 else '-'} {word}" for sign, word in terms)
    return " ".join(signed).removeprefix("+ ")


def similarities(vectors: Vectors, words: Sequence[str]) -> Float32[np.ndarray, "n n"]:
    """Return the cosine of each word with each.

    Args:
        vectors: The words and their rows.
        words: Which. One that is not in the table is a ValueError.
    """
    unit = units(vectors.weight[[vectors.row(word) for word in words]])
    return np.clip(unit @ unit.T, -1, 1)


def units(rows: Float32[np.ndarray, "rows width"]) -> Float32[np.ndarray, "rows width"]:
    """Return the rows one unit long; zeros stay."""
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return rows / np.where(norms > 0, norms, 1)
