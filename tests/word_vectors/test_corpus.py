"""Words of many languages, and ids in a file that equal those in memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.word_vectors import corpus as corpus_module
from firstlayer.word_vectors.corpus import Corpus, IdWriter, learn_tokenizer, tokenized

SENTENCES = {
    "English": (
        "We don’t know the king's \"I'M\" 'tis o'clock, it's new_york 3.14!",
        "We don't know the king's I'M tis o clock it's new_york 3 14",
    ),
    "French": ("L'été, j'ai vu l’arc-en-ciel.", "L été j ai vu l arc en ciel"),
    "Python": ("f(b't', r'abc', x='s')", "f b t r abc x s"),
    "Chinese": ("我们在北京学习，用iPhone。", "我 们 在 北 京 学 习 用 iPhone"),
    "Japanese": (
        "私は東京でコーヒーを飲んでいます。",
        "私 は 東 京 で コーヒー を 飲 んでいます",
    ),
    "Korean": ("나는 서울에서 한국어를 배운다.", "나는 서울에서 한국어를 배운다"),
    "Thai": ("ที่นี่ดี", "ที่ นี่ ดี"),
    "Arabic": ("أَدْرُسُ اللغةَ، العربية؟", "أَدْرُسُ اللغةَ العربية"),
    "Persian": ("می‌خواهم بروم", "می‌خواهم بروم"),
    "Hindi": ("मैं हिन्दी में क्‍या पढ़ता हूँ।", "मैं हिन्दी में क्‍या पढ़ता हूँ"),
    "Tamil": ("தமிழ் மொழி", "தமிழ் மொழி"),
    "decomposed": ("cafe\u0301 A\u030a", "cafe\u0301 A\u030a"),
    "emoji": ("👩\u200d💻 code", "code"),
}


@pytest.mark.parametrize("text, words", SENTENCES.values(), ids=SENTENCES)
def test_words_of_a_sentence(text, words):
    tokenizer = learn_tokenizer([[text]], min_count=1)
    assert tokenizer.encode(text).tokens == words.split(" ")


def test_pattern_and_lower_case_define_words():
    texts = [["New-York's, a_b don’t! "]]
    tokenizer = learn_tokenizer(texts, min_count=1, pattern=r"[\w-]+", lower=True)
    assert tokenizer.encode(texts[0][0]).tokens == ["new-york", "s", "a_b", "don", "t"]
    tokenizer = learn_tokenizer(texts, min_count=1, lower=True)
    tokens = tokenizer.encode(texts[0][0]).tokens
    assert tokens == ["new", "york's", "a_b", "don't"]


@pytest.mark.rejects
def test_wrong_options_of_the_tokenizer_are_rejected():
    cases = [
        ({"kind": "letters"}, "kind must be 'words' or 'bpe', got 'letters'"),
        (
            {"kind": "bpe", "size": 255},
            "size must be at least 256 for bpe, a piece for each byte, got 255",
        ),
        ({"min_count": 0}, "min_count must be positive, got 0"),
        (
            {"pattern": "(a"},
            "pattern must be a regular expression: Oniguruma error: end pattern with "
            "unmatched parenthesis",
        ),
        ({"kind": "bpe", "pattern": "a"}, "pattern is for words, but the tokenizer is bpe"),
    ]
    for options, want in cases:
        with pytest.raises(ValueError) as caught:
            learn_tokenizer([["a"]], **options)
        assert want in str(caught.value)


def test_corpus_keeps_document_bounds_and_drops_unknown_words():
    documents = [["one two ", "one three"], [], ["two two"], []]
    tokenizer = learn_tokenizer(documents, min_count=2)
    corpus = tokenized(documents, tokenizer)
    rows = tokenizer.get_vocab()
    want = [rows[word] for word in ("one", "two", "one", "two", "two")]
    assert corpus.ids.tolist() == want and corpus.bounds.tolist() == [0, 3, 3, 5, 5]
    assert rows == {"[UNK]": 0, "two": 1, "one": 2}
    assert corpus.counts().tolist() == [0, 3, 2]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    chunk=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_chunks_of_a_file_equal_arrays_in_memory(lengths, chunk, seed):
    rng = np.random.default_rng(seed)
    tokenizer = learn_tokenizer([["a b c d"]], min_count=1)
    ids = rng.integers(0, 5, sum(lengths)).astype(np.int32)
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int64)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.array([0.9, 0.2, 0.5, 1.0, 0.0], np.float32)
    is_kept = np.random.default_rng(seed).random(ids.size, dtype=np.float32) < kept[ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "CHUNK", chunk)
        for scratch in (None, "/tmp"):
            corpus = Corpus(tokenizer, ids, bounds, scratch)
            found = list(corpus.chunks())
            assert [i for part, _ in found for i in part] == ids.tolist()
            assert [i for _, part in found for i in part] == numbers.tolist()
            drawn = corpus.subsampled(kept, np.random.default_rng(seed))
            assert drawn[0].tolist() == ids[is_kept].tolist()
            assert drawn[1].tolist() == numbers[is_kept].tolist()
            assert {array.dtype.name for array in drawn} == {"int32"}
    assert corpus.counts().tolist() == np.bincount(ids, minlength=5).tolist()


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK", 1 << 14)
    monkeypatch.setattr(corpus_module, "MAX_CHARACTERS", 1 << 15)
    block = "red green blue cat dog " * 600
    tokenizer = learn_tokenizer([[block]])
    whole = tokenized([[block] * 100], tokenizer)
    kept = np.full(6, 0.9, np.float32)
    drawn = whole.subsampled(kept, np.random.default_rng(3))
    tracemalloc.start()
    corpus = tokenized([(block for _ in range(100))], tokenizer, scratch=tmp_path)
    assert np.array_equal(corpus.counts(), whole.counts())
    again = corpus.subsampled(kept, np.random.default_rng(3))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The ids alone have 1.2 MB in memory; three arrays of that size are made.
    assert whole.ids.nbytes == 1_200_000 and peak < 800_000
    assert np.array_equal(corpus.ids, whole.ids)
    assert all(np.array_equal(a, b) for a, b in zip(again, drawn, strict=True))
    assert corpus.ids.flags.writeable and list(tmp_path.iterdir()) == []


def test_two_arrays_grow_in_one_folder(tmp_path):
    one, other, empty = (IdWriter(tmp_path) for _ in range(3))
    for i in range(5):
        one.append(np.arange(i))
        other.append(np.array([7 * i]))
    assert one.array().tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert other.array().tolist() == [0, 7, 14, 21, 28] and empty.array().size == 0
