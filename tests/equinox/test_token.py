import contextlib
import io
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.equinox.token import Embedding
from firstlayer.numpy.token import Embedding as NumpyEmbedding
from tests.support.gradients import central_difference
from tests.support.jax_lives import LIVES, built

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
HALF = ["float16", "bfloat16"]
rng = np.random.default_rng(0)
KEY = jax.random.key(7)
TABLE = rng.standard_normal((10, 4))


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


def build(**options: Any) -> Embedding:
    return Embedding(10, 4, **{"weight": TABLE.astype("float32"), **options})


def squares(layer, ids):
    return (layer(ids).astype(jnp.float32) ** 2).sum()


# Compiled whole: one operation after the other, JAX would compile each of them.
gradient = eqx.filter_jit(eqx.filter_grad(squares))


def rows(layer, ids):
    """Return rows looked up in eager code, on the host."""
    return np.asarray(layer(ids))


# Lookup


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_lookup_returns_the_rows_to_the_bit(dtype):
    layer, ids = build(dtype=dtype), rng.integers(0, 10, (3, 5))
    for got in (layer(ids), jax.jit(layer.__call__)(ids)):
        assert got.dtype == dtype
        assert bits(got) == bits(np.asarray(layer.weight)[ids])


def test_float64_needs_64_bits_and_then_keeps_them():
    with jax.enable_x64(True):
        layer = Embedding(10, 4, weight=TABLE, padding_idx=2)
        assert layer.weight.dtype == np.float64
        assert bits(layer([1, 2, 3])) == bits(TABLE[[1, 2, 3]])
        assert Embedding(2, 2, init="zeros", key=KEY).weight.dtype == np.float64
    assert Embedding(10, 4, weight=TABLE).weight.dtype == np.float32
    assert Embedding(2, 2, init="zeros", key=KEY).weight.dtype == np.float32


@settings(max_examples=30)
@given(
    dtype=st.sampled_from(INTEGERS),
    shape=st.sampled_from([(), (0,), (2, 3)]),
    seed=st.integers(0, 99),
)
def test_ids_of_any_integer_dtype_and_shape(dtype, shape, seed):
    ids = np.random.default_rng(seed).integers(0, 10, shape).astype(dtype)
    layer = build()
    for given_ids in (ids, ids.tolist(), jnp.asarray(ids)):
        assert bits(layer(given_ids)) == bits(TABLE.astype("float32")[ids.astype(int)])


def test_one_id_under_vmap_is_what_equinox_takes():
    ours, theirs = build(), eqx.nn.Embedding(weight=jnp.asarray(TABLE, jnp.float32))
    both = eqx.nn.Sequential([ours, eqx.nn.Lambda(lambda x: 2 * x)])

    @jax.jit
    def everything(ids):
        each = jax.vmap(jax.vmap(ours))(ids), jax.vmap(jax.vmap(theirs))(ids)
        return *each, both(ids, key=KEY) / 2

    ids = np.arange(6).reshape(2, 3)
    for got in everything(ids):
        np.testing.assert_array_equal(got, rows(ours, ids))
    np.testing.assert_array_equal(jax.vmap(ours)(ids[0]), rows(ours, ids)[0])


WRONG = [
    ([3, 10], r"ids\[1\] is 10, but num_embeddings is 10"),
    (np.array([[0, 1], [-1, 12]]), r"ids\[1, 0\] is -1, but num_embeddings is 10"),
    (np.int8(-128), r"ids is -128, but num_embeddings is 10"),
    (np.array([2**63], np.uint64), r"ids\[0\] is 9223372036854775808, but num_"),
    (np.array([3, 2**32 + 3]), r"ids\[1\] is 4294967299, but num_embeddings is 10"),
    (jnp.array([3, -1], jnp.int8), r"ids\[1\] is -1, but num_embeddings is 10"),
]


@pytest.mark.rejects
@pytest.mark.parametrize(("ids", "sentence"), WRONG)
def test_a_concrete_id_out_of_range_is_named_with_its_place_and_bound(ids, sentence):
    layer = build()
    roads = [layer, lambda ids: jax.jit(lambda w: build(weight=w)(ids))(layer.weight)]
    if isinstance(ids, np.ndarray):
        # An eager vmap leaves NumPy's arrays as they are, 64 bits and all.
        roads += [jax.vmap(layer), eqx.filter_vmap(layer)]
        roads += [jax.vmap(jax.vmap(layer))] if ids.ndim == 2 else []
    for road in roads:
        with pytest.raises(IndexError, match=f"^{sentence}"):
            road(ids)


