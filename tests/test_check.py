"""Arrays that no layer accepts: masked ones, strings and numbers beyond 64 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import firstlayer.equinox as in_equinox
import firstlayer.numpy as in_numpy
import firstlayer.torch as in_torch
from firstlayer._check import dtype_text, host_array, not_masked
from firstlayer.optim import RowSGD

FRONT_ENDS: dict[str, Any] = {"numpy": in_numpy, "torch": in_torch, "equinox": in_equinox}
IDS = np.ma.masked_equal([[3, 7, 7]], 7)
REALS = np.ma.masked_less(np.ones((3, 8), np.float32), 0.0)
MATRIX = np.ma.array([[1.0, 2.0]], mask=[[True, False]])
TABLE = np.ma.masked_less(np.ones((9, 8), np.float32), 0.0)


def vectors(front_end):
    made = {"numpy": np.ones, "torch": torch.ones, "equinox": jnp.ones}
    return made[front_end]((3, 8))


def layers(front_end: str) -> dict[str, Any]:
    """Return calls that pass a masked array, by the name of the argument."""
    library, x = FRONT_ENDS[front_end], vectors(front_end)
    key = {"key": jax.random.key(0)} if front_end == "equinox" else {}
    rotary, sinusoidal = library.RotaryPositions(8), library.SinusoidalPositions(8)
    learned = library.LearnedPositions(9, 8, **key)
    bias = library.AlibiBias(2)
    options = {"padding_idx": 0, "zero_padding": True, "position": "sinusoidal"}
    layer = library.EmbeddingLayer(9, 8, segments=2, **options, **key)
    ids = torch.tensor([[1, 2, 3]]) if front_end == "torch" else np.array([[1, 2, 3]])
    return {
        "positions, rotary": lambda: rotary(x, IDS[0]),
        "positions, rotary phases": lambda: rotary.phases(IDS),
        "offset, rotary": lambda: rotary(x, offset=IDS[0]),
        "delta, rotary": lambda: rotary.rerotate(x, IDS[0]),
        "positions, sinusoidal": lambda: sinusoidal(x, IDS[0]),
        "positions, encode": lambda: sinusoidal.encode([IDS[0], IDS[0]]),
        "positions, learned": lambda: learned(x, IDS[0]),
        "q_positions, bias": lambda: bias.bias(IDS[0], [1, 2]),
        "ids, layer": lambda: layer(IDS),
        "segments, layer": lambda: layer(ids, segments=IDS % 2),
        "mask, layer": lambda: layer(ids, mask=IDS > 5),
        "positions, layer": lambda: layer(ids, positions=IDS),
        "matrix, fourier": lambda: library.FourierFeatures(MATRIX),
        "frequencies, rotary": lambda: library.RotaryPositions(4, frequencies=MATRIX[0]),
        "value, padding": lambda: layer.token.set_padding(REALS[0]),
    }


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_masked_arrays_are_refused(front_end):
    for name, call in layers(front_end).items():
        argument = name.partition(",")[0]
        with pytest.raises(TypeError, match=f"{argument} must not be a masked array"):
            call()


@pytest.mark.parametrize("front_end", ["numpy", "equinox"])
def test_masked_arrays_are_refused_as_ids_and_vectors(front_end):
    library = FRONT_ENDS[front_end]
    key = {"key": jax.random.key(0)} if front_end == "equinox" else {}
    table, bag = library.Embedding(9, 8, **key), library.EmbeddingBag(9, 8, **key)
    fourier = library.FourierFeatures([[1.0] * 8])
    calls = {
        "ids, table": lambda: table(IDS),
        "ids, mask": lambda: table.mask(IDS),
        "ids, bag": lambda: bag(IDS),
        "per_sample_weights, bag": lambda: bag(
            np.array([[1, 2, 3]]), per_sample_weights=REALS[:1, :3]
        ),
        "x, logits": lambda: table.logits(REALS),
        "x, rotary": lambda: library.RotaryPositions(8)(REALS),
        "x, sinusoidal": lambda: library.SinusoidalPositions(8)(REALS),
        "coordinates, fourier": lambda: fourier(REALS),
        "weight, table": lambda: library.Embedding(9, 8, weight=TABLE),
    }
    for name, call in calls.items():
        argument = name.partition(",")[0]
        with pytest.raises(TypeError, match=f"{argument} must not be a masked array"):
            call()


def test_masked_gradients_are_refused_by_pullbacks():
    table = in_numpy.Embedding(9, 8)
    for layer, args in (
        (table, ([1, 2, 3],)),
        (in_numpy.RotaryPositions(8), (REALS.data,)),
    ):
        _, pullback = layer.vjp(*args)
        with pytest.raises(TypeError, match="dy must not be a masked array"):
            pullback(REALS)


def test_masked_gradients_are_refused_by_optimizers():
    layer = in_numpy.Embedding(9, 8)
    before = layer.weight.copy()
    with pytest.raises(TypeError, match=r"grads\['weight'\] must not be a masked array"):
        RowSGD(layer, lr=0.1).step({"weight": TABLE})
    np.testing.assert_array_equal(layer.weight, before)


def test_the_error_says_how_to_fill_a_masked_array():
    message = "ids must not be a masked array: fill it, for example ids.filled(0)"
    with pytest.raises(TypeError) as error:
        in_numpy.Embedding(9, 4)(IDS)
    assert str(error.value) == message


def test_other_arrays_are_returned_unchanged():
    class Subclass(np.ndarray):
        pass

    for x in (np.ones(2), np.ones(2).view(Subclass), [1, 2], (1.0,), 3, [[1], [2]]):
        assert not_masked(x, name="x") is x
    array = np.ones(2)
    assert host_array(array, name="x") is array


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("<U32", "str"),
        ("S5", "bytes"),
        ("V8", "void"),
        ("O", "object"),
        ("bool", "bool"),
        ("complex64", "complex64"),
        ("datetime64[s]", "datetime64[s]"),
        (jnp.bfloat16, "bfloat16"),
    ],
)
def test_dtypes_are_named_without_the_size_of_strings(dtype, text):
    assert dtype_text(np.dtype(dtype)) == text


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_strings_are_refused_by_the_name_of_their_type(front_end):
    library = FRONT_ENDS[front_end]
    with pytest.raises(TypeError, match="positions must be integers or reals, got str$"):
        library.SinusoidalPositions(8).encode(["one", "two"])
    if front_end != "torch":
        key = {"key": jax.random.key(0)} if front_end == "equinox" else {}
        with pytest.raises(TypeError, match="ids must be integers, got str$"):
            library.Embedding(9, 4, **key)(np.array(["one"]))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("large", [10**30, -(10**30)])
def test_numbers_beyond_64_bits_are_out_of_range(front_end, large):
    library, x = FRONT_ENDS[front_end], vectors(front_end)
    for layer in (library.RotaryPositions(8), library.SinusoidalPositions(8)):
        message = f"offset must be smaller than {2**62} in size, got {large}"
        with pytest.raises(ValueError, match=message):
            layer(x, offset=large)
        message = f"positions must be smaller than {2**63} in size, got {large}"
        with pytest.raises(ValueError, match=message):
            layer(x, [1, large, 2])
        with pytest.raises(ValueError, match=f"offset .* got {large}"):
            layer(x, offset=[large])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_unsigned_scalars_are_accepted_where_they_fit(front_end):
    library, x = FRONT_ENDS[front_end], vectors(front_end)
    rotary, sinusoidal = library.RotaryPositions(8), library.SinusoidalPositions(8)
    five, huge = np.uint64(5), np.uint64(2**63 + 5)
    for got, want in zip(rotary.phases(five), rotary.phases(5), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(sinusoidal.encode(five), sinusoidal.encode(5))
    for layer in (rotary, sinusoidal):
        np.testing.assert_array_equal(layer(x, [five] * 3), layer(x, [5] * 3))
        np.testing.assert_array_equal(layer(x, offset=five), layer(x, offset=5))
        with pytest.raises(ValueError, match=f"positions must be .* got {huge}"):
            layer(x, [huge] * 3)
    with pytest.raises(ValueError, match=f"positions must be .* got {huge}"):
        rotary.phases(huge)
