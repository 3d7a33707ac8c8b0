"""Positions added to vectors on Equinox, and what holds for every scheme of the face."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from firstlayer.equinox._constant import Constant
from firstlayer.equinox._positions.arguments import positions_for
from firstlayer.equinox.fourier import FourierFeatures
from firstlayer.equinox.learned import LearnedPositions
from firstlayer.equinox.sinusoidal import SinusoidalPositions
from firstlayer.positions import learned
from tests.support.jax_lives import (
    LEARNED,
    LIVES,
    SCHEMES,
    built,
    called,
    cast,
    compiled_quickly,
    everything,
    key,
    stacked,
)

EDGES = [0, 1, 255, 256, 65_536, 2**24 - 1, -9_999_999]
SINUSOIDAL = SinusoidalPositions(6, base=500.0, scale=0.5)
TABLE = np.random.default_rng(3).standard_normal((42, 6)).astype("float32")
ROBERTA = LearnedPositions(40, 6, row_offset=2, padding_idx=1, weight=TABLE)
ADDED = {"sinusoidal": SINUSOIDAL, "learned": ROBERTA}


def draw(*shape, dtype: Any = "float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture(autouse=True, scope="module")
def quickly():
    with compiled_quickly():
        yield


@eqx.filter_jit
def add(layer, x, positions=None, offset: Any = 0):
    return layer(x, positions, offset=offset)


@eqx.filter_jit
def encode(layer, positions):
    return layer.encode(positions)


def waves(positions):
    """The waves of SINUSOIDAL, by the paper's formula."""
    angles = np.asarray(positions, np.longdouble)[..., None]
    angles = angles * np.longdouble(500.0) ** (-np.arange(0, 6, 2) / np.longdouble(6))
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return 0.5 * pairs.reshape(*pairs.shape[:-2], 6).astype(np.float64)


# ----------------------------------------------------------------- right numbers


def test_waves_are_right_far_out():
    got = encode(SINUSOIDAL, jnp.array(EDGES))
    np.testing.assert_allclose(got, waves(EDGES), atol=1.3e-7)
    other = encode(SinusoidalPositions(6), jnp.array(EDGES))
    assert np.abs(got - other)[1:].max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_waves_of_real_positions_are_those_between(dtype):
    positions = np.array([0.5, -3.25, 1000.75, 7.0]).astype(jnp.dtype(dtype))
    got = encode(SINUSOIDAL, jnp.asarray(positions))
    np.testing.assert_allclose(got, waves(positions.astype(float)), atol=2e-7)


