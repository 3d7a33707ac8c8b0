import contextlib
import io
import re
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

from firstlayer.equinox.bag import EmbeddingBag
from firstlayer.equinox.layer import EmbeddingLayer
from firstlayer.equinox.learned import LearnedPositions
from firstlayer.equinox.rows import touched
from firstlayer.equinox.token import Embedding
from firstlayer.numpy.bag import EmbeddingBag as NumpyEmbeddingBag
from firstlayer.numpy.token import Embedding as NumpyEmbedding
from tests.support.gradients import central_difference
from tests.support.jax_round_trips import ROUND_TRIPS, built

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


# Jitted: eager JAX would compile every operation separately.
gradient = eqx.filter_jit(eqx.filter_grad(squares))


def rows(layer, ids):
    """Return the rows of an eager lookup as a NumPy array."""
    return np.asarray(layer(ids))


# Lookup


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_lookup_returns_the_exact_rows(dtype):
    layer, ids = build(dtype=dtype), rng.integers(0, 10, (3, 5))
    for got in (layer(ids), jax.jit(layer.__call__)(ids)):
        assert got.dtype == dtype
        assert bits(got) == bits(np.asarray(layer.weight)[ids])


def test_float64_tables_are_exact_with_x64_and_float32_without():
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
def test_ids_may_have_any_integer_dtype_and_shape(dtype, shape, seed):
    ids = np.random.default_rng(seed).integers(0, 10, shape).astype(dtype)
    layer = build()
    for given_ids in (ids, ids.tolist(), jnp.asarray(ids)):
        assert bits(layer(given_ids)) == bits(TABLE.astype("float32")[ids.astype(int)])


def test_lookup_of_one_id_under_vmap_equals_equinox():
    ours, theirs = build(), eqx.nn.Embedding(weight=jnp.asarray(TABLE, jnp.float32))
    sequence = eqx.nn.Sequential([ours, eqx.nn.Lambda(lambda x: 2 * x)])

    @jax.jit
    def lookups(ids):
        mapped = jax.vmap(jax.vmap(ours))(ids), jax.vmap(jax.vmap(theirs))(ids)
        return *mapped, sequence(ids, key=KEY) / 2

    ids = np.arange(6).reshape(2, 3)
    for got in lookups(ids):
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
@pytest.mark.parametrize(("ids", "message"), WRONG)
def test_concrete_id_out_of_range_is_an_error_with_index_and_bound(ids, message):
    layer = build()
    calls = [layer, lambda ids: jax.jit(lambda w: build(weight=w)(ids))(layer.weight)]
    if isinstance(ids, np.ndarray):
        # An eager vmap keeps NumPy arrays, with all 64 bits.
        calls += [jax.vmap(layer), eqx.filter_vmap(layer)]
        calls += [jax.vmap(jax.vmap(layer))] if ids.ndim == 2 else []
    for call in calls:
        with pytest.raises(IndexError, match=f"^{message}"):
            call(ids)


TRANSFORMS = {
    "jit": lambda layer, ids: layer(ids),
    "vmap": lambda layer, ids: jax.vmap(layer)(ids),
    "vmap in jit": lambda layer, ids: eqx.filter_vmap(layer)(ids),
    "scan": lambda layer, ids: jax.lax.scan(lambda c, i: (c, layer(i)), 0, ids)[1],
}
OPTIONS = [{}, {"padding_idx": 0}, {"padding_idx": -1, "max_norm": 0.9}]


