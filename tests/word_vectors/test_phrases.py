"""Phrases equal those of gensim, for any division of the text into chunks."""

from pathlib import Path

import numpy as np
import pytest
from gensim.models.phrases import Phrases as GensimPhrases
from gensim.test.utils import datapath
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.word_vectors import corpus as corpus_module
from firstlayer.word_vectors import phrases as phrases_module
from firstlayer.word_vectors.corpus import Corpus, learn_tokenizer, tokenized
from firstlayer.word_vectors.phrases import (
    Phrases,
    find_phrases,
    join_phrases,
    learn_phrases,
)


def spelled(corpus, names=None):
    """Return the words of each document."""
    words = corpus.words() if names is None else names
    bounds = corpus.bounds
    return [
        [words[i] for i in corpus.ids[lo:hi]]
        for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def test_phrases_equal_gensim(monkeypatch):
    lines = Path(datapath("lee_background.cor")).read_text().splitlines()
    documents = [[line] for line in lines]
    tokenizer = learn_tokenizer(documents, min_count=1, size=10**6, lower=True)
    corpus = tokenized(documents, tokenizer, keep_unknown=True)
    sentences = spelled(corpus)
    options = {"min_count": 4, "threshold": 7.5}
    joined = sentences
    for _ in range(2):
        theirs = GensimPhrases(joined, **options)
        joined = [theirs[sentence] for sentence in joined]
    monkeypatch.setattr(corpus_module, "CHUNK", 1000)
    names, found = find_phrases(corpus, passes=2, **options)
    ids = [[names.index(word) for word in sentence] for sentence in sentences[:50]]
    ours = [[names[i] for i in one] for one in found.joined(ids)]
    assert ours == joined[:50]
    assert {"new_york", "osama_bin", "al_qaeda"} & {w for one in joined for w in one}
    # All phrases, not only those of these documents.
    theirs = {word for one in joined for word in one if "_" in word}
    chunks = list(found.join_chunks(corpus.chunks()))
    mine = {names[i] for some, _ in chunks for i in some if "_" in names[i]}
    assert mine == theirs and len(mine) > 300 and any(w.count("_") > 1 for w in mine)


def joined_in_python(ids, passes):
    for pairs in passes:
        out, i = [], 0
        while i < len(ids):
            pair = tuple(ids[i : i + 2])
            out.append(pairs.get(pair, ids[i]))
            i += 2 if pair in pairs else 1
        ids = out
    return ids


@given(
    texts=st.lists(st.lists(st.integers(1, 4), max_size=12), max_size=5),
    first=st.sets(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=6),
    second=st.sets(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=9),
    chunk=st.integers(1, 6),
)
def test_pairs_are_joined_from_left_to_right(texts, first, second, chunk):
    passes = [{pair: 5 + i for i, pair in enumerate(sorted(first))}]
    passes.append({pair: 20 + i for i, pair in enumerate(sorted(second))})
    tables = []
    for pairs in passes:
        keys = np.array([a << 32 | b for a, b in pairs], np.int64)
        tables.append(phrases_module.Pairs(keys, np.array([*pairs.values()], np.int32)))
    phrases = Phrases(tuple(tables))
    want = [joined_in_python(ids, passes) for ids in texts]
    assert phrases.joined(texts) == want
    flat = np.array([i for ids in texts for i in ids], np.int32)
    bounds = np.append(0, np.cumsum([len(ids) for ids in texts])).astype(np.int64)
    tokenizer = learn_tokenizer([["a b c d e"]], min_count=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "CHUNK", chunk)
        got = join_phrases(Corpus(tokenizer, flat, bounds), phrases)
    parts = zip(got.bounds[:-1], got.bounds[1:], strict=True)
    assert [got.ids[lo:hi].tolist() for lo, hi in parts] == want


def text_with(phrase, count=60):
    """Return a text of random words with a phrase and a rare word in it."""
    words = [f"w{i}" for i in np.random.default_rng(0).integers(0, 20, 2000)]
    for i in range(count):
        words.insert(33 * i, phrase)
    return [[" ".join(words) + " rare" * 4]]


TEXT = text_with("new york city")


def test_vocabulary_has_phrases_and_their_words(tmp_path):
    tokenizer = learn_tokenizer(TEXT, min_count=4)
    corpus = tokenized(TEXT, tokenizer, keep_unknown=True, scratch=tmp_path)
    joined, phrases = learn_phrases(corpus, passes=2, min_count=5, threshold=1.0)
    words = joined.words()
    assert words[0] == "[UNK]" and "new_york_city" in words
    # Words of phrases stay, so that the phrases are found; other rare words do not.
    assert {"new", "york", "city"} <= set(words) and "rare" not in words
    ids = joined.tokenizer.encode("w3 rare new york city").ids
    row = words.index("new_york_city")
    assert len(ids) == 5 and phrases.joined([ids]) == [[words.index("w3"), 0, row]]
    again = tokenized(TEXT, joined.tokenizer, keep_unknown=True)
    assert spelled(join_phrases(again, phrases)) == spelled(joined)
    assert "[UNK]" not in spelled(joined)[0]
    few, _ = learn_phrases(corpus, passes=2, min_count=5, threshold=1.0, size=4)
    assert few.num_embeddings <= 4
    saved = Phrases.from_words(phrases.to_words(words), joined.tokenizer.get_vocab())
    for one, other in zip(saved.passes, phrases.passes, strict=True):
        assert np.array_equal(one.keys, other.keys) and np.array_equal(one.ids, other.ids)


def test_rare_pairs_are_forgotten_and_frequent_ones_found(monkeypatch):
    rng = np.random.default_rng(0)
    noise = " ".join(f"w{i}" for i in rng.integers(0, 60, 4000))
    texts = [[noise + " new york" * 50 + " " + noise]]
    corpus = tokenized(texts, learn_tokenizer(texts, min_count=1), keep_unknown=True)
    monkeypatch.setattr(corpus_module, "CHUNK", 500)
    monkeypatch.setattr(phrases_module, "MAX_PAIRS", 100)
    names, found = find_phrases(corpus, passes=1, min_count=5, threshold=0.5)
    assert "new_york" in names and sum(one.keys.size for one in found.passes) <= 100


@pytest.mark.rejects
def test_wrong_options_are_rejected():
    corpus = tokenized(TEXT, learn_tokenizer(TEXT), keep_unknown=True)
    for options, want in [
        ({"passes": 0}, "passes must be positive, got 0"),
        ({"passes": 1, "min_count": 0}, "min_count must be positive, got 0"),
        ({"passes": 1, "threshold": -1.0}, "threshold must not be negative, got -1"),
    ]:
        with pytest.raises(ValueError, match=want):
            learn_phrases(corpus, **options)
