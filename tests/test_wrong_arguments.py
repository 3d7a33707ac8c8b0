"""Constructors that take another library's object: arguments of a wrong kind."""

import re

import jax
import numpy as np
import pytest
import torch

import firstlayer.equinox
import firstlayer.numpy
import firstlayer.torch
from firstlayer import ngram
from firstlayer.torch import sharding

OURS = firstlayer.numpy
THEIRS = firstlayer.torch
JAX = firstlayer.equinox

WRONG = {
    "None": None,
    "a list": [1],
    "a list of words": ["a"],
    "ragged lists": [[1.0, 2.0], [3.0]],
    "a number": 3,
    "a vector": np.zeros(3),
    "three axes": np.zeros((2, 2, 2)),
    "complex numbers": np.zeros((2, 2), complex),
    "words": np.array([["a"]]),
    "a tensor of one axis": torch.zeros(3),
    "a tensor of three axes": torch.zeros(2, 2, 2),
    "another module": torch.nn.Linear(2, 3),
    "a dict": {"a": 1},
    "an object": object(),
}

CONSTRUCTORS = {
    "numpy Embedding.from_pretrained": OURS.Embedding.from_pretrained,
    "numpy EmbeddingBag.from_pretrained": OURS.EmbeddingBag.from_pretrained,
    "torch Embedding.from_pretrained": THEIRS.Embedding.from_pretrained,
    "torch EmbeddingBag.from_pretrained": THEIRS.EmbeddingBag.from_pretrained,
    "torch FrozenRowsEmbedding.from_pretrained": lambda x: (
        THEIRS.FrozenRowsEmbedding.from_pretrained(x, frozen=[0])
    ),
    "torch FrozenRowsEmbedding.from_embedding": lambda x: (
        THEIRS.FrozenRowsEmbedding.from_embedding(x, frozen=[0])
    ),
    "torch PartlyFrozenEmbedding.from_pretrained": lambda x: (
        THEIRS.PartlyFrozenEmbedding.from_pretrained(x, frozen=[0])
    ),
    "equinox Embedding.from_pretrained": JAX.Embedding.from_pretrained,
    "equinox EmbeddingBag.from_pretrained": JAX.EmbeddingBag.from_pretrained,
    "numpy Embedding.from_store": OURS.Embedding.from_store,
    "numpy EmbeddingBag.from_store": OURS.EmbeddingBag.from_store,
    "torch Embedding.from_store": THEIRS.Embedding.from_store,
    "torch EmbeddingBag.from_store": THEIRS.EmbeddingBag.from_store,
    "equinox Embedding.from_store": JAX.Embedding.from_store,
    "equinox EmbeddingBag.from_store": JAX.EmbeddingBag.from_store,
    "numpy RotaryPositions.from_hf": OURS.RotaryPositions.from_hf,
    "torch RotaryPositions.from_hf": THEIRS.RotaryPositions.from_hf,
    "equinox RotaryPositions.from_hf": JAX.RotaryPositions.from_hf,
    "ngram.from_hf": ngram.from_hf,
    "TableGroup.from_torchrec": THEIRS.TableGroup.from_torchrec,
    "sharding.from_torchrec": sharding.from_torchrec,
    "sharding.copy_to_torchrec": lambda x: sharding.copy_to_torchrec(
        torch.nn.ModuleDict({"a": THEIRS.Embedding(3, 2)}), x
    ),
    "copy_to_torchrec of other layers": lambda x: sharding.copy_to_torchrec(
        x, torch.nn.ModuleDict({"a": torch.nn.Embedding(3, 2)})
    ),
    "to_torch": THEIRS.to_torch,
    "replace_embeddings": THEIRS.replace_embeddings,
    "replace_rotary": THEIRS.replace_rotary,
    "numpy TableGroup": OURS.TableGroup,
    "torch TableGroup": THEIRS.TableGroup,
    "equinox TableGroup": lambda x: JAX.TableGroup(x, key=jax.random.key(0)),
    "load_leaves": lambda x: JAX.load_leaves(x, JAX.Embedding(3, 2, key=jax.random.key(0))),
}


@pytest.mark.rejects
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_arguments_of_a_wrong_kind_are_named_with_the_rule_and_the_value(name):
    for kind, value in WRONG.items():
        if name == "to_torch" and kind == "another module":
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            CONSTRUCTORS[name](value)
        message = str(caught.value)
        assert re.match(r"\w+(\[.+\])? must .+, got .", message), (kind, message)


@pytest.mark.rejects
def test_a_group_of_no_configs_raises():
    with pytest.raises(ValueError, match="tables must have at least one config, got none"):
        THEIRS.TableGroup.from_torchrec([])


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", [OURS, THEIRS, JAX])
def test_an_array_in_place_of_a_store_raises_what_to_call(front_end):
    message = "^store must be a RowStore, got ndarray; call MemoryStore or open_store$"
    with pytest.raises(TypeError, match=message):
        front_end.Embedding.from_store(np.zeros((3, 2)))