@pytest.mark.parametrize(
    ("transform", "options"),
    [
        *(("jit", options) for options in OPTIONS),
        *((name, OPTIONS[2]) for name in TRANSFORMS),
    ],
)
def test_traced_id_out_of_range_is_nan_and_has_no_gradient(transform, options):
    layer = build(**options)
    ids = np.array([1, -1, 10, 9, 1, -10, 2**31 - 1, 0], "int32")
    good = np.array([0, 3, 4, 7])

    def loss(one, ids):
        out = TRANSFORMS[transform](one, ids)
        return (out**2).sum(), out

    # The output gradient of a NaN row is NaN and must not reach the table.
    grad_of = eqx.filter_grad(loss, has_aux=True)
    grad_of = grad_of if transform == "vmap" else eqx.filter_jit(grad_of)
    grads, out = grad_of(layer, jnp.asarray(ids))
    out, grad = np.asarray(out), np.asarray(grads.weight)
    np.testing.assert_array_equal(out[good], rows(layer, ids[good]))
    assert np.isnan(np.delete(out, good, axis=0)).all()
    want = gradient(layer, ids[good]).weight
    np.testing.assert_allclose(grad, want, rtol=1e-6)
    assert not grad[[2, 5, 8]].any()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint32"])
def test_traced_ids_in_an_empty_table_are_nan(dtype):
    layer = Embedding(0, 3, weight=np.zeros((0, 3), "float32"))
    assert np.isnan(jax.jit(lambda ids: layer(ids))(jnp.array([0, 3], dtype))).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_traced_ids_are_compared_with_bounds_beyond_their_dtype(dtype):
    info = np.iinfo(dtype)
    ids = np.array([info.min, 1, 99, info.max], dtype)
    table = np.arange(600, dtype="float32").reshape(300, 2)
    good = [i for i in range(4) if 0 <= int(ids[i]) < 300]
    with jax.enable_x64(True):
        layer = Embedding(300, 2, weight=table, padding_idx=299)
        outputs = jax.jit(lambda ids: (layer(ids), layer.mask(ids)))(ids)
        got, tokens = map(np.asarray, outputs)
        np.testing.assert_array_equal(layer.mask(ids), tokens)
    assert tokens.all()
    assert bits(got[good]) == bits(table[ids[good].astype(int)])
    assert np.isnan(np.delete(got, good, axis=0)).all()


@pytest.mark.rejects
@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray, lambda x: x.tolist()])
def test_ids_that_are_not_integers_are_a_type_error(convert):
    layer = build()
    for ids, name in ((np.array([1.0], "float32"), "float"), (np.array([True]), "bool")):
        with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
            layer(convert(ids))
        with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
            jax.jit(layer.__call__)(ids)
        with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
            layer.mask(convert(ids))
    with pytest.raises(TypeError, match="^ids must be integers, got float32"):
        layer(jnp.array([]))


@pytest.mark.rejects
def test_empty_table_rejects_every_id():
    layer = Embedding(0, 4, weight=np.zeros((0, 4)))
    with pytest.raises(IndexError, match=r"ids\[0\] is 0, but num_embeddings is 0"):
        layer([0])
    assert layer([]).shape == (0, 4)
    assert np.isnan(jax.jit(layer.__call__)(jnp.array([0, 1]))).all()


# Initialization


@pytest.mark.rejects
@pytest.mark.parametrize("shape", [(6, 4), (20, 4), (3, 10, 4)])
def test_a_weight_of_another_number_of_rows_is_an_error(shape):
    """Ids are checked against num_embeddings; a shorter table would repeat its last row."""
    message = "^weight must have 2 axes and num_embeddings 10 rows, got shape "
    message += re.escape(str(shape))
    layers = {
        "token": (build(), lambda layer: layer.weight, ([[1, 8]],)),
        "bag": (EmbeddingBag(10, 4, key=KEY), lambda layer: layer.weight, ([[1, 8]],)),
        "layer": (
            EmbeddingLayer(10, 4, position=None, key=KEY),
            lambda layer: layer.token.weight,
            ([[1, 8]],),
        ),
        "positions": (
            LearnedPositions(10, 4, key=KEY),
            lambda layer: layer.table.weight,
            (jnp.zeros((7, 4)),),
        ),
    }
    for layer, where, arguments in layers.values():
        other = eqx.tree_at(where, layer, jnp.ones(shape))
        for call in (other, eqx.filter_jit(other)):
            with pytest.raises(ValueError, match=message):
                call(*map(jnp.asarray, arguments))
    with pytest.raises(ValueError, match=message):
        touched(eqx.tree_at(lambda layer: layer.weight, build(), jnp.ones(shape)), [1])


