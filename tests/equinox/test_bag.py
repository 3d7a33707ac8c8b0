import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.embeddings.bag import MODES
from firstlayer.equinox import Table, TableGroup
from firstlayer.equinox.bag import EmbeddingBag
from firstlayer.numpy.bag import EmbeddingBag as NumpyBag
from tests.equinox.test_token import bits, strict_jax
from tests.support.gradients import central_difference
from tests.support.jax_round_trips import ROUND_TRIPS, built

rng = np.random.default_rng(0)
KEY = jax.random.key(3)
TABLE = rng.standard_normal((7, 3))
IDS = np.array([[1, 4, 1], [6, 2, 2], [2, 2, 2], [0, 6, 5]])
WEIGHTS = rng.uniform(-0.5, 2.0, IDS.shape)
#: The same ids as a matrix, with offsets, and with the end of the last bag included.
FORMS = {
    "matrix": (IDS, None, {}),
    "offsets": (IDS.ravel(), np.array([0, 2, 2, 7, 12]), {}),
    "last": (IDS.ravel(), np.array([0, 2, 2, 7, 9]), {"include_last_offset": True}),
}


def pair(**options):
    """Return an Equinox and a NumPy layer with the same table, in JAX's default dtype."""
    return (
        EmbeddingBag(7, 3, weight=TABLE, **options),
        NumpyBag(7, 3, weight=TABLE.astype(jnp.result_type(float)), **options),
    )


# Output and gradients


@pytest.mark.parametrize(
    ("mode", "form"),
    [*((mode, form) for mode in MODES for form in list(FORMS)[:2]), ("mean", "last")],
)
def test_bags_and_their_gradients_equal_numpy(mode, form):
    (ids, offsets, last), is_weighted = FORMS[form], form != "last"
    layer, reference = pair(mode=mode, padding_idx=2, scale_grad_by_freq=True, **last)
    weights = WEIGHTS.reshape(ids.shape).astype("float32") if is_weighted else None
    y, pull = reference.vjp(ids, offsets, weights)
    dy = rng.standard_normal(y.shape)

    def loss(parameters, ids, offsets):
        layer, weights = parameters
        out = layer(ids, offsets, weights)
        return (out * dy).sum(), out

    grad_of = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    arrays = [None if x is None else jnp.asarray(x) for x in (weights, ids, offsets)]
    grads, got = grad_of((layer, arrays[0]), *arrays[1:])
    wanted = pull(dy)
    np.testing.assert_allclose(got, y, atol=1e-6)
    np.testing.assert_allclose(grads[0].weight, wanted["weight"].dense(7), atol=1e-5)
    if is_weighted:
        np.testing.assert_allclose(grads[1], wanted["per_sample_weights"], atol=1e-5)


