"""Additive positions in the Equinox front end, and properties of every scheme."""

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
from firstlayer.equinox._positions import positions_argument
from firstlayer.equinox.fourier import FourierFeatures
from firstlayer.equinox.learned import LearnedPositions
from firstlayer.equinox.sinusoidal import SinusoidalPositions
from firstlayer.positions import learned
from tests.support.jax_round_trips import (
    LEARNED,
    ROUND_TRIPS,
    SCHEMES,
    all_schemes,
    built,
    call_scheme,
    cast,
    fast_compilation,
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
def _fast_compilation():
    with fast_compilation():
        yield


@eqx.filter_jit
def add(layer, x, positions=None, offset: Any = 0):
    return layer(x, positions, offset=offset)


@eqx.filter_jit
def encode(layer, positions):
    return layer.encode(positions)


def sinusoids(positions):
    """Return the vectors of SINUSOIDAL by the paper's formula."""
    angles = np.asarray(positions, np.longdouble)[..., None]
    angles = angles * np.longdouble(500.0) ** (-np.arange(0, 6, 2) / np.longdouble(6))
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return 0.5 * pairs.reshape(*pairs.shape[:-2], 6).astype(np.float64)


# Values


def test_sinusoids_are_accurate_at_large_positions():
    got = encode(SINUSOIDAL, jnp.array(EDGES))
    np.testing.assert_allclose(got, sinusoids(EDGES), atol=1.3e-7)
    other = encode(SinusoidalPositions(6), jnp.array(EDGES))
    assert np.abs(got - other)[1:].max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinusoids_of_real_positions_equal_the_formula(dtype):
    positions = np.array([0.5, -3.25, 1000.75, 7.0]).astype(jnp.dtype(dtype))
    got = encode(SINUSOIDAL, jnp.asarray(positions))
    np.testing.assert_allclose(got, sinusoids(positions.astype(float)), atol=2e-7)


def test_sinusoids_are_added_to_the_vectors():
    x = draw(2, 5, 6)
    got = add(SINUSOIDAL, x, jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])) - x
    want = sinusoids([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_layers_work_in_eqx_nn_sequential():
    x = draw(5, 6)
    run = eqx.filter_jit(eqx.nn.Sequential([SINUSOIDAL, ROBERTA]))
    want = np.asarray(x) + sinusoids(range(5)) + TABLE[2:7]
    np.testing.assert_allclose(run(x, key=key(0)), want, atol=1e-6)


def test_each_axis_gets_its_share_of_the_features():
    layer, half = SinusoidalPositions(8, axes=2), SinusoidalPositions(4)
    positions = jnp.array([[3, 1, 4], [1, 5, 9]])
    want = np.concatenate(np.asarray(encode(half, positions)), axis=-1)
    np.testing.assert_allclose(encode(layer, positions), want, atol=1e-7)
    got = add(layer, jnp.zeros((2, 3, 8)), positions)
    np.testing.assert_allclose(got, np.stack([want, want]), atol=1e-7)


def test_fourier_features_and_their_derivatives_equal_the_formula():
    matrix = np.array([[0.5, 30.0], [-7.0, 0.25], [900.0, 0.0]])
    v = np.random.default_rng(0).uniform(-3, 3, (4, 2)).astype(np.float32)
    angles = 2 * np.pi * v.astype(float) @ matrix.T
    layer, rates = FourierFeatures(matrix), 2 * np.pi * matrix.sum(axis=1)
    y, slope = jax.jit(lambda v: jax.jvp(layer, (v,), (jnp.ones((4, 2)),)))(v)
    np.testing.assert_allclose(y[:, :3], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(y[:, 3:], np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(slope[:, :3] / rates, -np.sin(angles), atol=1e-5)
    np.testing.assert_allclose(slope[:, 3:] / rates, np.cos(angles), atol=1e-5)


def test_fourier_features_of_many_axes_compile_in_a_program_of_one_size():
    """Fused products of all axes took minutes to compile for 8 axes and few pairs."""
    rng, sizes = np.random.default_rng(0), []
    for axes in (2, 5, 12):
        layer = FourierFeatures(rng.standard_normal((3, axes)) * 2)
        points = rng.standard_normal((4, axes)).astype(np.float32)

        def cubes(points, layer=layer):
            return (layer(points) ** 3).sum()

        step = jax.jit(jax.value_and_grad(cubes))
        sizes.append(step.lower(points).as_text().count("\n"))
        angles = 2 * np.pi * points.astype(np.float64) @ layer.matrix.T
        cos, sin = np.cos(angles), np.sin(angles)
        value, gradient = step(points)
        np.testing.assert_allclose(value, (cos**3 + sin**3).sum(), atol=1e-4)
        slopes = 3 * cos * sin * (sin - cos)
        want = 2 * np.pi * slopes @ layer.matrix
        np.testing.assert_allclose(gradient, want, atol=2e-4)
    assert sizes[0] == sizes[1] == sizes[2]


def test_fourier_frequencies_depend_on_the_key_and_are_stored_exactly():
    def make(seed):
        return FourierFeatures.gaussian(200, axes=3, std=10.0, key=key(seed))

    layer, again, other = make(0), make(0), make(1)
    assert eqx.tree_equal(layer, again) and not eqx.tree_equal(layer, other)
    assert layer.matrix.dtype == np.float64 and layer.matrix.shape == (200, 3)
    assert abs(layer.matrix.std() - 10.0) < 0.7
    assert eqx.tree_equal(FourierFeatures(**layer.config()), layer)
    assert (layer.matrix != layer.matrix.astype(np.float32)).any()
    assert not jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))


def test_learned_positions_return_their_rows():
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


def test_resize_equals_the_core_functions():
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


# Positions and offsets


@pytest.mark.parametrize("name", ADDED)
def test_offset_shifts_the_positions(name):
    layer, x = ADDED[name], draw(2, 5, 6)
    want = add(layer, x, jnp.arange(7, 12))
    got = jax.jit(lambda x: layer(x, offset=[7, 7]))(x)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(add(layer, x) - want).max() > 0.1


@pytest.mark.parametrize(
    "offset",
    [7, np.int64(7), [7, 7], np.array([7, 7], np.uint64), jnp.array([7, 7]), 7.0, [[7]]],
    ids=["int", "numpy", "list", "uint64", "jax", "real", "nested"],
)
def test_offsets_may_be_numbers_or_arrays_of_any_dtype(offset):
    checked = []
    given = positions_argument(5, positions=None, offset=offset, check=checked.append)
    got = jax.jit(lambda given: given.count(5))(given)
    want = np.asarray(offset)[..., None] + np.arange(5) if np.ndim(offset) else None
    want = np.arange(7, 12) if want is None else want
    np.testing.assert_array_equal(got, want)
    ends = [np.min(checked), np.max(checked)]
    np.testing.assert_array_equal(ends, [want.min(), want.max()])


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("dtype", ["int8", "uint32", "bfloat16"])
def test_traced_offsets_shift_each_row(name, dtype):
    layer, x = ADDED[name], draw(2, 5, 6)
    got = add(layer, x, offset=jnp.array([3, 20], dtype))
    want = add(layer, x, jnp.stack([jnp.arange(3, 8), jnp.arange(20, 25)]))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("name", ADDED)
def test_decoding_with_scan_equals_one_call(name):
    layer, x, start = ADDED[name], draw(2, 5, 6), jnp.array([0, 11])

    def step(offset, x):
        return offset + 1, layer(x[:, None], offset=offset)[:, 0]

    _, got = jax.lax.scan(step, start, x.swapaxes(0, 1))
    want = add(layer, x, offset=start)
    np.testing.assert_allclose(got.swapaxes(0, 1), want, atol=1e-6)
    by_row = jax.jit(jax.vmap(lambda x, offset: layer(x, offset=offset)))(x, start)
    np.testing.assert_allclose(by_row, want, atol=1e-6)


@given(st.lists(st.integers(-(2**24) + 1, 2**24 - 1), min_size=4, max_size=4))
def test_sinusoids_of_any_position_equal_the_formula(positions):
    got = encode(SINUSOIDAL, jnp.array(positions))
    np.testing.assert_allclose(got, sinusoids(positions), atol=1.3e-7)


# Positions out of reach


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_only_traced_positions_out_of_reach_are_nan(dtype):
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
def test_concrete_positions_out_of_reach_are_an_error(position):
    with pytest.raises(ValueError, match=f"smaller than 16777216 in size, got {position}"):
        SINUSOIDAL.encode(np.array([1, position]))
    with pytest.raises(ValueError, match="coordinates must be smaller than 16777216"):
        FourierFeatures([[1.0]])(jnp.array([2.0**24]))


@pytest.mark.rejects
@pytest.mark.parametrize("name", ADDED)
def test_positions_are_checked_before_jax_truncates_them_to_32_bits(name):
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
def test_concrete_positions_without_a_row_are_an_error(positions, message):
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
def test_invalid_arguments_are_an_error(message):
    is_type = "must be real" in message or "integers or reals" in message
    with pytest.raises(TypeError if is_type else ValueError, match=message):
        WRONG[message]()


# Gradients and padding


def test_gradients_of_positions_and_tables_equal_finite_differences():
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


def test_positions_out_of_reach_pass_no_gradient_to_the_table():
    def loss(weight, at):
        own = ROBERTA.with_parameters({"weight": weight})
        return jnp.nansum(own.encode(at) * jnp.arange(6.0))

    grad = jax.jit(jax.grad(loss))
    for at in (jnp.array([40, 5, -3, 5]), jnp.array([39.5, 5.0, -2.5, 5.0])):
        got = np.asarray(grad(jnp.asarray(TABLE), at))
        np.testing.assert_array_equal(got[7], 2 * np.arange(6.0))
        assert not np.delete(got, 7, axis=0).any()


def test_gradient_of_repeated_bfloat16_rows_is_summed_in_float32():
    layer = LearnedPositions(4, 2, weight=jnp.zeros((4, 2), jnp.bfloat16))
    x, factor = jnp.zeros((3072, 1, 2)), 1 + 2**-8.1

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(layer, at):
        return (layer(x, at) * factor).sum()

    # The factor rounds to 1 in bfloat16: terms rounded before the sum would give 3072.
    got = grad(layer, jnp.ones((3072, 1), int)).weight[1]
    np.testing.assert_array_equal(got.astype("float32"), [3088.0, 3088.0])


def test_padding_row_of_learned_positions_gets_no_gradient_and_keeps_what_is_written():
    layer, at = built(all_schemes)["learned"], jnp.array([-1, 0, -1])
    assert not encode(layer, at)[0].any()  # a new table has a zero row for padding
    for positions in (at, at + 0.0):
        grad_of = eqx.filter_jit(eqx.filter_grad(lambda one, at: one.encode(at).sum()))
        grad = grad_of(layer, positions).weight
        assert not grad[1].any() and (grad[2] == 1).all()
    moved = eqx.tree_at(lambda layer: layer.table.weight, layer, layer.weight + 1)
    np.testing.assert_array_equal(encode(moved, at), encode(layer, at) + 1)
    written = moved.set_padding(7.0)
    for resized in (written, written.resize(9)):
        assert (encode(resized, at)[0] == 7).all()
        assert (resized.parameters()["weight"][1] == 7).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype):
    x = draw(2, 5, 6, dtype=dtype)
    for layer in ADDED.values():
        got = add(layer, x, jnp.arange(20, 25))
        want = (x.astype("float32") + encode(layer, jnp.arange(20, 25))).astype(dtype)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.view("uint16"), want.view("uint16"))