def test_new_tables_have_the_requested_distribution():
    wanted = {
        "normal": (1.0, 6.0),
        "uniform": (0.05 / 3**0.5, 0.05),
        "xavier": ((6 / 4050) ** 0.5 / 3**0.5, (6 / 4050) ** 0.5),
        # A normal distribution truncated at 2 has standard deviation 0.8796.
        "truncated_normal": (0.02 * 0.8796, 0.04),
        jax.nn.initializers.normal(0.3): (0.3, 2.0),
    }

    @jax.jit
    def draw(key):
        return [
            [Embedding(4000, 50, init=init, key=key, dtype=dtype).weight for init in wanted]
            for dtype in (None, "bfloat16")
        ]

    (full, half), (other_key, _) = draw(KEY), draw(jax.random.key(4))
    for k, (std, limit) in enumerate(wanted.values()):
        a = np.asarray(full[k])
        assert bits(a.astype(jnp.bfloat16)) == bits(half[k])
        assert (a == np.asarray(other_key[k])).mean() < 1e-3
        assert abs(a.mean()) < 4 * std / a.size**0.5
        assert a.std() == pytest.approx(std, rel=0.01)
        assert np.abs(a).max() <= limit


def test_given_table_is_copied_and_cast():
    table = TABLE.astype("float32")
    layer = Embedding(10, 4, weight=table, dtype="float16")
    same_dtype = Embedding(10, 4, weight=table)
    want = table.copy()
    table[...] = 7
    assert bits(same_dtype.weight) == bits(want) and layer.weight.dtype == np.float16
    assert not np.asarray(Embedding(3, 2, init="zeros", key=KEY).weight).any()


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
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
def test_constructor_rejects_invalid_arguments(arguments, error, message):
    options: dict[str, Any] = {"num_embeddings": 10, "embedding_dim": 4, "weight": TABLE}
    with pytest.raises(error, match=message):
        Embedding(**{**options, **arguments})


# Padding


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("max_norm", [None, 0.9])
def test_lookup_passes_no_gradient_to_the_padding_row(transform, max_norm):
    layer = build(padding_idx=-3, max_norm=max_norm)

    @eqx.filter_jit
    @eqx.filter_grad
    def grad_of(layer, ids):
        return (TRANSFORMS[transform](layer, ids) ** 2).sum()

    grad = np.asarray(grad_of(layer, jnp.array([1, 7, 7, 2])).weight)
    assert not grad[7].any() and grad[[1, 2]].all()


def test_tied_head_passes_the_padding_row_its_gradient():
    layer, ids = build(padding_idx=3), jnp.array([3, 1])

    @eqx.filter_jit
    @eqx.filter_grad
    def grad_of(layer):
        return layer.logits(jax.lax.stop_gradient(layer(ids)))[:, 3].sum()

    grad = np.asarray(grad_of(layer).weight)
    np.testing.assert_allclose(grad[3], TABLE[3] + TABLE[1], rtol=1e-5)
    assert not np.delete(grad, 3, axis=0).any()


def test_adamw_decays_the_padding_row_like_any_row_without_gradient():
    layer = build(padding_idx=7).set_padding([1.0, -2.0, 0.5, 8.0])
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = optimizer.init(eqx.filter(layer, eqx.is_array))

    @eqx.filter_jit
    def step(layer, state):
        grads = eqx.filter_grad(squares)(layer, np.array([1, 7, 7]))
        updates, state = optimizer.update(grads, state, eqx.filter(layer, eqx.is_array))
        return eqx.apply_updates(layer, updates), state

    for _ in range(3):
        layer, state = step(layer, state)
    # The decay of one step is lr * weight_decay, as in torch.optim.AdamW.
    decayed = 0.95**3 * np.array([1.0, -2.0, 0.5, 8.0])
    np.testing.assert_allclose(layer(7), decayed, rtol=1e-6)
    np.testing.assert_allclose(layer([5]), 0.95**3 * TABLE[[5]], rtol=1e-5)
    np.testing.assert_array_equal(layer.mask([1, 7]), [True, False])


