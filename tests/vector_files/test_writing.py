"""Tables are written in formats that other programs and Firstlayer read."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from gensim.models import KeyedVectors

from firstlayer.vector_files import writing
from firstlayer.vector_files.reading import read_vectors
from firstlayer.vector_files.table import VectorTable
from firstlayer.vector_files.writing import format_of, write_vectors
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.command import call, error_message, file_contents, stdout_of
from tests.support.vector_files import WORDS, table

NAMES = {
    "word2vec": "a.txt",
    "word2vec-binary": "a.bin",
    "glove": "glove.txt",
    "tsv": "a.tsv",
    "npy": "b.npy",
    "parquet": "a.parquet",
}


def source() -> VectorTable:
    rows = table()
    rows[0, 0], rows[1, 1] = 1e-40, -0.0
    return VectorTable(list(WORDS), rows)


@pytest.mark.parametrize("format", NAMES)
def test_a_table_is_read_back_bit_for_bit(format, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHUNK_NUMBERS", 12)
    reported = []
    path = tmp_path / NAMES[format]
    written = write_vectors(source(), path, format, report=reported.append)
    assert (written.rows, written.width, written.left_out) == (5, 6, [])
    assert sorted(written.files) == sorted(map(str, tmp_path.iterdir()))
    assert reported == [2, 4, 5]
    found = read_vectors(path)
    assert found.words == WORDS and found.weight.tobytes() == source().weight.tobytes()


def test_gensim_and_numpy_read_the_files(tmp_path):
    for format in ("word2vec", "word2vec-binary"):
        path = tmp_path / NAMES[format]
        write_vectors(source(), path, format)
        theirs = KeyedVectors.load_word2vec_format(path, binary="binary" in format)
        assert theirs.index_to_key == WORDS
        assert theirs.vectors.tobytes() == source().weight.tobytes()
    write_vectors(source(), tmp_path / "a.npy", "npy")
    assert np.load(tmp_path / "a.npy").tobytes() == source().weight.tobytes()
    write_vectors(source(), tmp_path / "a.tsv", "tsv")
    np.testing.assert_array_equal(
        np.loadtxt(tmp_path / "a.tsv", np.float32, delimiter="\t"), source().weight
    )
    assert (tmp_path / "a.metadata.tsv").read_text().split() == WORDS


def test_compressed_text_is_the_same_every_time(tmp_path):
    write_vectors(source(), tmp_path / "a.txt", "word2vec")
    for name in ("a.txt.gz", "b.vec.gz"):
        assert format_of(name) == "word2vec"
        write_vectors(source(), tmp_path / name, "word2vec")
    packed = (tmp_path / "a.txt.gz").read_bytes()
    assert packed == (tmp_path / "b.vec.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.txt").read_bytes()


def test_a_folder_is_read_by_model2vec(tmp_path):
    from model2vec import StaticModel

    words = ["king", "Red", "king", "", "c"]
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    written = write_vectors(VectorTable(words, rows), tmp_path / "v", "folder")
    assert (written.rows, written.duplicates, written.left_out) == (4, 1, [""])
    model = StaticModel.from_pretrained(tmp_path / "v")
    np.testing.assert_allclose(model.encode("king Red"), rows[:2].mean(axis=0))
    vectors = open_vectors(tmp_path / "v")
    assert vectors["c"].tolist() == rows[4].tolist() and "[UNK]" in vectors
    with pytest.raises(FileExistsError, match="exists already"):
        write_vectors(source(), tmp_path / "v", "folder")
    write_vectors(source(), tmp_path / "v", "folder", replace=True)
    assert read_vectors(tmp_path / "v").words == [*WORDS, "[UNK]"]


def test_words_that_a_format_cannot_hold_are_left_out(tmp_path):
    words = ["a b", "c\nd", "", "e\tf", "g"]
    one = VectorTable(words, table(2))
    left = {
        "word2vec": ["a b", "c\nd", "", "e\tf"],
        "word2vec-binary": ["a b", "c\nd", ""],
        "glove": ["a b", "c\nd", "", "e\tf"],
        "tsv": ["c\nd", "", "e\tf"],
        "npy": ["c\nd", ""],
    }
    for format, want in left.items():
        path = tmp_path / NAMES[format]
        assert write_vectors(one, path, format).left_out == want
        kept = [word for word in words if word not in want]
        assert read_vectors(path).words == kept


def test_convert_writes_by_the_name_of_the_output(tmp_path):
    write_vectors(source(), tmp_path / "a.txt", "word2vec")
    vocabulary = tmp_path / "d.vocab.txt"
    for name, format, files in (
        ("b.bin", "word2vec-binary", ["b.bin"]),
        ("d.npy", "npy", ["d.npy", "d.vocab.txt"]),
        ("e.tsv", "tsv", ["e.tsv", "e.metadata.tsv"]),
        ("folder", "folder", ["folder"]),
        ("f.txt.gz", "word2vec", ["f.txt.gz"]),
    ):
        found = json.loads(
            stdout_of("convert", tmp_path / "a.txt", tmp_path / name, "--json")
        )
        assert found["format"] == format
        assert found["files"] == [str(tmp_path / file) for file in files]
        queen = open_vectors(tmp_path / name)["queen"]
        assert queen.tobytes() == source().weight[1].tobytes()
    text = stdout_of("convert", tmp_path / "a.txt", tmp_path / "g", "--to", "glove")
    assert text == f"{tmp_path}/g: 5 rows of 6\n"
    assert (tmp_path / "g").read_text().startswith("king ")
    # Rows alone, in a format of the store.
    output = tmp_path / "rows.safetensors"
    text = stdout_of("convert", tmp_path / "a.txt", output, "--format", "float16")
    assert "5 rows of 6 in float16, 60 bytes (before: 120)" in text
    # The second file is checked as well.
    (tmp_path / "d.npy").unlink()
    message = error_message("convert", tmp_path / "a.txt", tmp_path / "d.npy")
    assert message == f"{vocabulary} exists; use --force to replace it"


@pytest.mark.rejects
def test_convert_refuses_before_anything_is_written(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("a b 1 2\nc 1 2\n\nd 1 2\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine").write_text("mine")
    before = file_contents(tmp_path)
    for arguments, message, code in (
        ([tmp_path / "b.bin"], "is not a file with vectors", 1),
        ([path, "--force"], "OUTPUT must not be FILE", 2),
        ([tmp_path / "sub", "--force"], "holds 'mine', so it is not replaced", 1),
        ([tmp_path / "sub"], "holds 'mine', so it is not replaced", 1),
        ([tmp_path / "sub", "--to", "glove"], "sub is a folder", 1),
        ([tmp_path / "b.npy", "--tensor", "x"], "--tensor needs a .safetensors OUTPUT", 2),
    ):
        assert message in error_message("convert", path, *arguments, code=code)
        assert file_contents(tmp_path) == before
    path.write_text("a 1 2\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = error_message("convert", path, tmp_path / "a.parquet")
    assert message == "writing .parquet needs pyarrow: pip install 'firstlayer[parquet]'"
    assert not (tmp_path / "a.parquet").exists()
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    message = error_message("neighbors", tmp_path / "b.parquet", "a")
    assert message == "reading .parquet needs pyarrow: pip install 'firstlayer[parquet]'"


def test_what_is_left_out_is_said(tmp_path):
    np.savez(tmp_path / "a.npz", rows=table(2), w=np.array(["a b", "c\nd", "", "a", "a"]))
    done = call("convert", tmp_path / "a.npz", tmp_path / "b.bin")
    assert done.stderr.splitlines() == [
        "2 words left out, which word2vec-binary cannot hold: 'a b', 'c\\nd'",
        "1 row without a word left out",
    ]
    assert done.stdout == f"{tmp_path}/b.bin: 2 rows of 2\n"
    done = call("convert", tmp_path / "a.npz", tmp_path / "folder")
    assert "1 row left out, whose words occur before" in done.stderr
    assert Path(tmp_path / "folder" / "tokenizer.json").exists()


def test_parquet_has_a_column_of_words_and_one_of_vectors(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    words = ["a", "b c", "日本", "a\nb", ""]
    monkeypatch.setattr(writing, "CHUNK_NUMBERS", 6)
    reported = []
    written = write_vectors(
        VectorTable(words, rows), tmp_path / "a.parquet", "parquet", report=reported.append
    )
    assert (written.rows, written.width) == (5, 3) and len(reported) > 1
    found = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert found["word"] == words
    np.testing.assert_array_equal(np.array(found["vector"], np.float32), rows)