def test_waves_are_added():
    x = draw(2, 5, 6)
    got = add(SINUSOIDAL, x, jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])) - x
    want = waves([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_layers_stand_in_a_sequence_of_equinox():
    x = draw(5, 6)
    run = eqx.filter_jit(eqx.nn.Sequential([SINUSOIDAL, ROBERTA]))
    want = np.asarray(x) + waves(range(5)) + TABLE[2:7]
    np.testing.assert_allclose(run(x, key=key(0)), want, atol=1e-6)


def test_several_axes_share_the_features():
    layer, half = SinusoidalPositions(8, axes=2), SinusoidalPositions(4)
    positions = jnp.array([[3, 1, 4], [1, 5, 9]])
    want = np.concatenate(np.asarray(encode(half, positions)), axis=-1)
    np.testing.assert_allclose(encode(layer, positions), want, atol=1e-7)
    got = add(layer, jnp.zeros((2, 3, 8)), positions)
    np.testing.assert_allclose(got, np.stack([want, want]), atol=1e-7)


def test_fourier_features_are_waves_of_the_coordinates():
    matrix = np.array([[0.5, 30.0], [-7.0, 0.25], [900.0, 0.0]])
    v = np.random.default_rng(0).uniform(-3, 3, (4, 2)).astype(np.float32)
    angles = 2 * np.pi * v.astype(float) @ matrix.T
    layer, rates = FourierFeatures(matrix), 2 * np.pi * matrix.sum(axis=1)
    y, slope = jax.jit(lambda v: jax.jvp(layer, (v,), (jnp.ones((4, 2)),)))(v)
    np.testing.assert_allclose(y[:, :3], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(y[:, 3:], np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(slope[:, :3] / rates, -np.sin(angles), atol=1e-5)
    np.testing.assert_allclose(slope[:, 3:] / rates, np.cos(angles), atol=1e-5)


def test_fourier_frequencies_are_drawn_with_the_key_and_kept_to_the_bit():
    def make(seed):
        return FourierFeatures.gaussian(200, axes=3, std=10.0, key=key(seed))

    layer, again, other = make(0), make(0), make(1)
    assert eqx.tree_equal(layer, again) and not eqx.tree_equal(layer, other)
    assert layer.matrix.dtype == np.float64 and layer.matrix.shape == (200, 3)
    assert abs(layer.matrix.std() - 10.0) < 0.7
    assert eqx.tree_equal(FourierFeatures(**layer.config()), layer)
    assert (layer.matrix != layer.matrix.astype(np.float32)).any()
    assert not jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))


def test_learned_rows_are_those_of_the_positions():
    at = np.array([[0, 39], [-2, 7]])
    np.testing.assert_array_equal(ROBERTA.encode(at), TABLE[at + 2])
    np.testing.assert_array_equal(encode(ROBERTA, jnp.array([5, -1])), TABLE[[7, 1]])
    got = encode(ROBERTA, jnp.array([1.25, 39.0, -2.0]))
    np.testing.assert_allclose(got[0], 0.75 * TABLE[3] + 0.25 * TABLE[4], atol=1e-6)
    np.testing.assert_array_equal(got[1:], TABLE[[41, 0]])
    half = LearnedPositions(40, 6, row_offset=2, weight=TABLE, scale=0.5)
    np.testing.assert_array_equal(half.encode(at), TABLE[at + 2] / 2)
    x = draw(2, 5, 6)
    got = add(ROBERTA, x, jnp.array([3, 0, 3, -2, 9]))
    np.testing.assert_array_equal(got, x + TABLE[[5, 2, 5, 0, 11]])


def test_a_learned_table_is_resized_as_the_core_does():
    longer = ROBERTA.resize(100, align="centres")
    want = learned.resize_linear(TABLE[2:], 100, align="centres")
    np.testing.assert_array_equal(longer.weight, np.concatenate([TABLE[:2], want]))
    np.testing.assert_array_equal(longer.encode([99, -1]), [want[-1], TABLE[1]])
    assert ROBERTA.max_positions == 40 and longer.max_positions == 100
    grid = LearnedPositions(5, 6, weight=TABLE[:5])
    options: Any = {"grid": (2, 2), "antialias": True, "nudge": 0.1}
    got = grid.resize_grid((3, 4), **options)
    want = learned.resize_grid(TABLE[:5], (3, 4), **options)
    np.testing.assert_array_equal(got.weight, want)
    assert got.max_positions == 13


# ------------------------------------------------------------ positions and offsets


@pytest.mark.parametrize("name", ADDED)
def test_offset_is_how_many_came_before(name):
    layer, x = ADDED[name], draw(2, 5, 6)
    want = add(layer, x, jnp.arange(7, 12))
    got = jax.jit(lambda x: layer(x, offset=[7, 7]))(x)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(add(layer, x) - want).max() > 0.1


@pytest.mark.parametrize(
    "offset",
    [7, np.int64(7), [7, 7], np.array([7, 7], np.uint64), jnp.array([7, 7]), 7.0, [[7]]],
    ids=["int", "numpy", "list", "uint64", "jax", "real", "deep"],
)
def test_offsets_may_be_numbers_or_arrays_of_any_kind(offset):
    seen = []
    found = positions_for(5, positions=None, offset=offset, check=seen.append)
    want = np.asarray(offset)[..., None] + np.arange(5) if np.ndim(offset) else None
    want = np.arange(7, 12) if want is None else want
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(seen, want[None])


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("dtype", ["int8", "uint32", "bfloat16"])
def test_traced_offsets_count_from_each_row(name, dtype):
    layer, x = ADDED[name], draw(2, 5, 6)
    got = add(layer, x, offset=jnp.array([3, 20], dtype))
    want = add(layer, x, jnp.stack([jnp.arange(3, 8), jnp.arange(20, 25)]))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("name", ADDED)
def test_a_scan_decodes_what_one_call_gives(name):
    layer, x, start = ADDED[name], draw(2, 5, 6), jnp.array([0, 11])

    def step(offset, x):
        return offset + 1, layer(x[:, None], offset=offset)[:, 0]

    _, got = jax.lax.scan(step, start, x.swapaxes(0, 1))
    want = add(layer, x, offset=start)
    np.testing.assert_allclose(got.swapaxes(0, 1), want, atol=1e-6)
    by_row = jax.jit(jax.vmap(lambda x, offset: layer(x, offset=offset)))(x, start)
    np.testing.assert_allclose(by_row, want, atol=1e-6)


@given(st.lists(st.integers(-(2**24) + 1, 2**24 - 1), min_size=4, max_size=4))
def test_waves_of_any_position_are_right(positions):
    got = encode(SINUSOIDAL, jnp.array(positions))
    np.testing.assert_allclose(got, waves(positions), atol=1.3e-7)


# -------------------------------------------------------------------- out of reach


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_traced_positions_out_of_reach_are_nan_and_alone(dtype):
    far = [3, 2**24, -(2**24), 2**31 - 256, -(2**31)]
    got = np.isnan(encode(SINUSOIDAL, jnp.array(far, dtype))).all(axis=1)
    assert got.tolist() == [False, True, True, True, True]
    got = np.isnan(encode(ROBERTA, jnp.array([39, 40, -2, -3, 2**24], dtype)))
    assert got.all(axis=1).tolist() == got.any(axis=1).tolist()
    assert got.all(axis=1).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("name", ADDED)
def test_traced_offsets_that_overflow_are_nan(name):
    x = jnp.zeros((2, 5, 6))
    for offset in (jnp.array([0, 2**31 - 2]), jnp.array([0, 2**32 - 2], "uint32")):
        got = np.isnan(add(ADDED[name], x, offset=offset))
        assert not got[0].any() and got[1].all()


@pytest.mark.rejects
@pytest.mark.parametrize("position", [2**24, -(2**24), 2**32 + 3, float("nan"), 2.0**24])
def test_concrete_positions_out_of_reach_are_refused(position):
    with pytest.raises(ValueError, match=f"smaller than 16777216 in size, got {position}"):
        SINUSOIDAL.encode(np.array([1, position]))
    with pytest.raises(ValueError, match="coordinates must be smaller than 16777216"):
        FourierFeatures([[1.0]])(jnp.array([2.0**24]))


@pytest.mark.rejects
@pytest.mark.parametrize("name", ADDED)
def test_what_jax_would_cut_to_32_bits_is_looked_at_before(name):
    layer, far, x = ADDED[name], np.array([3, 2**32 + 3]), jnp.zeros((2, 1, 6))
    for run in (
        lambda: layer(x[:, 0], far),
        lambda: layer(x, offset=far),
        lambda: jax.vmap(layer.encode)(far),
        lambda: jax.vmap(lambda x, offset: layer(x, offset=offset))(x, far),
    ):
        with pytest.raises(ValueError, match=r"smaller than .*, got 4294967299"):
            run()


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([40], "smaller than max_positions 40, got 40"),
        ([39.5], "at most 39, the last of max_positions 40, got 39.5"),
        ([-3], "at least -2 for row_offset 2, got -3"),
    ],
)
def test_concrete_positions_without_a_row_are_refused(positions, message):
    for call in (ROBERTA.encode, lambda at: ROBERTA(jnp.zeros((1, 6)), at)):
        with pytest.raises(ValueError, match=message):
            call(positions)