ROADS = {
    "jit": lambda layer, ids: layer(ids),
    "vmap": lambda layer, ids: jax.vmap(layer)(ids),
    "vmap in jit": lambda layer, ids: eqx.filter_vmap(layer)(ids),
    "scan": lambda layer, ids: jax.lax.scan(lambda c, i: (c, layer(i)), 0, ids)[1],
}
OPTIONS = [{}, {"padding_idx": 0}, {"padding_idx": -1, "max_norm": 0.9}]


@pytest.mark.parametrize(
    ("road", "options"),
    [*(("jit", options) for options in OPTIONS), *((road, OPTIONS[2]) for road in ROADS)],
)
def test_a_traced_id_out_of_range_is_nan_and_trains_no_row(road, options):
    layer = build(**options)
    ids = np.array([1, -1, 10, 9, 1, -10, 2**31 - 1, 0], "int32")
    good = np.array([0, 3, 4, 7])

    def loss(one, ids):
        out = ROADS[road](one, ids)
        return (out**2).sum(), out

    # The gradient that arrives at a bad row is NaN, and must reach nobody.
    made = eqx.filter_grad(loss, has_aux=True)
    made = made if road == "vmap" else eqx.filter_jit(made)
    grads, out = made(layer, jnp.asarray(ids))
    out, grad = np.asarray(out), np.asarray(grads.weight)
    np.testing.assert_array_equal(out[good], rows(layer, ids[good]))
    assert np.isnan(np.delete(out, good, axis=0)).all()
    want = gradient(layer, ids[good]).weight
    np.testing.assert_allclose(grad, want, rtol=1e-6)
    assert not grad[[2, 5, 8]].any()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint32"])
def test_a_table_without_rows_has_none_for_traced_ids(dtype):
    layer = Embedding(0, 3, weight=np.zeros((0, 3), "float32"))
    assert np.isnan(jax.jit(lambda ids: layer(ids))(jnp.array([0, 3], dtype))).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_traced_ids_of_every_dtype_meet_a_bound_that_does_not_fit_them(dtype):
    kind = np.iinfo(dtype)
    ids = np.array([kind.min, 1, 99, kind.max], dtype)
    table = np.arange(600, dtype="float32").reshape(300, 2)
    good = [i for i in range(4) if 0 <= int(ids[i]) < 300]
    with jax.enable_x64(True):
        layer = Embedding(300, 2, weight=table, padding_idx=299)
        made = jax.jit(lambda ids: (layer(ids), layer.mask(ids)))(ids)
        got, tokens = map(np.asarray, made)
        np.testing.assert_array_equal(layer.mask(ids), tokens)
    assert tokens.all()
    assert bits(got[good]) == bits(table[ids[good].astype(int)])
    assert np.isnan(np.delete(got, good, axis=0)).all()


@pytest.mark.rejects
@pytest.mark.parametrize("of", [jnp.asarray, np.asarray, lambda x: x.tolist()])
def test_ids_that_are_not_integers_are_refused(of):
    layer = build()
    for ids, name in ((np.array([1.0], "float32"), "float"), (np.array([True]), "bool")):
        with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
            layer(of(ids))
        with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
            jax.jit(layer.__call__)(ids)
        with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
            layer.mask(of(ids))
    with pytest.raises(TypeError, match="^ids must be integers, got float32"):
        layer(jnp.array([]))


@pytest.mark.rejects
def test_an_empty_table_has_no_row():
    layer = Embedding(0, 4, weight=np.zeros((0, 4)))
    with pytest.raises(IndexError, match=r"ids\[0\] is 0, but num_embeddings is 0"):
        layer([0])
    assert layer([]).shape == (0, 4)
    assert np.isnan(jax.jit(layer.__call__)(jnp.array([0, 1]))).all()


# How a table begins


