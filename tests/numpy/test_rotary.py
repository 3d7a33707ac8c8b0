"""RotaryPositions for NumPy: kernels against the core, gradients, caches, configs."""

import copy
import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer import kernels, positions
from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.positions.phases import axial_digit_phases, digit_phases, digit_tables
from firstlayer.positions.rotary import (
    over_heads,
    pixtral_axial_frequencies,
    qwen_axial_frequencies,
    rotate,
)
from firstlayer.positions.scaling import DynamicNTK, Linear, LongRoPE, YaRN
from firstlayer.positions.turns import (
    float64_digit_tables,
    float64_phases,
    turn_constants,
)

LAYOUTS = ["half", "interleaved", "interleaved_to_half"]
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
YARN = YaRN(factor=4.0, original_length=64)
LONGROPE = LongRoPE(
    short_factors=[1.0, 1.5, 2.0, 3.0],
    long_factors=[1.0, 4.0, 8.0, 9.0],
    original_length=16,
    factor=4.0,
)
rng = np.random.default_rng(0)


def by_core_functions(layer, x, positions):
    """Rotate with the core functions in the compute dtype, rounded once."""
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    w, factor = layer.frequencies, layer.attention_factor
    axial = w.ndim == 2
    aligned = over_heads(np.asarray(positions), x, heads_axis=layer.heads_axis, axial=axial)
    if dtype == np.float32:
        make = axial_digit_phases if axial else digit_phases
        cos, sin = make(aligned, digit_tables(w, factor=factor), w.astype(dtype))
    elif axial or aligned.dtype.kind == "f":
        cos, sin = float64_phases(aligned, turn_constants(w), scale=factor)
    else:
        tables = float64_digit_tables(turn_constants(w), scale=factor)
        cos, sin = digit_phases(aligned, tables[0], w)
    return rotate(x.astype(dtype), cos, sin, layout=layer.layout).astype(x.dtype)


def random(shape, dtype: type = np.float32):
    return rng.standard_normal(shape).astype(dtype)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield
    kernels.set_num_threads(before)


