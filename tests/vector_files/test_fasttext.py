"""fastText's binary format, with vectors of unknown words."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gensim.models.fasttext import load_facebook_vectors
from gensim.test.utils import datapath

from firstlayer import kernels
from firstlayer.kernels import plain
from firstlayer.vector_files.fasttext import read_fasttext
from firstlayer.word_vectors.encode import encode
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.vector_files import (
    WORDS,
    fasttext_bytes,
    quantized_fasttext_bytes,
)

rng = np.random.default_rng(0)


@pytest.mark.parametrize("name", ["crime-and-punishment.bin", "lee_fasttext_new.bin"])
def test_real_models_equal_gensim(name):
    path = datapath(name)
    theirs, vectors = load_facebook_vectors(path), open_vectors(path)
    assert vectors.words == theirs.index_to_key
    # fastText gives the end of a line no n-grams; gensim does.
    rows = [i for i, word in enumerate(vectors.words) if word != "</s>"]
    np.testing.assert_array_equal(vectors.weight[rows], theirs.vectors[rows])
    for word in ("unbelievablement", "преступник", "a", "é"):
        np.testing.assert_array_equal(vectors[word], theirs[word])


def fnv(gram):
    value = 2166136261
    for byte in gram.encode():
        value = (value ^ (byte | 0xFFFFFF00 if byte > 127 else byte)) * 16777619 % 2**32
    return value


def grams(word):
    """Return the n-grams of one and two characters."""
    inside, whole = list(word), f"<{word}>"
    return inside + [whole[i : i + 2] for i in range(len(whole) - 1)]


def test_word_vectors_are_means_by_the_definition(tmp_path):
    rows = rng.standard_normal((len(WORDS) + 7, 3)).astype(np.float32)
    (tmp_path / "a.bin").write_bytes(fasttext_bytes(WORDS, rows, buckets=7, lengths=(1, 2)))
    vectors = open_vectors(tmp_path / "a.bin")

    def hashed(gram):
        return fnv(gram) % 7 + len(WORDS)

    for number, word in enumerate(WORDS):
        own = [number, *map(hashed, grams(word))]
        np.testing.assert_allclose(vectors[word], rows[own].mean(axis=0), atol=1e-6)
    other = rows[[hashed(gram) for gram in grams("ré漢")]].mean(axis=0)
    np.testing.assert_allclose(vectors["ré漢"], other, atol=1e-6)
    assert vectors.find("unking").note == "unking is the mean of 13 character n-grams"
    (got,) = encode(vectors, ["king ré漢"])
    np.testing.assert_allclose(got[0], (vectors["king"] + other) / 2, atol=1e-6)


def test_plain_version_equals_the_kernel():
    words = [f"<{word}>".encode() for word in (*WORDS, "a", "")] + [b"", b"\xff\x80"]
    bounds = np.append(0, np.cumsum([len(word) for word in words])).astype(np.int64)
    text = np.frombuffer(b"".join(words), np.uint8)
    table = rng.standard_normal((20, 4)).astype(np.float32)
    own = np.array([0, -1, 3, 2, 1, -1, 0, -1, 99])[: len(words)]
    kept = np.array([[0, 2, 3, 9, 14], [19, 3, 7, 15, 0]], np.int32)
    for lengths, buckets, rows in (
        ((1, 3), 15, None),
        ((3, 6), 1, None),
        ((2, 2), 0, None),
        ((1, 3), 15, kept),
    ):
        results = []
        for module in (kernels, plain):
            out = np.empty((len(words), 4), np.float32)
            counts = np.empty(len(words), np.int64)
            module.mean_subword_rows(
                text,
                bounds,
                own,
                table,
                buckets=buckets,
                lengths=lengths,
                out=out,
                counts=counts,
                bucket_rows=rows,
            )
            results.append((out, counts))
        np.testing.assert_array_equal(results[0][1], results[1][1])
        np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-6)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("keeps_all", [False, True])
def test_quantized_models_are_decoded_by_the_definition(tmp_path, has_norms, keeps_all):
    # Rows of 7 numbers in parts of 3, 3 and 1; each part has 256 centroids.
    centroids = [rng.standard_normal((256, size)).astype(np.float32) for size in (3, 3, 1)]
    buckets, kept = 11, {8: 0, 3: 2, 5: 1}
    rows_of = {i: i for i in range(buckets)} if keeps_all else kept
    count = len(WORDS) + len(rows_of)
    codes = rng.integers(0, 256, (count, 3)).astype(np.uint8)
    norms = (
        rng.integers(0, 256, count).astype(np.uint8),
        rng.standard_normal(256).astype(np.float32),
    )
    (tmp_path / "a.ftz").write_bytes(
        quantized_fasttext_bytes(
            WORDS,
            codes,
            centroids,
            buckets=buckets,
            kept=None if keeps_all else list(kept.items()),
            norms=norms if has_norms else None,
            lengths=(1, 2),
        )
    )
    vectors = open_vectors(tmp_path / "a.ftz")
    rows = []
    for number in range(count):
        row = [x for part in range(3) for x in centroids[part][codes[number, part]]]
        rows.append(np.array(row) * (norms[1][norms[0][number]] if has_norms else 1))

    def of_grams(word):
        hashes = [fnv(gram) % buckets for gram in grams(word)]
        return [rows[len(WORDS) + rows_of[one]] for one in hashes if one in rows_of]

    assert vectors.words == WORDS
    for number, word in enumerate(WORDS):
        want = np.mean([rows[number], *of_grams(word)], axis=0)
        np.testing.assert_allclose(vectors[word], want, atol=1e-6)
    other = of_grams("unking")
    np.testing.assert_allclose(vectors["unking"], np.mean(other, axis=0), atol=1e-6)
    assert f"the mean of {len(other)} character" in vectors.find("unking").note


#: Vectors of ``tests/data/fasttext_0_9_2.ftz``, which fastText 0.9.2 wrote (``quantize``
#: with ``cutoff=260, dsub=2, qnorm=True``), by its own ``getWordVector``.
GOLDEN = {
    "king": [0.16117146611213684, -0.4520342946052551, -0.0719120129942894],
    "naïve": [0.30132636427879333, -0.6842483282089233, -0.19621747732162476],
    "漢字": [0.23477719724178314, -0.7173426151275635, -0.21020738780498505],
    "kings": [0.0061990683898329735, -0.0950285941362381, -0.05736305192112923],
    "unread": [0.06539938598871231, -0.09629741311073303, 0.007382778916507959],
}


def test_quantized_model_of_fasttext_equals_fasttext():
    path = Path(__file__).parents[1] / "data" / "fasttext_0_9_2.ftz"
    vectors = open_vectors(path)
    assert vectors.words[:3] == ["</s>", "reddish", "blue"] and len(vectors) == 11
    for word, want in GOLDEN.items():
        np.testing.assert_allclose(vectors[word], want, atol=1e-7)
    assert "kings" not in vectors.rows


ROWS = np.ones((len(WORDS) + 2, 3), np.float32)
GOOD = fasttext_bytes(WORDS, ROWS, buckets=2)
SMALL = quantized_fasttext_bytes(
    WORDS,
    np.zeros((7, 1), np.uint8),
    [np.ones((256, 2))],
    buckets=3,
    kept=[(1, 0), (2, 1)],
)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "content, message",
    [
        (GOOD[:30], "is cut short"),
        (GOOD[:120], "is cut short"),
        (GOOD[:-60], "is cut short: 7 rows of 3 numbers"),
        (fasttext_bytes(WORDS, ROWS, buckets=2, version=9), "version 11 or 12, got 9"),
        (fasttext_bytes(WORDS, ROWS, buckets=2, pruned=99), "99 n-grams in"),
        (SMALL[:-30], "a quantizer of 2 numbers"),
        (
            SMALL.replace(struct.pack("<2i", 1, 0), struct.pack("<2i", 3, 0)),
            "has n-gram 3 of 3 and",
        ),
        (
            SMALL.replace(struct.pack("<2i", 1, 0), struct.pack("<2i", 1, 2)),
            "and its row 2 of 2",
        ),
        (
            SMALL.replace(struct.pack("<2qi", 7, 2, 7), struct.pack("<2qi", 7, 2, 6)),
            "is cut short: a quantizer of 512 numbers",
        ),
        (SMALL.replace(struct.pack("<2qi", 7, 2, 7), struct.pack("<2qi", 7, 2, -1)), "cut"),
        (fasttext_bytes(WORDS, ROWS, buckets=9), "7 rows, but 5 words and 9"),
        (fasttext_bytes(WORDS, ROWS, buckets=2, lengths=(3, 99)), "of 3 to 99 characters"),
        (GOOD.replace(struct.pack("<2q", 7, 3), struct.pack("<2q", 2**60, 3)), "cut short"),
    ],
)
def test_damaged_models_are_refused(content, message, tmp_path):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_fasttext(Path(tmp_path / "a.bin"))