def test_a_table_is_drawn_with_its_key():
    wanted = {
        "normal": (1.0, 6.0),
        "uniform": (0.05 / 3**0.5, 0.05),
        "xavier": ((6 / 4050) ** 0.5 / 3**0.5, (6 / 4050) ** 0.5),
        # The standard deviation of a normal cut at two is 0.8796.
        "truncated_normal": (0.02 * 0.8796, 0.04),
        jax.nn.initializers.normal(0.3): (0.3, 2.0),
    }

    @jax.jit
    def drawn(key):
        return [
            [Embedding(4000, 50, init=init, key=key, dtype=dtype).weight for init in wanted]
            for dtype in (None, "bfloat16")
        ]

    (firsts, halves), (others, _) = drawn(KEY), drawn(jax.random.key(4))
    for k, (std, limit) in enumerate(wanted.values()):
        a = np.asarray(firsts[k])
        assert bits(a.astype(jnp.bfloat16)) == bits(halves[k])
        assert (a == np.asarray(others[k])).mean() < 1e-3
        assert abs(a.mean()) < 4 * std / a.size**0.5
        assert a.std() == pytest.approx(std, rel=0.01)
        assert np.abs(a).max() <= limit


def test_a_given_table_is_copied_and_takes_the_dtype_asked_for():
    table = TABLE.astype("float32")
    layer = Embedding(10, 4, weight=table, dtype="float16")
    kept = Embedding(10, 4, weight=table)
    want = table.copy()
    table[...] = 7
    assert bits(kept.weight) == bits(want) and layer.weight.dtype == np.float16
    assert not np.asarray(Embedding(3, 2, init="zeros", key=KEY).weight).any()


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"num_embeddings": -1}, ValueError, "num_embeddings must be at least 0, got -1"),
        ({"embedding_dim": 2.0}, TypeError, "embedding_dim must be an integer, got float"),
        ({"padding_idx": 10}, ValueError, r"padding_idx must be in \[-10, 10\)"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be positive, got 0.0"),
        ({"init": [1.0], "weight": None}, TypeError, "init must be a name or a function"),
        ({"norm_type": -1.0}, ValueError, "norm_type must be positive, got -1.0"),
        ({"weight": TABLE[:9]}, ValueError, r"weight must have shape \(10, 4\), got"),
        ({"weight": TABLE.astype(int)}, TypeError, "weight must be real, got int64"),
        ({"weight": None}, ValueError, "key must be given to draw parameters, got None"),
        ({"weight": None, "init": "orthogonal"}, ValueError, "init must be 'normal', "),
        (
            {"weight": None, "key": KEY, "init": lambda key, shape, dtype: np.ones(3)},
            ValueError,
            r"init must return an array of shape \(10, 4\), got \(3,\)",
        ),
        ({"dtype": "int32"}, TypeError, "dtype must be float64, float32, float16 or b"),
        ({"dtype": "float64"}, ValueError, "dtype float64 needs jax.config.update"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error, sentence):
    options: dict[str, Any] = {"num_embeddings": 10, "embedding_dim": 4, "weight": TABLE}
    with pytest.raises(error, match=sentence):
        Embedding(**{**options, **arguments})


# Padding


def test_no_step_of_an_optimizer_moves_padding():
    dtype = "float16"
    layer = build(padding_idx=-3, dtype=dtype).set_padding([1.0, -2.0, 0.5, 8.0])
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = optimizer.init(eqx.filter(layer, eqx.is_inexact_array))
    first, kept = np.asarray(layer.weight), rows(layer, 7)

    @eqx.filter_jit
    def step(layer, state):
        grads = eqx.filter_grad(squares)(layer, np.array([1, 7, 7]))
        updates, state = optimizer.update(grads, state, eqx.filter(layer, eqx.is_array))
        return eqx.apply_updates(layer, updates), state, grads

    for _ in range(3):
        layer, state, grads = step(layer, state)
        assert not np.asarray(grads.weight)[7].any()
    moved = np.asarray(layer.weight)
    assert (moved[7] != first[7]).all() and (moved[1] != first[1]).all()
    assert bits(rows(layer, 7)) == bits(kept) == bits(np.asarray([1, -2, 0.5, 8], dtype))
    assert bits(np.asarray(layer.parameters()["weight"])[7]) == bits(kept)
    np.testing.assert_array_equal(layer.mask([1, 7]), [True, False])
    head = layer.logits(np.ones((2, 4), dtype))
    np.testing.assert_array_equal(np.asarray(head)[:, 7], [7.5, 7.5])


def test_padding_is_what_was_set_given_or_loaded():
    drawn, table = Embedding(10, 4, padding_idx=3, key=KEY), TABLE.astype("float32")
    assert not rows(drawn, [3, 3])[0].any() and np.asarray(drawn.weight)[2].all()
    layer = build(padding_idx=3)
    other = layer.set_padding(2.5)
    loaded = layer.with_parameters({"weight": 2 * TABLE})
    # A new array in its place, as a step is one, changes no padding.
    swapped = eqx.tree_at(lambda one: one.weight, layer, jnp.asarray(-table))
    for one, want in (
        (layer, table[[3, 4]]),
        (other, [[2.5] * 4, table[4]]),
        (loaded, 2 * table[[3, 4]]),
        (swapped, [table[3], -table[4]]),
    ):
        np.testing.assert_array_equal(one([3, 4]), want)


def test_padding_outlives_a_cast_of_the_model():
    layer = build(padding_idx=1, weight=np.full((10, 4), 1.25, "float32"))
    half = eqx.tree_at(lambda one: one.weight, layer, np.zeros((10, 4), jnp.bfloat16))
    assert bits(half([1])) == bits(np.full((1, 4), 1.25, jnp.bfloat16))
    with jax.enable_x64(True):
        wide = build(padding_idx=1, weight=np.full((10, 4), 0.1))
        narrow = eqx.tree_at(lambda one: one.weight, wide, np.zeros((10, 4), "float32"))
        assert rows(wide, [1]).tolist() == [[0.1] * 4]
        assert bits(narrow([1])) == bits(np.full((1, 4), 0.1, "float32"))


@pytest.mark.rejects
def test_set_padding_and_with_parameters_name_what_does_not_fit():
    with pytest.raises(ValueError, match="^set_padding needs a layer with padding_idx, g"):
        build().set_padding(0.0)
    with pytest.raises(
        ValueError, match=r"\['weight'\]; missing \['weight'\], unknown \['"
    ):
        build().with_parameters({"wieght": TABLE})
    with pytest.raises(ValueError, match=r"parameters\['weight'\] must have shape \(10, 4"):
        build().with_parameters({"weight": TABLE[1:]})


# Gradients


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"max_norm": 50.0, "norm_type": 1.0}]
)
def test_gradients_equal_finite_differences(options):
    table, dy = TABLE.copy(), rng.standard_normal((2, 3, 4))
    ids = np.array([[1, 1, 2], [9, 1, 0]])
    with jax.enable_x64(True):

        def loss(weight):
            return (jnp.sin(Embedding(10, 4, weight=weight, **options)(ids)) * dy).sum()

        f = jax.jit(loss)
        want = central_difference(lambda: float(f(table)), table)
        if "padding_idx" in options:
            want[2] = 0
        direction = rng.standard_normal(table.shape)
        both = jax.jit(lambda t: (jax.grad(loss)(t), jax.jvp(loss, (t,), (direction,))[1]))
        got, along = both(table)
        np.testing.assert_allclose(got, want, atol=1e-6)
        np.testing.assert_allclose(along, (want * direction).sum(), atol=1e-6)


