"""KERPLE: both kernels, the limits of their parameters, and gradients."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.numpy.kerple import KerpleBias
from firstlayer.positions.kerple import Form, kerple_bias, kerple_initial, kerple_limited

rng = np.random.default_rng(0)
FORMS: list[Form] = ["log", "power"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def formula(q, k, r1, r2, form):
    """Return the bias in float64, one element at a time, without clamping."""
    out = np.empty((len(r1), len(q), len(k)))
    for h in range(len(r1)):
        for i, m in enumerate(q):
            for j, n in enumerate(k):
                d = abs(m - n)
                kernel = np.log(1 + r2[h] * d) if form == "log" else float(d) ** r2[h]
                out[h, i, j] = -r1[h] * kernel
    return out


# The bias


@pytest.mark.parametrize("form", FORMS)
def test_bias_matches_formula(form):
    q, k = [0, 1, 255, 65_536, -7], [0, 3, 256, -300, 65_530, 2**24 - 1]
    r1, r2 = [0.01, 0.3, 5.0], [0.01, 1.0, 2.0]
    want = formula(q, k, r1, r2, form)
    got = KerpleBias(3, form=form, r1=r1, r2=r2).bias(q, k)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)
    got = KerpleBias(3, form=form, r1=r1, r2=r2, dtype="float32").bias(q, k)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bias_depends_on_relative_position_only(form):
    layer, q, k = KerpleBias(4, form=form, rng=0), np.arange(50), np.arange(70)
    here = layer.bias(q, k)
    for start in (1, -1_000_003, 2**24 - 1, 2**52):
        np.testing.assert_array_equal(layer.bias(q + start, k + start), here)


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 99))
def test_bias_decays_with_distance_and_is_zero_at_the_query(form, seed):
    bias = KerpleBias(4, form=form, dtype="float64", rng=seed).bias([0], range(300))
    assert (bias[..., 0] == 0).all() and (np.diff(bias, axis=-1) < 0).all()
    np.testing.assert_array_equal(
        bias, KerpleBias(4, form=form, dtype="float64", rng=seed)([0], -np.arange(300))
    )


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 99))
def test_kernel_is_conditionally_positive_definite(form, seed):
    bias = KerpleBias(3, form=form, dtype="float64", rng=seed).bias(range(24), range(24))
    centred = np.eye(24) - 1 / 24
    assert np.linalg.eigvalsh(centred @ bias @ centred).min() > -1e-8


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_positions_are_upcast_before_subtraction(form):
    q, k = np.array([0.25, 250.0], BFLOAT16), np.array([1.5, 0.75], BFLOAT16)
    layer = KerpleBias(3, form=form, dtype="float64", rng=0)
    want = formula([0.25, 250.0], [1.5, 0.75], layer.r1, layer.r2, form)
    np.testing.assert_allclose(layer.bias(q, k), want, rtol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_and_padding_give_the_rows_of_the_whole_bias(form):
    layer = KerpleBias(3, form=form, rng=0)
    whole = layer.bias(range(60), range(60))
    np.testing.assert_array_equal(layer.bias([59], range(60)), whole[:, -1:])
    padded = np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    got = layer.bias(padded, padded)
    np.testing.assert_array_equal(got[0, :, 2:, 2:], whole[:, :3, :3])
    np.testing.assert_array_equal(got[1], whole[:, :5, :5])


# The limits


def test_parameters_beyond_their_limits_are_clamped():
    r1, r2 = [-1.0, 0.5, 0.5], [0.5, -3.0, 9.0]
    for form, last in zip(FORMS, (9.0, 2.0), strict=True):
        want = formula([0], [0, 5], [0.01, 0.5, 0.5], [0.5, 0.01, last], form)
        got = KerpleBias(3, form=form, r1=r1, r2=r2).bias([0], [0, 5])
        np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_project_clamps_parameters_so_that_they_get_gradients(dtype):
    layer = KerpleBias(2, form="power", r1=[-1.0, 0.5], r2=[0.25, 3.0], dtype=dtype)
    before = layer.bias(range(9), range(9), dtype="float64")
    _, pullback = layer.vjp(range(9), range(9))
    grads = pullback(np.ones((2, 9, 9)))
    assert grads["r1"][0] == 0 and grads["r2"][1] == 0
    stored = layer.parameters()
    layer.project()
    assert layer.r1 is stored["r1"] and layer.r2 is stored["r2"]
    np.testing.assert_allclose(layer.r1.astype(float), [0.01, 0.5], rtol=2e-3)
    np.testing.assert_allclose(layer.r2.astype(float), [0.25, 2.0])
    after = layer.bias(range(9), range(9), dtype="float64")
    np.testing.assert_allclose(after, before, rtol=2e-3)
    _, pullback = layer.vjp(range(9), range(9))
    assert all((grad != 0).all() for grad in pullback(np.ones((2, 9, 9))).values())


def test_clamping_keeps_nan():
    for form in FORMS:
        got = KerpleBias(1, form=form, r1=[0.5], r2=[np.nan]).bias([0], [2, 3])
        assert np.isnan(got).all()


@pytest.mark.parametrize(("form", "limits"), [("log", (2, 1)), ("power", (1, 2))])
def test_parameters_are_drawn_uniformly_within_their_limits(form, limits):
    drawn = kerple_initial(20_000, form=form, rng=np.random.default_rng(0))
    for values, limit in zip(drawn, limits, strict=True):
        assert 0.01 <= values.min() < 0.02 and 0.99 * limit < values.max() <= limit
        np.testing.assert_allclose(values.mean(), limit / 2, rtol=0.03)
    for values, same in zip(drawn, kerple_limited(*drawn, form=form), strict=True):
        np.testing.assert_array_equal(values, same)


# The gradient


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradient_matches_finite_differences(form, batch):
    # The last three heads are beyond a limit, and one distance is 0.
    r1, r2 = [0.3, 1.7, -0.2, 0.6, 0.6], [0.4, 1.3, 0.7, -1.0, 2.5]
    layer = KerpleBias(5, form=form, r1=r1, r2=r2)
    q, k = rng.integers(0, 30, (*batch, 6)), np.arange(0, 30, 4)
    q[..., 0] = 4
    bias, pullback = layer.vjp(q, k)
    np.testing.assert_array_equal(bias, layer.bias(q, k))
    d = rng.standard_normal(bias.shape)
    got = pullback(d)
    for name, values in layer.parameters().items():
        for h in range(5):
            saved, sides = values[h], []
            for step in (1e-6, -1e-6):
                values[h] = saved + step
                sides.append((layer.bias(q, k) * d).sum())
            values[h] = saved
            want = (sides[0] - sides[1]) / 2e-6
            np.testing.assert_allclose(got[name][h], want, rtol=1e-6, atol=1e-6)
    assert got["r1"][2] == 0 and got["r2"][3] == 0
    assert (got["r2"][4] == 0) == (form == "power")


@pytest.mark.parametrize("form", FORMS)
def test_gradient_at_distance_zero_is_zero_and_not_nan(form):
    _, pullback = KerpleBias(3, form=form, rng=0).vjp([5], [5])
    for grad in pullback(np.ones((3, 1, 1))).values():
        np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("form", FORMS)
def test_pullback_uses_the_values_of_the_forward(form):
    layer = KerpleBias(3, form=form, rng=0)
    bias, pullback = layer.vjp(range(9), range(9))
    want = pullback(np.ones(bias.shape))
    layer.r1 += 1
    layer.r2 *= 0.5
    for name, grad in pullback(np.ones(bias.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_float32_rounded_once(form, dtype):
    layer = KerpleBias(4, form=form, dtype=dtype, rng=0)
    full = KerpleBias(
        4, form=form, r1=layer.r1.astype("float32"), r2=layer.r2.astype("float32")
    )
    keys = np.arange(0, 150, 3)
    half = torch.from_numpy(full.bias([0], keys)).to(getattr(torch, dtype))
    bias, pullback = layer.vjp([0], keys)
    np.testing.assert_array_equal(bias.view(np.int16), half.view(torch.int16).numpy())
    rounded = full.bias([0], keys, dtype=dtype)
    np.testing.assert_array_equal(rounded.view(np.int16), bias.view(np.int16))
    want = full.vjp([0], keys)[1](np.ones(bias.shape))
    for name, grad in pullback(np.ones(bias.shape, bias.dtype)).items():
        assert grad.dtype == np.float32
        np.testing.assert_array_equal(grad, want[name])


# NumPy, torch and JAX


def in_float32():
    q, k = (rng.integers(-20, 20, n).astype("int32") for n in ((2, 5), 7))
    k[:2] = q[0, :2]
    r1, r2 = np.array([0.01, 1.5, -1.0], "float32"), np.array([0.8, 0.01, 2.0], "float32")
    return q, k, r1, r2


@pytest.mark.parametrize("form", FORMS)
def test_torch_and_jax_agree_in_bias_and_gradient(form):
    def run(q, k, r1, r2):
        return kerple_bias(q, k, r1=r1, r2=r2, form=form)

    q, k, r1, r2 = in_float32()
    want, pullback = KerpleBias(3, form=form, r1=r1, r2=r2).vjp(q, k)
    np.testing.assert_array_equal(run(q, k, r1, r2), want)
    grads = pullback(np.ones(want.shape))

    values = [torch.asarray(r).requires_grad_() for r in (r1, r2)]
    got = run(torch.asarray(q), torch.asarray(k), *values)
    np.testing.assert_allclose(got.detach(), want, rtol=2e-6)
    got.sum().backward()
    for value, grad in zip(values, grads.values(), strict=True):
        np.testing.assert_allclose(np.asarray(value.grad), grad, rtol=1e-5)

    inputs = [jnp.asarray(x) for x in (q, k, r1, r2)]
    for f in (run, jax.jit(run)):
        np.testing.assert_allclose(f(*inputs), want, rtol=2e-6)
    grads_jax = jax.grad(lambda *x: run(*x).sum(), argnums=(2, 3))(*inputs)
    for got, grad in zip(grads_jax, grads.values(), strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5)


def test_gradient_of_real_positions_is_finite_at_distance_zero():
    q, k, r = np.array([2.0], "float32"), np.array([2.0, 5.0], "float32"), [0.5]

    def total(q, array):
        return kerple_bias(q, array(k), r1=array(r), r2=array(r), form="power").sum()

    tensor = torch.asarray(q).requires_grad_()
    total(tensor, lambda x: torch.asarray(x, dtype=torch.float32)).backward()
    grads_jax = jax.grad(total)(jnp.asarray(q), lambda x: jnp.asarray(x, jnp.float32))
    # Only the key at distance 3 contributes, with -0.5 · 3^0.5.
    for gradient in (np.asarray(tensor.grad), grads_jax):
        np.testing.assert_allclose(gradient, [0.25 / 3**0.5], rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_torch_compiles_the_bias_without_graph_breaks(form):
    def run(q, k, r1, r2):
        return kerple_bias(q, k, r1=r1, r2=r2, form=form)

    inputs = in_float32()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    got = compiled(*map(torch.asarray, inputs))
    np.testing.assert_allclose(got, run(*inputs), rtol=2e-6)


# The layer


def test_layers_do_not_share_parameters():
    a, b = KerpleBias(2, rng=0), KerpleBias(2, form="power", rng=0)
    first = a.bias([0], range(9))
    assert (b.bias([0], range(1, 9)) != first[..., 1:]).all()
    b.r1[:] = 1
    np.testing.assert_array_equal(a.bias([0], range(9)), first)
    assert (KerpleBias(2, rng=1).r1 != a.r1).all()


def test_config_and_state_rebuild_the_layer():
    layer = KerpleBias(3, form="power", dtype="bfloat16", rng=3)
    rebuilt = KerpleBias(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer) and list(rebuilt.state_dict()) == ["r1", "r2"]
    np.testing.assert_array_equal(rebuilt.bias([5], range(9)), layer.bias([5], range(9)))


def test_given_parameters_are_used_without_a_copy():
    r1, r2 = np.ones(2, np.float32), np.ones(2, np.float32)
    layer = KerpleBias(2, r1=r1, r2=r2)
    assert layer.r1 is r1 and layer.r2 is r2
    mixed = KerpleBias(2, r1=r1, rng=0)
    assert mixed.r1 is r1 and (mixed.r2 == KerpleBias(2, rng=0).r2).all()


@pytest.mark.rejects
def test_rejects_bad_arguments():
    with pytest.raises(ValueError, match="num_heads must be positive, got 0"):
        KerpleBias(0)
    with pytest.raises(ValueError, match="form must be 'log' or 'power', got 'linear'"):
        KerpleBias(2, form="linear")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"r1 must have shape \(2,\), got \(3,\)"):
        KerpleBias(2, r1=np.ones(3))
    with pytest.raises(TypeError, match="r2 must be real, got int64"):
        KerpleBias(2, r2=np.ones(2, np.int64))
    with pytest.raises(ValueError, match="one dtype, got float64 and float32"):
        KerpleBias(2, r1=np.ones(2))


@pytest.mark.rejects
def test_rejects_invalid_positions_and_gradients():
    layer = KerpleBias(2)
    with pytest.raises(TypeError, match="q_positions must be integers or reals, got bool"):
        layer.bias([True], [0])
    with pytest.raises(ValueError, match="k_positions must be finite, got -inf"):
        layer.bias([0], [-np.inf])
    _, pullback = layer.vjp([0], [0, 1])
    with pytest.raises(
        ValueError, match=r"dbias must have shape \(2, 1, 2\), got \(2, 2\)"
    ):
        pullback(np.zeros((2, 2)))