def test_every_way_of_writing_the_padding_row_sticks():
    table = TABLE.astype("float32")
    drawn = Embedding(10, 4, padding_idx=3, key=KEY)
    assert not rows(drawn, [3, 3])[0].any() and np.asarray(drawn.weight)[2].all()
    given = build(padding_idx=3)
    for layer, want in (
        (given, table[[3, 4]]),
        (given.set_padding(2.5), [[2.5] * 4, table[4]]),
        (given.with_parameters({"weight": 2 * TABLE}), 2 * table[[3, 4]]),
        (eqx.tree_at(lambda one: one.weight, given, jnp.asarray(-table)), -table[[3, 4]]),
    ):
        np.testing.assert_array_equal(layer([3, 4]), want)
        np.testing.assert_array_equal(np.asarray(layer.weight)[[3, 4]], want)
        np.testing.assert_array_equal(layer.parameters()["weight"], layer.weight)
        head = np.asarray(layer.logits(np.ones(4, "float32")))
        np.testing.assert_allclose(head[[3, 4]], np.sum(want, axis=1), rtol=1e-5)


def test_tree_has_one_leaf_whatever_the_padding_row_holds():
    zero = Embedding(10, 4, padding_idx=0, init="zeros", key=KEY)
    nine = build(padding_idx=0).set_padding(9.0)
    assert [leaf.shape for leaf in jax.tree.leaves(nine)] == [(10, 4)]
    assert jax.tree.structure(zero) == jax.tree.structure(nine)
    for layer, like in ((nine, zero), (zero, nine)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, layer)
        file.seek(0)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, like), layer)
    # Plain jax.grad accepts the tree.
    grad = jax.jit(jax.grad(squares))(nine, jnp.array([1, 0]))
    np.testing.assert_allclose(np.asarray(grad.weight)[1], 2 * TABLE[1], rtol=1e-6)


def test_cast_of_the_model_rounds_the_padding_row():
    layer = build(padding_idx=1, weight=np.full((10, 4), 1 + 2**-10, "float32"))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer)
    assert bits(half([1])) == bits(np.ones((1, 4), jnp.bfloat16))


@pytest.mark.rejects
def test_set_padding_and_with_parameters_reject_invalid_arguments():
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
        derivatives = jax.jit(
            lambda t: (jax.grad(loss)(t), jax.jvp(loss, (t,), (direction,))[1])
        )
        got, tangent = derivatives(table)
        np.testing.assert_allclose(got, want, atol=1e-6)
        np.testing.assert_allclose(tangent, (want * direction).sum(), atol=1e-6)


def test_second_derivatives_equal_the_formula():
    layer = build(padding_idx=3)

    def cubes(weight):
        one = eqx.tree_at(lambda one: one.weight, layer, weight)
        return (one([1, 1, 3]) ** 3).sum()

    want = np.zeros((10, 4))
    want[1] = 2 * 6 * TABLE[1]
    tangent = np.ones((10, 4), "float32")

    @jax.jit
    def twice(weight):
        forward = jax.jvp(jax.grad(cubes), (weight,), (tangent,))[1]
        return forward, jax.grad(lambda w: (jax.grad(cubes)(w) * tangent).sum())(weight)

    for got in twice(layer.weight):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_eager_jvp_accepts_a_numpy_tangent():
    layer, tangent = build(), np.ones((10, 4), "float32")
    _, got = jax.jvp(lambda w: build(weight=w)([3, 3]), (layer.weight,), (tangent,))
    np.testing.assert_array_equal(got, tangent[:2])