def test_second_derivatives_are_right():
    layer = build(padding_idx=3)

    def cubes(weight):
        one = eqx.tree_at(lambda one: one.weight, layer, weight)
        return (one([1, 1, 3]) ** 3).sum()

    want = np.zeros((10, 4))
    want[1] = 2 * 6 * TABLE[1]
    along = np.ones((10, 4), "float32")

    @jax.jit
    def twice(weight):
        forward = jax.jvp(jax.grad(cubes), (weight,), (along,))[1]
        return forward, jax.grad(lambda w: (jax.grad(cubes)(w) * along).sum())(weight)

    for got in twice(layer.weight):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_tangent_may_be_numpys_and_eager():
    layer, along = build(), np.ones((10, 4), "float32")
    _, got = jax.jvp(lambda w: build(weight=w)([3, 3]), (layer.weight,), (along,))
    np.testing.assert_array_equal(got, along[:2])


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_a_frequent_half_precision_id_do_not_saturate(dtype):
    layer, ids = build(dtype=dtype), np.r_[np.ones(3000, int), 2]

    def total(weight, by):
        return (build(weight=weight)(ids) * by).sum()

    @jax.jit
    def everything(weight, by):
        each = jax.vmap(jax.grad(total), in_axes=(None, 0))(weight, by)
        # Forward, a tangent is a lookup and loses no bit.
        _, along = jax.jvp(lambda w: build(weight=w)(ids), (weight,), (weight * 2,))
        return jax.grad(total)(weight, by[0]), each, along

    grad, each, along = map(
        np.asarray, everything(layer.weight, np.array([1, 2], jnp.dtype(dtype)))
    )
    want = np.array([0, 3000, 1, *[0] * 7]).astype(grad.dtype)
    assert grad.dtype == dtype and bits(grad[:, 0]) == bits(want)
    assert bits(each[:, 1, 0]) == bits(np.array([3000, 6000]).astype(grad.dtype))
    assert bits(along) == bits((2 * np.asarray(layer.weight))[ids])


