"""Text in files of any encoding and compression, in folders, and in JSON lines."""

import bz2
import gzip
import io
import json
import lzma
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.word_vectors import documents as documents_module
from firstlayer.word_vectors import text as text_module
from firstlayer.word_vectors.documents import ReadingOptions, documents_in, read_texts
from firstlayer.word_vectors.text import is_binary, read_blocks, read_lines

rng = np.random.default_rng(0)
COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
#: A text, its encoding, and the option that is needed to read it.
ENCODED = [
    ("naïve 漢字\r\n\nline 3 ", "utf-8", "utf-8"),
    ("naïve 漢字\r\n\nline 3", "utf-8-sig", "utf-8"),
    ("naïve 漢字\n𝒳 \n", "utf-16", "utf-8"),
    ("naïve 漢字\n𝒳 \n", "utf-32", "UTF8"),
    ("naïve Ärger\n\n", "latin-1", "latin-1"),
    ("漢字 コーヒー\nかな", "shift_jis", "shift_jis"),
    ("漢字 naïve\n€", "gb18030", "gb18030"),
    ("naïve 漢字", "utf-16-le", "utf-16-le"),
]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK", 7)
    monkeypatch.setattr(text_module, "LONGEST", 30)


def contents(documents):
    return ["".join(document) for document in documents]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_encodings_and_compressions_give_the_same_text(tmp_path, small_blocks, suffix):
    for text, encoding, option in ENCODED:
        # Compression is found by content, so the name has no suffix.
        path = tmp_path / "a.txt"
        path.write_bytes(COMPRESSIONS[suffix](text.encode(encoding)))
        assert "".join(read_blocks(path, encoding=option)) == text
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        want = lines if lines[-1] else lines[:-1]
        assert list(read_lines(path, encoding=option)) == want


def test_blocks_end_between_words_and_contain_every_character(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK", 64)
    monkeypatch.setattr(text_module, "LONGEST", 256)
    path = tmp_path / "a.txt"
    words = ["x" * n for n in rng.integers(1, 30, 200)]
    path.write_text("\ufeff" + " ".join(words))
    blocks = list(read_blocks(path))
    assert len(blocks) > 20 and " ".join(blocks).split() == words
    # Text without spaces is divided too.
    path.write_text("漢" * 1000 + "\n\r\n" + "é" * 100)
    assert "".join(read_blocks(path)) == "漢" * 1000 + "\n\r\n" + "é" * 100
    assert max(map(len, read_blocks(path))) < 300
    assert list(read_lines(path)) == ["漢" * 1000, "", "é" * 100]


@given(
    before=st.text("aé漢𝒳\n ", max_size=40),
    bad=st.sampled_from([b"\xff", b"\xe9 ", b"\xf0\x9d\x92", b"\x00"]),
    after=st.text("aé漢\n ", max_size=20),
)
def test_the_first_wrong_byte_and_its_line_are_named(before, bad, after):
    data = before.encode() + bad + b" " + after.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "BLOCK", 7)
        with pytest.raises(ValueError) as caught:
            list(read_blocks(io.BytesIO(data), name="a"))
    place = len(before.encode())
    if bad == b"\0":
        assert str(caught.value) == f"a is binary, not text: byte {place} is 0"
    else:
        line = 1 + before.count("\n")
        want = f"a is not UTF-8 text: byte {place} (line {line}) is 0x{bad[0]:02x}"
        assert str(caught.value) == want


BAD = {
    "utf-16 cut": ("né\n".encode("utf-16") + b"a", "utf-8", "utf-16 text: byte 8 (line 2)"),
    "utf-16 without a mark": (b"a\0", "utf-16", "a.txt is not utf-16 text: UTF-16 stream"),
    "utf-32 without a mark": (b"a\0\0\0", "utf-32", "a.txt is not utf-32 text: UTF-32 str"),
    "shift_jis": (b"a\n b\n\xfd c", "shift_jis", "shift_jis text: byte 5 (line 3) is 0xfd"),
    "ascii": ("ab é".encode(), "ascii", "ascii text: byte 3 (line 1) is 0xc3"),
    "utf-16 zero": ("a\0".encode("utf-16"), "utf-8", "is binary, not text: byte 4 is 0"),
    "zstd": (b"\x28\xb5\x2f\xfd....", "utf-8", "compressed by zstd: decompress it first"),
    "empty": (b"", "utf-8", "a.txt is empty"),
    "empty gzip": (gzip.compress(b""), "utf-8", "a.txt is empty"),
    "encoding": (
        b"a",
        "utf-9",
        "encoding must be the name of a text encoding, got 'utf-9'",
    ),
    "no text": (b"a", "base64", "must be the name of a text encoding, got 'base64'"),
}


