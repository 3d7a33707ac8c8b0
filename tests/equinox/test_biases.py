"""Attention biases in the Equinox front end: formulas, gradients, position dtypes."""

import math
import re
from operator import attrgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from firstlayer.equinox.alibi import AlibiBias
from firstlayer.equinox.cope import CopeBias
from firstlayer.equinox.fire import FireBias
from firstlayer.equinox.gates import EngramGate, NgramAverage, ShortConvGate
from firstlayer.equinox.kerple import KerpleBias
from firstlayer.equinox.shaw import ShawScores
from firstlayer.equinox.t5 import T5Bias
from firstlayer.equinox.time2vec import Time2Vec
from firstlayer.equinox.transformer_xl import TransformerXLScores
from tests.support.jax_round_trips import built, fast_compilation, key

Q = np.array([[0, 7, 40], [900, 3, 12]])
K = np.array([0, 1, 5, 12, 41, 900])
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((10, 4)).astype(np.float32)
# Every argument at a value that is not its default.
LAYERS: dict[str, Any] = {
    "alibi": AlibiBias(4, symmetric=True, max_bias=4.0, factor=3.0),
    "t5": T5Bias(4, num_buckets=10, max_distance=30, bidirectional=False, weight=TABLE),
    "kerple": KerpleBias(4, form="power", r1=[0.5, 2.0, 1.0, 0.3], r2=[1.5, 0.1, 1.0, 0.7]),
    "fire": built(
        lambda key: FireBias(4, width=3, c=0.75, threshold=30.0, eps=1e-3, key=key)
    ),
}
SHAW = ShawScores(
    6, max_left=5, max_right=2, weight=RNG.standard_normal((8, 6)).astype("f")
)


@pytest.fixture(autouse=True, scope="module")
def _fast_compilation():
    with fast_compilation():
        yield


@eqx.filter_jit
def bias(layer, q, k, dtype=None):
    return layer.bias(q, k, dtype=dtype)


@eqx.filter_jit
def biases(layers, q, k, dtype=None):
    return {name: layer.bias(q, k, dtype=dtype) for name, layer in layers.items()}


@eqx.filter_jit
def score(layer, q, k, q_positions, k_positions):
    return layer.scores(q, k, q_positions, k_positions)


def distance(q: Any = Q, k: Any = K):
    """Return the distance from each query to each key."""
    return np.asarray(k, np.float64)[..., None, :] - np.asarray(q, np.float64)[..., None]


# Values


def by_hand(name, q: Any = Q, k: Any = K):
    """Return the bias of a scheme by its formula in float64, ``(batch, heads, q, k)``."""
    layer, signed = LAYERS[name], distance(q, k)[:, None]
    far = np.abs(signed)
    if name == "alibi":
        slopes = 2.0 ** (-4.0 * np.arange(1, 5) / 4) / 3
        return -slopes[:, None, None] * far
    if name == "t5":
        return np.moveaxis(TABLE[bucket(-signed[:, 0])], -1, -3)
    values = {n: np.asarray(v, np.float64) for n, v in layer.parameters().items()}
    if name == "kerple":
        r1, r2 = values["r1"][:, None, None], values["r2"][:, None, None]
        return -r1 * far**r2
    own = np.maximum(np.asarray(q, np.float64), 30.0)[:, None, :, None]
    share = np.log1p(0.75 * far) / (np.log1p(0.75 * own) + 1e-3)
    hidden = share[:, 0, ..., None] * values["hidden_weight"] + values["hidden_bias"]
    out = np.maximum(hidden, 0) @ values["head_weight"].T + values["head_bias"]
    return np.moveaxis(out, -1, -3)


def bucket(before):
    """Return the decoder bucket of a distance: five exact, five logarithmic up to 30."""
    before = np.maximum(before, 0)
    logarithmic = 5 + np.floor(np.log(np.maximum(before, 5) / 5) / np.log(30 / 5) * 5)
    return np.where(before < 5, before, np.minimum(logarithmic, 9)).astype(int)


def test_biases_equal_their_formulas():
    batched = biases(LAYERS, jnp.asarray(Q), jnp.asarray(K))
    step = biases(LAYERS, jnp.asarray(Q[:1, 2:]), jnp.asarray(K))
    unbatched = biases(LAYERS, jnp.asarray(Q[0]), jnp.asarray(K))
    for name in LAYERS:
        want = by_hand(name)
        close = {"rtol": 2e-6, "atol": 1e-6, "err_msg": name}
        np.testing.assert_allclose(batched[name], want, **close)
        # One step of decoding.
        np.testing.assert_allclose(step[name][0, :, 0], want[0, :, 2], **close)
        np.testing.assert_allclose(unbatched[name], want[0], **close)