def test_scaled_by_frequency_agrees_with_numpy():
    ids, dy = np.array([[1, 1, 2], [9, 1, 0]]), rng.standard_normal((2, 3, 4))
    options = {"scale_grad_by_freq": True, "padding_idx": 2}
    _, pull = NumpyEmbedding(10, 4, weight=TABLE, **options).vjp(ids)
    want, layer = pull(dy)["weight"].dense(10), build(**options)

    @eqx.filter_jit
    def made(one, traced):
        return [
            eqx.filter_grad(lambda one, i=i: jnp.nansum(one(i) * dy))(one).weight
            for i in (ids, traced)
        ]

    for got in made(layer, jnp.asarray(ids)):
        np.testing.assert_allclose(got, want, atol=1e-6)
    # An id that is not there counts for nobody.
    odd = np.where(ids == 1, [[10, -1, 0], [0, 1, 0]], 0)
    grad = np.asarray(made(layer, jnp.asarray(odd))[1])
    np.testing.assert_allclose(grad[1], dy[1, 1], atol=1e-6)
    np.testing.assert_allclose(grad[0], (dy[0, 2] + dy[1, 0] + dy[1, 2]) / 3, atol=1e-6)
    assert not grad[2:].any()


# Norms


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_max_norm_agrees_with_numpy_and_has_torchs_gradient(norm_type):
    options = {"max_norm": 0.8, "norm_type": norm_type, "padding_idx": 5}
    layer = build(**options)
    reference = NumpyEmbedding(10, 4, weight=TABLE.astype("float32"), **options)
    ids = np.array([5, 3, 3, 0])
    want = reference(ids)
    np.testing.assert_allclose(layer(ids), want, atol=1e-6)
    grad = np.asarray(gradient(layer, ids).weight)
    # Of the row as it is used: the norm itself has no gradient.
    np.testing.assert_allclose(grad[3], 4 * want[1], atol=1e-6)
    np.testing.assert_array_equal(grad[5], 0)


def test_max_norm_in_half_precision_is_rounded_once():
    layer = build(max_norm=0.8, dtype="bfloat16")
    reference = NumpyEmbedding(10, 4, weight=np.asarray(layer.weight), max_norm=0.8)
    got, want = rows(layer, range(10)), reference(range(10))
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=2**-7)
    assert (got == want).mean() > 0.9


def test_projected_shortens_the_stored_rows_asked_for():
    layer = build(max_norm=0.5, padding_idx=2)
    kept, short = np.asarray(layer.weight), rows(layer, range(10))
    some = np.asarray(layer.projected([1, 1, 4]).weight)
    np.testing.assert_allclose(some[[1, 4]], short[[1, 4]], rtol=1e-6)
    assert bits(some[5:]) == bits(kept[5:])
    whole = layer.projected()
    norms = np.linalg.norm(np.asarray(whole.weight), axis=1)
    np.testing.assert_allclose(norms, 0.5, rtol=1e-5)
    assert bits(np.asarray(whole.parameters()["weight"])[2]) == bits(kept[2])
    traced = jax.jit(lambda i: layer.projected(i).weight)(jnp.array([1, -1, 99]))
    np.testing.assert_allclose(np.asarray(traced)[1], short[1], rtol=1e-6)
    assert bits(np.asarray(traced)[2:]) == bits(kept[2:])
    plain = build()
    assert plain.projected([1]) is plain
    with pytest.raises(IndexError, match=r"^ids\[0\] is -1, but num_embeddings is 10$"):
        layer.projected([-1])