@pytest.mark.parametrize("data, encoding, want", BAD.values(), ids=BAD)
@pytest.mark.rejects
def test_files_that_are_not_text_are_rejected(tmp_path, small_blocks, data, encoding, want):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ValueError) as caught:
        list(read_blocks(tmp_path / "a.txt", encoding=encoding))
    assert want in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.rejects
def test_damaged_compression_is_rejected(tmp_path, suffix):
    whole = COMPRESSIONS[suffix](b"some words to compress " * 50)
    for data in (whole[:-9], whole[: len(whole) // 2] + b"damage" + whole[-20:]):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(ValueError, match="a is damaged: "):
            list(read_blocks(tmp_path / "a"))


def test_folders_are_read_in_sorted_order_without_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {
        "b/1.txt": b"third",
        "b/0.md.gz": gzip.compress(b"second"),
        "a.txt": b"first",
        "c.txt": "last".encode("utf-16"),
        ".hidden": b"hidden",
        ".git/config": b"hidden",
        "image.png": b"\x89PNG\r\n\x1a\n\0\0\0\r",
        "paper.pdf": b"%PDF-1.7\n\xe2\xe3",
        "empty.txt": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = documents_in([tmp_path])
    # Files of a folder precede its folders.
    assert contents(found) == ["first", "last", "second", "third"]
    assert found.description == "4 files (3 left out: binary or empty)"
    assert contents(found) == ["first", "last", "second", "third"]
    assert is_binary(tmp_path / "image.png", encoding="latin-1")
    assert not is_binary(tmp_path / "a.txt", encoding="UTF8")
    one = documents_in([tmp_path / "b" / "1.txt", tmp_path / "b"])
    assert contents(one) == ["third", "second", "third"] and one.description == "3 files"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none is a folder without text files"):
        documents_in([tmp_path / "none"])
    with pytest.raises(IsADirectoryError, match="none is a folder: name the files in it"):
        list(read_blocks(tmp_path / "none"))


def test_progress_is_the_share_of_bytes_that_was_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK", 100)
    monkeypatch.setattr(documents_module, "SECONDS_PER_REPORT", 0.0)
    for name in "ab":
        (tmp_path / name).write_text("a word " * 100)
    found, shares = documents_in([tmp_path]), []
    found.report = shares.append
    for _ in range(2):
        shares.clear()
        assert contents(found) == ["a word " * 100] * 2
        np.testing.assert_allclose(shares, np.arange(1, 15) / 14)


def test_each_line_of_json_is_a_document(tmp_path):
    lines = [json.dumps({"text": f"page {i}\nof 3", "body": f"b{i}"}) for i in range(3)]
    path = tmp_path / "a.JSONL.gz"
    path.write_bytes(gzip.compress("\n\n".join(lines).encode()))
    assert contents(documents_in([path])) == [f"page {i}\nof 3" for i in range(3)]
    options = ReadingOptions(text_field="body")
    assert contents(documents_in([path], options)) == ["b0", "b1", "b2"]
    assert list(read_texts(path, options)) == ["b0", "b1", "b2"]
    plain = tmp_path / "a.txt"
    plain.write_text("\n".join(lines))
    assert contents(documents_in([plain], options)) == ["b0", "b1", "b2"]
    assert contents(documents_in([plain])) == ["\n".join(lines)]
    assert contents(documents_in([plain], ReadingOptions(lines=True))) == lines


BAD_LINES = {
    '{"body": "x"}': "must be an object with the field 'text', got ['body']",
    '"text"': "must be an object with the field 'text', got 'text'",
    '{"text": 3}': ": the field 'text' must be a string, got int",
    '{"text": null}': ": the field 'text' must be a string, got NoneType",
    '{"text": "whole \\ud83d\\ude00, half \\ud83d"}': (
        ": the field 'text' must be Unicode text, got '\\ud83d' without the other half"
    ),
    "{text": " is not JSON: Expecting property name enclosed in double quotes",
}


@pytest.mark.parametrize("line", BAD_LINES)
@pytest.mark.rejects
def test_lines_of_json_without_text_are_rejected(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        list(documents_in([path]))
    assert str(caught.value).startswith(f"{path}, line 3") and BAD_LINES[line] in str(
        caught.value
    )


@pytest.mark.parametrize("in_memory", [1 << 20, 16])
def test_standard_input_is_read_once_and_iterated_repeatedly(
    tmp_path, monkeypatch, in_memory
):
    monkeypatch.setattr(documents_module, "IN_MEMORY", in_memory)
    data = io.BytesIO(gzip.compress(b"one line\nand another\n" * 100))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    found = documents_in(["-"], scratch=tmp_path)
    assert contents(found) == contents(found) == ["one line\nand another\n" * 100]
    # The temporary file has no name.
    assert list(tmp_path.iterdir()) == []