@settings(max_examples=20)
@given(
    mode=st.sampled_from(MODES),
    lengths=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_ragged_bags_of_concrete_ids_equal_numpy(mode, lengths, seed):
    # A constant number of ids, because JAX compiles every length separately.
    ids = np.random.default_rng(seed).integers(0, 7, 16)
    offsets = np.cumsum([0, *lengths])
    layer, reference = pair(mode=mode, padding_idx=0, include_last_offset=True)
    np.testing.assert_allclose(layer(ids, offsets), reference(ids, offsets), atol=1e-6)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("form", ["matrix", "offsets"])
def test_gradients_of_bags_equal_finite_differences(mode, form):
    rng = np.random.default_rng(4)
    ids, offsets, _ = FORMS[form]
    table, weights = TABLE.copy(), WEIGHTS.reshape(ids.shape).copy()
    with jax.enable_x64(True):
        layer = EmbeddingBag(7, 3, mode=mode, weight=table, padding_idx=2, max_norm=50.0)
        dy = rng.standard_normal((len(IDS) if offsets is None else len(offsets), 3))

        def loss(table, weights):
            one = eqx.tree_at(lambda one: one.weight, layer, table)
            return (jnp.sin(one(ids, offsets, weights)) * dy).sum()

        f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        # Wait for JAX before the arrays are modified below.
        got = jax.block_until_ready(f(table, weights)[1])
        for array, grad in zip((table, weights), got, strict=True):
            want = central_difference(lambda: float(f(table, weights)[0]), array)
            np.testing.assert_allclose(grad, want, atol=1e-6)
        if (mode, form) in (("mean", "offsets"), ("max", "matrix")):
            tangent = rng.standard_normal(table.shape)
            twice = jax.jit(lambda t: jax.jvp(lambda t: f(t, weights)[1], (t,), (tangent,)))
            (ahead, _), (behind, _) = (
                f(table + step * tangent, weights)[1] for step in (1e-6, -1e-6)
            )
            got = twice(table)[1][0]
            np.testing.assert_allclose(got, (ahead - behind) / 2e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES[1:])
def test_empty_bags_padding_and_zero_weights_give_zero(mode):
    layer, _ = pair(mode=mode, padding_idx=2)
    np.testing.assert_array_equal(np.asarray(layer([1, 2, 2], [0, 0, 1]))[[0, 2]], 0)
    np.testing.assert_array_equal(np.asarray(layer(IDS))[2], 0)
    assert layer(np.zeros((0, 4), int)).shape == (0, 3)
    np.testing.assert_array_equal(layer(np.zeros((2, 0), int)), np.zeros((2, 3)))
    assert layer([], []).shape == (0, 3)
    if mode == "mean":
        np.testing.assert_array_equal(layer([[1, 3]], None, [[1.0, -1.0]]), [[0] * 3])


@pytest.mark.parametrize("form", ["matrix", "offsets"])
def test_max_propagates_nan_and_the_first_of_equals_gets_the_gradient(form):
    ids, offsets, _ = FORMS[form]
    table = TABLE.copy()
    table[6] = np.nan
    layer = EmbeddingBag(7, 3, mode="max", weight=table)
    want = NumpyBag(7, 3, mode="max", weight=table)(ids, offsets)
    np.testing.assert_allclose(layer(ids, offsets), want, atol=1e-6)
    equal = EmbeddingBag(7, 3, mode="max", weight=np.ones((7, 3)))
    call = ([[3, 1]], None) if form == "matrix" else ([3, 1], [0])
    grads = eqx.filter_jit(eqx.filter_grad(lambda one: one(*call).sum()))(equal)
    np.testing.assert_array_equal(np.asarray(grads.weight)[:, 0], [0, 0, 0, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("mode", "dtype"), [("sum", "float16"), ("mean", "bfloat16"), ("max", "bfloat16")]
)
def test_half_precision_is_rounded_once(mode, dtype):
    layer = EmbeddingBag(7, 3, mode=mode, weight=TABLE, dtype=dtype, max_norm=0.9)
    table = np.asarray(layer.weight)
    reference = NumpyBag(7, 3, mode=mode, weight=table, max_norm=0.9)
    got, want = np.asarray(layer(IDS)), reference(IDS)
    assert got.dtype == dtype
    ulp = 2.0 ** (-10 if dtype == "float16" else -7)
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=ulp, atol=1e-6)


def test_half_precision_is_summed_in_float32():
    # In bfloat16, a sum of ones would stop at 256.
    ones = EmbeddingBag(2, 1, mode="sum", weight=np.ones((2, 1)), dtype="bfloat16")
    ids, want = np.ones((1, 3000), int), np.full(1, 3000, jnp.bfloat16)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def value_and_grad(one):
        return one(ids).sum()

    value, grads = value_and_grad(ones)
    assert bits(value) == bits(want) == bits(np.asarray(grads.weight)[1])


# Invalid ids and offsets


@pytest.mark.parametrize(
    ("mode", "form"), [("sum", "offsets"), ("mean", "matrix"), ("max", "offsets")]
)
def test_bag_with_a_traced_id_out_of_range_is_nan_and_has_no_gradient(mode, form):
    layer = EmbeddingBag(
        7, 3, mode=mode, weight=TABLE, padding_idx=0, max_norm=0.8, scale_grad_by_freq=True
    )
    ids = jnp.array([[1, 4, 1], [6, -1, 2], [0, 7, 0], [5, 5, 5]])
    offsets = None
    if form == "offsets":
        ids, offsets = ids.ravel(), jnp.array([0, 3, 6, 9])

    def loss(one, ids, offsets):
        out = one(ids, offsets)
        return (out**2).sum(), out

    grad_of = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    grads, out = grad_of(layer, ids, offsets)
    out = np.asarray(out)
    assert np.isnan(out[1:3]).all()
    options = {"mode": mode, "max_norm": 0.8, "scale_grad_by_freq": True}
    reference = NumpyBag(7, 3, weight=TABLE.astype("float32"), **options)
    y, pull = reference.vjp([[1, 4, 1], [5, 5, 5]])
    np.testing.assert_allclose(out[[0, 3]], y, atol=1e-6)
    want = pull(2 * y)["weight"].dense(7)
    np.testing.assert_allclose(grads.weight, want, atol=1e-6)


def test_invalid_traced_offsets_give_nan():
    layer, _ = pair(mode="sum")
    call = eqx.filter_jit(lambda offsets: layer(IDS.ravel(), offsets))
    assert np.isfinite(call(jnp.array([0, 3, 5]))).all()
    for wrong in ([1, 3, 5], [0, 5, 3], [0, 3, 13], [-1, 3, 5]):
        assert np.isnan(call(jnp.array(wrong))).all()
    with jax.enable_x64(True):
        for wrong in ([0, 3, 2**32 + 5], [2**32, 3, 5], [0, 3 - 2**32, 5]):
            assert np.isnan(call(jnp.array(wrong, "int64"))).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_offsets_of_every_dtype_are_compared_with_sizes_beyond_it(dtype):
    layer, reference = pair(mode="sum")
    # More ids than an offset of 8 or 16 bits can count.
    size = 300 if dtype.endswith("8") else 70_000
    ids, offsets = np.arange(size) % 7, np.array([0, 5, 5, 100], dtype)
    wanted = reference(ids, offsets)
    for call in (layer, eqx.filter_jit(layer)):
        np.testing.assert_allclose(call(ids, jnp.asarray(offsets)), wanted, rtol=1e-4)
    group = TableGroup({"a": Table(7, 3)}, key=KEY).with_parameters({
        "tables.a.weight": TABLE
    })
    # The end of the last bag is the number of ids.
    ends = np.array([0, 5, 5, 100], dtype)
    got = group({"a": (jnp.asarray(ids[:100]), jnp.asarray(ends))})["a"]
    wanted = NumpyBag(7, 3, mode="sum", weight=TABLE)(ids[:100], ends[:-1])
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    too_few = {"a": (jnp.asarray(ids), jnp.asarray(ends))}
    assert np.isnan(eqx.filter_jit(group)(too_few)["a"]).all()


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (([[1, 7]],), IndexError, r"^ids\[0, 1\] is 7, but num_embeddings is 7$"),
        ((np.array([[2**32]]),), IndexError, r"^ids\[0, 0\] is 4294967296, but num_emb"),
        (([[1.0]],), TypeError, "^ids must be integers, got float64"),
        (([1, 2],), ValueError, "^offsets must be given for ids of 1 axis, got None"),
        (([[1]], [0]), ValueError, "^offsets must be None for ids of 2 axes, got shape"),
        ((3,), ValueError, r"^ids must have 1 or 2 axes, got shape \(\)"),
        (([1, 2], [1]), ValueError, "^offsets must begin with 0, got 1"),
        (([1, 2], [0, 2, 1]), ValueError, "^offsets must not decrease, got 1 after 2"),
        (([1, 2], [0, 3]), ValueError, "^offsets must be at most 2, the number of ids"),
        (([1, 2], [0.0]), TypeError, "^offsets must be integers, got float64"),
        (
            ([[1]], None, [1.0]),
            ValueError,
            r"^per_sample_weights must have the shape \(1, ",
        ),
        (([[1]], None, [[True]]), TypeError, "^per_sample_weights must be integers or re"),
    ],
)
def test_invalid_arguments_raise_the_same_errors_as_numpy(call, error, message):
    layer, reference = pair()
    for one in (layer, reference):
        with pytest.raises(error, match=message):
            one(*call)


