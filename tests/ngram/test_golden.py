"""Rows equal those of the named implementations, in every library."""

import numpy as np
import pytest

from firstlayer.ngram import (
    ByteGroups,
    Engram,
    LongCatNgram,
    QwenNgram,
    SaltedNgram,
    from_hf,
)
from tests.support.ngram import LIBRARIES, MANIFEST, golden, rows_in

in_every_library = pytest.mark.parametrize("library", LIBRARIES)


def engram_of(name: str) -> tuple[Engram, dict[str, np.ndarray]]:
    """Return the scheme of one of DeepSeek's configs, and its golden arrays."""
    config, arrays = golden(name)
    scheme = from_hf(config, arrays["canonical"])
    assert isinstance(scheme, Engram)
    return scheme, arrays


def test_every_golden_file_is_in_the_manifest():
    assert {f"{name}.npz" for name in USED} == MANIFEST.keys()


USED = [
    *("canonical_bytes2k", "canonical_strings_public"),
    *("engram_v41_release_layout", "engram_v41_layout_0", "engram_v41_layout_3"),
    *("engram_v41_hash_0", "engram_v41_hash_2", "engram_v41_image_0"),
    *("engram_v41_image_2", "engram_v41_decode_0", "engram_v41_decode_2"),
    *("engram_v41_documents_1", "engram_demo_0", "engram_demo_2", "engram_maxtext_1"),
    *("qwen4_release_layout", "qwen4_hash_0", "qwen4_hash_2"),
    *("longcat_hash_0", "longcat_hash_2", "blt_hash_0", "blt_hash_2", "nanochat_hash_0"),
    # tests/ngram/test_gates.py
    *("engram_demo_layer_0", "engram_v41_gate_0", "longcat_layer_0", "qwen4_layer_0"),
]


@pytest.mark.parametrize("name", ["release_layout", "layout_0", "layout_3"])
def test_engram_layout(name):
    config, arrays = golden(f"engram_v41_{name}")
    canonical = np.arange(config["engram_compressed_vocab_size"])
    scheme = from_hf({**config, "engram_pad_token_id": 2}, canonical)
    assert isinstance(scheme, Engram)
    for i, layer in enumerate(config["engram_layer_ids"]):
        layout = scheme.layout(layer)
        assert list(layout.sizes) == arrays["primes"][i].ravel().tolist()
        assert list(layout.multipliers) == arrays["multipliers"][i].tolist()
        assert layout.rows == arrays["rows"][i]
        if "bounds" in arrays:
            assert [*layout.offsets, layout.rows] == arrays["bounds"][i].tolist()


@in_every_library
@pytest.mark.parametrize("name", ["hash_0", "hash_2", "image_0", "image_2"])
def test_engram_of_deepseek(name, library):
    scheme, arrays = engram_of(f"engram_v41_{name}")
    image, dead = golden(f"engram_v41_{name}")[0].get("image_token_id"), None
    if image is not None:
        dead = arrays["ids"] == image
        assert dead.any()
    for i, layer in enumerate(scheme.layers):
        layout = scheme.layout(layer)
        assert list(layout.sizes) == arrays["primes"][i].ravel().tolist()
        assert list(layout.offsets) == arrays["offsets"][i].tolist()
        found = rows_in(library, scheme, arrays["ids"], layer=layer, dead=dead)
        assert (found == arrays["rows"][:, :, i]).all()


@in_every_library
def test_engram_with_documents(library):
    scheme, arrays = engram_of("engram_v41_documents_1")
    documents, masked = arrays["sequence_ids"], ~arrays["token_mask"]
    padding = documents == 0
    for i, layer in enumerate(scheme.layers):
        for name, options in {
            "rows": {},
            "rows_documents": {"documents": documents, "dead": padding},
            "rows_mask": {"dead": masked},
            "rows_both": {"documents": documents, "dead": padding | masked},
        }.items():
            found = rows_in(library, scheme, arrays["ids"], layer=layer, **options)
            assert (found == arrays[name][:, :, i]).all(), name


@in_every_library
@pytest.mark.parametrize("name", ["engram_v41_decode_0", "engram_v41_decode_2"])
def test_engram_in_chunks_steps_and_drafts(name, library):
    scheme, arrays = engram_of(name)
    ids, layer = arrays["ids"], scheme.layers[-1]
    rows, at = arrays["rows"][:, :, -1], [0, 1, 3, *range(11, 21)]
    history = None
    for start, end in zip(at[:-1], at[1:], strict=True):
        if start >= 11:
            assert (history == arrays["history_before"][:, start - 11]).all()
        chunk = ids[:, start:end]
        # jit compiles each shape once, and one layer is enough here.
        if library == "numpy" or start in (0, 3, 15):
            found = rows_in(library, scheme, chunk, layer=layer, history=history)
            assert (found == rows[:, start:end]).all()
        history = scheme.advance(history, chunk)
    for block, drafted in enumerate(arrays["draft_ids"]):
        found = rows_in(library, scheme, drafted, layer=layer, history=history)
        assert (found == arrays["draft_rows"][block, :, :, -1]).all()
        history = scheme.advance(history, drafted, accepted=arrays["accepted"][block])
        assert (history == arrays["history_after"][block]).all()


