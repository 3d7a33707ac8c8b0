"""CoPE: the formula, x-transformers, masks, decoding, gradients, all front ends."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

import firstlayer.equinox
import firstlayer.torch
from firstlayer.numpy.cope import CopeBias
from firstlayer.positions.cope import cope_gates, cope_positions
from tests.support.gradients import central_difference
from tests.support.torch_round_trips import ROUND_TRIPS, built, forget_graphs, graphs

# Inductor and forward-mode AD import deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

rng = np.random.default_rng(0)


def random_inputs(*lead, q_length=5, k_length=7, head_dim=4):
    q = rng.standard_normal((*lead, q_length, head_dim))
    return q, 2 * rng.standard_normal((*lead, q_length, k_length))


def causal(scores):
    """Return scores with -inf for keys after the query, which is among the last keys."""
    q_length, k_length = scores.shape[-2:]
    seen = np.arange(k_length) <= np.arange(q_length)[:, None] + k_length - q_length
    return np.where(seen, scores, -np.inf)


def formula(q, scores, weight):
    """Return the bias in float64, one element at a time."""
    out, last = np.empty(scores.shape), len(weight) - 1
    for *lead, i, j in np.ndindex(scores.shape):
        gates = [1 / (1 + np.exp(-s)) for s in scores[(*lead, i)][j:]]
        position = min(sum(gates[::-1]), last)
        low, high = int(np.floor(position)), int(np.ceil(position))
        share = position - low
        vector = (1 - share) * weight[low] + share * weight[high]
        out[(*lead, i, j)] = q[(*lead, i)] @ vector
    return out


# ------------------------------------------------------------------------- values


@pytest.mark.parametrize("max_positions", [2, 4, 20])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_bias_matches_the_formula(max_positions, lead):
    layer = CopeBias(4, max_positions=max_positions, init="normal", rng=0)
    q, scores = random_inputs(*lead)
    want = formula(q, scores, layer.weight.astype(float))
    np.testing.assert_allclose(layer.bias(q, scores), want, atol=1e-12)
    got = layer(q.astype("float32"), scores.astype("float32"))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("max_positions", [3, 16])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_bias_and_gradients_match_x_transformers(max_positions):
    """x-transformers 2.31.10, whose module has no mask of its own."""
    from x_transformers.x_transformers import CoPE

    module = CoPE(dim=4, heads=3, max_pos=max_positions)
    torch.nn.init.normal_(module.pos_emb)
    layer = firstlayer.torch.CopeBias(
        4, max_positions=max_positions, weight=module.pos_emb.detach().clone()
    )
    results = []
    inputs = [torch.from_numpy(x).float() for x in random_inputs(2, 3)]
    inputs[1] = torch.from_numpy(causal(inputs[1].numpy()))
    for run, weight in ((module, module.pos_emb), (layer, layer.weight)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves), weight.grad])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_open_gates_count_keys_and_closed_gates_are_skipped():
    layer = CopeBias(1, max_positions=9, weight=np.arange(9.0)[:, None])
    scores = np.array([[np.inf, -np.inf, np.inf, np.inf, -1e30]])
    got = layer.bias(np.ones((1, 1)), scores)
    assert got.tolist() == [[3.0, 2.0, 2.0, 1.0, 0.0]]


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.integers(2, 6))
def test_positions_fall_from_key_to_key_and_stay_in_the_table(scores, max_positions):
    gates = cope_gates(np.array([scores]))
    positions = cope_positions(gates, last=max_positions - 1)[0]
    assert (np.diff(positions) <= 0).all()
    assert (positions >= 0).all() and (positions <= max_positions - 1).all()
    np.testing.assert_allclose(gates, 1 / (1 + np.exp(-np.array([scores]))), atol=1e-15)


def test_a_zero_table_gives_no_bias_and_still_gets_a_gradient():
    layer = CopeBias(4, max_positions=4)
    bias, pullback = layer.vjp(*random_inputs(2))
    assert not bias.any() and pullback(np.ones(bias.shape))["weight"].any()


# ------------------------------------------------------------------- masks and caches


def test_decoding_step_by_step_equals_one_causal_pass():
    layer = CopeBias(4, max_positions=4, init="normal", rng=0)
    q, scores = random_inputs(2, 3, q_length=7)
    whole = layer.bias(q, causal(scores))
    for n in range(7):
        step = layer.bias(q[..., [n], :], scores[..., [n], : n + 1])
        np.testing.assert_allclose(step[..., 0, :], whole[..., n, : n + 1], atol=1e-12)


def test_masked_keys_get_no_gradient_and_give_none():
    layer = CopeBias(4, max_positions=4, init="normal", rng=0)
    q, scores = random_inputs(2, 3, q_length=7)
    masked = causal(scores)
    bias, pullback = layer.vjp(q, masked)
    d = rng.standard_normal(bias.shape)
    gradient = pullback(d)["scores"]
    assert (gradient[np.isinf(masked)] == 0).all() and np.isfinite(gradient).all()
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, masked)]
    other = firstlayer.torch.CopeBias(
        4, max_positions=4, weight=torch.from_numpy(layer.weight)
    )
    other(*tensors).backward(torch.from_numpy(d))
    np.testing.assert_allclose(np.asarray(tensors[1].grad), gradient, atol=1e-10)
    table = jnp.asarray(layer.weight)

    def run(scores):
        own = firstlayer.equinox.CopeBias(4, max_positions=4, weight=table)
        return (own(jnp.asarray(q, "float32"), scores) * d).sum()

    got = jax.grad(run)(jnp.asarray(masked, "float32"))
    np.testing.assert_allclose(got, gradient, atol=1e-4)


def test_nan_scores_give_nan_from_that_key_on():
    layer = CopeBias(4, max_positions=4, init="normal", rng=0)
    q, scores = random_inputs()
    scores[2, 3] = np.nan
    got = np.isnan(layer.bias(q, scores))
    want = np.zeros((5, 7), bool)
    want[2, :4] = True
    np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("lead", [(), (2, 2)])
def test_gradients_match_finite_differences(lead):
    layer = CopeBias(3, max_positions=3, init="normal", dtype="float64", rng=0)
    q, scores = random_inputs(*lead, q_length=2, k_length=5, head_dim=3)
    bias, pullback = layer.vjp(q, scores)
    np.testing.assert_array_equal(bias, layer.bias(q, scores))
    d = rng.standard_normal(bias.shape)
    got = pullback(d)
    for name, x in {"q": q, "scores": scores, "weight": layer.weight}.items():
        want = central_difference(lambda: (layer.bias(q, scores) * d).sum(), x)
        np.testing.assert_allclose(got[name], want, atol=1e-7, err_msg=name)
    assert (got["weight"] != 0).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_float32_rounded_once(dtype):
    layer = CopeBias(4, max_positions=4, init="normal", dtype=dtype, rng=0)
    full = CopeBias(4, max_positions=4, weight=layer.weight.astype("float32"))
    q, scores = (x.astype(dtype) for x in random_inputs(2, 3))
    bias, pullback = layer.vjp(q, scores)
    want, pullback32 = full.vjp(q.astype("float32"), scores.astype("float32"))
    np.testing.assert_array_equal(bias.view("u2"), want.astype(dtype).view("u2"))
    got, want = pullback(bias), pullback32(bias.astype("float32"))
    for name in ("q", "scores"):
        rounded = want[name].astype(dtype)
        np.testing.assert_array_equal(got[name].view("u2"), rounded.view("u2"))
    assert got["weight"].dtype == np.float32
    np.testing.assert_array_equal(got["weight"], want["weight"])


def test_pullback_uses_the_values_of_the_forward():
    layer = CopeBias(4, max_positions=4, init="normal", rng=0)
    q, scores = random_inputs(2)
    bias, pullback = layer.vjp(q, scores)
    want = pullback(np.ones(bias.shape))
    for array in (q, scores, layer.weight):
        array += 1
    for name, grad in pullback(np.ones(bias.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


# ----------------------------------------------------------------------- torch and JAX


def torch_layer(**options):
    layer = firstlayer.torch.CopeBias(4, max_positions=4, **options)
    if not layer.weight.is_meta:
        torch.nn.init.normal_(layer.weight)
    return layer


def test_torch_gradients_pass_gradcheck():
    layer = torch_layer(dtype=torch.float64)
    leaves = [layer.weight, *map(torch.from_numpy, random_inputs(2, q_length=2))]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]

    def run(weight, q, scores):
        return functional_call(layer, {"weight": weight}, (q, scores))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_torch_compiles_one_graph_for_all_lengths_and_vmaps():
    layer = torch_layer()
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for lengths in ((5, 7), (4, 9), (6, 11)):
        inputs = random_inputs(3, 2, q_length=lengths[0], k_length=lengths[1])
        q, scores = (torch.from_numpy(x).float() for x in inputs)
        torch.testing.assert_close(compiled(q, scores), layer(q, scores))
    assert graphs() == 1
    torch.testing.assert_close(torch.func.vmap(layer)(q, scores), layer(q, scores))


def test_torch_autocast_does_not_change_the_bias():
    layer = torch_layer()
    q, scores = (torch.from_numpy(x).float() for x in random_inputs(3, 2))
    want = layer(q, scores)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(q, scores), want)


@pytest.mark.parametrize("round_trip", [name for name in ROUND_TRIPS if name != "reset"])
def test_torch_layer_survives_casts_moves_and_checkpoints(round_trip):
    q, scores = (torch.from_numpy(x).float() for x in random_inputs(3, 2))
    layer = ROUND_TRIPS[round_trip](torch_layer)
    assert torch.equal(layer(q, scores), built(torch_layer)(q, scores))
    assert list(layer.state_dict()) == ["weight"]


def test_torch_table_is_zero_after_reset_parameters():
    layer = torch_layer()
    assert layer.weight.any()
    layer.reset_parameters()
    assert not layer.weight.any()


def test_jax_layer_under_jit_and_vmap():
    layer = firstlayer.equinox.CopeBias(
        4, max_positions=4, init="normal", key=jax.random.key(0)
    )
    q, scores = (jnp.asarray(x, jnp.float32) for x in random_inputs(3, 2))
    want = layer.bias(q, scores)
    np.testing.assert_allclose(eqx.filter_jit(layer)(q, scores), want, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(layer)(q, scores), want, atol=1e-5)
    text = str(jax.make_jaxpr(layer)(q, scores))
    assert text.count("Precision.HIGHEST, Precision.HIGHEST") == 1


# ----------------------------------------------------------------------------- layer


def test_config_and_state_rebuild_the_layer():
    layer = CopeBias(4, max_positions=3, dtype="bfloat16", init="normal", rng=3)
    rebuilt = CopeBias(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer)
    np.testing.assert_array_equal(rebuilt.weight, layer.weight)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: CopeBias(0, max_positions=4), "head_dim must be positive, got 0"),
        (lambda: CopeBias(4, max_positions=1), "max_positions must be at least 2, got 1"),
        (
            lambda: CopeBias(4, max_positions=3, weight=np.ones((4, 3))),
            r"weight must have shape \(3, 4\), got \(4, 3\)",
        ),
        (
            lambda: CopeBias(3, max_positions=4).bias(*random_inputs()),
            r"q must have shape \(..., length, 3\), got \(5, 4\)",
        ),
        (
            lambda: CopeBias(4, max_positions=4).bias(np.ones((5, 4)), np.ones((2, 5, 7))),
            r"scores must have shape \(5, k_length\), got \(2, 5, 7\)",
        ),
        (
            lambda: CopeBias(4, max_positions=4).vjp(*random_inputs())[1](np.ones((7, 5))),
            r"dbias must have shape \(5, 7\), got \(7, 5\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(run, message):
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.rejects
def test_integer_scores_are_rejected():
    q, scores = random_inputs()
    jax_layer = firstlayer.equinox.CopeBias(4, max_positions=4, key=jax.random.key(0))
    whole, message = scores.astype(np.int64), "scores must be real, got int64"
    with pytest.raises(TypeError, match=message):
        CopeBias(4, max_positions=4).bias(q, whole)
    with pytest.raises(TypeError, match=message):
        torch_layer().bias(torch.from_numpy(q), torch.from_numpy(whole))
    with pytest.raises(TypeError, match=message):
        jax_layer.bias(q, whole)