@pytest.mark.rejects
def test_traced_offsets_of_wrong_shape_or_dtype_are_an_error():
    layer, _ = pair()
    call = jax.jit(layer.__call__)
    with pytest.raises(ValueError, match=r"^offsets must have 1 axis, got shape \(1, 1\)"):
        call(jnp.array([1]), jnp.array([[0]]))
    with pytest.raises(ValueError, match="^offsets must be None for ids of 2 axes, got"):
        call(jnp.array([[1]]), jnp.array([0]))
    with pytest.raises(TypeError, match="^offsets must be integers, got float32"):
        call(jnp.array([1]), jnp.array([0.0]))
    with pytest.raises(ValueError, match="^mode must be 'sum', 'mean' or 'max', got 'avg'"):
        EmbeddingBag(7, 3, mode="avg", key=KEY)  # pyright: ignore


# Trees and strict modes of JAX


@pytest.mark.parametrize("trip", ["serialise", "unstack"])
def test_round_trips_do_not_change_the_bag(trip):
    def make(key):
        return EmbeddingBag(7, 3, mode="sum", padding_idx=2, key=key).set_padding(0.5)

    want, got = built(make), ROUND_TRIPS[trip](make)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    assert bits(got(IDS)) == bits(want(IDS)) and (got.weight[2] == 0.5).all()
    assert got.config() == want.config()


