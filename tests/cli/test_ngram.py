"""``firstlayer ngram``: tables of a config, rows of a text, collisions on a corpus."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from firstlayer.analysis.ngram import PAGE, usage
from firstlayer.ngram import ByteGroups, Engram, LongCatNgram, QwenNgram, SaltedNgram
from tests.support.command import error_message, stdout_of

BLT = {"encoder_hash_byte_group_size": [2, 3], "encoder_hash_byte_group_vocab": 97}
QWEN = {
    "ple_layer_ids": [2, 5],
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "vocab_size": 6,
    "eos_token_id": 5,
    "ple_embed_dim": 512,
}


@pytest.fixture
def blt(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BLT))
    return tmp_path


@pytest.fixture
def qwen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    words = {word: i for i, word in enumerate(["to", "be", "or", "not", "that", "[EOS]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tables_of_a_config(qwen):
    scheme = QwenNgram(order=3, heads=2, base=50, layers=(2, 5), vocab_size=6, eos=5)
    out = json.loads(stdout_of("ngram", qwen, "--json"))
    for table, layer in zip(out["tables"], (2, 5), strict=True):
        layout = scheme.layout(layer)
        assert table["layer"] == layer and table["columns"] == 4
        assert table["rows"] == layout.rows
        # Four columns of 128 numbers in bfloat16.
        assert table["nbytes"] == layout.rows * 256
        assert [table["smallest"], table["largest"]] == [
            min(layout.sizes),
            max(layout.sizes),
        ]
    lines = stdout_of("ngram", qwen, "--layer", 5, "--row-bytes", 100).splitlines()
    assert len(lines) == 2 and lines[1].split()[:2] == ["5", "4"]


def test_rows_of_a_text_are_those_of_the_scheme(qwen):
    out = json.loads(stdout_of("ngram", qwen, "--text", "to be or not", "--json"))
    scheme = QwenNgram(order=3, heads=2, base=50, layers=(2, 5), vocab_size=6, eos=5)
    assert out["tokens"] == ["to", "be", "or", "not"]
    ids = [0, 1, 2, 3]
    assert out["rows"] == {str(at): scheme(ids, layer=at).tolist() for at in (2, 5)}
    text = stdout_of("ngram", qwen, "--text", "to be", "--layer", 5)
    row = " ".join(map(str, scheme(ids[:2], layer=5)[1]))
    assert "rows of layer 5:" in text and f"be  {row}" in text


def test_rows_of_a_text_are_wrapped_to_the_terminal(blt, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    first, second = ByteGroups(sizes=(2, 3), rows=97)([0x62, 0x65]).tolist()
    lines = stdout_of("ngram", blt, "--text", "be").splitlines()
    where = lines.index("rows:") + 1
    assert [line.split() for line in lines[where:]] == [
        ["0x62", str(first[0])],
        [str(first[1])],
        ["0x65", str(second[0])],
        [str(second[1])],
    ]


def test_a_model_of_bytes_has_no_tokenizer(blt):
    out = json.loads(stdout_of("ngram", blt, "--text", "be", "--json"))
    assert out["tokens"] == ["0x62", "0x65"]
    assert out["rows"] == {"None": ByteGroups(sizes=(2, 3), rows=97)([0x62, 0x65]).tolist()}


@pytest.mark.rejects
def test_a_text_that_is_not_unicode_is_rejected(blt, qwen):
    for model in (blt, qwen):
        message = error_message("ngram", model, "--text", "b\udcff", code=2)
        assert "--text must be in the terminal's encoding, got 'b\\udcff'" in message


def test_an_unknown_size_says_how_to_give_it(blt):
    hint = "the config does not state the bytes of a row: give them by --row-bytes"
    lines = stdout_of("ngram", blt).splitlines()
    assert lines[1].split()[-1] == "unknown" and lines[-1] == hint
    # 97 rows of 1000 bytes for each of two group sizes
    lines = stdout_of("ngram", blt, "--row-bytes", 1000).splitlines()
    assert lines[1].endswith("194 kB") and hint not in lines


def test_collisions_and_pages_of_a_corpus(blt, tmp_path):
    text = "the cat sat on the mat and the rat sat on the cat"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("the end")
    args = ("ngram", blt, tmp_path / "a.txt", tmp_path / "b.txt", "--row-bytes", 1000)
    out = json.loads(stdout_of(*args, "--json"))["usage"][0]
    scheme = ByteGroups(sizes=(2, 3), rows=97)
    rows, owners, reads = set(), {}, 0
    for part in (text, "the end"):
        data = np.frombuffer(part.encode(), np.uint8).astype(int)
        found = scheme(data)
        reads += found.size
        for p in range(len(data)):
            for column, size in enumerate((2, 3)):
                ngram = tuple(data[p - s] if s <= p else 0 for s in range(size))
                rows.add(int(found[p, column]))
                owners.setdefault((column, int(found[p, column])), set()).add(ngram)
    assert out["tokens"] == len(text) + 7 and out["reads"] == reads
    assert out["distinct_rows"] == len(rows)
    assert out["distinct_ngrams"] == sum(map(len, owners.values()))
    assert out["collided"] == sum(len(own) for own in owners.values() if len(own) > 1)
    assert 0 < out["collided"] < out["distinct_ngrams"]
    pages = {byte // PAGE for row in rows for byte in (row * 1000, row * 1000 + 999)}
    assert out["pages"] == len(pages)
    share = 100 * out["collided"] / out["distinct_ngrams"]
    assert f"{share:.2f} %" in stdout_of(*args)


@pytest.mark.parametrize(
    ("scheme", "orders"),
    [
        (ByteGroups(sizes=(2, 4), rows=10, functions=2), (2, 4, 2, 4)),
        (SaltedNgram(orders=(3, 2), salts=2, rows=10), (3, 3, 2, 2)),
        (LongCatNgram(order=3, splits=1, ratio=2, vocab_size=9, eos=None), (2, 3)),
        (
            Engram(order=3, heads=2, base=5, layers=(0,), canonical=np.arange(9)),
            (2, 2, 3, 3),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_ngrams_have_equal_rows(scheme, orders):
    assert scheme.column_orders() == orders
    ids = np.random.default_rng(0).integers(0, 4, 300)
    rows, ngrams = scheme(ids), scheme.ngrams(ids)
    for column, order in enumerate(orders):
        by_ngram = {}
        for row, ngram in zip(rows[:, column], ngrams[:, :order].tolist(), strict=True):
            assert by_ngram.setdefault(tuple(ngram), row) == row


def test_an_empty_text_uses_nothing():
    found = usage(ByteGroups(sizes=(2,), rows=9), [np.array([], int)], row_bytes=8)
    assert (found.tokens, found.pages, found.collision_share) == (0, 0, 0.0)


@pytest.mark.rejects
def test_errors_are_one_sentence(tmp_path, qwen):
    assert error_message("ngram", tmp_path / "none") == f"no file {tmp_path / 'none'}"
    assert "layer must be one of 2, 5, got 3" in error_message("ngram", qwen, "--layer", 3)
    (qwen / "tokenizer.json").unlink()
    rule = "tokenizer.json must be next to the config to read text, got none"
    assert rule in error_message("ngram", qwen, "--text", "to be")
    assert rule in error_message("ngram", qwen, qwen / "config.json")
    (tmp_path / "config.json").write_text("{}")
    assert "config must have one of the keys" in error_message("ngram", tmp_path)