@pytest.mark.parametrize("dtype", HALF)
def test_gradient_of_repeated_half_precision_ids_is_summed_in_float32(dtype):
    layer, ids = build(dtype=dtype), np.r_[np.ones(3000, int), 2]

    def total(weight, by):
        return (build(weight=weight)(ids) * by).sum()

    @jax.jit
    def derivatives(weight, by):
        each = jax.vmap(jax.grad(total), in_axes=(None, 0))(weight, by)
        # The forward tangent is a lookup and is exact.
        _, tangent = jax.jvp(lambda w: build(weight=w)(ids), (weight,), (weight * 2,))
        return jax.grad(total)(weight, by[0]), each, tangent

    grad, each, tangent = map(
        np.asarray, derivatives(layer.weight, np.array([1, 2], jnp.dtype(dtype)))
    )
    want = np.array([0, 3000, 1, *[0] * 7]).astype(grad.dtype)
    assert grad.dtype == dtype and bits(grad[:, 0]) == bits(want)
    assert bits(each[:, 1, 0]) == bits(np.array([3000, 6000]).astype(grad.dtype))
    assert bits(tangent) == bits((2 * np.asarray(layer.weight))[ids])


def test_scale_grad_by_freq_equals_numpy():
    ids, dy = np.array([[1, 1, 2], [9, 1, 0]]), rng.standard_normal((2, 3, 4))
    options = {"scale_grad_by_freq": True, "padding_idx": 2}
    _, pull = NumpyEmbedding(10, 4, weight=TABLE, **options).vjp(ids)
    want, layer = pull(dy)["weight"].dense(10), build(**options)

    @eqx.filter_jit
    def gradients(one, traced):
        return [
            eqx.filter_grad(lambda one, i=i: jnp.nansum(one(i) * dy))(one).weight
            for i in (ids, traced)
        ]

    for got in gradients(layer, jnp.asarray(ids)):
        np.testing.assert_allclose(got, want, atol=1e-6)
    # Ids out of range are not counted.
    odd = np.where(ids == 1, [[10, -1, 0], [0, 1, 0]], 0)
    grad = np.asarray(gradients(layer, jnp.asarray(odd))[1])
    np.testing.assert_allclose(grad[1], dy[1, 1], atol=1e-6)
    np.testing.assert_allclose(grad[0], (dy[0, 2] + dy[1, 0] + dy[1, 2]) / 3, atol=1e-6)
    assert not grad[2:].any()


# Norms


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_max_norm_equals_numpy_and_the_norm_has_no_gradient(norm_type):
    options = {"max_norm": 0.8, "norm_type": norm_type, "padding_idx": 5}
    layer = build(**options)
    reference = NumpyEmbedding(10, 4, weight=TABLE.astype("float32"), **options)
    ids = np.array([5, 3, 3, 0])
    want = reference(ids)
    np.testing.assert_allclose(layer(ids), want, atol=1e-6)
    grad = np.asarray(gradient(layer, ids).weight)
    # As in torch, the gradient is that of the scaled row.
    np.testing.assert_allclose(grad[3], 4 * want[1], atol=1e-6)
    np.testing.assert_array_equal(grad[5], 0)


def test_max_norm_in_half_precision_is_rounded_once():
    layer = build(max_norm=0.8, dtype="bfloat16")
    reference = NumpyEmbedding(10, 4, weight=np.asarray(layer.weight), max_norm=0.8)
    got, want = rows(layer, range(10)), reference(range(10))
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=2**-7)
    assert (got == want).mean() > 0.9


