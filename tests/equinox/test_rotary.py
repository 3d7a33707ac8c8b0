"""RotaryPositions in the Equinox front end: values, tracing, use in Equinox attention."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import firstlayer.equinox
import firstlayer.numpy
import firstlayer.torch
from firstlayer.equinox.rotary import RotaryPositions
from firstlayer.numpy.rotary import RotaryPositions as NumpyRotary
from firstlayer.positions.axial import qwen_axial_frequencies
from firstlayer.positions.scaling import DynamicNTK, Linear, YaRN
from tests.support.jax_round_trips import fast_compilation, key

LAYOUTS = ["half", "interleaved", "interleaved_to_half"]
LAYER = RotaryPositions(8, base=500.0)


def draw(*shape, dtype: Any = "float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture(autouse=True, scope="module")
def _fast_compilation():
    with fast_compilation():
        yield


@eqx.filter_jit
def rotate(layer, x, positions=None, offset: Any = 0):
    return layer(x, positions, offset=offset)


def rotated(x, positions, *, base=500.0, layout="half"):
    """Return the rotation in float64, with one complex number for each pair."""
    x, size = np.asarray(x, np.float64), x.shape[-1]
    angles = np.asarray(positions)[..., None] * base ** (-np.arange(0, size, 2) / size)
    halves = np.split(x, 2, axis=-1)
    a, b = halves if layout == "half" else (x[..., 0::2], x[..., 1::2])
    z = (a + 1j * b) * np.exp(1j * angles)
    if layout == "interleaved":
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    return np.concatenate([z.real, z.imag], -1)


# Values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_equals_a_complex_product(layout):
    x, positions = draw(2, 3, 4, 8), jnp.array([0, -7, 300, 70_000])
    got = rotate(RotaryPositions(8, base=500.0, layout=layout), x, positions)
    np.testing.assert_allclose(got, rotated(x, positions, layout=layout), atol=1e-6)


@given(st.lists(st.integers(-(2**24) + 1, 2**24 - 1), min_size=4, max_size=4))
def test_rotation_by_any_position_keeps_the_norm(positions):
    x = draw(2, 3, 4, 8)
    got = np.asarray(rotate(LAYER, x, jnp.array(positions)), np.float64)
    np.testing.assert_allclose(got, rotated(x, positions), atol=4e-6)
    sizes = [np.linalg.norm(y, axis=-1) for y in (got, np.asarray(x))]
    np.testing.assert_allclose(*sizes, rtol=1e-6)


def test_scores_depend_on_relative_position_only():
    q, k = np.asarray(draw(2, 8))

    def scores(positions):
        x = jnp.asarray(np.broadcast_to(np.stack([q, k]), (2, 3, 2, 8)))
        a, b = np.asarray(rotate(LAYER, x, jnp.array(positions)))[0, 0]
        return a @ b

    assert scores([7, 3]) == pytest.approx(scores([10_000_007, 10_000_003]), abs=1e-5)
    assert scores([7, 3]) == pytest.approx(scores([-1, -5]), abs=1e-5)
    assert abs(scores([7, 3]) - scores([7, 4])) > 0.01


def test_phases_are_accurate_at_large_positions():
    positions = np.array([0, 255, 256, 65_536, 2**24 - 1, -9_999_999])
    cos, sin = eqx.filter_jit(LAYER.phases)(jnp.asarray(positions))
    angles = positions[:, None].astype(np.longdouble) * 500.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.cos(angles).astype(float), atol=2.5e-7)
    np.testing.assert_allclose(sin, np.sin(angles).astype(float), atol=2.5e-7)


def test_real_positions_equal_the_formula():
    x, positions = draw(2, 3, 4, 8), np.array([0.5, -3.25, 1000.75, 7.0])
    for dtype in ("float32", "bfloat16"):
        got = rotate(LAYER, x, jnp.asarray(positions, dtype))
        at = np.asarray(positions.astype(jnp.dtype(dtype)), np.float64)
        np.testing.assert_allclose(got, rotated(x, at), atol=1e-6)


def test_two_layers_with_different_bases_do_not_interfere():
    x, other = draw(2, 3, 4, 8), RotaryPositions(8, base=77.0)

    @eqx.filter_jit
    def run(a, b, x):
        return a(x), b(jnp.concat([x, x], axis=-2)), a(x), b(x)

    first, _, again, theirs = run(LAYER, other, x)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first, rotated(x, range(4)), atol=1e-6)
    np.testing.assert_allclose(theirs, rotated(x, range(4), base=77.0), atol=1e-6)
    assert np.abs(first - theirs).max() > 0.1


def test_batched_positions_do_not_broadcast_along_the_heads_axis():
    x, positions = draw(3, 3, 3, 8), np.arange(9).reshape(3, 3)
    got = rotate(LAYER, x, jnp.asarray(positions))
    np.testing.assert_allclose(got, rotated(x, positions[:, None]), atol=1e-6)
    last = rotate(RotaryPositions(8, base=500.0, heads_axis=-2), x, jnp.asarray(positions))
    np.testing.assert_allclose(last, rotated(x, positions[:, :, None]), atol=1e-6)


def test_each_coordinate_rotates_its_section_of_pairs():
    layer = RotaryPositions(8, base=500.0, sections=[2, 1, 1], heads_axis=-3)
    x = draw(2, 4, 8)
    positions = np.arange(24).reshape(3, 2, 4)
    got = rotate(layer, x, jnp.asarray(positions))
    by_axis = [rotated(x, positions[axis]).reshape(2, 4, 2, 4) for axis in range(3)]
    want = np.stack([by_axis[axis][..., i] for i, axis in enumerate([0, 0, 1, 2])], -1)
    np.testing.assert_allclose(got, want.reshape(x.shape), atol=1e-6)
    # Text has the same position on every axis.
    np.testing.assert_allclose(
        rotate(layer, x, None, 5), rotated(x, np.arange(5, 9)), atol=1e-6
    )
    image = RotaryPositions(8, frequencies=qwen_axial_frequencies(8))
    assert (image.axes, layer.axes, LAYER.axes) == (2, 3, None)
    np.testing.assert_array_equal(image.frequencies, qwen_axial_frequencies(8))


def test_at_length_equals_numpy():
    rule = DynamicNTK(factor=2.0, original_length=16)
    layer, theirs = RotaryPositions(8, scaling=rule), NumpyRotary(8, scaling=rule)
    for n in (16, 40):
        ours, want = layer.at_length(n), theirs.at_length(n)
        np.testing.assert_array_equal(ours.tables.array, want.tables)
        np.testing.assert_array_equal(ours.frequencies, want.frequencies)
    assert layer.at_length(16).tables == layer.tables != layer.at_length(40).tables
    yarn = YaRN(factor=4.0, original_length=64)
    assert RotaryPositions(8, scaling=yarn).attention_factor == yarn.attention_factor > 1


def test_from_hf_equals_numpy():
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    }
    layer = RotaryPositions.from_hf(config, heads_axis=-2)
    assert layer.config() == NumpyRotary.from_hf(config, heads_axis=-2).config()
    assert layer.scaling == Linear(factor=3.0) and layer.base == 5e5
    assert eqx.tree_equal(RotaryPositions(**layer.config()), layer)


def test_rerotate_shifts_cached_keys():
    rule = YaRN(factor=4.0, original_length=64)
    layer = RotaryPositions(8, layout="interleaved_to_half", scaling=rule)
    k = draw(2, 3, 4, 8)

    @eqx.filter_jit
    def moved(layer, k, delta):
        keys = layer(k, offset=7)
        return [
            (layer.rerotate(keys, delta), layer(k, offset=7 + delta)),
            (layer.rerotate(keys, -5), layer(k, offset=2)),
        ]

    for got, want in moved(layer, k, jnp.array([4, -1])):
        np.testing.assert_allclose(got, want, atol=2e-6)


# Equinox attention


class TransformerBlock(eqx.Module):
    """The example in the documentation of ``eqx.nn.RotaryPositionalEmbedding``."""

    rope_embeddings: Any
    mha_attention: eqx.nn.MultiheadAttention

    def __call__(self, x):
        def process_heads(query_heads, key_heads, value_heads):
            rotate = jax.vmap(self.rope_embeddings, in_axes=1, out_axes=1)
            return rotate(query_heads), rotate(key_heads), value_heads

        return self.mha_attention(x, x, x, process_heads=process_heads)


class HeadsBlock(TransformerBlock):
    """The same without vmap: ``heads_axis`` gives the axis of the heads."""

    def __call__(self, x):
        def process_heads(query_heads, key_heads, value_heads):
            rotate = self.rope_embeddings
            return rotate(query_heads), rotate(key_heads), value_heads

        return self.mha_attention(x, x, x, process_heads=process_heads)


def attend(mha, x, *, base):
    """Return the attention of ``mha`` in float64, head by head."""
    q, k, v, out = (
        np.asarray(getattr(mha, f"{name}_proj").weight, np.float64)
        for name in ("query", "key", "value", "output")
    )
    x, heads = np.asarray(x, np.float64), []

    def rotary(x):
        return rotated(x, range(len(x)), base=base)

    for head in range(mha.num_heads):
        own = slice(8 * head, 8 * head + 8)
        a, b = rotary(x @ q[own].T), rotary(x @ k[own].T)
        weights = np.exp(a @ b.T / np.sqrt(8))
        weights /= weights.sum(axis=1, keepdims=True)
        heads.append(weights @ x @ v[own].T)
    return np.concatenate(heads, axis=1) @ out.T


def test_attention_of_the_equinox_documentation_equals_the_formula():
    mha = eqx.filter_jit(lambda key: eqx.nn.MultiheadAttention(2, 16, key=key))(key(0))
    x = draw(6, 16)
    want = attend(mha, x, base=10_000.0)
    ours = eqx.filter_jit(TransformerBlock(RotaryPositions(8), mha))(x)
    np.testing.assert_allclose(ours, want, atol=1e-5)
    heads = eqx.filter_jit(HeadsBlock(RotaryPositions(8, heads_axis=-2), mha))(x)
    np.testing.assert_allclose(heads, want, atol=1e-5)
    assert np.abs(attend(mha, x, base=10.0) - want).max() > 1e-3


def test_rotation_equals_equinox_at_small_positions():
    # equinox 0.13.8 computes angles as float32 products.
    x = draw(6, 8)
    theirs = eqx.filter_jit(eqx.nn.RotaryPositionalEmbedding(8))(x)
    np.testing.assert_allclose(rotate(RotaryPositions(8), x), theirs, atol=1e-6)


# Positions and offsets


def test_decoding_with_scan_equals_one_call():
    layer, q, start = LAYER, draw(2, 3, 4, 8), jnp.array([0, 100_000])

    def step(offset, q):
        return offset + 1, layer(q[:, :, None], offset=offset)[:, :, 0]

    _, got = jax.lax.scan(step, start, jnp.moveaxis(q, 2, 0))
    want = rotate(layer, q, offset=start)
    np.testing.assert_allclose(jnp.moveaxis(got, 0, 2), want, atol=1e-6)
    at = np.arange(4) + np.array([[0], [100_000]])
    np.testing.assert_allclose(want, rotated(q, at[:, None]), atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "float16"])
def test_offsets_and_positions_may_have_any_dtype(dtype):
    x, offset = draw(2, 3, 4, 8), jnp.array([3, 100], dtype)
    at = np.arange(4) + np.array([[3], [100]])
    got = rotate(LAYER, x, offset=offset)
    np.testing.assert_allclose(got, rotated(x, at[:, None]), atol=1e-6)
    got = rotate(LAYER, x, jnp.asarray(at, dtype))
    np.testing.assert_allclose(got, rotated(x, at[:, None]), atol=1e-6)


def test_half_precision_offset_is_added_in_float32():
    x = draw(1, 3000, 8)
    got = rotate(LAYER, x, offset=jnp.array([0.5], "bfloat16"))
    np.testing.assert_allclose(got[0], rotated(x[0], np.arange(3000) + 0.5), atol=2e-6)


def test_only_traced_positions_out_of_reach_are_nan():
    x = jnp.ones((5, 8))
    for dtype in ("int32", "float32"):
        far = jnp.array([3, 2**24, -(2**24), 2**31 - 256, -(2**31)], dtype)
        got = np.isnan(rotate(LAYER, x, far))
        assert got.all(axis=1).tolist() == [False, True, True, True, True]
        assert not got[0].any()
    assert np.isnan(rotate(LAYER, x, jnp.full(5, jnp.nan))).all()


@pytest.mark.rejects
@pytest.mark.parametrize(
    "run",
    [
        lambda: LAYER(jnp.ones((2, 8)), np.array([1, 2**32 + 3])),
        lambda: LAYER(jnp.ones((2, 8)), offset=2**32 + 2),
        lambda: LAYER.phases(np.array([2**32 + 3])),
        lambda: LAYER.rerotate(jnp.ones((2, 8)), 2**32 + 3),
        lambda: jax.vmap(LAYER.phases)(np.array([1, 2**32 + 3])),
        lambda: jax.jit(lambda x: LAYER(x, offset=2**32 + 3))(jnp.ones((1, 8))),
    ],
    ids=["positions", "offset", "phases", "delta", "eager vmap", "constant in jit"],
)
def test_concrete_positions_out_of_reach_are_an_error(run):
    with pytest.raises(ValueError, match="smaller than 16777216 in size, got 429496729"):
        run()


X = np.ones((2, 3, 4, 8), np.float32)
WRONG = {
    "head_dim must be positive and even, got 7": lambda: RotaryPositions(7),
    "base must be greater than 1, got 1.0": lambda: RotaryPositions(8, base=1.0),
    "layout must be 'half', .* got 'neox'": lambda: RotaryPositions(8, layout="neox"),  # pyright: ignore
    "heads_axis must be -3 or -2, got 1": lambda: RotaryPositions(8, heads_axis=1),
    "give frequencies or scaling": lambda: RotaryPositions(
        8, frequencies=[1.0], rotary_dim=4
    ),
    "n must be positive, got 0": lambda: LAYER.at_length(0),
    "give positions or offset, not both": lambda: LAYER(X, range(4), offset=1),
    r"positions must fit x of shape \(2, 3, 4, 8\)": lambda: LAYER(X, [1, 2]),
    r"x must have shape \(..., length, 8\), got \(8,\)": lambda: LAYER(X[0, 0, 0]),
    r"keys must have shape \(..., length, 8\)": lambda: LAYER.rerotate(X[..., :6], 1),
    r"delta must be a number or one per row": lambda: LAYER.rerotate(X, [1, 2, 3]),
    r"positions must have shape \(2, ...\), one coordinate": lambda: RotaryPositions(
        8, sections=[2, 2]
    )(X, range(4)),
    "positions must be given for 2 axes, got None": lambda: RotaryPositions(
        8, frequencies=qwen_axial_frequencies(8)
    )(X),
}


@pytest.mark.rejects
@pytest.mark.parametrize("message", WRONG)
def test_invalid_arguments_are_an_error(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.rejects
def test_inputs_that_are_not_real_are_a_type_error():
    with pytest.raises(TypeError, match="x must be real, got int64"):
        LAYER(np.ones((4, 8), int))
    with pytest.raises(TypeError, match="delta must be integers or reals, got bool"):
        LAYER.rerotate(X, True)
    with pytest.raises(TypeError, match="positions must be integers or reals, got bool"):
        rotate(LAYER, X, jnp.ones(4, bool))


# Gradients, precision and trees


def test_gradients_and_tangents_equal_finite_differences():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8)))
        layer = RotaryPositions(8, layout="interleaved", rotary_dim=6, heads_axis=-3)

        @jax.jit
        def run(x, at):
            return layer(x, at), layer.rerotate(x, at[0])

        check_grads(run, (x, jnp.array([2.25, -7.5, 300.75])), order=1, eps=1e-5)
        assert run(x, jnp.arange(3.0))[0].dtype == jnp.float64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype):
    x = draw(2, 3, 4, 8, dtype=dtype)
    got = rotate(LAYER, x, jnp.array([0, 900, 4_000_000, 3]))
    want = rotate(LAYER, x.astype("float32"), jnp.array([0, 900, 4_000_000, 3]))
    np.testing.assert_array_equal(got.view("uint16"), want.astype(dtype).view("uint16"))


def test_layer_has_no_leaves_and_equal_layers_have_equal_hashes():
    assert not jax.tree.leaves(LAYER)
    assert not LAYER.parameters()
    same = RotaryPositions(8, base=500.0)
    assert same == LAYER and hash(same) == hash(LAYER) != hash(RotaryPositions(8))
    assert LAYER.frequencies.dtype == np.float64


# Heads


REFUSED = r"heads_axis must be given for x of three axes, got shape \(3, 4, 8\): -2 for"


def test_three_axes_need_heads_axis_unless_every_row_has_positions():
    layer, x = RotaryPositions(8, base=500.0), draw(3, 4, 8)
    one_row = np.arange(4)[None]
    for options in ({}, {"offset": 7}, {"positions": range(4)}, {"positions": one_row}):
        with pytest.raises(ValueError, match=REFUSED):
            layer(x, **options)
        with pytest.raises(ValueError, match=REFUSED):
            jax.vmap(lambda x, options=options: layer(x, **options))(x[None])
    rows = np.arange(3)[:, None] * 10 + np.arange(4)
    np.testing.assert_allclose(layer(x, rows), rotated(x, rows), atol=1e-6)
    np.testing.assert_allclose(layer(x, offset=[0, 10, 20]), rotated(x, rows), atol=1e-6)


def test_input_of_equinox_attention_is_rotated_by_its_length():
    x = draw(5, 2, 8)
    got = RotaryPositions(8, base=500.0, heads_axis=-2)(x)
    np.testing.assert_allclose(got, rotated(x, np.arange(5)[:, None]), atol=1e-6)
    first = RotaryPositions(8, base=500.0, heads_axis=-3)(x)
    np.testing.assert_allclose(first, rotated(x, np.arange(2)), atol=1e-6)


@pytest.mark.parametrize("name", ["RotaryPositions", "XPosRotary"])
def test_every_front_end_refuses_ambiguous_heads(name):
    x, rows = np.asarray(draw(3, 4, 8)), np.arange(12).reshape(3, 4) * 3
    for library in (firstlayer.numpy, firstlayer.torch, firstlayer.equinox):
        build = partial(getattr(library, name), 8, base=500.0)
        layer, given = build(), build(heads_axis=-3)
        value = torch.tensor(x) if library is firstlayer.torch else x
        for bad in ({}, {"offset": 3}, {"positions": [0, 1, 2, 3]}):
            with pytest.raises(ValueError, match=REFUSED):
                layer(value, **bad)
        assert layer.heads_axis is None and layer.config()["heads_axis"] is None
        # The same numbers with a batch axis, without heads, and with positions of all rows.
        np.testing.assert_array_equal(layer(value[None])[0], given(value))
        np.testing.assert_array_equal(layer(value[0]), given(value)[0])
        np.testing.assert_array_equal(layer(value, rows.tolist()), given(value, rows))
        other = build(heads_axis=-2)(value)
        assert not np.allclose(other, given(value), atol=1e-2)