# Kernels and core functions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layer_has_the_bits_of_the_core_functions(layout, dtype):
    x = random((2, 3, 7, 20), dtype)
    layer = RotaryPositions(20, base=5e5, layout=layout, rotary_dim=16, scaling=YARN)
    y = layer(x, offset=300)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, by_core_functions(layer, x, np.arange(300, 307)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_the_number_of_threads(layout, threads):
    x = random((2, 4, 2000, 64))
    layer = RotaryPositions(64, layout=layout)
    np.testing.assert_array_equal(layer(x), by_core_functions(layer, x, np.arange(2000)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads_axis, shape", [(-3, (2, 3, 5, 8)), (-2, (2, 5, 3, 8))])
def test_positions_may_differ_per_row(layout, heads_axis, shape):
    layer = RotaryPositions(8, layout=layout, heads_axis=heads_axis)
    x, at = random(shape), np.array([[0, 1, 2, 3, 4], [9, -1, 70_000, 9, 2**24 - 1]])
    y = layer(x, at)
    np.testing.assert_array_equal(y, by_core_functions(layer, x, at))
    np.testing.assert_array_equal(y[1], layer(x[1], at[1]))
    assert not np.allclose(y, layer(x))


@pytest.mark.parametrize("heads_axis", [-3, -2])
def test_batched_positions_broadcast_over_heads_even_if_sizes_coincide(heads_axis):
    layer = RotaryPositions(4, heads_axis=heads_axis)
    x, at = np.ones((3, 3, 3, 4), "float32"), np.arange(9).reshape(3, 3)
    y = layer(x, at)
    for row, head in np.ndindex(3, 3):
        got = y[row, head] if heads_axis == -3 else y[row, :, head]
        np.testing.assert_array_equal(got, RotaryPositions(4)(x[0, 0], at[row]))


VIEWS = {
    "transposed": lambda: random((2, 5, 3, 8)).transpose(0, 2, 1, 3),
    "every other row": lambda: random((2, 3, 10, 8))[:, :, ::2],
    "backwards": lambda: random((2, 3, 5, 8))[:, ::-1],
    "every other feature": lambda: random((2, 3, 5, 16))[..., ::2],
    "column order": lambda: np.asfortranarray(random((2, 3, 5, 8))),
    "broadcast": lambda: np.broadcast_to(random((1, 1, 5, 8)), (2, 3, 5, 8)),
    "one head": lambda: random((2, 5, 1, 8)).transpose(0, 2, 1, 3),
    "empty": lambda: random((2, 3, 5, 8))[:0],
    "no length": lambda: random((2, 3, 0, 8)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_any_view_is_rotated_and_not_modified(view, layout):
    layer, x = RotaryPositions(8, layout=layout), VIEWS[view]()
    before = x.copy()
    at = np.arange(7, 7 + x.shape[-2])
    y = layer(x, at)
    np.testing.assert_array_equal(y, by_core_functions(layer, before, at))
    np.testing.assert_array_equal(x, before)
    assert y.flags.writeable and not np.shares_memory(x, y)


def test_a_transposed_view_keeps_its_memory_layout():
    x = VIEWS["transposed"]()
    assert RotaryPositions(8)(x).transpose(0, 2, 1, 3).flags.c_contiguous


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from(LAYOUTS),
    st.sampled_from([np.float32, np.float64]),
    st.data(),
)
def test_any_shape_has_the_bits_of_the_core_functions(lead, pairs, layout, dtype, data):
    extra = data.draw(st.integers(0, 5))
    layer = RotaryPositions(
        2 * pairs + extra,
        layout=layout,
        rotary_dim=2 * pairs if extra else None,
        heads_axis=-3,
    )
    x = np.random.default_rng(0).standard_normal((*lead, 2 * pairs + extra)).astype(dtype)
    in_range = st.integers(-(2**24) + 1, 2**24 - 1)
    at = data.draw(st.lists(in_range, min_size=lead[-1], max_size=lead[-1]))
    np.testing.assert_array_equal(layer(x, at), by_core_functions(layer, x, at))


# Positions and offsets


def test_positions_count_from_the_offset_by_default():
    layer, x = RotaryPositions(8, heads_axis=-3), random((3, 2, 5, 8))
    np.testing.assert_array_equal(layer(x), layer(x, [0, 1, 2, 3, 4]))
    np.testing.assert_array_equal(layer(x, offset=7), layer(x, [7, 8, 9, 10, 11]))
    rows = layer(x, offset=[0, 7, 1_000_000])
    np.testing.assert_array_equal(rows[0], layer(x[0]))
    np.testing.assert_array_equal(rows[2], layer(x[2], offset=1_000_000))
    assert not np.allclose(layer(x), layer(x, offset=7))


def test_decoding_step_by_step_equals_one_call():
    layer, x = RotaryPositions(8, layout="interleaved"), random((2, 3, 6, 8))
    steps = [layer(x[:, :, [i]], offset=i) for i in range(6)]
    np.testing.assert_array_equal(np.concatenate(steps, axis=2), layer(x))


def test_padded_and_packed_sequences_equal_separate_calls():
    layer, x = RotaryPositions(8, heads_axis=-3), random((2, 3, 5, 8))
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    y = layer(x, positions.from_mask(mask))
    np.testing.assert_array_equal(y[0, :, 2:], layer(x[0, :, 2:]))
    packed = layer(x, positions.from_lengths([2, 3]))
    np.testing.assert_array_equal(packed[:, :, 2:], layer(x[:, :, 2:]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, np.float32])
def test_positions_have_any_dtype(dtype):
    layer, x = RotaryPositions(8), random((4, 8))
    got = layer(x, np.array([0, 3, 100, 127], dtype))
    np.testing.assert_allclose(got, layer(x, [0, 3, 100, 127]), atol=1e-6)


def test_real_positions_match_formula():
    layer, x = RotaryPositions(8, base=100.0), random((3, 8), np.float64)
    at = [0.25, -1234.5, 70_000.125]
    angles = np.array(at)[:, None] * layer.frequencies
    want = rotate(x, np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(layer(x, at), want, atol=1e-6)


def test_lists_are_accepted():
    layer, x = RotaryPositions(2), [[1.0, 2.0], [3.0, 4.0]]
    assert layer(x).dtype == np.float64
    np.testing.assert_array_equal(layer(x, [4, 5]), layer(np.array(x), np.array([4, 5])))


def test_float32_scores_depend_on_relative_position_only_at_large_positions():
    layer, (q, k) = RotaryPositions(64, base=5e5), random((2, 1, 64))

    def score(m, n):
        return float(layer(q, [m])[0] @ layer(k, [n])[0])

    for shift in (1, 256, 65_536, 16_000_000, -9_999_999):
        assert score(40, 3) == pytest.approx(score(40 + shift, 3 + shift), abs=2e-5)
    assert abs(score(40, 3) - score(3, 40)) > 0.1


def test_norms_are_multiplied_by_the_attention_factor():
    x = random((2, 5, 8))
    norms = np.linalg.norm(x, axis=-1)
    for scaling, factor in ((None, 1.0), (YARN, YARN.attention_factor)):
        y = RotaryPositions(8, scaling=scaling, heads_axis=-3)(x, offset=100_000)
        np.testing.assert_allclose(np.linalg.norm(y, axis=-1), factor * norms, rtol=1e-6)


# Options

LAYERS = {
    "plain": {},
    "base": {"base": 5e5},
    "layout": {"layout": "interleaved"},
    "to half": {"layout": "interleaved_to_half"},
    "scaling": {"scaling": YARN},
    "partial": {"rotary_dim": 4},
    "sections": {"sections": [1, 2, 1]},
    "interleaved sections": {"sections": [2, 1, 1], "interleaved_sections": True},
    "frequencies": {"frequencies": np.array([0.3, 0.2, 0.1])},
    "length": {"scaling": DynamicNTK(factor=2.0, original_length=8, length=20)},
    "longrope": {"scaling": LONGROPE},
}
POSITIONS = np.stack([np.arange(5), 2 * np.arange(5), 9 - np.arange(5)])


def output_of(layer, x):
    return layer(x, POSITIONS if layer.axes else POSITIONS[0])


@pytest.mark.parametrize("name", LAYERS)
def test_every_option_changes_the_result(name):
    x = random((2, 5, 8))
    layers = {key: RotaryPositions(8, **LAYERS[key], heads_axis=-3) for key in LAYERS}
    got = output_of(layers[name], x)
    for other in LAYERS:
        if other != name:
            assert not np.allclose(got, output_of(layers[other], x), atol=1e-3), other
    # All layers are still alive, and share no state.
    fresh = RotaryPositions(8, **LAYERS[name], heads_axis=-3)
    np.testing.assert_array_equal(output_of(fresh, x), got)


def test_heads_axis_changes_the_result():
    x = random((3, 3, 3, 8))
    assert not np.allclose(RotaryPositions(8)(x), RotaryPositions(8, heads_axis=-2)(x))
    want = RotaryPositions(8)(x.swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_array_equal(RotaryPositions(8, heads_axis=-2)(x), want)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_survive_json_pickle_and_deepcopy(name):
    layer, x = RotaryPositions(8, **LAYERS[name], heads_axis=-3), random((2, 5, 8))
    want = output_of(layer, x)
    rebuilt = RotaryPositions(**json.loads(json.dumps(layer.config())))
    for same in (rebuilt, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        np.testing.assert_array_equal(output_of(same, x), want)
        assert same.config() == layer.config() and repr(same) == repr(layer)


def test_there_are_no_parameters():
    layer = RotaryPositions(8, scaling=YARN)
    assert layer.parameters() == {} and layer.state_dict() == {}
    layer.load_state_dict({})


def test_phases_give_the_rotation_of_the_layer():
    layer, x = RotaryPositions(8, scaling=YARN, layout="interleaved"), random((2, 5, 8))
    at = np.array([[0, 1, 2, 3, 4], [7, 300, -2, 70_000, 1]])
    cos, sin = layer.phases(at)
    assert cos.shape == sin.shape == (2, 5, 4) and cos.dtype == np.float32
    np.testing.assert_array_equal(rotate(x, cos, sin, layout="interleaved"), layer(x, at))
    angles = at[..., None] * layer.frequencies
    full, _ = layer.phases(at, dtype=np.float64)
    assert full.dtype == np.float64
    np.testing.assert_allclose(full, layer.attention_factor * np.cos(angles), atol=5e-7)
    assert layer.phases(3)[0].shape == (4,)


# Several coordinates


@pytest.mark.parametrize("interleaved", [False, True])
def test_default_positions_are_equal_on_every_coordinate(interleaved):
    x = random((2, 3, 5, 8))
    layer = RotaryPositions(8, sections=[2, 1, 1], interleaved_sections=interleaved)
    plain = RotaryPositions(8)
    np.testing.assert_allclose(layer(x), plain(x), atol=1e-6)
    np.testing.assert_allclose(
        layer(x, offset=[4, 90]), plain(x, offset=[4, 90]), atol=1e-6
    )
    at = np.array([[0, 5, 2, 3, 1], [9, 9, 9, 8, 7]])
    np.testing.assert_allclose(layer(x, np.stack([at] * 3)), plain(x, at), atol=1e-6)


@pytest.mark.parametrize("heads_axis", [-3, -2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_section_rotates_by_its_coordinate(heads_axis, layout):
    layer = RotaryPositions(8, sections=[1, 2, 1], layout=layout, heads_axis=heads_axis)
    x = random((2, 4, 5, 8) if heads_axis == -3 else (2, 5, 4, 8))
    at = rng.integers(0, 500, (3, 2, 5))
    y = layer(x, at)
    np.testing.assert_array_equal(y, by_core_functions(layer, x, at))
    for axis, pairs in enumerate([[0], [1, 2], [3]]):
        moved = at.copy()
        moved[axis] += 1
        changed = np.abs(layer(x, moved) - y).max(axis=(0, 1, 2)) > 1e-6
        features = [
            [2 * p, 2 * p + 1] if layout == "interleaved" else [p, p + 4] for p in pairs
        ]
        assert np.flatnonzero(changed).tolist() == sorted(sum(features, []))


def test_several_coordinates_apply_the_attention_factor_once():
    x, layer = random((5, 8)), RotaryPositions(8, sections=[2, 1, 1], scaling=YARN)
    norms = np.linalg.norm(layer(x), axis=-1)
    want = YARN.attention_factor * np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(norms, want, rtol=1e-6)


@pytest.mark.parametrize("make", [qwen_axial_frequencies, pixtral_axial_frequencies])
def test_image_scores_depend_on_relative_row_and_column(make):
    layer = RotaryPositions(16, frequencies=make(16, base=100.0))
    grid = positions.from_grid((3, 4))
    q, k = random((2, 12, 16))
    scores = layer(q, grid) @ layer(k, grid).T
    # Shifting the whole image does not change the scores; transposing it does.
    moved = grid + np.array([[5], [11]])
    np.testing.assert_allclose(layer(q, moved) @ layer(k, moved).T, scores, atol=1e-4)
    transposed = layer(q, grid[::-1]) @ layer(k, grid[::-1]).T
    assert not np.allclose(transposed, scores, atol=1e-2)


# Gradients


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_match_finite_differences(name):
    layer, x = (
        RotaryPositions(8, **LAYERS[name], heads_axis=-3),
        random((2, 5, 8), np.float64),
    )
    at = POSITIONS if layer.axes else POSITIONS[0]
    dy = random(x.shape, np.float64)
    y, pullback = layer.vjp(x, at)
    np.testing.assert_array_equal(y, layer(x, at))
    got = pullback(dy)
    assert list(got) == ["x"] and got["x"].dtype == np.float64
    want = np.empty_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-5
        change = layer(x + step, at) - layer(x - step, at)
        want[index] = np.vdot(change, dy) / 2e-5
    np.testing.assert_allclose(got["x"], want, atol=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtype_of_x_and_are_rounded_once(layout, dtype):
    layer = RotaryPositions(8, layout=layout, rotary_dim=6)
    x, dy = random((2, 3, 5, 8), dtype), random((2, 3, 5, 8))
    compute_dtype = np.float64 if dtype == np.float64 else np.float32
    _, pullback = layer.vjp(x, offset=9)
    _, full = layer.vjp(x.astype(compute_dtype), offset=9)
    got = pullback(dy)["x"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, full(dy)["x"].astype(dtype))
    same = pullback(dy.astype(dtype))["x"]
    np.testing.assert_array_equal(same, full(dy.astype(dtype))["x"].astype(dtype))


def test_gradient_of_a_transposed_view_and_of_a_list():
    x, layer = VIEWS["transposed"](), RotaryPositions(8)
    dy = random(x.shape)
    _, pullback = layer.vjp(x)
    _, plain = layer.vjp(x.copy())
    np.testing.assert_array_equal(pullback(dy)["x"], plain(dy)["x"])
    _, pullback = RotaryPositions(2).vjp([[1.0, 2.0]], [0])
    assert pullback([[3, 4]])["x"].tolist() == [[3.0, 4.0]]


# Lengths and caches


def test_at_length_depends_on_the_last_length_only():
    layer = RotaryPositions(8, scaling=DynamicNTK(factor=4.0, original_length=16))
    x, plain = random((5, 8)), RotaryPositions(8)
    np.testing.assert_array_equal(layer(x, offset=1000), plain(x, offset=1000))
    np.testing.assert_array_equal(layer.at_length(16)(x), plain(x))
    assert not np.allclose(layer.at_length(17)(x), plain(x), atol=1e-4)
    long = layer.at_length(64)
    np.testing.assert_array_equal(long.at_length(16)(x), plain(x))
    np.testing.assert_array_equal(layer.at_length(9999).at_length(64)(x), long(x))
    np.testing.assert_array_equal(layer(x), plain(x))


def test_longrope_uses_short_factors_until_at_length():
    layer, x = RotaryPositions(8, scaling=LONGROPE), random((5, 8))
    np.testing.assert_array_equal(layer.at_length(16)(x), layer(x))
    long = layer.at_length(17)
    assert not np.allclose(long(x), layer(x), atol=1e-3)
    assert long.attention_factor == layer.attention_factor > 1.0
    assert long.config()["scaling"]["length"] == 17


@pytest.mark.parametrize("scaling", [None, Linear(factor=2.0), YARN])
def test_at_length_is_a_noop_for_other_rules(scaling):
    layer = RotaryPositions(8, scaling=scaling, layout="interleaved", heads_axis=-2)
    same, x = layer.at_length(100_000), random((5, 2, 8))
    assert same is not layer and same.config() == layer.config()
    np.testing.assert_array_equal(same(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("delta", [0, 3, -40, 70_000, 0.5])
def test_rerotated_keys_equal_keys_at_the_shifted_positions(name, delta):
    layer, k = RotaryPositions(8, **LAYERS[name], heads_axis=-3), random((2, 5, 8))
    at = POSITIONS if layer.axes else POSITIONS[0]
    moved = layer.rerotate(layer(k, at), delta)
    np.testing.assert_allclose(moved, layer(k, at + delta), atol=3e-6)


@pytest.mark.parametrize("heads_axis", [-3, -2])
@pytest.mark.parametrize("sections", [None, [2, 1, 1]])
def test_rerotate_shifts_each_row_by_its_delta(heads_axis, sections):
    layer = RotaryPositions(8, heads_axis=heads_axis, sections=sections, scaling=YARN)
    k, delta = random((3, 3, 3, 8)), np.array([0, -7, 500])
    moved = layer.rerotate(layer(k, offset=10), delta)
    np.testing.assert_allclose(moved, layer(k, offset=10 + delta), atol=3e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rerotated_keys_are_rounded_once(dtype):
    layer, keys = RotaryPositions(8, layout="interleaved_to_half"), random((5, 8), dtype)
    moved = layer.rerotate(keys, -3)
    assert moved.dtype == dtype
    full = layer.rerotate(keys.astype(np.float32), -3)
    np.testing.assert_array_equal(moved, full.astype(dtype))


# Errors


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 7}, "head_dim must be positive and even, got 7"),
        ({"head_dim": 0}, "head_dim must be positive, got 0"),
        ({"head_dim": 8.0}, "head_dim must be an integer, got float"),
        ({"layout": "neox"}, "layout must be 'half', .* got 'neox'"),
        ({"base": 0.0}, "base must be greater than 1, got 0.0"),
        ({"rotary_dim": 12}, "rotary_dim must be at most head_dim 8, got 12"),
        ({"rotary_dim": 3}, "rotary_dim must be positive and even, got 3"),
        ({"sections": [1, 1]}, r"sections must add up to 4 pairs, got \[1, 1\]"),
        ({"heads_axis": 1}, "heads_axis must be -3 or -2, got 1"),
        ({"frequencies": [1.0], "rotary_dim": 2}, "give frequencies or .* not both"),
        ({"scaling": "yarn"}, "scaling must be a rule, a dict or None, got str"),
    ],
)
def test_rejects_bad_arguments(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RotaryPositions(**{"head_dim": 8, **change})


@pytest.mark.rejects
@pytest.mark.parametrize("far", [2**24, -(2**24), 2**63 - 1, float("nan"), 1e30])
def test_rejects_positions_out_of_range(far):
    layer = RotaryPositions(4)
    with pytest.raises(ValueError, match="positions must be smaller than 16777216 in size"):
        layer(np.ones((2, 4)), [1, far])
    with pytest.raises(ValueError, match="smaller than 16777216 in size, got 16777216"):
        layer(np.ones((2, 4)), offset=2**24 - 1)


@pytest.mark.rejects
def test_rejects_bad_inputs():
    layer, x = RotaryPositions(8), np.ones((2, 3, 5, 8))
    with pytest.raises(
        ValueError, match=r"x must have shape \(..., length, 8\), got \(5, 6\)"
    ):
        layer(np.ones((5, 6)))
    with pytest.raises(
        ValueError, match=r"x must have shape \(..., length, 8\), got \(8,\)"
    ):
        layer(np.ones(8))
    with pytest.raises(ValueError, match=r"\(..., length, heads, 8\), got \(5, 8\)"):
        RotaryPositions(8, heads_axis=-2)(np.ones((5, 8)))
    with pytest.raises(TypeError, match="x must be real, got int64"):
        layer(np.ones((5, 8), int))
    with pytest.raises(ValueError, match=r"positions must fit x .* got shape \(3, 5\)"):
        layer(x, np.zeros((3, 5), int))
    with pytest.raises(TypeError, match="positions must be integers or reals, got bool"):
        layer(x, np.ones(5, bool))
    with pytest.raises(ValueError, match="give positions or offset, not both"):
        layer(x, np.arange(5), offset=3)
    _, pullback = layer.vjp(x)
    with pytest.raises(ValueError, match=r"dy must have shape .* got \(5, 8\)"):
        pullback(np.ones((5, 8)))
    with pytest.raises(ValueError, match="n must be positive, got 0"):
        layer.at_length(0)


@pytest.mark.rejects
def test_rejects_missing_coordinates():
    text = RotaryPositions(8, sections=[2, 1, 1], heads_axis=-3)
    with pytest.raises(ValueError, match=r"positions must have shape \(3, ...\)"):
        text(np.ones((2, 5, 8)), np.zeros((2, 5), int))
    image = RotaryPositions(8, frequencies=qwen_axial_frequencies(8), heads_axis=-3)
    with pytest.raises(ValueError, match="positions must be given for 2 axes, got None"):
        image(np.ones((5, 8)))


@pytest.mark.rejects
def test_rerotate_rejects_bad_deltas():
    layer, keys = RotaryPositions(8), np.ones((2, 3, 5, 8))
    message = "delta must be a number or one per row"
    for delta, k in (([1, 2, 3], keys), (np.ones((2, 5)), keys), ([1] * 5, keys[0, 0])):
        with pytest.raises(ValueError, match=message):
            layer.rerotate(k, delta)
    with pytest.raises(TypeError, match="delta must be integers or reals, got bool"):
        layer.rerotate(keys, True)
    with pytest.raises(TypeError, match="keys must be real, got int64"):
        layer.rerotate(keys.astype(int), 1)
    with pytest.raises(ValueError, match="smaller than 16777216 in size"):
        layer.rerotate(keys, 2**24)
