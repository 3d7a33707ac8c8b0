"""Evaluate word vectors on files of human similarity scores and of analogies.

A similarity file has two words and a score per line, separated by tabs, commas or spaces
(WordSim-353), perhaps with the part of speech before the score (SimLex-999). An analogy
file has four words per line and section names after a colon (Google's
``questions-words.txt``). Lines with an unknown word are skipped, and counted.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from .neighbors import units
from .text import read_lines
from .vectors import Vectors

#: Questions answered at a time.
BATCH = 256


@dataclass(frozen=True)
class Evaluation:
    """Result of one file.

    Args:
        file: File name.
        measure: ``"spearman"`` for similarities, ``"accuracy"`` for analogies.
        score: Rank correlation from -1 to 1, or share of correct answers.
        used: Number of lines whose words are all known.
        total: Number of lines.
        sections: Accuracy by section of an analogy file.
    """

    file: str
    measure: str
    score: float
    used: int
    total: int
    sections: dict[str, float]


def evaluate(vectors: Vectors, path: str | os.PathLike[str]) -> Evaluation:
    """Evaluate vectors on a similarity or analogy file; its lines tell which it is.

    Similarities are compared by Spearman's rank correlation of cosines and scores. The
    answer to ``a b c`` is the word nearest to ``b - a + c``, other than the three.

    Args:
        vectors: Words and rows.
        path: The file, ``-`` for standard input.
    """
    name, lines = os.fspath(path), list(_numbered(read_lines(path)))
    if not lines:
        raise ValueError(f"{name} has no pairs and no analogies")
    # The first line may name the columns.
    last = lines[-1][1]
    if lines[0][1].startswith(":") or (len(last.split()) == 4 and _pair(last) is None):
        return _analogies(vectors, lines, name)
    return _similarities(vectors, lines, name)


def spearman(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """Return Spearman's rank correlation; ties have the mean of their ranks.

    Example:
        >>> round(spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 9.0, 4.0])), 3)
        0.5
    """
    x, y = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def _numbered(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Yield lines with their number, without comments and empty lines."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _similarities(vectors: Vectors, lines: list[tuple[int, str]], name: str) -> Evaluation:
    pairs: list[tuple[str, str, float]] = []
    for i, (number, line) in enumerate(lines):
        pair = _pair(line)
        if pair is not None:
            pairs.append(pair)
        elif i:
            raise ValueError(
                f"{name} must have two words and a score in line {number}, got {line!r}"
            )
    if not pairs:
        number, line = lines[0]
        raise ValueError(
            f"{name} must have two words and a score in line {number}, got {line!r}"
        )
    known = [(a, b, score) for a, b, score in pairs if a in vectors and b in vectors]
    if len(known) < 2:
        raise ValueError(
            f"the table must have the words of at least 2 of {len(pairs)} pairs of {name}, "
            f"got {len(known)}"
        )
    first, second = (
        units(np.stack([vectors.find(word).vector for word in words]))
        for words in ([a for a, _, _ in known], [b for _, b, _ in known])
    )
    cosines = np.einsum("ij,ij->i", first, second, dtype=np.float64)
    score = spearman(cosines, np.array([score for *_, score in known]))
    return Evaluation(name, "spearman", score, len(known), len(pairs), {})


def _pair(line: str) -> tuple[str, str, float] | None:
    """Return the two words of a line and their score, or None if it has none.

    Example:
        >>> _pair("old,new,1.58"), _pair("old\\tnew\\tA\\t1.58"), _pair("a b c d")
        (('old', 'new', 1.58), ('old', 'new', 1.58), None)
    """
    fields = re.split(r"\t|,|;", line) if re.search(r"[\t,;]", line) else line.split()
    # The part of speech is one letter.
    at = 3 if re.fullmatch(r"\s*[A-Za-z]\s*", "".join(fields[2:3])) else 2
    score = _score(fields[at]) if len(fields) > at else None
    return None if score is None else (fields[0].strip(), fields[1].strip(), score)


def _score(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _analogies(vectors: Vectors, lines: list[tuple[int, str]], name: str) -> Evaluation:
    section, total = "", 0
    questions: list[list[int]] = []
    sections: list[str] = []
    for number, line in lines:
        if line.startswith(":"):
            section = line[1:].strip()
            continue
        words = line.split()
        if len(words) != 4:
            raise ValueError(f"{name} must have four words in line {number}, got {line!r}")
        total += 1
        rows = [_own_row(vectors, word) for word in words]
        if None not in rows:
            questions.append([row for row in rows if row is not None])
            sections.append(section)
    if not questions:
        raise ValueError(f"the table has the words of none of {total} analogies of {name}")
    right = _answered(vectors, np.array(questions))
    names = np.array(sections)
    by_section = {
        section: float(right[names == section].mean())
        for section in dict.fromkeys(sections)
    }
    return Evaluation(
        name, "accuracy", float(right.mean()), len(questions), total, by_section
    )


def _own_row(vectors: Vectors, word: str) -> int | None:
    """Return the number of a word with a row of its own, or None."""
    numbers = vectors.find(word).numbers if word in vectors else []
    return numbers[0] if len(numbers) == 1 else None


def _answered(vectors: Vectors, questions: np.ndarray) -> np.ndarray:
    """Return whether each question is answered correctly."""
    unit = units(vectors.take(np.arange(len(vectors))))
    unit[vectors.nameless] = 0
    if vectors.unknown is not None:
        unit[vectors.unknown] = 0
    right = np.empty(len(questions), bool)
    for start in range(0, len(questions), BATCH):
        a, b, c, d = questions[start : start + BATCH].T
        cosines = np.nan_to_num((unit[b] - unit[a] + unit[c]) @ unit.T, nan=-np.inf)
        for given in (a, b, c):
            cosines[np.arange(len(given)), given] = -np.inf
        right[start : start + BATCH] = cosines.argmax(axis=1) == d
    return right