def test_positions_are_distinct_after_a_cast_to_bfloat16():
    rows = encode(cast(SINUSOIDAL, "bfloat16"), jnp.arange(4096))
    assert len(np.unique(rows, axis=0)) == 4096


# Properties of every scheme


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips_do_not_change_the_layers(trip):
    got, want = ROUND_TRIPS[trip](all_schemes), built(all_schemes)
    for name in SCHEMES:
        assert eqx.tree_equal(got[name], want[name], typematch=True), name
    assert hash(jax.tree.structure(got)) == hash(jax.tree.structure(want))


def test_constants_are_equal_by_bytes_and_read_only():
    one = Constant(np.array([1.0, np.nan]))
    assert one == Constant(one.array.copy()) and hash(one) == hash(Constant(one.array))
    for other in (np.array([0.0, np.nan]), one.array.view(np.int64), one.array[None]):
        assert one != Constant(other)
    assert Constant(np.array(0.0)) != Constant(np.array(-0.0)) and one != "one"
    with pytest.raises(ValueError, match="read-only"):
        one.array[0] = 2.0


def test_floating_point_leaves_are_the_parameters():
    for name, layer in built(all_schemes).items():
        real = jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))
        shapes = [value.shape for value in layer.parameters().values()]
        assert [leaf.shape for leaf in real] == shapes, name
        assert bool(real) == (name in LEARNED)


