"""Rotation, alignment of positions, frequencies, layouts and query temperature."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from firstlayer.positions.frequencies import layer_frequencies
from firstlayer.positions.phases import digit_phases, digit_tables
from firstlayer.positions.rotary import (
    convert_layout,
    inverse_frequencies,
    over_heads,
    query_temperature,
    rotate,
    section_frequencies,
)
from firstlayer.positions.scaling import Linear, YaRN

LAYOUTS = ["half", "interleaved", "interleaved_to_half"]
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}
rng = np.random.default_rng(0)


def at(positions, dim=8, base=10_000.0):
    w = inverse_frequencies(dim, base=base)
    return digit_phases(np.asarray(positions), digit_tables(w).astype(float), w)


def by_complex_numbers(x, positions, dim, base, layout):
    """Rotate in float64, with each pair as a complex number."""
    angles = np.asarray(positions, float)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    half = dim // 2
    if layout == "half":
        z = x[..., :half] + 1j * x[..., half:dim]
    else:
        z = x[..., 0:dim:2] + 1j * x[..., 1:dim:2]
    z = z * np.exp(1j * angles)
    if layout == "interleaved":
        rotated = np.stack([z.real, z.imag], axis=-1).reshape(*x.shape[:-1], dim)
    else:
        rotated = np.concatenate([z.real, z.imag], axis=-1)
    return np.concatenate([rotated, x[..., dim:]], axis=-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [2, 6, 8])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotation_equals_complex_multiplication(layout, dim, base):
    x, positions = rng.standard_normal((3, 4, 8)), [0, 5, -3, 1000]
    got = rotate(x, *at(positions, dim, base), layout=layout)
    want = by_complex_numbers(x, positions, dim, base, layout)
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_preserves_norms(layout):
    x = rng.standard_normal((5, 8))
    y = rotate(x, *at([0, 1, 65_536, -7, 2**24 - 1]), layout=layout)
    np.testing.assert_allclose(
        np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6
    )
    assert not np.allclose(y[1:], x[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.integers(-(2**23), 2**23), st.integers(-500, 500))
def test_scores_depend_on_relative_position_only(layout, shift, distance):
    q, k = np.random.default_rng(3).standard_normal((2, 1, 8))

    def score(m, n):
        rotated = [rotate(v, *at([p]), layout=layout) for v, p in ((q, m), (k, n))]
        return np.vdot(*rotated)

    np.testing.assert_allclose(
        score(distance, 0), score(shift + distance, shift), atol=1e-5
    )
    assert abs(score(1, 0) - score(7, 0)) > 1e-3


def test_interleaved_to_half_only_reorders_features():
    x, phases = rng.standard_normal((4, 8)), at([3, 1, 4, 1], 6)
    half = rotate(x, *phases, layout="interleaved_to_half")
    interleaved = rotate(x, *phases, layout="interleaved")
    np.testing.assert_array_equal(half[:, :6], interleaved[:, [0, 2, 4, 1, 3, 5]])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_negated_sines_rotate_back(layout):
    x, (cos, sin) = rng.standard_normal((3, 8)), at([3, 1, 70_000])
    back = rotate(rotate(x, cos, sin, layout=layout), cos, -sin, layout=layout)
    np.testing.assert_allclose(back, x, atol=1e-6)


# NumPy, torch and JAX


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [6, 8])
def test_rotation_is_the_same_in_every_library(library, layout, dim):
    wrap = LIBRARIES[library]
    arrays = [
        a.astype("float32") for a in (rng.standard_normal((2, 5, 8)), *at(range(5), dim))
    ]
    got = rotate(*map(wrap, arrays), layout=layout)
    np.testing.assert_array_equal(np.asarray(got), rotate(*arrays, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_compiles(layout):
    x, cos, sin = (
        a.astype("float32") for a in (rng.standard_normal((2, 5, 8)), *at(range(5), 6))
    )
    want = rotate(x, cos, sin, layout=layout)

    def run(x, cos, sin):
        return rotate(x, cos, sin, layout=layout)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    np.testing.assert_array_equal(compiled(*map(torch.from_numpy, (x, cos, sin))), want)
    np.testing.assert_allclose(jax.jit(run)(x, cos, sin), want, atol=1e-6)


# Alignment of positions


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "shape, x, heads_axis, want",
    [
        ((5,), (5, 8), -3, (5,)),
        ((5,), (4, 5, 8), -3, (5,)),
        ((5,), (2, 4, 5, 8), -3, (5,)),
        ((2, 5), (2, 5, 8), -3, (2, 5)),
        ((2, 5), (2, 4, 5, 8), -3, (2, 1, 5)),
        ((1, 5), (2, 4, 5, 8), -3, (1, 1, 5)),
        ((2, 1, 5), (2, 4, 5, 8), -3, (2, 1, 5)),
        ((3, 2, 5), (3, 2, 4, 5, 8), -3, (3, 2, 1, 5)),
        ((5,), (5, 4, 8), -2, (5, 1)),
        ((5,), (2, 5, 4, 8), -2, (5, 1)),
        ((2, 5), (2, 5, 4, 8), -2, (2, 5, 1)),
        ((2, 5, 4), (2, 5, 4, 8), -2, (2, 5, 4)),
    ],
)
def test_positions_are_aligned_by_their_number_of_axes(library, shape, x, heads_axis, want):
    positions, x = LIBRARIES[library](np.zeros(shape)), LIBRARIES[library](np.zeros(x))
    assert tuple(over_heads(positions, x, heads_axis=heads_axis).shape) == want
    axial = LIBRARIES[library](np.zeros((3, *shape)))
    aligned = over_heads(axial, x, heads_axis=heads_axis, axial=True)
    assert tuple(aligned.shape) == (3, *want)


@pytest.mark.parametrize("heads_axis", [-3, -2])
def test_batched_positions_broadcast_over_heads_even_if_sizes_coincide(heads_axis):
    x, positions = np.ones((4, 4, 4, 8)), np.arange(16).reshape(4, 4)
    y = rotate(x, *at(over_heads(positions, x, heads_axis=heads_axis)))
    for row, head in np.ndindex(4, 4):
        mine = y[row, head] if heads_axis == -3 else y[row, :, head]
        np.testing.assert_array_equal(mine, rotate(x[row, head], *at(positions[row])))


@pytest.mark.rejects
@pytest.mark.parametrize(
    "shape, x, heads_axis",
    [
        ((), (5, 8), -3),
        ((4,), (5, 8), -3),
        ((1,), (5, 8), -3),
        ((3, 5), (2, 4, 5, 8), -3),
        ((2, 1), (2, 4, 5, 8), -3),
        ((2, 5), (3, 2, 4, 5, 8), -3),
        ((2, 5, 4), (2, 4, 5, 8), -3),
        ((4,), (2, 5, 4, 8), -2),
        ((5,), (5, 8), -2),
        ((2, 5), (5, 2, 5, 2, 8), -2),
        ((2, 4), (2, 5, 4, 8), -2),
    ],
)
def test_rejects_positions_that_do_not_fit(shape, x, heads_axis):
    message = f"positions must fit x of shape .* heads_axis {heads_axis}, got shape"
    with pytest.raises(ValueError, match=message):
        over_heads(np.zeros(shape), np.zeros(x), heads_axis=heads_axis)


@pytest.mark.rejects
def test_rejects_bad_layouts_axes_and_widths():
    x, phases = np.ones((1, 8)), at([0])
    with pytest.raises(ValueError, match="layout must be 'half', .* got 'neox'"):
        rotate(x, *phases, layout="neox")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="x must have at least 8 features, got 6"):
        rotate(np.ones((1, 6)), *phases)
    with pytest.raises(ValueError, match="heads_axis must be -3 or -2, got 1"):
        over_heads(np.zeros(1), x, heads_axis=1)


# Frequencies


@pytest.mark.parametrize("base", [10_000.0, 150_000.0])
def test_frequencies_decrease_geometrically_from_one(base):
    w = inverse_frequencies(64, base=base)
    assert w[0] == 1.0 and w.dtype == np.float64
    np.testing.assert_allclose(w[1:] / w[:-1], base ** (-1 / 32), rtol=1e-12)


W = inverse_frequencies(128, base=1e6)


def test_sections_are_contiguous_runs_of_pairs():
    matrix = section_frequencies(W, [16, 24, 24])
    axis_of = np.repeat([0, 1, 2], [16, 24, 24])
    np.testing.assert_array_equal(matrix.sum(axis=0), W)
    np.testing.assert_array_equal(np.argmax(matrix, axis=0), axis_of)
    assert (np.count_nonzero(matrix, axis=0) == 1).all()


@pytest.mark.parametrize("sections, pairs", [([24, 20, 20], 64), ([11, 11, 10], 32)])
def test_interleaved_sections_are_round_robin(sections, pairs):
    w = inverse_frequencies(2 * pairs)
    matrix = section_frequencies(w, sections, interleaved=True)
    axis_of = np.argmax(matrix, axis=0)
    np.testing.assert_array_equal(matrix.sum(axis=0), w)
    assert np.bincount(axis_of).tolist() == sections
    assert (
        axis_of[:30].tolist() == [0, 1, 2] * 10 and (axis_of[3 * sections[1] :] == 0).all()
    )


def test_layer_frequencies_are_scaled_before_they_are_sectioned():
    rule = YaRN(factor=4.0, original_length=64)
    got, factor = layer_frequencies(
        24,
        base=5e5,
        scaling=rule,
        rotary_dim=16,
        sections=[4, 2, 2],
        interleaved_sections=True,
    )
    scaled = rule.inverse_frequencies(16, base=5e5)
    np.testing.assert_array_equal(
        got, section_frequencies(scaled, [4, 2, 2], interleaved=True)
    )
    assert factor == rule.attention_factor
    explicit, factor = layer_frequencies(8, frequencies=[[0.5, 0.0], [0.0, 2.0]])
    assert explicit.tolist() == [[0.5, 0.0], [0.0, 2.0]] and factor == 1.0


@pytest.mark.rejects
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: inverse_frequencies(7), "rotary_dim must be positive and even, got 7"),
        (lambda: inverse_frequencies(0), "rotary_dim must be positive, got 0"),
        (lambda: inverse_frequencies(8, base=1.0), "base must be greater than 1, got 1.0"),
        (
            lambda: inverse_frequencies(8, base=np.inf),
            "base must be greater than 1, got inf",
        ),
        (
            lambda: inverse_frequencies(8, base=np.nan),
            "base must be greater than 1, got nan",
        ),
        (lambda: section_frequencies(W, [16, 24]), r"add up to 64 pairs, got \[16, 24\]"),
        (lambda: section_frequencies(W, [65, -1]), "sections must be at least 0, got -1"),
        (
            lambda: section_frequencies(W, [16, 24, 24], interleaved=True),
            r"sections\[1\] must be at most 21 of 64 interleaved pairs, got 24",
        ),
        (lambda: layer_frequencies(7), "head_dim must be positive and even, got 7"),
        (lambda: layer_frequencies(-2), "head_dim must be positive, got -2"),
        (lambda: layer_frequencies(8, rotary_dim=3), "rotary_dim must be .* even, got 3"),
        (lambda: layer_frequencies(8, rotary_dim=10), "at most head_dim 8, got 10"),
        (
            lambda: layer_frequencies(8, frequencies=[1.0], scaling=Linear(factor=2.0)),
            "give frequencies or scaling, rotary_dim and sections, not both",
        ),
        (lambda: layer_frequencies(8, frequencies=[np.nan]), r"must be finite, .* \(1,\)"),
        (lambda: layer_frequencies(8, frequencies=[]), r"got shape \(0,\)"),
        (lambda: layer_frequencies(8, frequencies=np.ones(5)), "at most 4 pairs .* got 5"),
    ],
)
def test_rejects_bad_frequencies(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Layouts of weights


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_converting_both_projections_keeps_scores(library, rotary_dim, source, target):
    wrap, heads, head_dim = LIBRARIES[library], 3, 6
    x, phases = rng.standard_normal((5, 10)), at(range(5), rotary_dim or head_dim)

    def scores(weights, biases, layout):
        q, k = (
            rotate(
                (x @ w.T + b).reshape(5, heads, head_dim).swapaxes(0, 1),
                *phases,
                layout=layout,
            )
            for w, b in zip(weights, biases, strict=True)
        )
        return q @ k.swapaxes(-1, -2)

    def converted(arrays):
        options = {"source": source, "target": target, "rotary_dim": rotary_dim}
        return [np.asarray(convert_layout(wrap(a), heads, **options)) for a in arrays]

    weights = rng.standard_normal((2, heads * head_dim, 10))
    biases = rng.standard_normal((2, heads * head_dim))
    if library == "jax":
        weights, biases = weights.astype("float32"), biases.astype("float32")
    want = scores(weights, biases, source)
    got = scores(converted(weights), converted(biases), target)
    np.testing.assert_allclose(got, want, atol=1e-10 if library != "jax" else 1e-4)
    if (source == "half") != (target == "half"):
        assert not np.allclose(scores(weights, biases, target), want, atol=1e-2)


@pytest.mark.parametrize("library", LIBRARIES)
def test_conversion_only_reorders_rows(library):
    wrap, weight = LIBRARIES[library], np.arange(24).reshape(12, 2)
    converted_rows = convert_layout(
        wrap(weight), 2, source="interleaved", target="half", rotary_dim=4
    )
    order = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    np.testing.assert_array_equal(np.asarray(converted_rows), weight[order])
    back = convert_layout(
        converted_rows, 2, source="half", target="interleaved", rotary_dim=4
    )
    np.testing.assert_array_equal(np.asarray(back), weight)


@pytest.mark.rejects
def test_rejects_bad_conversions():
    weight, to = np.ones((12, 4)), dict[str, Any](source="half", target="interleaved")
    with pytest.raises(ValueError, match="num_heads must divide 12 rows, got 5"):
        convert_layout(weight, 5, **to)
    with pytest.raises(ValueError, match="num_heads must be positive, got 0"):
        convert_layout(weight, 0, **to)
    with pytest.raises(ValueError, match="head_dim must be positive and even, got 3"):
        convert_layout(weight, 4, **to)
    with pytest.raises(ValueError, match="rotary_dim must be at most head_dim 6, got 8"):
        convert_layout(weight, 2, **to, rotary_dim=8)
    with pytest.raises(ValueError, match="source must be 'half', .* got 'meta'"):
        convert_layout(weight, 2, source="meta", target="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="target must be 'half', .* got 'hf'"):
        convert_layout(weight, 2, source="half", target="hf")  # pyright: ignore[reportArgumentType]


# Query temperature


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scale, every", [(0.1, 8192), (0.3, 7)])
def test_query_temperature_matches_llama_4(library, scale, every):
    positions = np.array([0, 5, 6, 7, 8190, 8191, 8192, 16_382, 16_383, 2**24 - 1], "int32")
    got = query_temperature(LIBRARIES[library](positions), scale=scale, every=every)
    want = 1 + scale * np.log(1 + np.floor((positions.astype(float) + 1) / every))
    assert "float32" in str(got.dtype)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float32", "float64"])
def test_query_temperature_accepts_any_dtype(dtype):
    got = query_temperature(np.array([0, 99, 126, 127], dtype), every=64, dtype="float64")
    want = 1 + 0.1 * np.log([1, 2, 2, 3])
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-15)


def test_query_temperature_matches_ministral_one_position_earlier():
    positions = np.array([[0, 1, 16_383, 16_384, 50_000]])
    want = get_llama_4_attn_scale(torch.from_numpy(positions), 0.2, 16_384)
    got = query_temperature(positions - 1, scale=0.2, every=16_384)
    np.testing.assert_allclose(got.ravel(), want.numpy().ravel(), rtol=1e-6)


def test_query_temperature_compiles():
    positions = np.arange(0, 40_000, 999, dtype="int32")
    compiled = torch.compile(query_temperature, fullgraph=True, backend="eager")
    want = query_temperature(positions)
    np.testing.assert_allclose(compiled(torch.from_numpy(positions)), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(query_temperature)(positions), want, rtol=1e-6)


@pytest.mark.rejects
def test_query_temperature_rejects_a_step_of_zero():
    with pytest.raises(ValueError, match="every must be positive, got 0"):
        query_temperature(np.arange(3), every=0)