X = np.zeros((2, 3, 6), np.float32)
WRONG = {
    "give positions or offset, not both": lambda: ROBERTA(X, [1, 2, 3], offset=1),
    r"positions must have shape \(3,\) or \(2, 3\), got \(1,\)": lambda: ROBERTA(X, [1]),
    "positions must be integers or reals, got bool": lambda: ROBERTA(X, [True] * 3),
    "ns must be integers or reals, got bool": lambda: encode(ROBERTA, jnp.array([True])),
    "offset must be integers or reals, got bool": lambda: ROBERTA(X, offset=True),
    "x must be real, got int64": lambda: ROBERTA(np.ones((3, 6), int)),
    r"x must have shape \(..., length, 6\), got \(6,\)": lambda: ROBERTA(X[0, 0]),
    "key must be given to draw parameters, got None": lambda: LearnedPositions(4, 6),
    "padding_idx must be one of the 2 rows before position 0, got 2": lambda: (
        LearnedPositions(4, 6, row_offset=2, padding_idx=2)
    ),
    "positions must be given when axes is 2": lambda: SinusoidalPositions(6, axes=2)(X),
    "embedding_dim must be a multiple of axes 4": lambda: SinusoidalPositions(6, axes=4),
    r"matrix must have shape \(pairs, axes\), got \(1,\)": lambda: FourierFeatures([1.0]),
    "matrix must be finite": lambda: FourierFeatures([[np.inf]]),
    "coordinates must be real, got int64": lambda: FourierFeatures([[1.0]])([1]),
    r"coordinates must have shape \(..., 1\)": lambda: FourierFeatures([[1.0]])([1.0, 2.0]),
    "key must be concrete": lambda: eqx.filter_eval_shape(
        partial(FourierFeatures.gaussian, 2, axes=1, std=1.0), key=jax.random.key(0)
    ),
    "dtype float64 needs": lambda: SINUSOIDAL.encode([1], dtype="float64"),
}