def test_calling_the_layer_with_lists_equals_bias():
    want = by_hand("alibi", Q[:1])[0]
    np.testing.assert_allclose(LAYERS["alibi"](Q[0].tolist(), range(6)).shape, want.shape)
    np.testing.assert_allclose(LAYERS["alibi"](Q[0].tolist(), K), want, rtol=1e-6)


def test_shaw_scores_equal_their_formula():
    q, k = RNG.standard_normal((2, 3, 3, 6)), RNG.standard_normal((2, 3, 6, 6))
    rows = np.clip(distance(), -5, 2).astype(int) + 5
    vectors = np.asarray(SHAW.weight, np.float64)[rows]
    want = np.einsum("bhqd,bhkd->bhqk", q, k) + np.einsum("bhqd,bqkd->bhqk", q, vectors)
    q, k = jnp.asarray(q, "float32"), jnp.asarray(k, "float32")
    got = score(SHAW, q, k, jnp.asarray(Q), jnp.asarray(K))
    np.testing.assert_allclose(got, want / math.sqrt(6), atol=2e-6)


def test_alibi_in_bfloat16_is_exact_near_the_diagonal():
    layer = AlibiBias(6, max_bias=5.0)
    got = bias(layer, jnp.array([4095]), jnp.array([4094, 4095]), jnp.bfloat16)[:, 0]
    np.testing.assert_array_equal(got[:, 0], -layer.slopes.astype(jnp.bfloat16))
    assert not got[:, 1].any() and not jax.tree.leaves(layer)


def test_half_precision_is_rounded_once():
    q, k = jnp.asarray(Q), jnp.asarray(K)
    full, half = biases(LAYERS, q, k), biases(LAYERS, q, k, jnp.bfloat16)
    for name in LAYERS:
        want = np.asarray(full[name]).astype(jnp.bfloat16)
        np.testing.assert_array_equal(half[name], want, err_msg=name)


@given(
    st.lists(st.integers(-(2**29), 2**29), min_size=3, max_size=3),
    st.lists(st.integers(-(2**29), 2**29), min_size=6, max_size=6),
)
def test_alibi_and_t5_equal_their_formulas_at_any_position(q, k):
    for name in ("alibi", "t5"):
        got = bias(LAYERS[name], jnp.array([q, q]), jnp.array(k))
        np.testing.assert_allclose(got[0], by_hand(name, [q], k)[0], rtol=1e-6)


# Positions of any dtype


def test_real_positions_equal_the_formulas():
    q, k = Q + 0.25, K + 0.25
    got = biases(LAYERS, jnp.asarray(q, "float32"), jnp.asarray(k, "float32"))
    for name in LAYERS:
        want = by_hand(name, q, k)
        np.testing.assert_allclose(got[name], want, rtol=2e-6, atol=1e-6, err_msg=name)


def test_only_traced_positions_that_are_nan_give_nan():
    q, k = Q.astype("float32"), K.astype("float32")
    q[0, 1], k[4] = np.nan, np.nan
    want = np.zeros((2, 4, 3, 6), bool)
    want[0, :, 1], want[..., 4] = True, True
    for name, got in biases(LAYERS, jnp.asarray(q), jnp.asarray(k)).items():
        np.testing.assert_array_equal(np.isnan(got), want, err_msg=name)
    scores = score(SHAW, jnp.ones((2, 3, 6)), jnp.ones((2, 6, 6)), q, k)
    np.testing.assert_array_equal(np.isnan(scores), want[:, 0])


def test_unsigned_positions_have_negative_distances():
    q, k = jnp.asarray(Q, "uint32"), jnp.asarray(K, "uint32")
    np.testing.assert_allclose(bias(LAYERS["alibi"], q, k), by_hand("alibi"), rtol=1e-6)
    high = jnp.uint32(2**31)
    got = bias(LAYERS["alibi"], q + high, k + high)
    np.testing.assert_allclose(got, by_hand("alibi"), rtol=1e-6)


def test_positions_beyond_32_bits_with_x64():
    with jax.enable_x64(True):
        far = 2**40
        got = LAYERS["t5"].bias([far], np.array([far, far - 2, 0]))
        np.testing.assert_array_equal(got[:, 0].T, TABLE[[0, 2, 9]])
        exact = AlibiBias(2).bias([0.5], [1e9 + 0.75], dtype="float64")
        np.testing.assert_array_equal(exact[:, 0, 0], AlibiBias(2).slopes * (1e9 + 0.25))