# The tied head


@pytest.mark.parametrize(
    ("dtype", "of_x"),
    [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")],
)
def test_logits_agree_with_numpy(dtype, of_x):
    layer = build(dtype=dtype, padding_idx=4)
    x = rng.standard_normal((2, 3, 4)).astype(jnp.dtype(of_x))
    want = NumpyEmbedding(10, 4, weight=np.asarray(layer.weight), padding_idx=4).logits(x)
    got = np.asarray(layer.logits(x))
    assert got.dtype == of_x
    atol = 2e-6 if of_x == "float32" else 4e-2
    np.testing.assert_allclose(got.astype(float), want.astype(float), atol=atol, rtol=0)


def test_gradients_of_the_tied_head_are_right():
    x, dy = rng.standard_normal((3, 4)), rng.standard_normal((3, 10))
    with jax.enable_x64(True):

        @jax.jit
        @partial(jax.grad, argnums=(0, 1))
        def made(weight, x):
            return (build(weight=weight, padding_idx=6).logits(x) * dy).sum()

        dweight, dx = made(TABLE, x)
    want = dy.T @ x
    want[6] = 0
    np.testing.assert_allclose(dweight, want, atol=1e-12)
    np.testing.assert_allclose(dx, dy @ TABLE, atol=1e-12)
    ones = np.ones((3000, 4), jnp.bfloat16)
    made = jax.jit(jax.grad(lambda w: build(weight=w).logits(ones).sum()))
    grad = made(jnp.ones((10, 4), jnp.bfloat16))
    assert bits(grad) == bits(np.full((10, 4), 3000, jnp.bfloat16))


@pytest.mark.rejects
def test_logits_name_a_width_that_does_not_fit():
    with pytest.raises(ValueError, match=r"^x must end in embedding_dim 4, got shape \(2,"):
        build().logits(np.ones((2, 3)))
    with pytest.raises(TypeError, match="x must be real, got int"):
        build().logits(np.ones((2, 4), int))


# Another length


def test_resizing_keeps_rows_and_padding_and_leaves_the_layer_alone():
    table = TABLE.astype("float32")
    table[2] = 100
    layer = build(padding_idx=2, weight=table)
    moved = eqx.tree_at(lambda one: one.weight, layer, jnp.asarray(table + 1))
    longer, what = moved.resize(12)
    assert (what.kept, what.added) == (range(10), range(10, 12))
    assert what.dropped == range(12, 10)
    want = table + 1
    want[2] = 100
    mean = np.delete(want, 2, axis=0).mean(axis=0)
    got = rows(longer, range(12))
    np.testing.assert_allclose(got[10:], [mean] * 2, atol=1e-6)
    assert bits(got[:10]) == bits(want)
    assert longer.num_embeddings == 12 and moved.num_embeddings == 10
    assert longer.logits(np.ones(4, "float32")).shape == (12,)
    shorter, what = longer.resize(5)
    assert bits(shorter.weight) == bits(want[:5]) and what.dropped == range(5, 12)


def test_new_rows_are_drawn_as_asked():
    layer = build(dtype="float16")

    def new(count, **options):
        return np.asarray(layer.resize(10 + count, **options)[0].weight)[10:]

    a, b, c = (new(1000, init="gaussian", key=key) for key in (KEY, KEY, jax.random.key(1)))
    assert bits(a) == bits(b) != bits(c)
    np.testing.assert_allclose(np.cov(a.T, bias=True), np.cov(TABLE.T, bias=True), atol=0.2)
    assert not new(2, init="zeros", key=KEY).any()
    assert (new(2, init=jnp.full((2, 4), 3.0)) == 3).all()
    drawn = new(2000, init=jax.nn.initializers.normal(0.1), key=KEY)
    assert drawn.astype(float).std() == pytest.approx(0.1, rel=0.05)


@pytest.mark.rejects
def test_resizing_says_what_is_wrong():
    layer = build(padding_idx=8)
    with pytest.raises(ValueError, match="must leave the padding row 8 in place, got 5"):
        layer.resize(5)
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        layer.resize(-1)
    for init in ("gaussian", "normal"):
        with pytest.raises(ValueError, match="^key must be given to draw parameters, got "):
            layer.resize(12, init=init)
    with pytest.raises(ValueError, match=r"init must have shape \(2, 4\), got \(3, 4\)"):
        layer.resize(12, init=np.zeros((3, 4)))


# The life of a layer


@pytest.mark.parametrize("life", LIVES)
def test_nothing_that_happens_to_a_layer_changes_it(life):
    def make(key):
        return build(weight=None, padding_idx=1, max_norm=1.0, key=key)

    want, lived = built(make), LIVES[life](make)
    assert jax.tree.structure(want) == jax.tree.structure(lived)
    assert bits(lived(range(10))) == bits(want(range(10)))


def test_the_table_is_the_whole_tree_unless_padding_is_something():
    for layer in (build(), Embedding(10, 4, padding_idx=3, init="zeros", key=KEY)):
        assert [leaf.shape for leaf in jax.tree.leaves(layer)] == [(10, 4)]
    # Plain jax.grad takes it, and Adam begins with every array there is.
    made = jax.jit(jax.grad(squares))(build(), jnp.array([1]))
    np.testing.assert_allclose(np.asarray(made.weight)[1], 2 * TABLE[1], rtol=1e-6)
    layer, optimizer = build(padding_idx=3).set_padding(0.0), optax.adamw(0.1)

    @eqx.filter_jit
    def step(layer, state):
        arrays = eqx.filter(layer, eqx.is_array)
        grads = eqx.filter_grad(squares)(layer, jnp.array([1, 3]))
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.apply_updates(layer, updates), state

    state = optimizer.init(eqx.filter(layer, eqx.is_array))
    for _ in range(2):
        layer, state = step(layer, state)
    got = rows(layer, [1, 3])
    assert not got[1].any() and (got[0] != TABLE[1].astype("float32")).all()


def test_leaves_of_another_padding_are_stored_and_do_not_fit():
    zero = Embedding(10, 4, padding_idx=0, init="zeros", key=KEY)
    nine = build(padding_idx=0).set_padding(9.0)

    def stored(layer):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, layer)
        file.seek(0)
        return file

    again = eqx.tree_deserialise_leaves(stored(nine), build(padding_idx=0))
    assert (rows(again, [0, 1]) == [[9] * 4, TABLE[1].astype("float32")]).all()
    for layer, like in ((nine, zero), (zero, nine)):
        with pytest.raises(RuntimeError, match="has changed|at leaf with path"):
            eqx.tree_deserialise_leaves(stored(layer), like)


