"""Shaw's scores: the formula, its gradients, and wav2vec2-BERT's attention."""

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
    """The scores of one head in float64, a number at a time."""
    out = np.empty((len(q), len(k)))
    for i, m in enumerate(q_positions):
        for j, n in enumerate(k_positions):
            place = max(-layer.max_left, min(layer.max_right, n - m)) + layer.max_left
            vector = k[j].astype(float) + layer.weight[place].astype(float)
            out[i, j] = q[i].astype(float) @ vector / np.sqrt(layer.head_dim)
    return out


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def drawn(*lead, q_length=5, k_length=7, head_dim=4):
    q = rng.standard_normal((*lead, q_length, head_dim))
    return q, rng.standard_normal((*lead, k_length, head_dim))


# The scores


@pytest.mark.parametrize(("max_left", "max_right"), [(3, 2), (0, 4), (5, 0), (0, 0)])
def test_scores_are_the_formula(max_left, max_right):
    layer = ShawScores(4, max_left=max_left, max_right=max_right, init="normal", rng=0)
    q, k = drawn()
    at = [0, 1, 255, 2**24 - 1, -7], [0, 2, 5, 256, -300, 2**24, -9]
    want = formula(q, k, *at, layer)
    np.testing.assert_allclose(layer.scores(q, k, *at), want, rtol=1e-12)
    got = layer(q.astype("float32"), k.astype("float32"), *at)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_scores_depend_on_relative_position_only():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    (q, k), at, steps = drawn(2, 3), np.arange(5), np.arange(7)
    here = layer.scores(q, k, at, steps)
    for start in (1, -1_000_003, 2**52):
        moved = layer.scores(q, k, at + start, steps + start)
        np.testing.assert_array_equal(moved, here)
    assert (layer.scores(q, k, at + 1, steps) != here).any()


def test_a_zero_table_leaves_scaled_dot_products():
    layer = ShawScores(4, max_left=3, max_right=2, init="zeros")
    q, k = drawn(2, 3)
    np.testing.assert_allclose(layer.scores(q, k, range(5), range(7)), q @ k.mT / 2)


def test_attention_is_that_of_wav2vec2_bert():
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


def test_a_real_distance_counts_as_its_whole_part():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    (q, k), real = drawn(), np.array([-3.9, -1.5, -0.5, 0.0, 0.99, 1.0, 9.5])
    want = layer.scores(q, k, [0] * 5, np.trunc(real).astype(int))
    np.testing.assert_array_equal(layer.scores(q, k, [0] * 5, real), want)


def test_an_unknown_position_gives_nan_where_nothing_can_be_raised():
    q, k = (jnp.asarray(x, jnp.float32) for x in drawn(2))
    at = {
        "q_positions": jnp.array([0.0, jnp.nan, 1.0, 2.0, 3.0]),
        "k_positions": jnp.arange(7.0),
    }
    got = np.asarray(shaw_scores(q, k, **at, weight=jnp.ones((4, 4)), max_left=2))
    assert np.isnan(got[:, 1]).all() and not np.isnan(np.delete(got, 1, axis=1)).any()


# Positions do everything


def test_a_decode_step_is_the_last_row():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    q, k = drawn(2, 3, q_length=9, k_length=9)
    whole = layer.scores(q, k, range(9), range(9))
    step = layer.scores(q[..., -1:, :], k, [8], range(9))
    np.testing.assert_allclose(step, whole[..., -1:, :], rtol=1e-12)


@pytest.mark.parametrize("lead", [(3,), (3, 3), (3, 5)])
def test_batched_positions_skip_the_heads_axis_even_when_sizes_coincide(lead):
    layer = ShawScores(4, max_left=9, max_right=7, init="normal", rng=0)
    (q, k), at = drawn(*lead), rng.integers(0, 20, (3, 5))
    steps = rng.integers(0, 20, (3, 7))
    got = layer.scores(q, k, at, steps)
    for row in range(3):
        want = layer.scores(q[row], k[row], at[row], steps[row])
        np.testing.assert_allclose(got[row], want, rtol=1e-12)
    shared = layer.scores(q, k, at[:1], steps[0])
    np.testing.assert_allclose(shared, layer.scores(q, k, at[0], steps[0]), rtol=1e-12)


