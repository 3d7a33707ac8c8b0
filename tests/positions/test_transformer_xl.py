"""Transformer-XL's scores: the formula, XLNet's attention, caches, gradients."""

import json
import tracemalloc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.func import functional_call
from transformers import XLNetConfig, XLNetModel
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

import firstlayer.equinox
import firstlayer.torch
from firstlayer.numpy.transformer_xl import TransformerXLScores
from firstlayer.positions.transformer_xl import relative_shift
from tests.support.gradients import central_difference
from tests.support.torch_round_trips import ROUND_TRIPS, built, forget_graphs, graphs

# Inductor and forward-mode AD import deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

rng = np.random.default_rng(0)
OPTIONS: dict[str, Any] = {"embedding_dim": 10, "base": 700.0, "max_distance": 6}


def random_qk(*lead, q_length=5, k_length=7, head_dim=4):
    q = rng.standard_normal((*lead, q_length, head_dim))
    return q, rng.standard_normal((*lead, k_length, head_dim))


def sinusoids(distance, width, base):
    """Return all sines, then all cosines of one distance."""
    angles = distance * base ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)])


def formula(q, k, layer, *, offset):
    """Return the scores in float64, one element at a time."""
    heads, dim = layer.num_heads, layer.head_dim
    weight = layer.weight.astype(float).reshape(heads, dim, layer.embedding_dim)
    u, v = layer.u.astype(float), layer.v.astype(float)
    out = np.empty((*q.shape[:-1], k.shape[-2]))
    for *lead, h, i, j in np.ndindex(out.shape):
        distance = offset + i - j
        if layer.max_distance is not None:
            distance = np.clip(distance, -layer.max_distance, layer.max_distance)
        r = weight[h] @ sinusoids(distance, layer.embedding_dim, layer.base)
        at = (*lead, h)
        content = (q[at][i] + u[h]) @ k[at][j]
        out[(*at, i, j)] = (content + (q[at][i] + v[h]) @ r) / np.sqrt(dim)
    return out


# ------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("lengths", "offset"),
    [
        ((5, 7), None),
        ((5, 5), None),
        ((4, 2), None),
        ((1, 6), None),
        ((3, 4), 9),
        ((2, 1), 0),
    ],
)
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_scores_match_the_formula(lengths, offset, options):
    layer = TransformerXLScores(3, 4, init="normal", rng=0, **options)
    q, k = random_qk(2, 3, q_length=lengths[0], k_length=lengths[1])
    first = lengths[1] - lengths[0] if offset is None else offset
    want = formula(q, k, layer, offset=first)
    np.testing.assert_allclose(layer.scores(q, k, offset=offset), want, atol=1e-5)
    got = layer(q.astype("float32"), k.astype("float32"), offset=offset)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(("q_length", "k_length"), [(0, 3), (3, 0), (1, 0), (0, 0), (2, 1)])
def test_empty_queries_and_keys(q_length, k_length):
    q, k = random_qk(2, 3, q_length=q_length, k_length=k_length)
    layer = TransformerXLScores(3, 4, init="normal", rng=0)
    scores, pullback = layer.vjp(q, k)
    assert scores.shape == (2, 3, q_length, k_length)
    assert pullback(scores)["weight"].shape == layer.weight.shape


def test_relative_shift_equals_a_gather():
    by_distance = rng.standard_normal((2, 4, 9))
    i, j = np.indices((4, 6))
    want = by_distance[:, i, 3 - i + j]
    np.testing.assert_array_equal(relative_shift(by_distance, 6), want)


def xlnet(**options):
    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=30, d_model=24, n_layer=1, n_head=3, d_inner=8, dropout=0.0, **options
    )
    model = XLNetModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_attn" in name:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("memories", [0, 6])