def test_projected_scales_down_the_stored_rows_of_the_given_ids():
    layer = build(max_norm=0.5, padding_idx=2)
    before, scaled = np.asarray(layer.weight), rows(layer, range(10))
    some = np.asarray(layer.projected([1, 1, 4]).weight)
    np.testing.assert_allclose(some[[1, 4]], scaled[[1, 4]], rtol=1e-6)
    assert bits(some[5:]) == bits(before[5:])
    norms = np.linalg.norm(np.asarray(layer.projected().weight), axis=1)
    np.testing.assert_allclose(norms, 0.5, rtol=1e-5)
    traced = jax.jit(lambda i: layer.projected(i).weight)(jnp.array([1, -1, 99]))
    np.testing.assert_allclose(np.asarray(traced)[1], scaled[1], rtol=1e-6)
    assert bits(np.asarray(traced)[2:]) == bits(before[2:])
    plain = build()
    assert plain.projected([1]) is plain
    with pytest.raises(IndexError, match=r"^ids\[0\] is -1, but num_embeddings is 10$"):
        layer.projected([-1])


# The tied head


@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")],
)
def test_logits_equal_numpy(dtype, x_dtype):
    layer = build(dtype=dtype, padding_idx=4)
    x = rng.standard_normal((2, 3, 4)).astype(jnp.dtype(x_dtype))
    want = NumpyEmbedding(10, 4, weight=np.asarray(layer.weight), padding_idx=4).logits(x)
    got = np.asarray(layer.logits(x))
    assert got.dtype == x_dtype
    atol = 2e-6 if x_dtype == "float32" else 4e-2
    np.testing.assert_allclose(got.astype(float), want.astype(float), atol=atol, rtol=0)


def test_gradients_of_the_tied_head_reach_every_row():
    x, dy = rng.standard_normal((3, 4)), rng.standard_normal((3, 10))
    with jax.enable_x64(True):

        @jax.jit
        @partial(jax.grad, argnums=(0, 1))
        def gradients(weight, x):
            return (build(weight=weight, padding_idx=6).logits(x) * dy).sum()

        dweight, dx = gradients(TABLE, x)
    np.testing.assert_allclose(dweight, dy.T @ x, atol=1e-12)
    np.testing.assert_allclose(dx, dy @ TABLE, atol=1e-12)
    ones = np.ones((3000, 4), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda w: build(weight=w).logits(ones).sum()))
    grad = gradient(jnp.ones((10, 4), jnp.bfloat16))
    assert bits(grad) == bits(np.full((10, 4), 3000, jnp.bfloat16))


@pytest.mark.rejects
def test_logits_reject_inputs_of_another_width_or_dtype():
    with pytest.raises(ValueError, match=r"^x must end in embedding_dim 4, got shape \(2,"):
        build().logits(np.ones((2, 3)))
    with pytest.raises(TypeError, match="x must be real, got int"):
        build().logits(np.ones((2, 4), int))


# Resizing


def test_resize_keeps_rows_and_does_not_change_the_layer():
    table = TABLE.astype("float32")
    table[2] = 100
    layer = build(padding_idx=2, weight=table)
    longer, changes = layer.resize(12)
    assert (changes.kept, changes.added) == (range(10), range(10, 12))
    assert changes.dropped == range(12, 10)
    # The padding row is not part of the mean.
    mean = np.delete(table, 2, axis=0).mean(axis=0)
    got = rows(longer, range(12))
    np.testing.assert_allclose(got[10:], [mean] * 2, atol=1e-6)
    assert bits(got[:10]) == bits(table)
    assert longer.num_embeddings == 12 and layer.num_embeddings == 10
    assert longer.logits(np.ones(4, "float32")).shape == (12,)
    shorter, changes = longer.resize(5)
    assert bits(shorter.weight) == bits(table[:5]) and changes.dropped == range(5, 12)


def test_resize_initializes_new_rows_with_init():
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
def test_resize_rejects_invalid_arguments():
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


# Trees and strict modes of JAX


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips_do_not_change_the_layer(trip):
    def make(key):
        return build(weight=None, padding_idx=1, max_norm=1.0, key=key)

    want, got = built(make), ROUND_TRIPS[trip](make)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    assert bits(got(range(10))) == bits(want(range(10)))