def test_one_row_of_positions_serves_any_number_of_axes():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    q, k = drawn(2, 1, 3)
    got = layer.scores(q, k, range(5), range(7))
    want = layer.scores(q[1, 0], k[1, 0], range(5), range(7))
    np.testing.assert_allclose(got[1, 0], want, rtol=1e-12)


def test_left_padding_is_a_matter_of_positions():
    layer = ShawScores(4, max_left=3, max_right=2, init="normal", rng=0)
    (q, k), padded = drawn(2, 3, k_length=5), np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    got = layer.scores(q, k, padded, padded)[0, :, 2:, 2:]
    want = layer.scores(q[0, :, 2:], k[0, :, 2:], range(3), range(3))
    np.testing.assert_allclose(got, want, rtol=1e-12)


# Memory


def test_vectors_are_not_gathered_by_pair():
    layer = ShawScores(64, max_left=64, max_right=8, rng=0)
    q, k = (x.astype("float32") for x in drawn(q_length=256, k_length=256, head_dim=64))
    tracemalloc.start()
    scores, pull = layer.vjp(q, k, range(256), range(256))
    pull(scores)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 256 * 64 * 4 / 2


# The gradient


@pytest.mark.parametrize(
    ("lead", "heads"), [((), ""), ((2, 3), ""), ((2,), ""), ((2, 3), "k"), ((2, 3), "q")]
)
def test_gradients_are_those_of_finite_differences(lead, heads):
    layer = ShawScores(2, max_left=2, max_right=1, init="normal", dtype="float64", rng=0)
    q, k = drawn(*lead, q_length=3, k_length=4, head_dim=2)
    # One head of keys may serve all queries, and one of queries all keys.
    q, k = (x[:, :1].copy() if n == heads else x for n, x in (("q", q), ("k", k)))
    at, steps = rng.integers(0, 9, (*lead[:1], 3)), rng.integers(0, 9, (*lead[:1], 4))
    scores, pull = layer.vjp(q, k, at, steps)
    np.testing.assert_array_equal(scores, layer.scores(q, k, at, steps))
    d = rng.standard_normal(scores.shape)
    got = pull(d)
    for name, x in {"q": q, "k": k, "weight": layer.weight}.items():
        assert got[name].shape == x.shape
        for place in np.ndindex(x.shape):
            kept, sides = x[place], []
            for step in (1e-4, -1e-4):
                x[place] = kept + step
                sides.append((layer.scores(q, k, at, steps) * d).sum())
            x[place] = kept
            want = (sides[0] - sides[1]) / 2e-4
            np.testing.assert_allclose(got[name][place], want, atol=1e-8)


def test_every_vector_learns():
    layer = ShawScores(3, max_left=4, max_right=2, rng=0)
    q, k = drawn(2, q_length=9, k_length=9, head_dim=3)
    scores, pull = layer.vjp(q, k, range(9), range(9))
    assert (pull(np.ones(scores.shape))["weight"] != 0).all()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_half_precision_is_float32_rounded_once(dtype):
    layer = ShawScores(4, max_left=2, max_right=1, init="normal", dtype=dtype, rng=0)
    wide = ShawScores(4, max_left=2, max_right=1, weight=layer.weight.astype("float32"))
    q, k = (x.astype(dtype) for x in drawn(2, 3))
    scores, pull = layer.vjp(q, k, range(5), range(7))
    q32, k32 = q.astype("float32"), k.astype("float32")
    want, pull32 = wide.vjp(q32, k32, range(5), range(7))
    assert scores.dtype == dtype
    np.testing.assert_array_equal(scores.view("u2"), want.astype(dtype).view("u2"))
    got, want = pull(scores), pull32(scores.astype("float32"))
    for name in ("q", "k"):
        assert got[name].dtype == dtype
        rounded = want[name].astype(dtype)
        np.testing.assert_array_equal(got[name].view("u2"), rounded.view("u2"))
    assert got["weight"].dtype == np.float32
    np.testing.assert_array_equal(got["weight"], want["weight"])


def test_gradient_does_not_see_what_is_written_after():
    layer = ShawScores(4, max_left=2, max_right=1, rng=0)
    q, k = (x.astype("float32") for x in drawn(2))
    scores, pull = layer.vjp(q, k, range(5), range(7))
    want = pull(np.ones(scores.shape))
    for array in (q, k, layer.weight):
        array += 1
    for name, grad in pull(np.ones(scores.shape)).items():
        np.testing.assert_array_equal(grad, want[name])


