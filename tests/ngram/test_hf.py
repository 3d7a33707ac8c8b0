"""Schemes from configs, and arguments that are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.blt.modeling_blt import byte_group_hash_function
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from firstlayer.ngram import (
    ByteGroups,
    Engram,
    LongCatNgram,
    QwenNgram,
    SaltedNgram,
    from_hf,
)
from tests.support.ngram import golden

CANONICAL = np.arange(30)
# Any: some of the values below have wrong types.
engram: Any = Engram
ENGRAM = {
    "engram_layer_ids": [0, 3],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_vocab_size": 50,
    "engram_pad_token_id": 1,
}


def test_a_qwen_config_gives_the_rows_of_transformers():
    config = Qwen4ExpTextConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=4,
        ple_layer_ids=[3, 1],
        ple_embed_dim=12,
        ngram_size=4,
        heads_per_ngram=2,
        ngram_vocab_size_base=30,
        make_ngram_vocab_size_divisible_by=7,
        eos_token_id=[5, 6],
        seed=99,
    )
    scheme = from_hf(config)
    assert isinstance(scheme, QwenNgram) and list(scheme.layers) == [1, 3]
    ids = torch.tensor(np.random.default_rng(0).integers(0, 9, (2, 40)))
    for place, layer in enumerate(scheme.layers):
        embedding = Qwen4ExpTextNGramEmbedding(config, 12, 0, place).double()
        weight = embedding.ngram_embedding.weight
        assert scheme.layout(layer).rows == len(weight)
        with torch.no_grad():
            weight[:] = torch.arange(len(weight))[:, None]
            rows = embedding(ids, None).reshape(2, 40, 6, 2)[..., 0]
        assert (rows == scheme(ids, layer=layer)).all()
        # Padding is EOS in transformers.
        dead = ids == 3
        with torch.no_grad():
            rows = embedding(torch.where(dead, 5, ids), None).reshape(2, 40, 6, 2)[..., 0]
        assert (rows == scheme(ids, layer=layer, dead=dead)).all()


def test_byte_groups_are_those_of_transformers():
    ids = torch.tensor(np.random.default_rng(1).integers(0, 260, (2, 30)))
    scheme = ByteGroups(sizes=(2, 7), rows=1009, functions=2)
    rows = scheme(ids) - torch.tensor(scheme.layout().offsets)
    primes = [1000000007, 1000000007, 5915587277, 5915587277]
    for column, (size, prime) in enumerate(zip([2, 7, 2, 7], primes, strict=True)):
        expected = byte_group_hash_function(ids, size, prime, 1009)
        assert (rows[..., column] == expected).all()


def test_keys_of_older_and_nested_configs():
    new = golden("longcat_hash_0")[0]
    old = {"vocab_size": new["vocab_size"], "eos_token_id": [2, 3]}
    old |= {"oe_neighbor_num": 4, "oe_split_num": 4, "oe_vocab_size_ratio": 78}
    assert from_hf(old) == from_hf(new) == LongCatNgram(eos=2)
    nested = {"text_config": {**ENGRAM, "eos_token_id": 0}, "eos_token_id": 1}
    assert from_hf(nested, CANONICAL) == from_hf(ENGRAM, CANONICAL)
    renamed = {k: v for k, v in ENGRAM.items() if k != "engram_pad_token_id"}
    assert from_hf({**renamed, "engram_pad_id": 1}, CANONICAL) == from_hf(ENGRAM, CANONICAL)


def test_a_declared_layout_is_accepted_if_it_agrees():
    scheme = from_hf(ENGRAM, CANONICAL)
    assert isinstance(scheme, Engram)
    rows = [scheme.layout(layer).rows for layer in (0, 3)]
    declared = {"engram_num_embeddings": rows, "engram_compressed_vocab_size": 30}
    assert from_hf({**ENGRAM, **declared}, CANONICAL) == scheme


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change, canonical, message",
    [
        (
            {"engram_compressed_vocab_size": 31},
            CANONICAL,
            "engram_compressed_vocab_size must be 30 for this tokenizer, got 31",
        ),
        (
            {"engram_num_embeddings": [232, 5]},
            CANONICAL,
            r"engram_num_embeddings must be \[.*\] for this tokenizer, got \[232, 5\]",
        ),
        ({}, None, "tokenizer must be given for an Engram config, got None"),
        (
            {"engram_n_heads": None},
            CANONICAL,
            "config must have 'engram_n_heads', got none",
        ),
        ({"engram_layer_ids": None}, CANONICAL, "config must have one of the keys"),
    ],
)
def test_a_config_that_disagrees_is_refused(change, canonical, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        from_hf({**ENGRAM, **change}, canonical)


@pytest.mark.rejects
def test_a_config_must_be_a_dict():
    with pytest.raises(TypeError, match="^config must be a dict, got list"):
        from_hf([])


@pytest.mark.rejects
@pytest.mark.parametrize(
    "build, error, message",
    [
        (
            lambda: engram(canonical=CANONICAL, order=1),
            ValueError,
            "order must be at least 2",
        ),
        (
            lambda: engram(canonical=CANONICAL, heads=0),
            ValueError,
            "heads must be positive",
        ),
        (
            lambda: engram(canonical=CANONICAL, base=1),
            ValueError,
            "base must be at least 2",
        ),
        (
            lambda: engram(canonical=CANONICAL, base=[9]),
            ValueError,
            "base must have 3 entries for order 4, got 1",
        ),
        (
            lambda: engram(canonical=CANONICAL, layers=()),
            ValueError,
            "layers must have at least one entry, got none",
        ),
        (
            lambda: engram(canonical=CANONICAL, layers=(1, 1)),
            ValueError,
            r"layers must be different numbers, got \(1, 1\)",
        ),
        (
            lambda: engram(canonical=CANONICAL, layers=3),
            TypeError,
            "layers must be a list of integers, got int",
        ),
        (lambda: engram(canonical=CANONICAL, bits=16), ValueError, "bits must be 32 or 64"),
        (
            lambda: engram(canonical=CANONICAL, pad=30),
            ValueError,
            r"pad must be in \[0, 30\) for the number of canonical ids 30, got 30",
        ),
        (
            lambda: engram(canonical=CANONICAL, seed=-1),
            ValueError,
            "seed must be at least 0",
        ),
        (
            lambda: engram(canonical=CANONICAL, hash_negative=1),
            TypeError,
            "hash_negative must be a bool, got int",
        ),
        (
            lambda: engram(canonical=[0, 2]),
            ValueError,
            "canonical must have each number from 0 to its largest, got 2 numbers",
        ),
        (
            lambda: engram(canonical=[[0]]),
            ValueError,
            r"canonical must have one entry for each id, got shape \(1, 1\)",
        ),
        (
            lambda: engram(canonical=CANONICAL, base=2**31, bits=32),
            ValueError,
            "base must give primes of 32 bits, got 2147483648",
        ),
        (
            lambda: QwenNgram(vocab_size=9, eos=9),
            ValueError,
            r"eos must be in \[0, 9\) for vocab_size 9, got 9",
        ),
        (
            lambda: QwenNgram(vocab_size=9, eos=1, layers=(0,)),
            ValueError,
            r"layers\[0\] must be at least 1, got 0",
        ),
        (
            lambda: QwenNgram(vocab_size=9, eos=1, multiple_of=0),
            ValueError,
            "multiple_of must be positive, got 0",
        ),
        (
            lambda: LongCatNgram(eos=1, ratio=0),
            ValueError,
            "ratio must give a table at least one row for vocab_size 131072, got 0",
        ),
        (
            lambda: LongCatNgram(eos=1, ratio=2**20, vocab_size=2**25),
            ValueError,
            "ratio and vocab_size must keep sums below",
        ),
        (
            lambda: ByteGroups(sizes=(0,)),
            ValueError,
            r"sizes\[0\] must be at least 1, got 0",
        ),
        (lambda: ByteGroups(rows=0), ValueError, "rows must be positive, got 0"),
        (
            lambda: ByteGroups(functions=12),
            ValueError,
            "functions must be between 1 and 11, got 12",
        ),
        (lambda: SaltedNgram(rows=1), ValueError, "rows must be at least 2, got 1"),
        (
            lambda: SaltedNgram(rows=9, orders=(5,)),
            ValueError,
            "orders must be at most 4, got 5",
        ),
        (lambda: SaltedNgram(rows=9, salts=0), ValueError, "salts must be positive, got 0"),
    ],
)
def test_bad_arguments_are_named(build, error, message):
    with pytest.raises(error, match=f"^{message}"):
        build()
