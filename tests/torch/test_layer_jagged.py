"""Jagged ids in the complete layer: positions start again in each sequence."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nested import nested_tensor_from_jagged

from firstlayer.torch import LearnedPositions, RotaryPositions, SinusoidalPositions
from tests.support.run_alone import run_alone
from tests.support.torch_layers import build, gradients
from tests.support.torch_round_trips import plain_operators


class OtherPositions(SinusoidalPositions):
    """A position layer that the kernels do not know."""


# Nested tensors have the same shape only if they share the offsets tensor.
OFFSETS = torch.tensor([0, 3, 5])
ZEROS = torch.zeros(5, dtype=torch.int64)


def ragged(values: torch.Tensor) -> Any:
    """Return five values as a row of three and one of two."""
    return nested_tensor_from_jagged(values, OFFSETS)


@pytest.mark.parametrize("options", [{"layer_norm": True}, {"zero_padding": True}])
def test_jagged_ids_without_positions(options):
    layer = build(position=None, segments=2, **options)
    ids, segments = torch.tensor([1, 0, 3, 6, 0]), torch.tensor([1, 0, 0, 1, 1])
    got = layer(ragged(ids), segments=ragged(segments))
    torch.testing.assert_close(got.values(), layer(ids, segments=segments))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("offset", [0, 2, [1, 3], torch.tensor([0.5, 2.0])])
@pytest.mark.parametrize(
    "options",
    [
        {"segments": 3},
        {"position": "sinusoidal", "zero_padding": True, "layer_norm": True},
        {"position": OtherPositions(6), "scale": True},
        {"position": None, "zero_padding": True, "layer_norm": True},
    ],
)
def test_jagged_ids_equal_padded_ids(options, offset, plain):
    # The padded rows end in an id of padding, whose outputs are not compared.
    layer = build(**options)
    ids, dy = torch.tensor([1, 0, 3, 6, 2]), torch.randn(5, 6, dtype=torch.float64)
    padded, kept = (
        torch.tensor([[1, 0, 3], [6, 2, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]),
    )
    kept = kept.bool()
    segments = None if layer.segment is None else ids % 3
    at = {"offset": offset} if layer.position is not None else {}
    shape = padded.shape
    want = layer(padded, segments=None if segments is None else padded % 3, **at)
    expected = gradients(layer, want[kept], dy)
    with plain_operators() if plain else nullcontext():
        got = layer(
            ragged(ids), segments=None if segments is None else ragged(segments), **at
        )
    assert got.layout is torch.jagged and got.offsets() is OFFSETS and shape == (2, 3)
    torch.testing.assert_close(got.values(), want[kept])
    found = gradients(layer, got.values(), dy)
    torch.testing.assert_close(found, expected)


def test_jagged_vectors_positions_and_masks():
    layer = build(zero_padding=True)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    positions, mask = torch.tensor([4, 0, 2, 8, 1]), torch.tensor([1, 1, 0, 1, 1]).bool()
    want = layer(inputs_embeds=x, positions=positions, mask=mask)
    got = layer(
        inputs_embeds=ragged(x),
        positions=nested_tensor_from_jagged(positions, OFFSETS.clone()),
        mask=ragged(mask),
    )
    torch.testing.assert_close(got.values(), want)
    got.values().sum().backward()
    assert torch.equal(x.grad, mask[:, None].double().expand(5, 6))  # pyright: ignore


def test_jagged_ids_may_be_empty_and_hooks_run_once():
    layer, calls = build(), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    bounds = torch.tensor([0, 0, 2, 2])
    got: Any = layer(nested_tensor_from_jagged(torch.tensor([3, 4]), bounds))
    torch.testing.assert_close(got.values(), layer(torch.tensor([3, 4])))
    assert [len(part) for part in got.unbind()] == [0, 2, 0] and len(calls) == 2
    none = torch.tensor([], dtype=torch.int64)
    empty = layer(nested_tensor_from_jagged(none, torch.tensor([0, 0])))
    assert empty.values().shape == (0, 6)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "call, sentence",
    [
        (
            {"segments": ZEROS},
            "segments must be jagged like the tokens, got layout torch.strided",
        ),
        (
            {"positions": [1, 2, 3, 4, 5]},
            "positions must be jagged like the tokens, got list",
        ),
        (
            {"offset": [1, 2, 3]},
            r"offset must be a number or have shape \(2,\), got shape \(3,\)",
        ),
        (
            {"positions": ragged(torch.arange(5)), "offset": 2},
            "give positions or offset, not both",
        ),
        ({"ids": ragged(torch.tensor([1, 2, 7, 0, 0]))}, r"ids\[2\] is 7, but num_embed"),
        (
            {"segments": nested_tensor_from_jagged(ZEROS, torch.tensor([0, 1, 5]))},
            r"segments must have the offsets \[0, 3, 5\] of the tokens, got \[0, 1, 5\]",
        ),
        (
            {"ids": ragged(torch.ones(5, 3).long()).transpose(1, 2)},
            "nested ids must be contiguous and jagged in the second axis",
        ),
    ],
)
def test_wrong_jagged_arguments_are_named(call, sentence):
    layer = build(segments=3)
    with pytest.raises((ValueError, IndexError), match=sentence):
        layer(**{"ids": ragged(torch.arange(5)), **call})


@pytest.mark.rejects
def test_position_layers_name_a_nested_tensor():
    x = nested_tensor_from_jagged(torch.zeros(5, 8), torch.tensor([0, 3, 5]))
    for layer in (SinusoidalPositions(8), LearnedPositions(9, 8), RotaryPositions(8)):
        with pytest.raises(ValueError, match="x must be a dense tensor, got a nested one"):
            layer(x)


@pytest.mark.rejects
def test_tensors_of_torchrec_are_refused():
    run_alone("""
        import warnings

        warnings.simplefilter("ignore")
        import pytest
        import torch
        from torchrec import KeyedJaggedTensor

        from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer

        torch.manual_seed(0)
        values, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 0, 1, 2])
        keyed = KeyedJaggedTensor(
            keys=["a", "b"], values=values, lengths=lengths, weights=torch.rand(5)
        )
        token, bag = Embedding(7, 4), EmbeddingBag(7, 4, include_last_offset=True)
        layer = EmbeddingLayer(7, 4, max_positions=9)
        for ids in (keyed, keyed["a"]):
            name = type(ids).__name__
            for module, advice in (
                (token, "its values()"),
                (bag, "its values(), its offsets() with include_last_offset=True, and its "
                 "weights() as per_sample_weights"),
                (layer, "torch.nested.nested_tensor_from_jagged(ids.values(), "
                 "ids.offsets())"),
            ):
                with pytest.raises(TypeError) as error:
                    module(ids)
                assert str(error.value) == (
                    f"ids must be a tensor, got {name}: pass {advice}"
                )
        assert token(keyed.values()).shape == (5, 4)
        bag(keyed.values(), keyed.offsets(), None)
        weighted = bag(keyed.values(), keyed.offsets(), keyed.weights())
        assert weighted.shape == (4, 4) and not weighted[1].any()
        jagged = torch.nested.nested_tensor_from_jagged(keyed.values(), keyed.offsets())
        parts = layer(jagged).unbind()
        torch.testing.assert_close(parts[3], layer(torch.tensor([4, 5])))
    """)