@pytest.mark.rejects
@pytest.mark.parametrize("name", LAYERS)
def test_invalid_concrete_positions_are_an_error(name):
    layer = LAYERS[name]
    with pytest.raises(ValueError, match="k_positions must be finite, got nan"):
        layer.bias([1.0], [2.0, math.nan])
    with pytest.raises(TypeError, match="q_positions must be integers or reals, got bool"):
        layer.bias([True], [2])
    with pytest.raises(ValueError, match=r"q_positions must have shape \(length,\) or"):
        layer.bias(np.zeros((1, 2, 3), int), [2])
    with pytest.raises(ValueError, match="must have the same batch, got 2 and 3"):
        layer.bias(Q, np.zeros((3, 6), int))
    for run in (layer.bias, jax.vmap(layer.bias)):
        with pytest.raises(
            ValueError, match="q_positions must be smaller than 1073741824 in size, got 429"
        ):
            run(np.array([[2**32 + 1]]), np.array([[2**32]]))


WRONG = {
    "num_heads must be positive, got 0": lambda: AlibiBias(0),
    "max_bias must be positive and finite, got -1.0": lambda: AlibiBias(2, max_bias=-1.0),
    "num_buckets must be even and at least 4": lambda: T5Bias(2, num_buckets=5, key=key(0)),
    "max_distance must be greater than 8": lambda: T5Bias(2, max_distance=8, key=key(0)),
    r"weight must have shape \(32, 2\), got \(3, 2\)": lambda: T5Bias(
        2, weight=np.ones((3, 2))
    ),
    "key must be given to draw parameters, got None": lambda: T5Bias(2),
    "form must be 'log' or 'power', got 'exp'": lambda: KerpleBias(2, form="exp"),  # pyright: ignore
    r"r2 must have shape \(2,\), got \(1,\)": lambda: KerpleBias(
        2, r1=[1.0, 1.0], r2=[1.0]
    ),
    "r1 and r2 must have one dtype, got float32 and float16": lambda: KerpleBias(
        1, r1=[1.0], r2=np.ones(1, np.float16)
    ),
    "threshold must be positive and finite, got 0": lambda: FireBias(
        2, threshold=0, key=key(0)
    ),
    "width must be positive, got 0": lambda: FireBias(2, width=0, key=key(0)),
    "max_left must be at least 0, got -1": lambda: ShawScores(4, max_left=-1, max_right=1),
    r"q must have shape \(..., length, 6\), got \(2, 5\)": lambda: SHAW.scores(
        jnp.ones((2, 5)), jnp.ones((2, 6)), [0, 1], [0, 1]
    ),
    "k_positions must have one entry for each of the 2 rows of k, got 3": lambda: (
        SHAW.scores(jnp.ones((2, 6)), jnp.ones((2, 6)), [0, 1], [0, 1, 2])
    ),
}


