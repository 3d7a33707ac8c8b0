"""Tables with words are read from every format, bit for bit."""

import codecs
import gzip
import json
import os
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import ByteLevelBPETokenizer

from firstlayer.stores import open_store
from firstlayer.vector_files.reading import read_rows, read_vectors
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.vector_files import (
    WORDS,
    gguf_vocabulary,
    table,
    text_lines,
    write_all,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("files"))


def test_every_format_gives_the_same_words_and_bits(files):
    want = table()
    for kind, path in files.items():
        found = read_vectors(path)
        assert found.words == WORDS, kind
        assert found.weight.dtype == np.float32, kind
        assert found.weight.tobytes() == want.tobytes(), kind
        assert open_vectors(path)["queen"].tolist() == want[1].tolist(), kind
        assert read_rows(os.fspath(path)).flags.writeable, kind


def test_rows_are_read_without_words(files, tmp_path):
    want = table()
    np.save(tmp_path / "a.npy", want.astype(np.float16))
    np.savez(tmp_path / "b.npz", table=want)
    save_file({"wte.weight": want}, tmp_path / "model.safetensors")
    assert read_rows(tmp_path / "a.npy").tolist() == want.astype(np.float16).tolist()
    for path in (tmp_path, tmp_path / "b.npz"):
        assert read_rows(path).tobytes() == want.tobytes()
    for path in (tmp_path, tmp_path / "a.npy", tmp_path / "b.npz"):
        with pytest.raises(FileNotFoundError, match=r"has no words: neither .*vocab\.txt"):
            read_vectors(path)