@in_every_library
@pytest.mark.parametrize(
    "name, bits", [("engram_demo_0", 64), ("engram_demo_2", 64), ("engram_maxtext_1", 32)]
)
def test_engram_of_the_demo_and_of_maxtext(name, bits, library):
    config, arrays = golden(name)
    scheme = Engram(
        order=config["max_ngram_size"],
        heads=config["n_head_per_ngram"],
        base=config["engram_vocab_size"],
        layers=config["layer_ids"],
        canonical=arrays["canonical"],
        pad=config["pad_id"],
        seed=config["seed"],
        bits=bits,
        hash_negative=True,
    )
    if bits == 64:
        assert scheme == from_hf(config, arrays["canonical"])
    for layer in scheme.layers:
        layout = scheme.layout(layer)
        assert list(layout.multipliers) == arrays[f"multipliers_{layer}"].tolist()
        assert list(layout.sizes) == arrays[f"sizes_{layer}"].ravel().tolist()
        for ids, rows in (("ids", "hash"), ("ids_negative", "hash_negative")):
            found = rows_in(library, scheme, arrays[ids], layer=layer)
            assert (found - np.array(layout.offsets) == arrays[f"{rows}_{layer}"]).all()


def test_qwen_release_layout():
    config, arrays = golden("qwen4_release_layout")
    scheme = from_hf({**config, "ple_layer_ids": [2]})
    assert isinstance(scheme, QwenNgram)
    layout = scheme.layout(2)
    assert list(layout.multipliers) == arrays["multipliers"].tolist()
    assert (layout.sizes[0], layout.sizes[-1]) == (20_000_003, 20_000_171)
    assert (sum(layout.sizes), layout.rows) == (config["rows"], config["padded_rows"])


@in_every_library
@pytest.mark.parametrize("name", ["qwen4_hash_0", "qwen4_hash_2"])
def test_qwen(name, library):
    config, arrays = golden(name)
    scheme = from_hf(config)
    assert isinstance(scheme, QwenNgram)
    layout = scheme.layout()
    assert list(layout.multipliers) == arrays["multipliers"].tolist()
    assert list(layout.sizes) == arrays["head_sizes"].tolist()
    assert list(layout.offsets) == arrays["head_offsets"].tolist()
    assert layout.rows == arrays["padded_rows"]
    assert (rows_in(library, scheme, arrays["ids"]) == arrays["rows"]).all()


@in_every_library
@pytest.mark.parametrize("name", ["longcat_hash_0", "longcat_hash_2"])
def test_longcat(name, library):
    config, arrays = golden(name)
    scheme = from_hf(config)
    assert isinstance(scheme, LongCatNgram)
    assert list(scheme.layout().sizes) == arrays["mods"].ravel().tolist()
    assert (rows_in(library, scheme, arrays["ids"]) == arrays["rows"]).all()
    later, lengths = arrays["later_starts"], arrays["later_lengths"]
    ends = np.cumsum(lengths)
    for row, (start, length, end) in enumerate(zip(later, lengths, ends, strict=True)):
        ids = arrays["ids"][row : row + 1]
        history = ids[:, max(0, start - scheme.history_length) : start]
        chunk = ids[:, start : start + length]
        found = rows_in(library, scheme, chunk, history=history)
        assert (found[0] == arrays["later_rows"][end - length : end]).all()


@in_every_library
@pytest.mark.parametrize("name", ["blt_hash_0", "blt_hash_2"])
def test_byte_groups(name, library):
    config, arrays = golden(name)
    scheme = from_hf(config)
    assert isinstance(scheme, ByteGroups)
    found = rows_in(library, scheme, arrays["ids"])
    assert (found - np.array(scheme.layout().offsets) == arrays["rows"]).all()


@in_every_library
def test_salted(library):
    config, arrays = golden("nanochat_hash_0")
    scheme = SaltedNgram(
        orders=config["orders"], salts=len(config["salts"]), rows=config["table_size"]
    )
    assert (rows_in(library, scheme, arrays["ids"]) == arrays["rows"]).all()