@pytest.mark.parametrize("options", [{}, {"clamp_len": 4}])
def test_scores_match_xlnet(memories, options):
    """XLNet of transformers 5.22.2, with the memories of an earlier segment."""
    model = xlnet(**options)
    attention = model.layer[0].rel_attn
    assert isinstance(attention, XLNetRelativeAttention)
    length = 5
    hidden = torch.randn(memories + length, 2, 24)
    with torch.no_grad():
        q = torch.einsum("ibh,hnd->ibnd", hidden[memories:], attention.q)
        k = torch.einsum("ibh,hnd->ibnd", hidden, attention.k)
        encoding = model.relative_positional_encoding(length, memories + length, bsz=2)
        r = torch.einsum("ibh,hnd->ibnd", encoding, attention.r)
        # A one-hot value for each key makes the output the attention probabilities.
        values = torch.eye(memories + length)[:, None, None].expand(-1, 2, 3, -1)
        found: Any = attention.rel_attn_core(q, k, values, r)
        want = found.permute(1, 2, 0, 3)
        layer = TransformerXLScores(
            3,
            8,
            weight=attention.r.reshape(24, 24).T.numpy(),
            u=attention.r_w_bias.numpy(),
            v=attention.r_r_bias.numpy(),
            max_distance=options.get("clamp_len"),
        )
    scores = layer.scores(q.permute(1, 2, 0, 3).numpy(), k.permute(1, 2, 0, 3).numpy())
    got = torch.from_numpy(scores).softmax(-1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert want.std() > 0.01


# ------------------------------------------------------------------------- positions


def test_decoding_step_by_step_equals_one_pass():
    layer = TransformerXLScores(3, 4, init="normal", rng=0)
    q, k = random_qk(2, 3, q_length=9, k_length=9)
    whole = layer.scores(q, k)
    for n in range(9):
        step = layer.scores(q[..., [n], :], k[..., : n + 1, :])
        np.testing.assert_allclose(step[..., 0, :], whole[..., n, : n + 1], atol=1e-6)


def test_segments_with_memories_equal_one_pass():
    layer = TransformerXLScores(3, 4, init="normal", rng=0, **OPTIONS)
    q, k = random_qk(2, 3, q_length=9, k_length=9)
    whole = layer.scores(q, k)
    parts = [
        layer.scores(q[..., start : start + 3, :], k[..., : start + 3, :])
        for start in (0, 3, 6)
    ]
    for start, part in zip((0, 3, 6), parts, strict=True):
        want = whole[..., start : start + 3, : start + 3]
        np.testing.assert_allclose(part, want, atol=1e-6)
    # Keys that were dropped from the memories do not change the other scores.
    kept = layer.scores(q[..., 6:, :], k[..., 4:, :])
    np.testing.assert_allclose(kept, whole[..., 6:, 4:], atol=1e-6)


def test_encodings_are_not_made_for_every_pair():
    layer = TransformerXLScores(1, 64, rng=0)
    q, k = (
        x.astype("float32") for x in random_qk(1, q_length=256, k_length=256, head_dim=64)
    )
    tracemalloc.start()
    scores, pullback = layer.vjp(q, k)
    pullback(scores)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 256 * 64 * 4 / 2


def test_far_distances_are_accurate_in_float32():
    layer = TransformerXLScores(1, 8, init="normal", rng=0)
    q, k = random_qk(1, q_length=1, k_length=2, head_dim=8)
    want = formula(q, k, layer, offset=3_000_000)
    got = layer.scores(q.astype("float32"), k.astype("float32"), offset=3_000_000)
    np.testing.assert_allclose(got, want, atol=1e-5)


# ------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("lead", "lengths", "offset"),
    [((), (3, 5), None), ((2,), (3, 2), 1), ((2, 2), (1, 4), None)],
)
def test_gradients_match_finite_differences(lead, lengths, offset):
    layer = TransformerXLScores(
        2, 3, init="normal", dtype="float64", rng=0, embedding_dim=5, max_distance=2
    )
    q, k = random_qk(*lead, 2, q_length=lengths[0], k_length=lengths[1], head_dim=3)
    scores, pullback = layer.vjp(q, k, offset=offset)
    np.testing.assert_array_equal(scores, layer.scores(q, k, offset=offset))
    d = rng.standard_normal(scores.shape)
    got = pullback(d)
    for name, x in {"q": q, "k": k, **layer.parameters()}.items():
        want = central_difference(lambda: (layer.scores(q, k, offset=offset) * d).sum(), x)
        assert got[name].shape == x.shape
        np.testing.assert_allclose(got[name], want, atol=1e-7, err_msg=name)


def test_every_parameter_gets_a_gradient():
    layer = TransformerXLScores(2, 4, rng=0)
    scores, pullback = layer.vjp(*random_qk(2, q_length=6, k_length=9))
    # The same gradient for all keys would not reach u, after a softmax or otherwise.
    gradients = pullback(rng.standard_normal(scores.shape))
    assert all((gradients[name] != 0).all() for name in layer.parameters())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_float32_rounded_once(dtype):
    layer = TransformerXLScores(3, 4, init="normal", dtype=dtype, rng=0)
    full = TransformerXLScores(3, 4)
    full.load_state_dict(layer.state_dict())
    q, k = (x.astype(dtype) for x in random_qk(2, 3))
    scores, pullback = layer.vjp(q, k)
    want, pullback32 = full.vjp(q.astype("float32"), k.astype("float32"))
    assert scores.dtype == dtype
    np.testing.assert_array_equal(scores.view("u2"), want.astype(dtype).view("u2"))
    got, want = pullback(scores), pullback32(scores.astype("float32"))
    for name in ("q", "k"):
        rounded = want[name].astype(dtype)
        np.testing.assert_array_equal(got[name].view("u2"), rounded.view("u2"))
    for name in layer.parameters():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], want[name])