@contextlib.contextmanager
def strict_jax():
    """Make implicit promotion of dtypes and ranks, and NaN, an error."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
    ):
        yield


def test_lookup_and_gradients_run_in_strict_modes_with_x64():
    options = {"padding_idx": 1, "max_norm": 0.7, "scale_grad_by_freq": True}
    known = np.array([[3, 1, 3], [0, 1, 9]])

    def run(weight, ids):
        layer = build(weight=weight, **options)
        grads = eqx.filter_grad(lambda one: one(ids).astype(jnp.float32).sum())(layer)
        head = layer.logits(layer(ids))
        more = layer.projected(ids).weight, layer.set_padding(2.0).weight, grads.weight
        return layer(ids), layer(known), jax.vmap(layer)(ids[0]), head, *more

    with jax.enable_x64(True), strict_jax():
        table = jnp.asarray(TABLE, jnp.bfloat16)
        outputs = jax.jit(run)(table, jnp.asarray(known))
        eager = np.asarray(build(weight=table, **options)(known))
    assert all(one.dtype == jnp.bfloat16 for one in outputs)
    traced, concrete, by_id, head, *_, grads = map(np.asarray, outputs)
    assert bits(traced) == bits(concrete) == bits(eager)
    assert bits(by_id) == bits(traced[0])
    want = np.asarray(eager, float) @ np.asarray(table, float).T
    np.testing.assert_allclose(head.astype(float), want, atol=0.03)
    np.testing.assert_array_equal(grads[:, 0], [1, 0, 0, 1, 0, 0, 0, 0, 0, 1])


def test_sizes_default_to_those_of_the_weight():
    table = rng.standard_normal((7, 3)).astype("float32")
    for build in (Embedding, EmbeddingBag, NumpyEmbedding, NumpyEmbeddingBag):
        layer = build(weight=table, padding_idx=-1)
        assert (layer.num_embeddings, layer.embedding_dim) == (7, 3)
        assert layer.padding_idx == 6
        np.testing.assert_array_equal(layer.weight, table)
        assert build(embedding_dim=3, weight=table).num_embeddings == 7
        with pytest.raises(
            ValueError, match=r"weight must have shape \(8, 3\), got \(7, 3"
        ):
            build(8, weight=table)
        with pytest.raises(
            TypeError, match="num_embeddings must be an integer if no weight"
        ):
            build(embedding_dim=3)
        with pytest.raises(
            TypeError, match="embedding_dim must be an integer if no weight"
        ):
            build(7)
        with pytest.raises(ValueError, match=r"weight must have shape .*, got \(7,\)"):
            build(weight=table[:, 0])


def test_arguments_may_have_any_byte_order():
    layer = build(padding_idx=0)
    np.testing.assert_array_equal(layer(np.array([3, 1], ">i8")), layer([3, 1]))
    x = rng.standard_normal((2, 4)).astype(">f4")
    np.testing.assert_array_equal(layer.logits(x), layer.logits(x.astype("f4")))
    np.testing.assert_array_equal(layer.set_padding(x[0]).weight[0], x[0])
    assert layer.mask(np.array([3, 0], ">i4")).tolist() == [True, False]
    with pytest.raises(TypeError, match="value must be real, got object"):
        layer.set_padding(None)  # pyright: ignore[reportArgumentType]


def test_ids_of_none_are_refused():
    for layer in (build(), EmbeddingBag(weight=TABLE)):
        with pytest.raises(TypeError, match="ids must be integers, got None"):
            layer(None)
        with pytest.raises(TypeError, match="ids must be integers, got object"):
            layer([[3, None]])


def test_out_sharding_needs_an_explicit_mesh():
    with pytest.raises(ValueError, match="out_sharding needs a mesh with explicit axes"):
        build()([3], out_sharding=jax.sharding.PartitionSpec("d"))
