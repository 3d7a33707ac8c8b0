"""Scores equal those of SciPy and gensim, and lines with unknown words are counted."""

import json
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from firstlayer.word_vectors.evaluate import evaluate, spearman
from firstlayer.word_vectors.vectors import Vectors
from tests.support.command import error_message, stdout_of

rng = np.random.default_rng(0)
WORDS = [f"w{i}" for i in range(40)]


def table():
    rows = rng.standard_normal((40, 6)).astype(np.float32)
    # w3 - w0 + w10 is w13, and so on, for some of the words.
    rows[3], rows[13] = rows[0] + rows[20], rows[10] + rows[20]
    return Vectors(WORDS, rows)


def gensim_vectors(vectors):
    from gensim.models import KeyedVectors

    keyed = KeyedVectors(vectors.weight.shape[1])
    keyed.add_vectors(vectors.words, vectors.weight)
    return keyed


def test_spearman_equals_scipy_with_ties():
    a, b = rng.integers(0, 9, (2, 50)).astype(float)
    want: Any = spearmanr(a, b)[0]
    np.testing.assert_allclose(spearman(a, b), want, rtol=1e-12)
    assert np.isnan(spearman(np.ones(4), np.arange(4.0)))


def test_similarity_files_equal_gensim(tmp_path):
    vectors = table()
    pairs = [(*rng.choice(WORDS, 2), rng.integers(0, 8)) for _ in range(60)]
    lines = [f"{a}\t{b}\t{score}" for a, b, score in pairs]
    path = tmp_path / "pairs.tsv"
    path.write_text("# comment\n" + "\n".join(lines) + "\nw1\tunknown\t3\n")
    found = evaluate(vectors, path)
    want: Any = gensim_vectors(vectors).evaluate_word_pairs(str(path))[1][0]
    np.testing.assert_allclose(found.score, want, atol=1e-6)
    assert (found.measure, found.used, found.total) == ("spearman", 60, 61)
    for separator in (",", " "):
        path.write_text("first second score\n".replace(" ", separator))
        with open(path, "a") as file:
            file.write("\n".join(lines).replace("\t", separator))
        assert evaluate(vectors, path).score == found.score
    # The files of WordSim-353 and SimLex-999 as they were published.
    wordsim = ["Word 1,Word 2,Human (mean)", *(line.replace("\t", ",") for line in lines)]
    simlex = ["word1\tword2\tPOS\tSimLex999"]
    simlex += [f"{a}\t{b}\tN\t{score}" for a, b, score in pairs]
    # With the number of judgements after the score.
    counted = [f"{a} {b} {score} 16" for a, b, score in pairs]
    for rows in (wordsim, simlex, counted):
        path.write_text("\r\n".join(rows), encoding="utf-8-sig")
        assert evaluate(vectors, path).score == found.score
        assert evaluate(vectors, path).total == 60


def test_repeated_words_of_a_table_answer_nothing(tmp_path):
    # "d" again is nearer to b - a + c than "d" itself.
    rows = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0.2, 1, 1], [0, 1, 1]], np.float32)
    path = tmp_path / "questions.txt"
    path.write_text("a b c d\n")
    assert evaluate(Vectors(["a", "b", "c", "d", "e"], rows), path).score == 0
    assert evaluate(Vectors(["a", "b", "c", "d", "d"], rows), path).score == 1


def test_analogy_files_equal_gensim(tmp_path):
    vectors = table()
    questions = [rng.choice(WORDS, 4, replace=False) for _ in range(300)]
    lines = [": first", "w0 w3 w10 w13", "w0 w3 w10 nobody", ": second"]
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(lines + [" ".join(q) for q in questions]) + "\n")
    found = evaluate(vectors, path)
    want, sections = gensim_vectors(vectors).evaluate_word_analogies(str(path))
    assert (found.measure, found.used, found.total) == ("accuracy", 301, 302)
    assert found.score == want and found.sections["first"] == 1
    second = len(sections[1]["correct"]) / 300
    assert found.sections["second"] == second < 0.5


def test_command_prints_a_line_per_file(tmp_path):
    vectors = table()
    rows = [
        " ".join([w, *map(str, row)]) for w, row in zip(WORDS, vectors.weight, strict=True)
    ]
    (tmp_path / "glove.txt").write_text("\n".join(rows) + "\n")
    (tmp_path / "a.txt").write_text("w0 w3 w10 w13\n")
    (tmp_path / "b.tsv").write_text("w0\tw1\t1\nw0\tw3\t2\nw1\tnone\t3\n")
    args = ["evaluate", tmp_path / "glove.txt", tmp_path / "a.txt", tmp_path / "b.tsv"]
    first, second = stdout_of(*args).splitlines()
    assert first.split()[1:] == ["accuracy", "1.000", "1", "of", "1", "lines"]
    assert second.split()[1] == "spearman" and second.endswith("2 of 3 lines")
    analogy, similarity = json.loads(stdout_of(*args, "--json"))
    assert analogy["score"] == 1 and abs(similarity["score"]) == 1


@pytest.mark.rejects
def test_bad_files_are_rejected(tmp_path):
    path = tmp_path / "f.txt"
    for text, message in {
        "# nothing\n": "has no pairs and no analogies",
        "w0 w1 2\nw0 w1\n": "must have two words and a score in line 2, got 'w0 w1'",
        ": s\nw0 w1 w2\n": "must have four words in line 2, got 'w0 w1 w2'",
        "w0 no 1\nw1 w2 1\n": "words of at least 2 of 2 pairs of .*, got 1",
        "a b c d\n": "has the words of none of 1 analogies",
        "w0,w1,nan,2\nw0,w1,inf,3\n": "must have two words and a score in line 2",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            evaluate(table(), path)
    path.write_text("w0 w1 w2\n")
    (tmp_path / "v.txt").write_text("w0 1 2\nw1 2 1\n")
    message = error_message("evaluate", tmp_path / "v.txt", path)
    assert message == f"{path} must have two words and a score in line 1, got 'w0 w1 w2'"