@pytest.mark.rejects
@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_make_no_sense_are_refused(message):
    is_type = "must be real" in message or "integers or reals" in message
    with pytest.raises(TypeError if is_type else ValueError, match=message):
        WRONG[message]()


# ------------------------------------------------------------- gradients and padding


def test_gradients_of_positions_and_tables_are_right():
    x, at = np.random.default_rng(0).standard_normal((2, 3, 6)), [2.25, 7.5, 30.75]
    with jax.enable_x64(True):
        table = jnp.asarray(TABLE, jnp.float64)
        layer = LearnedPositions(40, 6, row_offset=2, weight=table, scale=0.7)
        rows = jnp.array([[3, 3, 0], [39, -2, 3]])

        @jax.jit
        def run(x, weight, at):
            own = layer.with_parameters({"weight": weight})
            return own(x, at), own(x, rows), SINUSOIDAL(x, at)

        check_grads(run, (jnp.asarray(x), table, jnp.array(at)), order=1, eps=1e-5)


def test_no_row_is_trained_by_a_position_out_of_reach():
    def loss(weight, at):
        own = ROBERTA.with_parameters({"weight": weight})
        return jnp.nansum(own.encode(at) * jnp.arange(6.0))

    grad = jax.jit(jax.grad(loss))
    for at in (jnp.array([40, 5, -3, 5]), jnp.array([39.5, 5.0, -2.5, 5.0])):
        got = np.asarray(grad(jnp.asarray(TABLE), at))
        np.testing.assert_array_equal(got[7], 2 * np.arange(6.0))
        assert not np.delete(got, 7, axis=0).any()


def test_a_row_met_often_in_bfloat16_has_its_whole_gradient():
    layer = LearnedPositions(4, 2, weight=jnp.zeros((4, 2), jnp.bfloat16))
    x, slope = jnp.zeros((3072, 1, 2)), 1 + 2**-8.1

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(layer, at):
        return (layer(x, at) * slope).sum()

    # A slope is 1 in bfloat16: rounded before they are added they would make 3072.
    got = grad(layer, jnp.ones((3072, 1), int)).weight[1]
    np.testing.assert_array_equal(got.astype("float32"), [3088.0, 3088.0])