@pytest.mark.rejects
def test_an_index_with_a_name_that_is_too_long_is_refused(tmp_path):
    index = {"weight_map": {"wte.weight": "x" * 300 + "\n"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        read_vectors(tmp_path)


def test_vocabulary_and_merges_of_byte_level_bpe_are_a_tokenizer(tmp_path):
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["the king sees a naïve queen, the 漢字 king"] * 3, 290)
    trained.save_model(str(tmp_path))
    rows = np.random.default_rng(2).standard_normal((290, 3)).astype(np.float32)
    save_file({"wte.weight": rows}, tmp_path / "model.safetensors")
    vectors = open_vectors(tmp_path)
    for text in ("the king sees naïve kings!", " 漢 queens\n\t'the"):
        assert vectors.tokenizer.encode(text).ids == trained.encode(text).ids
    number = trained.token_to_id("Ġking")
    assert vectors["king"].tolist() == rows[number].tolist() == vectors[" king"].tolist()
    merges = (tmp_path / "merges.txt").read_text()
    (tmp_path / "merges.txt").write_text(merges + "Ġk zebra\n")
    line = merges.count("\n") + 1
    want = rf"merges.txt, line {line} must join two tokens of vocab.json, got 'Ġk zebra'"
    with pytest.raises(ValueError, match=want):
        open_vectors(tmp_path)
    for content in ("[1]", '{"a": "b"}', "{"):
        (tmp_path / "vocab.json").write_text(content)
        with pytest.raises(ValueError, match="must be an object with the id of each token"):
            open_vectors(tmp_path)


def test_quantized_gguf_rows_are_decoded(tmp_path):
    rows = np.zeros((5, 34), np.uint8)
    rows[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    rows[:, 2:] = np.arange(32)
    content = gguf_vocabulary(table(32), WORDS)
    content = content.replace(table(32).tobytes(), rows.tobytes())
    # The type of the tensor follows its two axes.
    place = content.index(b"token_embd.weight") + 17 + 4 + 16
    (tmp_path / "q.gguf").write_bytes(content[:place] + b"\x08" + content[place + 1 :])
    found = read_vectors(tmp_path / "q.gguf")
    assert found.words == WORDS
    np.testing.assert_array_equal(found.weight, np.tile(np.arange(32) / 2, (5, 1)))


def test_words_with_spaces_and_blank_lines_at_the_end(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_bytes(b"a 1 2\n. . 3 4\n \xa0b\xff -5e-1\t+6.\n\n \n")
    found = read_vectors(path)
    assert found.words == ["a", ". .", "\\xa0b\\xff"]
    assert found.weight.tolist() == [[1, 2], [3, 4], [-0.5, 6]]


def test_a_byte_order_mark_is_not_part_of_a_word(tmp_path):
    mark, want = codecs.BOM_UTF8, table()
    lines = text_lines(want).encode()
    header = f"{len(WORDS)} {want.shape[1]}\n".encode()
    for name, content in {
        "word2vec.txt": mark + header + lines,
        "glove.txt": mark + lines,
        "glove.txt.gz": gzip.compress(mark + lines),
    }.items():
        (tmp_path / name).write_bytes(content)
        found = read_vectors(tmp_path / name)
        assert found.words == WORDS and found.weight.tobytes() == want.tobytes(), name
    np.save(tmp_path / "rows.npy", want)
    (tmp_path / "rows.vocab.txt").write_bytes(mark + "\n".join(WORDS).encode())
    assert read_vectors(tmp_path / "rows.npy").words == WORDS


@pytest.mark.rejects
@pytest.mark.parametrize("line", [" 0.5 0.5", "king 0,5 0,5"])
def test_text_with_a_bad_first_row_is_not_read_as_binary(line, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"9 2\n{line}\n" + "word 0.12345 0.12345\n" * 8)
    for read in (read_vectors, read_rows):
        with pytest.raises(ValueError, match="must have a word and 2 numbers in line 2"):
            read(path)


@pytest.mark.rejects
@pytest.mark.parametrize("layout", ["text", "blank line", "binary", "without line feeds"])
def test_counts_that_do_not_fit_the_rows_are_refused(layout, tmp_path):
    """Fewer counts than there are rows, or text that is read as binary, gave wrong rows."""
    rows = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)
    if layout in ("text", "blank line"):
        lines = [f"w{i} {' '.join(map(str, row))}\n".encode() for i, row in enumerate(rows)]
    else:
        end = b"\n" * (layout == "binary")
        lines = [b"w%d " % i + row.tobytes() + end for i, row in enumerate(rows)]
    body, path = b"".join(lines), tmp_path / "vectors"
    if layout == "blank line":
        body = b"\n" + body
    readers = [read_vectors, read_rows]
    if layout.startswith(("binary", "without")):
        readers.append(open_store)
    # Text with fewer numbers than a line has is that of words with spaces.
    for width in range(6 if layout == "text" else 1, 9):
        for count in range(1, 6):
            path.write_bytes(b"%d %d\n" % (count, width) + body)
            if (count, width) == (4, 6) and layout != "blank line":
                assert all(len(read(path)) == 4 for read in (read_rows, *readers[2:]))
                continue
            for read in readers:
                with pytest.raises(ValueError, match="declares|truncated|cut short"):
                    read(path)


@pytest.mark.rejects
def test_a_single_byte_and_a_device_are_refused(tmp_path):
    (tmp_path / "one").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="one is not a file with vectors: expected"):
        read_vectors(tmp_path / "one")
    with pytest.raises(ValueError, match="/dev/null"):
        read_vectors("/dev/null")


def test_chunks_end_between_lines(tmp_path, monkeypatch):
    import firstlayer.vector_files.text as text

    rows = np.random.default_rng(1).standard_normal((200, 3)).astype(np.float32)
    lines = [f"w{i} {' '.join(map(str, row))}\n" for i, row in enumerate(rows)]
    (tmp_path / "a.txt").write_text("200 3\n" + "".join(lines))
    for size in (1, 50, 333, 4096):
        monkeypatch.setattr(text, "CHUNK_BYTES", size)
        monkeypatch.setattr(text, "MAX_LINE_BYTES", 4096)
        found = read_vectors(tmp_path / "a.txt")
        assert found.words == [f"w{i}" for i in range(200)]
        assert found.weight.tobytes() == rows.tobytes()


LINES = text_lines(table())
BAD = {
    "negative": (b"-1 3\na 1 2 3\n", "a positive number of rows and width, got -1 and 3"),
    "zero": (b"3 0\na\nb\nc\n", "a positive number of rows and width, got 3 and 0"),
    "counts": (f"6 6\n{LINES}".encode(), "declares 6 rows, but has 5"),
    "line": (b"a 1 2\nb 1 2\nc 1 1_0\n", "a word and 2 numbers in line 3"),
    "header line": (b"2 2\na 1 2\nb 1 x\n", "a word and 2 numbers in line 3"),
    "no word": (b"a 1 2\n 1 2\n", "a word and 2 numbers in line 2"),
    "cut gzip": (gzip.compress(LINES.encode())[:-20], "is a damaged gzip file"),
    "gzip of others": (gzip.compress(b"\x93NUMPY"), "decompress it first"),
    "zip": (b"PK\x03\x04" + bytes(60), "is a damaged zip archive"),
    "pickle": (b"\x80\x04N.", "is a pickle without gensim's vectors"),
    "nothing": (b"", "is empty"),
    "numbers only": (b"0.5\t1\n0.25\t2\n", "has no words: neither bad.vocab.txt nor"),
    "gguf": (gguf_vocabulary(table(), []), "has no words: it has no tokenizer.ggml.tokens"),
}


@pytest.mark.rejects
@pytest.mark.parametrize("content, message", BAD.values(), ids=BAD)
def test_damaged_files_are_refused(content, message, tmp_path):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        read_vectors(tmp_path / "bad")
    assert "\n" not in str(caught.value)


@pytest.mark.rejects
def test_vocabularies_of_another_length_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", table())
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"vocab.txt has 2 words, but .*a.npy has 5 rows"):
        read_vectors(tmp_path / "a.npy")
    save_file({"wte.weight": table()[:1]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="vocab.txt has token 1, but there are 1 rows"):
        read_vectors(tmp_path)


@pytest.mark.rejects
def test_npz_needs_one_table_of_numbers(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=table(), b=table())
    with pytest.raises(ValueError, match="must have one table of floats, got a, b"):
        read_vectors(path)
    np.savez(path, a=np.array([{}], object))
    with pytest.raises(ValueError, match="has Python objects, which are not read"):
        read_vectors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\0")
    with pytest.raises(ValueError, match="is not a .npy file"):
        read_vectors(path)