def test_adamw_over_all_arrays_updates_the_parameters_only():
    # optax' Adam rejects the int32 leaves of FourierFeatures.
    layers = dict(built(all_schemes))
    del layers["fourier"]
    x, positions = draw(9, 6), jnp.array([0.0, 3, 5, 5, 7, 9.5, 12, 20, 33])

    def loss(model):
        layers, head = model
        runs = (
            call_scheme(name, layer, x @ head, positions) for name, layer in layers.items()
        )
        return sum(jnp.mean(jnp.square(out)) for out in runs)

    @eqx.filter_jit
    def step(model):
        optimizer = optax.adamw(1e-2, weight_decay=0.5)
        arrays = eqx.filter(model, eqx.is_array)
        gradients = eqx.filter_grad(loss)(model)
        updates, _ = optimizer.update(gradients, optimizer.init(arrays), arrays)
        return eqx.apply_updates(model, updates), gradients

    with jax.debug_nans(True):
        (after, _), (gradients, _) = step((layers, jnp.eye(6)))
    for name, layer in layers.items():
        before, now = (
            eqx.partition(tree, eqx.is_inexact_array) for tree in (layer, after[name])
        )
        assert eqx.tree_equal(before[1], now[1]), name
        old, new = jax.tree.leaves(before[0]), jax.tree.leaves(now[0])
        for a, b, grad in zip(old, new, jax.tree.leaves(gradients[name]), strict=True):
            assert (a != b).any() and grad.any(), name