def test_learned_padding_outlives_optimizers_and_gets_no_gradient():
    layer, at = built(everything)["learned"], jnp.array([-1, 0, -1])
    grad = eqx.filter_jit(eqx.filter_grad(lambda layer: layer.encode(at).sum()))(layer)
    assert not grad.weight[1].any() and (grad.weight[2] == 1).all()
    moved = eqx.tree_at(lambda layer: layer.weight, layer, layer.weight + 1)
    for kind in (at, at + 0.0):
        before, after = encode(layer, kind), encode(moved, kind)
        np.testing.assert_array_equal(after, before + np.array([[0], [1], [0]]))
        assert not before[0].any()
    kept = moved.set_padding(7.0)
    assert (encode(kept, at)[0] == 7).all()
    for saved in (kept, kept.resize(9)):
        assert (saved.parameters()["weight"][1] == 7).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype):
    x = draw(2, 5, 6, dtype=dtype)
    for layer in ADDED.values():
        got = add(layer, x, jnp.arange(20, 25))
        want = (x.astype("float32") + encode(layer, jnp.arange(20, 25))).astype(dtype)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.view("uint16"), want.view("uint16"))


def test_all_positions_differ_in_bfloat16():
    rows = encode(cast(SINUSOIDAL, "bfloat16"), jnp.arange(4096))
    assert len(np.unique(rows, axis=0)) == 4096


# --------------------------------------------------------------- every scheme's life


@pytest.mark.parametrize("life", LIVES)
def test_nothing_that_happens_to_a_layer_changes_it(life):
    lived, want = LIVES[life](everything), built(everything)
    for name in SCHEMES:
        assert eqx.tree_equal(lived[name], want[name], typematch=True), name
    assert hash(jax.tree.structure(lived)) == hash(jax.tree.structure(want))


def test_constants_are_equal_by_what_they_hold_and_never_written():
    one = Constant(np.array([1.0, np.nan]))
    assert one == Constant(one.array.copy()) and hash(one) == hash(Constant(one.array))
    for other in (np.array([0.0, np.nan]), one.array.view(np.int64), one.array[None]):
        assert one != Constant(other)
    assert Constant(np.array(0.0)) != Constant(np.array(-0.0)) and one != "one"
    with pytest.raises(ValueError, match="read-only"):
        one.array[0] = 2.0


def test_what_is_real_is_what_is_trained():
    for name, layer in built(everything).items():
        real = jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))
        shapes = [value.shape for value in layer.parameters().values()]
        assert [leaf.shape for leaf in real] == shapes, name
        assert bool(real) == (name in LEARNED)


def test_adamw_over_all_arrays_moves_what_learns_and_nothing_precomputed():
    # optax' Adam takes no integers at all: neither drawn frequencies nor padding rows.
    layers = dict(built(everything), learned=LearnedPositions(40, 6, weight=TABLE[:40]))
    del layers["fourier"]
    x, positions = draw(9, 6), jnp.array([0.0, 3, 5, 5, 7, 9.5, 12, 20, 33])

    def loss(model):
        layers, head = model
        runs = (called(name, layer, x @ head, positions) for name, layer in layers.items())
        return sum(jnp.mean(jnp.square(out)) for out in runs)

    @eqx.filter_jit
    def step(model):
        optimizer = optax.adamw(1e-2, weight_decay=0.5)
        arrays = eqx.filter(model, eqx.is_array)
        gradients = eqx.filter_grad(loss)(model)
        updates, _ = optimizer.update(gradients, optimizer.init(arrays), arrays)
        return eqx.apply_updates(model, updates), gradients

    with jax.debug_nans(True):  # nor is anything NaN on the way
        (after, _), (gradients, _) = step((layers, jnp.eye(6)))
    for name, layer in layers.items():
        before, now = (
            eqx.partition(tree, eqx.is_inexact_array) for tree in (layer, after[name])
        )
        assert eqx.tree_equal(before[1], now[1]), name
        old, new = jax.tree.leaves(before[0]), jax.tree.leaves(now[0])
        for was, became, slope in zip(
            old, new, jax.tree.leaves(gradients[name]), strict=True
        ):
            assert (was != became).any() and slope.any(), name