def test_bags_and_gradients_run_in_strict_modes_with_x64():
    flat, offsets = IDS.ravel(), np.array([0, 2, 2, 7])

    def run(table, weights, ids, bounds):
        results = []
        for mode in MODES:
            layer = EmbeddingBag(7, 3, mode=mode, weight=table, padding_idx=2, max_norm=2.0)
            for call in ((IDS, None, weights), (ids.ravel(), bounds, weights.ravel())):

                def loss(one, call=call):
                    out = one(*call)
                    return out.astype(jnp.float32).sum(), out

                results.append(eqx.filter_grad(loss, has_aux=True)(layer))
        return results

    with jax.enable_x64(True), strict_jax():
        table = jnp.asarray(TABLE, jnp.bfloat16)
        results = jax.jit(run)(table, jnp.asarray(WEIGHTS), IDS, offsets)
    for k, (grads, out) in enumerate(results):
        options = {"mode": MODES[k // 2], "padding_idx": 2, "max_norm": 2.0}
        reference = NumpyBag(7, 3, weight=np.asarray(table), **options)
        call = (flat, offsets, WEIGHTS.ravel()) if k % 2 else (IDS, None, WEIGHTS)
        assert out.dtype == grads.weight.dtype == jnp.bfloat16
        want = reference(*call).astype(float)
        np.testing.assert_allclose(out.astype(float), want, rtol=2**-7, atol=1e-6)


def test_weights_and_offsets_may_have_any_byte_order():
    bag, _ = pair(mode="sum")
    want = bag(IDS, per_sample_weights=WEIGHTS)
    got = bag(IDS.astype(">i4"), per_sample_weights=WEIGHTS.astype(">f8"))
    np.testing.assert_array_equal(got, want)
    offsets = np.arange(0, 12, 3)
    flat = bag(IDS.ravel(), offsets.astype(">i8"), WEIGHTS.ravel().astype(">f8"))
    np.testing.assert_allclose(flat, want, atol=1e-6)
    with pytest.raises(TypeError, match="per_sample_weights must be .*, got object"):
        bag([[1]], per_sample_weights=[[None]])
