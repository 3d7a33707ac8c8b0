"""FIRE: normalized distances, the network, and the gradients of both."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.numpy.fire import FireBias
from firstlayer.positions.fire import fire_bias, normalized_distances

rng = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def formula(q, k, layer):
    """Return the bias in float64, one pair at a time."""
    p = {name: value.astype(np.float64) for name, value in layer.parameters().items()}
    threshold = abs(p["multiplier"] * layer.threshold)
    out = np.empty((layer.num_heads, len(q), len(k)))
    for i, m in enumerate(q):
        for j, n in enumerate(k):
            denominator = math.log(abs(p["c"]) * max(m, threshold) + 1) + layer.eps
            x = math.log(abs(p["c"]) * abs(m - n) + 1) / denominator
            hidden = np.maximum(p["hidden_weight"] * x + p["hidden_bias"], 0)
            out[:, i, j] = p["head_weight"] @ hidden + p["head_bias"]
    return out


def small(**settings):
    """Return a layer whose threshold is within the positions of the tests."""
    return FireBias(3, width=5, **({"threshold": 8.0, "rng": 1} | settings))


# The bias


@pytest.mark.parametrize("settings", [{}, {"c": -0.7}, {"threshold": 300.0, "eps": 0.1}])
def test_bias_matches_formula(settings):
    q, k = [0, 7, 8, 9, 256, 65_536, 2**24 - 1], [0, 3, 255, 65_000, -20]
    full, layer = small(dtype="float64", **settings), small(**settings)
    for each in (full, layer):
        each.multiplier[...] = -1.5
    np.testing.assert_allclose(full.bias(q, k), formula(q, k, full), rtol=1e-11)
    assert layer(q, k).dtype == np.float32
    np.testing.assert_allclose(layer.bias(q, k), formula(q, k, layer), atol=2e-6)


def test_bias_depends_on_relative_position_only_up_to_the_threshold():
    layer, q, k = small(threshold=100.0), np.arange(20), np.arange(30)
    here = layer.bias(q, k)
    np.testing.assert_array_equal(layer.bias(q + 80, k + 80), here)
    moved = layer.bias(q + 90, k + 90)
    np.testing.assert_array_equal(moved[:, :11], here[:, :11])
    apart = (q[11:, None] + 90) != (k + 90)
    assert (moved[:, 11:] != here[:, 11:])[:, apart].any()


@given(st.floats(0.01, 5.0), st.floats(1.0, 600.0), st.integers(1, 10**6))
def test_normalized_distance_of_keys_before_the_query_is_between_zero_and_one(
    c, threshold, far
):
    q, k, c, threshold = map(np.array, ([far], np.linspace(0, far, 50), c, threshold))
    distances = normalized_distances(q, k, c=c, threshold=threshold)
    assert (np.diff(distances) < 0).all()
    assert distances[0, -1] == 0 and distances[0, 0] <= 1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_half_precision_positions_are_upcast_before_subtraction(dtype):
    layer, q, k = small(dtype="float64"), [0.25, 250.0], [1.5, 0.75]
    got = layer.bias(np.array(q, dtype), np.array(k, dtype))
    np.testing.assert_allclose(got, formula(q, k, layer), rtol=1e-11)


def test_decoding_and_padding_give_the_rows_of_the_whole_bias():
    layer = small()
    whole = layer.bias(range(60), range(60))
    step = layer.bias([59], range(60))
    np.testing.assert_allclose(step, whole[:, -1:], atol=1e-6)
    padded = np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    got = layer.bias(padded, padded)
    np.testing.assert_allclose(got[0, :, 2:, 2:], whole[:, :3, :3], atol=1e-6)
    np.testing.assert_allclose(got[1], whole[:, :5, :5], atol=1e-6)
    shared = layer.bias(range(5), padded)
    np.testing.assert_allclose(shared[1], whole[:, :5, :5], atol=1e-6)


# The gradient


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_match_finite_differences(batch, sign):
    layer = small(c=sign * 0.3, dtype="float64")
    layer.multiplier[...] = sign * 1.1
    q, k = rng.integers(0, 30, (*batch, 6)), np.arange(0, 30, 4)
    q[..., :2] = 4, 20
    bias, pullback = layer.vjp(q, k)
    np.testing.assert_array_equal(bias, layer.bias(q, k))
    d = rng.standard_normal(bias.shape)
    got = pullback(d)
    for name, values in layer.parameters().items():
        assert got[name].shape == values.shape and isinstance(got[name], np.ndarray)
        for index in np.ndindex(values.shape):
            saved, sides = values[index].copy(), []
            for step in (1e-6, -1e-6):
                values[index] = saved + step
                sides.append((layer.bias(q, k) * d).sum())
            values[index] = saved
            want = (sides[0] - sides[1]) / 2e-6
            np.testing.assert_allclose(got[name][index], want, rtol=1e-6, atol=1e-6)


def test_pullback_uses_the_values_of_the_forward():
    layer, q = small(), np.arange(20)
    bias, pullback = layer.vjp(q, q)
    want = pullback(np.ones(bias.shape))
    q += 7
    for value in layer.parameters().values():
        value += 1
    for name, grad in pullback(np.ones(bias.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


def test_every_parameter_gets_a_gradient():
    layer = FireBias(4, width=6, threshold=10.0, rng=0)
    layer.hidden_bias[:] = np.abs(layer.hidden_bias) + np.abs(layer.hidden_weight)
    bias, pullback = layer.vjp(range(30), range(30))
    for grad in pullback(rng.standard_normal(bias.shape)).values():
        assert (grad != 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_float32_rounded_once(dtype):
    layer, full = small(dtype=dtype), small()
    full.load_state_dict(layer.state_dict())
    half = torch.from_numpy(full.bias([40], range(41))).to(getattr(torch, dtype))
    bias, pullback = layer.vjp([40], range(41))
    np.testing.assert_array_equal(bias.view(np.int16), half.view(torch.int16).numpy())
    rounded = full.bias([40], range(41), dtype=dtype)
    np.testing.assert_array_equal(rounded.view(np.int16), bias.view(np.int16))
    want = full.vjp([40], range(41))[1](np.ones(bias.shape))
    for name, grad in pullback(np.ones(bias.shape, bias.dtype)).items():
        assert grad.dtype == np.float32
        np.testing.assert_array_equal(grad, want[name])


# NumPy, torch and JAX


def in_float32():
    q, k = (rng.integers(-5, 30, n).astype("int32") for n in ((2, 5), 7))
    layer = small(c=-0.4)
    return layer, q, k, list(layer.parameters().values())


def run(q, k, c, multiplier, hidden_weight, hidden_bias, head_weight, head_bias):
    return fire_bias(
        normalized_distances(q, k, c=c, threshold=8.0 * multiplier),
        hidden_weight=hidden_weight,
        hidden_bias=hidden_bias,
        head_weight=head_weight,
        head_bias=head_bias,
    )


def test_torch_and_jax_agree_in_bias_and_gradients():
    layer, q, k, values = in_float32()
    want, pullback = layer.vjp(q, k)
    grads = [pullback(np.ones(want.shape))[name] for name in layer.parameters()]

    tensors = [torch.asarray(value).requires_grad_() for value in values]
    got = run(torch.asarray(q), torch.asarray(k), *tensors)
    np.testing.assert_allclose(got.detach(), want, atol=1e-6)
    got.sum().backward()
    for tensor, grad in zip(tensors, grads, strict=True):
        np.testing.assert_allclose(np.asarray(tensor.grad), grad, rtol=1e-4, atol=1e-5)

    arrays = [jnp.asarray(x) for x in (q, k, *values)]
    for f in (run, jax.jit(run)):
        np.testing.assert_allclose(f(*arrays), want, atol=1e-6)
    grads_jax = jax.grad(lambda *x: run(*x).sum(), argnums=tuple(range(2, 8)))(*arrays)
    for got, grad in zip(grads_jax, grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-4, atol=1e-5)


def test_torch_compiles_the_bias_without_graph_breaks():
    layer, q, k, values = in_float32()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    got = compiled(*(torch.asarray(x) for x in (q, k, *values)))
    np.testing.assert_allclose(got, layer.bias(q, k), atol=1e-6)


# The layer


def test_layers_do_not_share_parameters():
    a, b = small(), small(c=0.5)
    np.testing.assert_array_equal(a.head_weight, b.head_weight)
    first = a.bias([9], range(9))
    assert (b.bias([9], range(9)) != first).all()
    b.head_bias[:] = 7
    np.testing.assert_array_equal(a.bias([9], range(9)), first)
    assert (small(rng=2).head_weight != a.head_weight).all()


def test_network_is_initialized_like_torch_linear_layers():
    layer = FireBias(50, width=400, rng=0)
    for values, limit in (
        (layer.hidden_weight, 1.0),
        (layer.hidden_bias, 1.0),
        (layer.head_weight, 0.05),
        (layer.head_bias, 0.05),
    ):
        assert 0.9 * limit < np.abs(values).max() <= limit
        assert values.min() < 0 < values.max()


def test_config_and_state_rebuild_the_layer():
    layer = FireBias(3, width=4, c=0.2, threshold=5.0, eps=0.01, dtype="float16", rng=3)
    rebuilt = FireBias(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer)
    np.testing.assert_array_equal(rebuilt.bias([5], range(9)), layer.bias([5], range(9)))


@pytest.mark.rejects
def test_rejects_bad_arguments():
    with pytest.raises(ValueError, match="num_heads must be positive, got 0"):
        FireBias(0)
    with pytest.raises(ValueError, match="width must be positive, got -1"):
        FireBias(2, width=-1)
    with pytest.raises(ValueError, match="threshold must be positive and finite, got 0"):
        FireBias(2, threshold=0.0)
    with pytest.raises(ValueError, match="eps must be positive and finite, got nan"):
        FireBias(2, eps=float("nan"))


@pytest.mark.rejects
def test_rejects_invalid_positions_and_gradients():
    layer = FireBias(2)
    with pytest.raises(TypeError, match="q_positions must be integers or reals, got bool"):
        layer.bias([True], [0])
    _, pullback = layer.vjp([0], [0, 1])
    with pytest.raises(
        ValueError, match=r"dbias must have shape \(2, 1, 2\), got \(2, 2\)"
    ):
        pullback(np.zeros((2, 2)))