def test_a_cast_rounds_parameters_and_no_position():
    x, positions = draw(9, 6), jnp.array([0, 3, 5, 6, 7, 9, 12, 20, 39])

    @eqx.filter_jit
    def run(layers):
        return {
            name: called(name, layer, x, positions * (1 if name == "learned" else 400_000))
            for name, layer in layers.items()
        }

    # The others have nothing that a cast could touch.
    layers = {name: built(everything)[name] for name in ("fourier", *LEARNED)}
    want, got = run(layers), run(cast(layers, "bfloat16"))
    for name in layers:
        kept = want[name].astype(got[name].dtype)
        assert np.isfinite(kept.astype("float32")).all()
        np.testing.assert_array_equal(got[name], kept, err_msg=name)


def test_stacks_of_layers_run_under_vmap_and_scan():
    x, positions, names = draw(9, 6), jnp.arange(9) * 4, ("learned", "rotary", "t5", "fire")
    arrays, rest = eqx.partition(stacked(everything), eqx.is_array)

    def one(arrays):
        layers = eqx.combine(arrays, rest)
        return {name: called(name, layers[name], x, positions) for name in names}

    mapped = jax.jit(jax.vmap(one))(arrays)
    _, scanned = jax.lax.scan(lambda carry, own: (carry, one(own)), 0, arrays)
    for name in names:
        np.testing.assert_allclose(mapped[name], scanned[name], atol=1e-6, err_msg=name)
        differ = len(np.unique(mapped[name], axis=0))
        assert differ == (3 if name in LEARNED else 1), name
    made = eqx.filter_eval_shape(eqx.filter_vmap(everything), jax.random.split(key(0), 3))
    assert [leaf.shape for leaf in jax.tree.leaves(made)] == [
        leaf.shape for leaf in jax.tree.leaves(arrays)
    ]


# ------------------------------------------------------------------ modes of JAX


@pytest.mark.parametrize(
    ("x64", "dtype", "own"),
    [
        (False, "bfloat16", "float32"),
        (True, "float64", "float32"),
        (True, "float32", "float64"),
    ],
)
def test_strict_promotion_and_64_bits_change_no_dtype(x64, dtype, own):
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        x, host = jnp.zeros((4, 6), dtype), [0, 3, 5, 6]
        layers = eqx.filter_eval_shape(lambda key: cast(everything(key), own), key(0))
        for positions in (jnp.asarray(host, kind) for kind in ("int8", "uint32", dtype)):
            for name, layer in layers.items():
                got = eqx.filter_eval_shape(called, name, layer, x, positions)
                want = own if name in ("t5", "kerple", "fire") else dtype
                assert got.dtype == ("float32" if name == "alibi" else want), name


def test_debug_nans_names_what_is_out_of_reach():
    with jax.debug_nans(True):
        encode(SINUSOIDAL, jnp.arange(4))
        # JAX runs what was compiled again, step by step, to find where the NaN is from.
        with pytest.raises(ValueError, match="must be smaller than 16777216 in size"):
            encode(SINUSOIDAL, jnp.array([0, 1, 2, 2**24]))


def test_float64_is_worked_on_in_float64():
    with jax.enable_x64(True):
        x = jnp.zeros((1, 6))
        got = add(SINUSOIDAL, x, jnp.array([1000.3]))  # float32 would move it by 1e-5
        np.testing.assert_allclose(got[0], waves(1000.3), atol=1.3e-7)
        table = TABLE.astype(np.float64) + 1e-12
        layer = LearnedPositions(42, 6, weight=table)
        got = add(layer, jnp.ones((1, 6)), jnp.array([3]))
        np.testing.assert_array_equal(got, 1 + table[3:4])