def test_cast_to_bfloat16_rounds_parameters_but_not_positions():
    x, positions = draw(9, 6), jnp.array([0, 3, 5, 6, 7, 9, 12, 20, 39])

    @eqx.filter_jit
    def run(layers):
        return {
            name: call_scheme(
                name, layer, x, positions * (1 if name == "learned" else 400_000)
            )
            for name, layer in layers.items()
        }

    # The other schemes have no leaves.
    layers = {name: built(all_schemes)[name] for name in ("fourier", *LEARNED)}
    want, got = run(layers), run(cast(layers, "bfloat16"))
    for name in layers:
        rounded = want[name].astype(got[name].dtype)
        assert np.isfinite(rounded.astype("float32")).all()
        np.testing.assert_array_equal(got[name], rounded, err_msg=name)


def test_stacks_of_layers_run_under_vmap_and_scan():
    x, positions, names = draw(9, 6), jnp.arange(9) * 4, ("learned", "rotary", "t5", "fire")
    arrays, rest = eqx.partition(stacked(all_schemes), eqx.is_array)

    def one(arrays):
        layers = eqx.combine(arrays, rest)
        return {name: call_scheme(name, layers[name], x, positions) for name in names}

    mapped = jax.jit(jax.vmap(one))(arrays)
    _, scanned = jax.lax.scan(lambda carry, own: (carry, one(own)), 0, arrays)
    for name in names:
        np.testing.assert_allclose(mapped[name], scanned[name], atol=1e-6, err_msg=name)
        distinct = len(np.unique(mapped[name], axis=0))
        assert distinct == (3 if name in LEARNED else 1), name
    built_by_vmap = eqx.filter_eval_shape(
        eqx.filter_vmap(all_schemes), jax.random.split(key(0), 3)
    )
    assert [leaf.shape for leaf in jax.tree.leaves(built_by_vmap)] == [
        leaf.shape for leaf in jax.tree.leaves(arrays)
    ]


# Modes of JAX


@pytest.mark.parametrize(
    ("x64", "dtype", "layer_dtype"),
    [
        (False, "bfloat16", "float32"),
        (True, "float64", "float32"),
        (True, "float32", "float64"),
    ],
)
def test_output_dtypes_in_strict_mode(x64, dtype, layer_dtype):
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        x, host = jnp.zeros((4, 6), dtype), [0, 3, 5, 6]
        layers = eqx.filter_eval_shape(
            lambda key: cast(all_schemes(key), layer_dtype), key(0)
        )
        for positions in (jnp.asarray(host, d) for d in ("int8", "uint32", dtype)):
            for name, layer in layers.items():
                got = eqx.filter_eval_shape(call_scheme, name, layer, x, positions)
                want = layer_dtype if name in ("t5", "kerple", "fire") else dtype
                assert got.dtype == ("float32" if name == "alibi" else want), name


def test_debug_nans_reports_positions_out_of_reach():
    with jax.debug_nans(True):
        encode(SINUSOIDAL, jnp.arange(4))
        # JAX reruns the program eagerly to find the NaN, and the eager check raises.
        with pytest.raises(ValueError, match="must be smaller than 16777216 in size"):
            encode(SINUSOIDAL, jnp.array([0, 1, 2, 2**24]))


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x = jnp.zeros((1, 6))
        got = add(SINUSOIDAL, x, jnp.array([1000.3]))  # the error in float32 is 1e-5
        np.testing.assert_allclose(got[0], sinusoids(1000.3), atol=1.3e-7)
        table = TABLE.astype(np.float64) + 1e-12
        layer = LearnedPositions(42, 6, weight=table)
        got = add(layer, jnp.ones((1, 6)), jnp.array([3]))
        np.testing.assert_array_equal(got, 1 + table[3:4])