# The other array libraries


def in_float32(real):
    q, k = (x.astype("float32") for x in drawn(2, 3))
    at, steps = (rng.integers(-9, 9, n).astype("int32") for n in ((2, 5), 7))
    if real:
        at, steps = (at / 2).astype("float32"), (steps / 2).astype("float32")
    return q, k, at, steps, rng.standard_normal((6, 4)).astype("float32")


def run(q, k, at, steps, weight):
    return shaw_scores(q, k, q_positions=at, k_positions=steps, weight=weight, max_left=3)


@pytest.mark.parametrize("real", [False, True])
def test_torch_and_jax_agree_in_scores_and_gradients(real):
    inputs = in_float32(real)
    layer = ShawScores(4, max_left=3, max_right=2, weight=inputs[-1])
    want, pull = layer.vjp(*inputs[:4])
    grads = list(pull(np.ones(want.shape)).values())

    tensors = [torch.asarray(x) for x in inputs]
    for learned in (0, 1, 4):
        tensors[learned].requires_grad_()
    got = run(*tensors)
    np.testing.assert_allclose(got.detach(), want, atol=1e-6)
    got.sum().backward()
    for learned, grad in zip((0, 1, 4), grads, strict=True):
        found = np.asarray(tensors[learned].grad)
        np.testing.assert_allclose(found, grad, rtol=1e-5, atol=1e-5)

    arrays = [jnp.asarray(x) for x in inputs]
    for f in (run, jax.jit(run)):
        np.testing.assert_allclose(f(*arrays), want, atol=1e-6)
    found = jax.grad(lambda *x: run(*x).sum(), argnums=(0, 1, 4))(*arrays)
    for got, grad in zip(found, grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("real", [False, True])
def test_torch_compiles_the_scores_whole(real):
    inputs = in_float32(real)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    got = compiled(*map(torch.asarray, inputs))
    np.testing.assert_allclose(got, run(*inputs), atol=1e-6)


# The layer


def test_two_layers_keep_their_own_tables():
    a = ShawScores(4, max_left=3, max_right=2, rng=0)
    b = ShawScores(4, max_left=2, max_right=3, rng=0)
    q, k = drawn()
    first = a.scores(q, k, range(5), range(7))
    assert (b.scores(q, k, range(5), range(7)) != first).any()
    b.weight[:] = 7
    np.testing.assert_array_equal(a.scores(q, k, range(5), range(7)), first)


def test_config_and_state_build_the_same_layer():
    layer = ShawScores(4, max_left=1, max_right=3, dtype="bfloat16", rng=3)
    again = ShawScores(**json.loads(json.dumps(layer.config())))
    again.load_state_dict(layer.state_dict())
    assert repr(again) == repr(layer) and layer.prefix == "bias."
    np.testing.assert_array_equal(again.weight, layer.weight)


def test_a_table_that_is_given_is_used():
    weight = np.zeros((6, 4), np.float32)
    assert ShawScores(4, max_left=3, max_right=2, weight=weight).weight is weight


@pytest.mark.rejects
def test_shaw_rejects_bad_sizes():
    with pytest.raises(ValueError, match="head_dim must be positive, got 0"):
        ShawScores(0, max_left=1, max_right=1)
    with pytest.raises(ValueError, match="max_left must be at least 0, got -1"):
        ShawScores(4, max_left=-1, max_right=1)
    with pytest.raises(ValueError, match="max_right must be at least 0, got -2"):
        ShawScores(4, max_left=1, max_right=-2)
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 4\), got \(4, 3\)"):
        ShawScores(4, max_left=1, max_right=1, weight=np.ones((4, 3)))


@pytest.mark.rejects
def test_shaw_rejects_queries_keys_and_positions_that_do_not_fit():
    layer = ShawScores(4, max_left=1, max_right=1)
    q, k = drawn(2, 3)
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
def test_shaw_rejects_a_gradient_of_another_shape():
    layer = ShawScores(4, max_left=1, max_right=1)
    _, pull = layer.vjp(*drawn(), range(5), range(7))
    with pytest.raises(ValueError, match=r"dscores must have shape \(5, 7\), got \(7, 5\)"):
        pull(np.ones((7, 5)))