def test_pullback_uses_the_values_of_the_forward():
    layer = TransformerXLScores(3, 4, rng=0)
    q, k = random_qk(2, 3)
    scores, pullback = layer.vjp(q, k)
    want = pullback(np.ones(scores.shape))
    for array in (q, k, *layer.parameters().values()):
        array += 1
    for name, grad in pullback(np.ones(scores.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


# ----------------------------------------------------------------------- torch and JAX


def torch_layer(**options):
    return firstlayer.torch.TransformerXLScores(2, 4, **options)


def test_torch_gradients_pass_gradcheck():
    layer = torch_layer(dtype=torch.float64, max_distance=2)
    q, k = (torch.from_numpy(x) for x in random_qk(2, q_length=3, k_length=4))
    names = ("weight", "u", "v")

    def run(q, k, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (q, k))

    leaves = [q, k, *(getattr(layer, name) for name in names)]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_torch_compiles_one_graph_for_all_lengths_and_vmaps():
    layer = torch_layer()
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for q_length, k_length in ((5, 7), (4, 9), (6, 11)):
        q, k = (
            torch.from_numpy(x).float()
            for x in random_qk(3, 2, q_length=q_length, k_length=k_length)
        )
        torch.testing.assert_close(compiled(q, k), layer(q, k), atol=1e-6, rtol=1e-5)
    assert graphs() == 1
    mapped = torch.func.vmap(layer)(q, k)
    torch.testing.assert_close(mapped, layer(q, k), atol=1e-6, rtol=1e-5)


def test_torch_autocast_does_not_change_the_scores():
    layer = torch_layer()
    q, k = (torch.from_numpy(x).float() for x in random_qk(3, 2))
    want = layer(q, k)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(q, k), want)
        half = layer(q.bfloat16(), k.bfloat16())
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("round_trip", [name for name in ROUND_TRIPS if name != "reset"])
def test_torch_layer_survives_casts_moves_and_checkpoints(round_trip):
    q, k = (torch.from_numpy(x).float() for x in random_qk(3, 2))
    layer = ROUND_TRIPS[round_trip](torch_layer)
    assert torch.equal(layer(q, k), built(torch_layer)(q, k))
    assert list(layer.state_dict()) == ["weight", "u", "v"]


def test_torch_parameters_are_drawn_again_by_reset_parameters():
    layer = torch_layer()
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    for old, new in zip(before, layer.parameters(), strict=True):
        assert (old != new).any() and new.abs().max() <= 0.04


def test_jax_layer_under_jit_vmap_and_grad():
    layer = firstlayer.equinox.TransformerXLScores(2, 4, key=jax.random.key(0))
    q, k = (jnp.asarray(x, jnp.float32) for x in random_qk(3, 2))
    want = layer.scores(q, k)
    np.testing.assert_allclose(eqx.filter_jit(layer)(q, k), want, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(layer)(q, k), want, atol=1e-6)
    gradient = eqx.filter_grad(lambda layer: (layer(q, k) ** 2).sum())(layer)
    assert all(leaf.any() for leaf in gradient.parameters().values())
    text = str(jax.make_jaxpr(layer)(q, k))
    products = text.count("dot_general[")
    assert products and text.count("Precision.HIGHEST, Precision.HIGHEST") == products


# ----------------------------------------------------------------------------- layer


def test_config_and_state_rebuild_the_layer():
    layer = TransformerXLScores(3, 4, dtype="bfloat16", rng=3, **OPTIONS)
    rebuilt = TransformerXLScores(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer)
    q, k = random_qk(2, 3)
    np.testing.assert_array_equal(rebuilt(q, k), layer(q, k))


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: TransformerXLScores(0, 4), "num_heads must be positive, got 0"),
        (lambda: TransformerXLScores(2, 0), "head_dim must be positive, got 0"),
        (
            lambda: TransformerXLScores(2, 4, u=np.ones((4, 2))),
            r"u must have shape \(2, 4\), got \(4, 2\)",
        ),
        (
            lambda: TransformerXLScores(2, 4, u=np.ones((2, 4))),
            "weight, u and v must have one dtype, got float32, float64 and float32",
        ),
        (
            lambda: TransformerXLScores(2, 4).scores(*random_qk(3)),
            r"q must have shape \(..., 2, length, 4\), got \(3, 5, 4\)",
        ),
        (
            lambda: TransformerXLScores(2, 4).scores(*random_qk(2), offset=2**24),
            "distances must be smaller than 16777216 in size, got 16777220",
        ),
        (
            lambda: TransformerXLScores(2, 4).vjp(*random_qk(2))[1](np.ones((2, 7, 5))),
            r"dscores must have shape \(2, 5, 7\), got \(2, 7, 5\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(run, message):
    with pytest.raises(ValueError, match=message):
        run()
