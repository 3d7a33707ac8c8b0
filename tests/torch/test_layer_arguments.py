"""Errors of the complete layer: constructor, call, ids out of range."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from firstlayer.torch.alibi import AlibiBias
from firstlayer.torch.layer import EmbeddingLayer
from firstlayer.torch.sinusoidal import SinusoidalPositions
from tests.support.torch_layers import build
from tests.support.torch_round_trips import plain_operators


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({}, ValueError, "position='learned' needs max_positions, got None"),
        ({"position": None, "max_positions": 4}, ValueError, "got 4 with None"),
        (
            {"position": "rotary"},
            ValueError,
            "'learned', 'sinusoidal', None or a layer that adds positions, got 'rotary'",
        ),
        ({"position": AlibiBias(2)}, TypeError, "that adds positions, got AlibiBias"),
        (
            {"position": {"class": "os"}},
            ValueError,
            r"position\['class'\] must be .* got 'os'",
        ),
        (
            {"position": SinusoidalPositions(4)},
            ValueError,
            "position must have embedding_dim 6, got 4",
        ),
        ({"max_positions": 0}, ValueError, "max_positions must be positive, got 0"),
        ({"position": None, "segments": 0}, ValueError, "segments must be positive, got 0"),
        ({"position": None, "dropout": 1.5}, ValueError, "between 0 and 1, got 1.5"),
        ({"position": None, "norm_eps": -1.0}, ValueError, "not be negative, got -1.0"),
        ({"position": None, "zero_padding": True}, ValueError, "padding_idx, got None"),
        ({"position": None, "padding_idx": 7}, ValueError, r"padding_idx must be in \[-7"),
    ],
)
def test_constructor_errors_name_the_argument(options, error, sentence):
    with pytest.raises(error, match=sentence):
        EmbeddingLayer(7, 6, **options)


@pytest.mark.rejects
def test_embedding_dim_must_be_positive():
    with pytest.raises(ValueError, match="embedding_dim must be positive, got 0"):
        EmbeddingLayer(7, 0, position=None)


ONE = torch.tensor([1])
WIDE = torch.ones(2, 6)


@pytest.mark.rejects
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        ({}, ValueError, "give ids or inputs_embeds, got neither"),
        ({"ids": torch.tensor([7])}, IndexError, r"is 7, but num_embeddings is 7|range"),
        ({"ids": ONE.float()}, TypeError, "ids must be integers, got float32"),
        ({"ids": torch.tensor(3)}, ValueError, "ids must have a length axis"),
        ({"ids": ONE, "positions": [0], "offset": 1}, ValueError, "not both"),
        (
            {"ids": torch.tensor([[1, 2]]), "positions": [[1], [2]]},
            ValueError,
            r"shape \(2,\) or \(1, 2\)",
        ),
        ({"ids": ONE, "positions": [True]}, TypeError, "integers or reals, got bool"),
        ({"ids": ONE, "segments": [0, 1]}, ValueError, r"segments must have shape \(1,\)"),
        (
            {"inputs_embeds": torch.ones(2, 5)},
            ValueError,
            r"\(..., length, 6\), got \(2, 5\)",
        ),
        ({"inputs_embeds": WIDE.int()}, TypeError, "inputs_embeds must be real, got int32"),
        ({"inputs_embeds": WIDE}, ValueError, "needs ids or a mask"),
        ({"inputs_embeds": WIDE, "ids": ONE}, ValueError, r"the shape \(2,\) of"),
        ({"ids": ONE, "mask": [1]}, ValueError, r"mask must be bools of shape \(1,\)"),
    ],
)
def test_call_errors_name_the_argument(call, error, sentence, plain):
    layer = build(zero_padding=True, segments=2)
    with plain_operators() if plain else nullcontext():
        with pytest.raises(error, match=sentence):
            layer(**call)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        ({"ids": [7]}, IndexError, r"ids\[0\] is 7, but num_embeddings is 7"),
        (
            {"ids": torch.tensor([[1, 2], [-1, 2]]).T},
            IndexError,
            r"ids\[0, 1\] is -1, but num_embeddings is 7",
        ),
        (
            {"ids": torch.tensor([[1], [9]], dtype=torch.int32)},
            IndexError,
            r"ids\[1, 0\] is 9, but num_embeddings is 7",
        ),
        (
            {"ids": torch.tensor([2**63 + 5], dtype=torch.uint64)},
            IndexError,
            r"ids\[0\] is 9223372036854775813, but",
        ),
        (
            {"ids": [8], "inputs_embeds": torch.ones(1, 6)},
            IndexError,
            r"ids\[0\] is 8, but num_embeddings is 7",
        ),
        ({"ids": [1] * 10}, ValueError, "smaller than max_positions 9, got 9"),
        ({"ids": [1], "offset": 9}, ValueError, "smaller than max_positions 9, got 9"),
        ({"ids": [1], "positions": [-1]}, ValueError, "must be at least 0"),
        (
            {"ids": [1], "segments": [2]},
            IndexError,
            r"segments\[0\] is 2, but the number of segments is 2",
        ),
    ],
)
def test_values_out_of_range_are_named(call, error, sentence):
    layer = build(segments=2)
    with pytest.raises(error, match=sentence):
        layer(**call)


@pytest.mark.rejects
def test_segments_need_a_table():
    with pytest.raises(ValueError, match="the layer was made without them"):
        build()(ONE, segments=[0])


@pytest.mark.rejects
@pytest.mark.parametrize("layer_norm", [False, True])
def test_backward_checks_ids_that_were_changed_without_torch(layer_norm):
    layer = EmbeddingLayer(20, 8, position=None, layer_norm=layer_norm)
    for bad in (10**9, -100, 20):
        ids = np.arange(6)
        y = layer(torch.from_numpy(ids))
        ids[:] = bad
        with pytest.raises((IndexError, ValueError), match=f"{bad}"):
            y.sum().backward()
    ids = torch.arange(2000) % 20
    y = layer(ids)
    ids.data = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="an id for each of 2000 rows, got 1"):
        y.sum().backward()
