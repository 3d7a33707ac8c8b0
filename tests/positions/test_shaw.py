"""Shaw's scores: the formula, gradients, and wav2vec2-BERT's attention."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    Wav2Vec2BertSelfAttention,
)

from firstlayer.numpy.shaw import ShawScores
from firstlayer.positions.shaw import shaw_scores

rng = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def formula(q, k, q_positions, k_positions, layer):
    """Return the scores of one head in float64, one element at a time."""
    out = np.empty((len(q), len(k)))
    for i, m in enumerate(q_positions):
        for j, n in enumerate(k_positions):
            index = max(-layer.max_left, min(layer.max_right, n - m)) + layer.max_left
            vector = k[j].astype(float) + layer.weight[index].astype(float)
            out[i, j] = q[i].astype(float) @ vector / np.sqrt(layer.head_dim)
    return out


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def random_qk(*lead, q_length=5, k_length=7, head_dim=4):
    q = rng.standard_normal((*lead, q_length, head_dim))
    return q, rng.standard_normal((*lead, k_length, head_dim))


# The scores


@pytest.mark.parametrize(("max_left", "max_right"), [(3, 2), (0, 4), (5, 0), (0, 0)])
def test_scores_match_formula(max_left, max_right):
    layer = ShawScores(4, max_left=max_left, max_right=max_right, init="normal", rng=0)
    q, k = random_qk()
    at = [0, 1, 255, 2**24 - 1, -7], [0, 2, 5, 256, -300, 2**24, -9]
    want = formula(q, k, *at, layer)
    np.testing.assert_allclose(layer.scores(q, k, *at), want, rtol=1e-12)
    got = layer(q.astype("float32"), k.astype("float32"), *at)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_scores_depend_on_relative_position_only():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    (q, k), q_at, k_at = random_qk(2, 3), np.arange(5), np.arange(7)
    here = layer.scores(q, k, q_at, k_at)
    for start in (1, -1_000_003, 2**52):
        moved = layer.scores(q, k, q_at + start, k_at + start)
        np.testing.assert_array_equal(moved, here)
    assert (layer.scores(q, k, q_at + 1, k_at) != here).any()


def test_a_zero_table_gives_scaled_dot_products():
    layer = ShawScores(4, max_left=3, max_right=2, init="zeros")
    q, k = random_qk(2, 3)
    np.testing.assert_allclose(layer.scores(q, k, range(5), range(7)), q @ k.mT / 2)


def test_attention_matches_wav2vec2_bert():
    config = Wav2Vec2BertConfig(
        hidden_size=24,
        num_attention_heads=3,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=64,
        right_max_position_embeddings=8,
    )
    config._attn_implementation = "eager"
    theirs = Wav2Vec2BertSelfAttention(config).eval()
    x = torch.randn(2, 90, 24)
    with torch.no_grad():
        want = theirs(x)[1]
        q, k = (
            project(x).view(2, 90, 3, 8).transpose(1, 2).numpy()
            for project in (theirs.linear_q, theirs.linear_k)
        )
        weight = theirs.distance_embedding.weight.numpy()
    layer = ShawScores(8, max_left=64, max_right=8, weight=weight)
    got = softmax(layer.scores(q, k, range(90), range(90)))
    np.testing.assert_allclose(got, want.numpy(), atol=1e-6)


def test_real_distances_are_truncated():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    (q, k), real = random_qk(), np.array([-3.9, -1.5, -0.5, 0.0, 0.99, 1.0, 9.5])
    want = layer.scores(q, k, [0] * 5, np.trunc(real).astype(int))
    np.testing.assert_array_equal(layer.scores(q, k, [0] * 5, real), want)


def test_a_nan_position_gives_nan_scores_on_jax():
    q, k = (jnp.asarray(x, jnp.float32) for x in random_qk(2))
    at = {
        "q_positions": jnp.array([0.0, jnp.nan, 1.0, 2.0, 3.0]),
        "k_positions": jnp.arange(7.0),
    }
    got = np.asarray(shaw_scores(q, k, **at, weight=jnp.ones((4, 4)), max_left=2))
    assert np.isnan(got[:, 1]).all() and not np.isnan(np.delete(got, 1, axis=1)).any()


# Positions


def test_scores_of_one_query_are_a_row_of_the_whole():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    q, k = random_qk(2, 3, q_length=9, k_length=9)
    whole = layer.scores(q, k, range(9), range(9))
    step = layer.scores(q[..., -1:, :], k, [8], range(9))
    np.testing.assert_allclose(step, whole[..., -1:, :], rtol=1e-12)


@pytest.mark.parametrize("lead", [(3,), (3, 3), (3, 5)])
def test_batched_positions_broadcast_over_heads_even_if_sizes_coincide(lead):
    layer = ShawScores(4, max_left=9, max_right=7, init="normal", rng=0)
    (q, k), q_at = random_qk(*lead), rng.integers(0, 20, (3, 5))
    k_at = rng.integers(0, 20, (3, 7))
    got = layer.scores(q, k, q_at, k_at)
    for row in range(3):
        want = layer.scores(q[row], k[row], q_at[row], k_at[row])
        np.testing.assert_allclose(got[row], want, rtol=1e-12)
    shared = layer.scores(q, k, q_at[:1], k_at[0])
    np.testing.assert_allclose(shared, layer.scores(q, k, q_at[0], k_at[0]), rtol=1e-12)


def test_positions_without_a_batch_apply_to_any_number_of_axes():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    q, k = random_qk(2, 1, 3)
    got = layer.scores(q, k, range(5), range(7))
    want = layer.scores(q[1, 0], k[1, 0], range(5), range(7))
    np.testing.assert_allclose(got[1, 0], want, rtol=1e-12)


def test_left_padded_positions_give_the_unpadded_scores():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    (q, k), padded = (
        random_qk(2, 3, k_length=5),
        np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]),
    )
    got = layer.scores(q, k, padded, padded)[0, :, 2:, 2:]
    want = layer.scores(q[0, :, 2:], k[0, :, 2:], range(3), range(3))
    np.testing.assert_allclose(got, want, rtol=1e-12)


# Memory


def test_vectors_are_not_gathered_for_every_pair():
    layer = ShawScores(64, max_left=64, max_right=8, rng=0)
    q, k = (x.astype("float32") for x in random_qk(q_length=256, k_length=256, head_dim=64))
    tracemalloc.start()
    scores, pullback = layer.vjp(q, k, range(256), range(256))
    pullback(scores)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 256 * 64 * 4 / 2


# The gradient


@pytest.mark.parametrize(
    ("lead", "heads"), [((), ""), ((2, 3), ""), ((2,), ""), ((2, 3), "k"), ((2, 3), "q")]
)
def test_gradients_match_finite_differences(lead, heads):
    layer = ShawScores(2, max_left=2, max_right=1, init="normal", dtype="float64", rng=0)
    q, k = random_qk(*lead, q_length=3, k_length=4, head_dim=2)
    # A single head of keys or of queries is broadcast.
    q, k = (x[:, :1].copy() if n == heads else x for n, x in (("q", q), ("k", k)))
    q_at, k_at = rng.integers(0, 9, (*lead[:1], 3)), rng.integers(0, 9, (*lead[:1], 4))
    scores, pullback = layer.vjp(q, k, q_at, k_at)
    np.testing.assert_array_equal(scores, layer.scores(q, k, q_at, k_at))
    d = rng.standard_normal(scores.shape)
    got = pullback(d)
    for name, x in {"q": q, "k": k, "weight": layer.weight}.items():
        assert got[name].shape == x.shape
        for index in np.ndindex(x.shape):
            saved, sides = x[index], []
            for step in (1e-4, -1e-4):
                x[index] = saved + step
                sides.append((layer.scores(q, k, q_at, k_at) * d).sum())
            x[index] = saved
            want = (sides[0] - sides[1]) / 2e-4
            np.testing.assert_allclose(got[name][index], want, atol=1e-8)


def test_every_vector_gets_a_gradient():
    layer = ShawScores(3, max_left=4, max_right=2, rng=0)
    q, k = random_qk(2, q_length=9, k_length=9, head_dim=3)
    scores, pullback = layer.vjp(q, k, range(9), range(9))
    assert (pullback(np.ones(scores.shape))["weight"] != 0).all()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_half_precision_is_float32_rounded_once(dtype):
    layer = ShawScores(4, max_left=2, max_right=1, init="normal", dtype=dtype, rng=0)
    full = ShawScores(4, max_left=2, max_right=1, weight=layer.weight.astype("float32"))
    q, k = (x.astype(dtype) for x in random_qk(2, 3))
    scores, pullback = layer.vjp(q, k, range(5), range(7))
    q32, k32 = q.astype("float32"), k.astype("float32")
    want, pullback32 = full.vjp(q32, k32, range(5), range(7))
    assert scores.dtype == dtype
    np.testing.assert_array_equal(scores.view("u2"), want.astype(dtype).view("u2"))
    got, want = pullback(scores), pullback32(scores.astype("float32"))
    for name in ("q", "k"):
        assert got[name].dtype == dtype
        rounded = want[name].astype(dtype)
        np.testing.assert_array_equal(got[name].view("u2"), rounded.view("u2"))
    assert got["weight"].dtype == np.float32
    np.testing.assert_array_equal(got["weight"], want["weight"])


def test_pullback_uses_the_values_of_the_forward():
    layer = ShawScores(4, max_left=2, max_right=1, rng=0)
    q, k = (x.astype("float32") for x in random_qk(2))
    scores, pullback = layer.vjp(q, k, range(5), range(7))
    want = pullback(np.ones(scores.shape))
    for array in (q, k, layer.weight):
        array += 1
    for name, grad in pullback(np.ones(scores.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


# NumPy, torch and JAX


def in_float32(real):
    q, k = (x.astype("float32") for x in random_qk(2, 3))
    q_at, k_at = (rng.integers(-9, 9, n).astype("int32") for n in ((2, 5), 7))
    if real:
        q_at, k_at = (q_at / 2).astype("float32"), (k_at / 2).astype("float32")
    return q, k, q_at, k_at, rng.standard_normal((6, 4)).astype("float32")


def run(q, k, q_at, k_at, weight):
    return shaw_scores(q, k, q_positions=q_at, k_positions=k_at, weight=weight, max_left=3)


@pytest.mark.parametrize("real", [False, True])
def test_torch_and_jax_agree_in_scores_and_gradients(real):
    inputs = in_float32(real)
    layer = ShawScores(4, max_left=3, max_right=2, weight=inputs[-1])
    want, pullback = layer.vjp(*inputs[:4])
    grads = list(pullback(np.ones(want.shape)).values())

    tensors = [torch.asarray(x) for x in inputs]
    for i in (0, 1, 4):
        tensors[i].requires_grad_()
    got = run(*tensors)
    np.testing.assert_allclose(got.detach(), want, atol=1e-6)
    got.sum().backward()
    for i, grad in zip((0, 1, 4), grads, strict=True):
        got = np.asarray(tensors[i].grad)
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)

    arrays = [jnp.asarray(x) for x in inputs]
    for f in (run, jax.jit(run)):
        np.testing.assert_allclose(f(*arrays), want, atol=1e-6)
    grads_jax = jax.grad(lambda *x: run(*x).sum(), argnums=(0, 1, 4))(*arrays)
    for got, grad in zip(grads_jax, grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("real", [False, True])
def test_torch_compiles_the_scores_without_graph_breaks(real):
    inputs = in_float32(real)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    got = compiled(*map(torch.asarray, inputs))
    np.testing.assert_allclose(got, run(*inputs), atol=1e-6)


# The layer


def test_layers_do_not_share_tables():
    a = ShawScores(4, max_left=3, max_right=2, rng=0)
    b = ShawScores(4, max_left=2, max_right=3, rng=0)
    q, k = random_qk()
    first = a.scores(q, k, range(5), range(7))
    assert (b.scores(q, k, range(5), range(7)) != first).any()
    b.weight[:] = 7
    np.testing.assert_array_equal(a.scores(q, k, range(5), range(7)), first)


def test_config_and_state_rebuild_the_layer():
    layer = ShawScores(4, max_left=1, max_right=3, dtype="bfloat16", rng=3)
    rebuilt = ShawScores(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer)
    np.testing.assert_array_equal(rebuilt.weight, layer.weight)


def test_a_given_table_is_used_without_a_copy():
    weight = np.zeros((6, 4), np.float32)
    assert ShawScores(4, max_left=3, max_right=2, weight=weight).weight is weight


@pytest.mark.rejects
def test_rejects_bad_sizes():
    with pytest.raises(ValueError, match="head_dim must be positive, got 0"):
        ShawScores(0, max_left=1, max_right=1)
    with pytest.raises(ValueError, match="max_left must be at least 0, got -1"):
        ShawScores(4, max_left=-1, max_right=1)
    with pytest.raises(ValueError, match="max_right must be at least 0, got -2"):
        ShawScores(4, max_left=1, max_right=-2)
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 4\), got \(4, 3\)"):
        ShawScores(4, max_left=1, max_right=1, weight=np.ones((4, 3)))


@pytest.mark.rejects
def test_rejects_queries_keys_and_positions_that_do_not_fit():
    layer = ShawScores(4, max_left=1, max_right=1)
    q, k = random_qk(2, 3)
    with pytest.raises(ValueError, match=r"q must have shape \(\.\.\., length, 4\), got"):
        layer.scores(q[..., :3], k, range(5), range(7))
    with pytest.raises(TypeError, match="k must be real, got int64"):
        layer.scores(q, k.astype(np.int64), range(5), range(7))
    rule = "must have one entry for each of the"
    with pytest.raises(ValueError, match=f"q_positions {rule} 5 rows of q, got 1"):
        layer.scores(q, k, [0], range(7))
    with pytest.raises(ValueError, match=f"k_positions {rule} 7 rows of k, got 6"):
        layer.scores(q, k, range(5), range(6))
    with pytest.raises(ValueError, match=r"need q with 3 or 4 axes, got shape \(5, 4\)"):
        layer.scores(q[0, 0], k[0, 0], [range(5)], [range(7)])
    with pytest.raises(TypeError, match="q_positions must be integers or reals, got bool"):
        layer.scores(q, k, [True] * 5, range(7))


@pytest.mark.rejects
def test_rejects_a_gradient_of_another_shape():
    layer = ShawScores(4, max_left=1, max_right=1)
    _, pullback = layer.vjp(*random_qk(), range(5), range(7))
    with pytest.raises(ValueError, match=r"dscores must have shape \(5, 7\), got \(7, 5\)"):
        pullback(np.ones((7, 5)))