@contextlib.contextmanager
def demanding():
    """Ask of JAX that it refuses whatever is done without saying so."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
    ):
        yield


def test_strict_promotion_ranks_nans_and_64_bits_are_no_trouble():
    options = {"padding_idx": 1, "max_norm": 0.7, "scale_grad_by_freq": True}
    known = np.array([[3, 1, 3], [0, 1, 9]])

    def everything(weight, ids):
        layer = build(weight=weight, **options)
        grads = eqx.filter_grad(lambda one: one(ids).astype(jnp.float32).sum())(layer)
        head = layer.logits(layer(ids))
        more = layer.projected(ids).weight, layer.set_padding(2.0).weight, grads.weight
        return layer(ids), layer(known), jax.vmap(layer)(ids[0]), head, *more

    with jax.enable_x64(True), demanding():
        table = jnp.asarray(TABLE, jnp.bfloat16)
        made = jax.jit(everything)(table, jnp.asarray(known))
        eager = np.asarray(build(weight=table, **options)(known))
    assert all(one.dtype == jnp.bfloat16 for one in made)
    traced, concrete, by_id, head, *_, grads = map(np.asarray, made)
    assert bits(traced) == bits(concrete) == bits(eager)
    assert bits(by_id) == bits(traced[0])
    want = np.asarray(eager, float) @ np.asarray(table, float).T
    np.testing.assert_allclose(head.astype(float), want, atol=0.03)
    np.testing.assert_array_equal(grads[:, 0], [1, 0, 0, 1, 0, 0, 0, 0, 0, 1])