@pytest.mark.rejects
@pytest.mark.parametrize("message", WRONG)
def test_invalid_arguments_are_an_error(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def scores(layer):
    x = jnp.ones((layer.num_heads, 3, layer.head_dim))
    return layer.scores(x, x)


X, LENGTH = jnp.ones((3, 6)), range(3)
#: Layers with the parameters, and a call that reads all of them.
CALLS = {
    "t5": (LAYERS["t5"], lambda layer: layer.bias(LENGTH, LENGTH)),
    "kerple": (LAYERS["kerple"], lambda layer: layer.bias(LENGTH, LENGTH)),
    "fire": (LAYERS["fire"], lambda layer: layer.bias(LENGTH, LENGTH)),
    "shaw": (SHAW, lambda layer: layer.scores(X, X, LENGTH, LENGTH)),
    "cope": (
        CopeBias(6, max_positions=5, weight=np.ones((5, 6))),
        lambda layer: layer.bias(X, jnp.ones((3, 4))),
    ),
    "xl": (
        built(lambda key: TransformerXLScores(2, 4, embedding_dim=6, key=key)),
        scores,
    ),
    "time2vec": (
        Time2Vec(3, weight=np.ones(3), bias=np.ones(3)),
        lambda layer: layer(LENGTH),
    ),
    "engram": (
        built(lambda key: EngramGate(5, 6, streams=None, key=key)),
        lambda layer: layer(X, jnp.ones((3, 5))),
    ),
    "short_conv": (
        built(lambda key: ShortConvGate(5, 6, bias=True, key=key)),
        lambda layer: layer(X, jnp.ones((3, 5))),
    ),
    "average": (
        built(lambda key: NgramAverage(2, 3, 6, key=key)),
        lambda layer: layer(X, jnp.ones((3, 6))),
    ),
}


@pytest.mark.rejects
@pytest.mark.parametrize("case", CALLS)
def test_parameters_replaced_by_others_of_another_shape_are_an_error(case):
    """They would be broadcast, or read out of range, where JAX repeats the last row."""
    layer, call = CALLS[case]
    for name, value in layer.parameters().items():
        shapes = {
            (*value.shape[:axis], size, *value.shape[axis + 1 :])
            for axis, own in enumerate(value.shape)
            for size in (1, own - 1, own + 1)
            if size not in (0, own)
        }
        for shape in {*shapes, (1, *value.shape), (2, *value.shape)}:
            other = eqx.tree_at(attrgetter(name), layer, jnp.ones(shape))
            message = f"{name} must have shape {value.shape}, got {shape}"
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                eqx.filter_eval_shape(call, other)


# Parameters


def test_gradients_of_all_parameters_equal_finite_differences():
    q, k = RNG.standard_normal((1, 3, 6)), RNG.standard_normal((1, 6, 6))
    with jax.enable_x64(True):
        layers = {
            **LAYERS,
            "shaw": SHAW,
            "log": KerpleBias(2, r1=[0.5, 2.0], r2=[0.1, 1.0]),
        }
        del layers["alibi"]
        values = {
            name: {n: jnp.asarray(v, "float64") for n, v in layer.parameters().items()}
            for name, layer in layers.items()
        }
        near = jnp.asarray(Q[0]), jnp.asarray(K[:4])

        @jax.jit
        def run(values, q, k):
            own = {
                name: eqx.tree_at(
                    lambda layer, n=name: [getattr(layer, name) for name in values[n]],
                    layers[name],
                    list(values[name].values()),
                )
                for name in layers
            }
            out = [own.pop("shaw").scores(q, k, near[0], near[0])]
            return [*out, *(jnp.tanh(layer.bias(*near)) for layer in own.values())]

        queries = jnp.asarray(q), jnp.asarray(k[:, :3])
        check_grads(run, (values, *queries), order=1, eps=1e-6, atol=1e-5, rtol=1e-5)


def test_gradient_of_repeated_bfloat16_buckets_is_summed_in_float32():
    layer = T5Bias(2, weight=jnp.zeros((32, 2), jnp.bfloat16))

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(layer, q, k):
        return layer.bias(q, k).astype(jnp.float32).sum()

    got = grad(layer, jnp.array([0]), jnp.full(3000, -500)).weight
    np.testing.assert_array_equal(got[15], np.full(2, 3000).astype(jnp.bfloat16))
    assert not np.delete(np.asarray(got), 15, axis=0).any()


def test_kerple_parameters_are_clipped_in_use_and_by_projected():
    numbers: Any = {"r1": [-1.0, 0.5], "r2": [3.0, 1.0]}
    layer = KerpleBias(2, form="power", **numbers)
    clipped = layer.projected()
    np.testing.assert_allclose(clipped.r1, [0.01, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(clipped.r2, [2.0, 1.0])
    np.testing.assert_array_equal(layer.r1, numbers["r1"])

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(layer, q, k):
        return layer.bias(q, k).sum()

    value, grad = run(layer, jnp.array([3]), jnp.array([0, 3]))
    assert grad.r1[0] == 0 == grad.r2[0] and grad.r1[1] and grad.r2[1]
    same, grad = run(clipped, jnp.array([3]), jnp.array([0, 3]))
    assert same == value and grad.r1[0] and grad.r2[0]


def test_new_parameters_have_the_distributions_of_the_papers():
    layers = [T5Bias(200, key=key(seed)) for seed in (0, 0, 1)]
    first, again, other = (np.asarray(layer.weight) for layer in layers)
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    assert 0.015 < first.std() < 0.02 and np.abs(first).max() <= 0.04
    for form, limits in (("log", (2.0, 1.0)), ("power", (1.0, 2.0))):
        drawn = KerpleBias(500, form=form, key=key(0))  # pyright: ignore[reportArgumentType]
        for numbers, limit in zip((drawn.r1, drawn.r2), limits, strict=True):
            assert 0.9 * limit < numbers.max() <= limit and 0.01 <= numbers.min() < 0.1


def test_matrix_products_use_full_precision_on_any_device():
    q = jnp.ones((3, 6), jnp.bfloat16)
    for run in (
        lambda: SHAW.scores(q, q, Q[0], Q[0]),
        lambda: LAYERS["fire"].bias(Q[0], Q[0]),
    ):
        text = str(jax.make_jaxpr(run)())
        products = text.count("dot_general[")
        assert products and text.count("Precision.HIGHEST, Precision.HIGHEST") == products
        assert text.count("preferred_element_type=float32") == products
