"""Time2Vec: the formula, dtypes, gradients, all front ends."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.func import functional_call

import firstlayer.equinox
import firstlayer.torch
from firstlayer.numpy.time2vec import Time2Vec
from tests.support.gradients import central_difference
from tests.support.torch_round_trips import ROUND_TRIPS, built, forget_graphs, graphs

# Inductor and forward-mode AD import deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

rng = np.random.default_rng(0)


def formula(times, layer):
    """Return the features in float64, one at a time."""
    weight, bias = layer.weight.astype(float), layer.bias.astype(float)
    out = np.empty((*np.shape(times), len(weight)))
    for *at, i in np.ndindex(out.shape):
        angle = weight[i] * float(times[tuple(at)]) + bias[i]
        out[(*at, i)] = angle if i == 0 else np.sin(angle)
    return out


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("embedding_dim", [2, 7])
def test_features_match_the_formula(shape, embedding_dim):
    layer = Time2Vec(embedding_dim, rng=0)
    times = 5 * rng.standard_normal(shape)
    want = formula(times, layer)
    np.testing.assert_allclose(layer(times), want, atol=1e-12)
    got = layer(np.float32(times))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_integer_times_have_the_features_of_reals_in_the_dtype_of_the_layer():
    layer = Time2Vec(5, dtype="bfloat16", rng=0)
    got, want = layer([0, 3, 200]), layer(np.array([0, 3, 200], np.float32))
    assert got.dtype == layer.weight.dtype and want.dtype == np.float32
    np.testing.assert_array_equal(got, want.astype(got.dtype))
    other = Time2Vec(5, rng=0)
    assert other([1, 2]).dtype == np.float32


def test_sines_repeat_with_the_learned_period_and_the_first_feature_does_not():
    layer = Time2Vec(2, weight=[0.5, 2 * np.pi / 7], bias=[1.0, 0.3])
    times = np.arange(5) * 0.5
    now, later = layer(times), layer(times + 7)
    np.testing.assert_allclose(later[:, 1], now[:, 1], atol=1e-12)
    np.testing.assert_allclose(later[:, 0], now[:, 0] + 3.5, atol=1e-12)


def test_float64_times_are_accurate_where_float32_is_not():
    weight, bias = np.array([1.0, 3.0, 5.0], "float32"), np.zeros(3, "float32")
    times, want = np.array([1e9]), np.sin([3e9, 5e9])
    got = Time2Vec(3, weight=weight, bias=bias)(times)
    np.testing.assert_allclose(got[0, 1:], want, atol=1e-6)
    layer = firstlayer.torch.Time2Vec(3, weight=weight, bias=bias)
    got = layer(torch.from_numpy(times)).detach()
    np.testing.assert_allclose(got[0, 1:], want, atol=1e-6)
    with jax.enable_x64(True):
        got = firstlayer.equinox.Time2Vec(3, weight=weight, bias=bias)(times)
    np.testing.assert_allclose(got[0, 1:], want, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_gradients_match_finite_differences(shape):
    layer = Time2Vec(4, dtype="float64", rng=0)
    times = np.asarray(rng.standard_normal(shape))
    y, pullback = layer.vjp(times)
    np.testing.assert_array_equal(y, layer(times))
    dy = rng.standard_normal(y.shape)
    got = pullback(dy)
    for name, x in {"x": times, **layer.parameters()}.items():
        want = central_difference(lambda: (layer(times) * dy).sum(), x)
        np.testing.assert_allclose(got[name], want, atol=1e-7, err_msg=name)
    assert (got["weight"] != 0).all() and (got["bias"] != 0).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_float32_rounded_once(dtype):
    layer = Time2Vec(4, dtype=dtype, rng=0)
    full, times = Time2Vec(4), rng.standard_normal(6).astype(dtype)
    full.load_state_dict(layer.state_dict())
    y, pullback = layer.vjp(times)
    want, pullback32 = full.vjp(times.astype("float32"))
    np.testing.assert_array_equal(y.view("u2"), want.astype(dtype).view("u2"))
    got, want = pullback(y), pullback32(y.astype("float32"))
    np.testing.assert_array_equal(got["x"].view("u2"), want["x"].astype(dtype).view("u2"))
    for name in ("weight", "bias"):
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], want[name])


def test_pullback_uses_the_values_of_the_forward():
    layer, times = Time2Vec(4, rng=0), rng.standard_normal(6)
    y, pullback = layer.vjp(times)
    want = pullback(np.ones(y.shape))
    for array in (times, layer.weight, layer.bias):
        array += 1
    for name, grad in pullback(np.ones(y.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


# ----------------------------------------------------------------------- torch and JAX


def torch_layer(**options):
    return firstlayer.torch.Time2Vec(5, **options)


def test_torch_gradients_pass_gradcheck():
    layer = torch_layer(dtype=torch.float64)
    leaves = [layer.weight, layer.bias, torch.randn(3, dtype=torch.float64)]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]

    def run(weight, bias, times):
        return functional_call(layer, {"weight": weight, "bias": bias}, (times,))

    assert torch.autograd.gradcheck(run, leaves)


def test_torch_compiles_one_graph_for_all_lengths_and_vmaps():
    layer = torch_layer()
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for length in (3, 4, 9):
        times = torch.randn(2, length)
        torch.testing.assert_close(compiled(times), layer(times))
    assert graphs() == 1
    torch.testing.assert_close(torch.func.vmap(layer)(times), layer(times))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(times), layer(times.clone()))
        assert layer(times).dtype == torch.float32


@pytest.mark.parametrize("round_trip", [name for name in ROUND_TRIPS if name != "reset"])
def test_torch_layer_survives_casts_moves_and_checkpoints(round_trip):
    times = torch.linspace(-3, 9, 7)
    layer = ROUND_TRIPS[round_trip](torch_layer)
    assert torch.equal(layer(times), built(torch_layer)(times))
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_torch_parameters_are_drawn_again_by_reset_parameters():
    layer = torch_layer()
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert all((a != b).all() for a, b in zip(before, layer.parameters(), strict=True))


def test_jax_layer_under_jit_vmap_and_grad():
    layer = firstlayer.equinox.Time2Vec(5, key=jax.random.key(0))
    times = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
    want = layer(times)
    np.testing.assert_allclose(eqx.filter_jit(layer)(times), want, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.vmap(layer))(times), want, atol=1e-6)
    np.testing.assert_allclose(layer(np.array([1, 2])), layer(np.array([1.0, 2.0])))
    gradient = eqx.filter_grad(lambda layer: (layer(times) ** 2).sum())(layer)
    assert gradient.weight.all() and gradient.bias.all()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32", "int8"])
@pytest.mark.parametrize("layer_dtype", ["float32", "bfloat16"])
def test_jax_does_not_truncate_whole_times_on_the_host(dtype, layer_dtype):
    """Milliseconds since 1970 need 41 bits."""
    times = np.array([np.iinfo(dtype).max - 7, 5], dtype)
    times = times.clip(max=1_700_000_000_000).astype(dtype)
    options = {"weight": [1.0, 1e-12], "bias": [0.5, 0.25], "dtype": layer_dtype}
    want = Time2Vec(2, **options)(times)
    got = firstlayer.equinox.Time2Vec(2, **options)(times)
    assert got.dtype == layer_dtype
    np.testing.assert_array_equal(np.asarray(got)[:, 0], want[:, 0])
    np.testing.assert_allclose(*(np.float64(y[:, 1]) for y in (got, want)), rtol=1e-6)


# ----------------------------------------------------------------------------- layer


def test_config_and_state_rebuild_the_layer():
    layer = Time2Vec(4, dtype="bfloat16", rng=3)
    rebuilt = Time2Vec(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer)
    np.testing.assert_array_equal(rebuilt([0.5]), layer([0.5]))


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Time2Vec(1), "embedding_dim must be at least 2, got 1"),
        (lambda: Time2Vec(0), "embedding_dim must be positive, got 0"),
        (lambda: Time2Vec(2, bias=[1.0]), r"bias must have shape \(2,\), got \(1,\)"),
        (
            lambda: Time2Vec(2, bias=np.ones(2)),
            "weight and bias must have one dtype, got float32 and float64",
        ),
        (
            lambda: Time2Vec(2).vjp([1.0])[1]([1.0]),
            r"dy must have shape \(1, 2\), got \(1,\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(run, message):
    with pytest.raises(ValueError, match=message):
        run()
