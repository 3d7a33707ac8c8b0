"""T5's bias: buckets, table, gradient, and comparison with transformers."""

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
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from firstlayer.numpy.t5 import T5Bias
from firstlayer.positions.t5 import (
    clipped_index,
    reach,
    relative_positions,
    t5_bias,
    t5_buckets,
    t5_edges,
)

rng = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# T5 and mT5, UMT5, LongT5, MPNet, LayoutLMv3, WavLM, and unpublished ones.
SETTINGS = [
    *((32, 128), (64, 128), (32, 256), (320, 800), (64, 256), (32, 64)),
    *((8, 128), (4, 3), (12, 20), (48, 1000), (32, 20)),
]


def formula(relative, num_buckets, max_distance, bidirectional):
    """Return T5's bucket of one relative position."""
    first, distance = 0, max(0, -relative)
    if bidirectional:
        num_buckets //= 2
        first, distance = num_buckets * (relative > 0), abs(relative)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    fraction = math.log(distance / exact) / math.log(max_distance / exact)
    # 1e-9 puts a distance exactly on an edge into the bucket above it.
    step = math.floor(fraction * (num_buckets - exact) + 1e-9)
    return first + min(exact + step, num_buckets - 1)


def buckets_at(relative, num_buckets, max_distance, bidirectional):
    table = t5_buckets(num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    left, right = reach(table, bidirectional=bidirectional)
    return table[clipped_index(np.asarray(relative), left=left, right=right)]


# The buckets


def test_edges_match_the_published_setting():
    want = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert t5_edges(16, max_distance=128).tolist() == want


def test_edges_are_exact_if_the_formula_is_an_integer():
    # 8 · (27/8)^(2/3) is 18, and less than 18 in float32.
    assert t5_edges(17, max_distance=27)[14] == 18
    assert t5_edges(8, max_distance=4 * 3**4).tolist() == [0, 1, 2, 3, 4, 12, 36, 108]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SETTINGS)
def test_buckets_match_formula(num_buckets, max_distance, bidirectional):
    if not bidirectional and max_distance <= num_buckets // 2:
        max_distance = num_buckets
    relative = range(-max_distance - 9, max_distance + 10)
    setting = (num_buckets, max_distance, bidirectional)
    want = [formula(r, *setting) for r in relative]
    np.testing.assert_array_equal(buckets_at(relative, *setting), want)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SETTINGS)
def test_buckets_match_transformers(num_buckets, max_distance, bidirectional):
    if not bidirectional and max_distance <= num_buckets // 2:
        max_distance = num_buckets
    relative = torch.arange(-3 * max_distance, 3 * max_distance)
    want = T5Attention._relative_position_bucket(
        relative,
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    got = buckets_at(relative.numpy(), num_buckets, max_distance, bidirectional)
    np.testing.assert_array_equal(got, want.numpy())


@given(st.integers(2, 60), st.integers(1, 400))
def test_buckets_increase_with_distance(num_buckets, further):
    max_distance = num_buckets // 2 + further
    edges = t5_edges(num_buckets, max_distance=max_distance)
    assert len(edges) == num_buckets and edges[-1] <= max_distance
    assert (np.diff(edges) >= 0).all()
    buckets = t5_buckets(num_buckets, max_distance=max_distance, bidirectional=False)
    assert buckets[0] == num_buckets - 1 and buckets[-1] == 0
    assert (np.diff(buckets) <= 0).all()


def test_large_distances_share_the_last_bucket_of_their_direction():
    far = [-(2**40), -(2**24), -128, -91, 91, 128, 2**24, 2**40]
    assert buckets_at(far, 32, 128, True).tolist() == [15] * 4 + [31] * 4
    assert buckets_at(far, 32, 128, False).tolist()[:3] == [31] * 3
    assert buckets_at(far, 32, 128, False).tolist()[4:] == [0] * 4


# The bias


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bias_matches_formula(bidirectional):
    q, k = [0, 1, 255, 256, 65_536, 2**24 - 1, -7], [-300, 0, 3, 250, 65_500, 2**24]
    setting = {"num_buckets": 12, "max_distance": 50, "bidirectional": bidirectional}
    layer = T5Bias(3, **setting, init="normal", rng=1)
    for h in range(3):
        for i, m in enumerate(q):
            want = [layer.weight[formula(n - m, *setting.values()), h] for n in k]
            np.testing.assert_array_equal(layer.bias(q, k)[h, i], want)


@pytest.mark.parametrize("is_decoder", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 40)])
def test_bias_matches_transformers(is_decoder, num_buckets, max_distance):
    config = T5Config(
        d_model=8,
        d_kv=2,
        num_heads=4,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    config.is_decoder = is_decoder
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(
        4,
        num_buckets=num_buckets,
        max_distance=max_distance,
        bidirectional=not is_decoder,
        weight=theirs.relative_attention_bias.weight.detach().numpy(),
    )
    want = theirs.compute_bias(150, 150)[0].detach().numpy()
    np.testing.assert_array_equal(ours.bias(range(150), range(150)), want)
    want = theirs.compute_bias(2, 150, past_seen_tokens=148)[0].detach().numpy()
    np.testing.assert_array_equal(ours.bias([148, 149], range(150)), want)


@given(st.integers(-(2**40), 2**40), st.booleans())
def test_bias_depends_on_relative_position_only(start, bidirectional):
    layer = T5Bias(2, bidirectional=bidirectional, rng=0)
    q, k = np.arange(9) * 20, np.arange(11) * 15
    np.testing.assert_array_equal(layer.bias(q + start, k + start), layer.bias(q, k))


def test_direction_matters_only_if_bidirectional():
    both, causal = T5Bias(2, rng=0), T5Bias(2, bidirectional=False, rng=0)
    ahead = np.arange(1, 200)
    assert (both.bias([0], ahead) != both.bias([0], -ahead)).all()
    np.testing.assert_array_equal(causal.bias([0], ahead), causal.bias([0], 0 * ahead))


def test_real_distances_are_truncated():
    layer, real = T5Bias(4, rng=0), np.array([-20.9, -1.5, -0.5, 0.0, 0.99, 1.0, 300.5])
    want = layer.bias([0], np.trunc(real).astype(int))
    np.testing.assert_array_equal(layer.bias([0], real), want)
    np.testing.assert_array_equal(layer.bias([0.5], real + 0.5), want)
    half = np.array([-3.5, 2.25, 200.0]).astype(BFLOAT16)
    np.testing.assert_array_equal(layer.bias([0.0], half), layer.bias([0], [-3, 2, 200]))


def test_a_nan_position_gives_nan_bias_under_jit():
    weight, buckets = jnp.ones((32, 2)), jnp.asarray(t5_buckets())
    q, k = jnp.array([0.0, jnp.nan]), jnp.array([1.0, 2.0, jnp.inf])
    got = np.asarray(jax.jit(t5_bias)(q, k, weight=weight, buckets=buckets))
    assert (got[:, 0] == 1).all() and np.isnan(got[:, 1]).all()


# Positions


def test_bias_of_one_query_is_a_row_of_the_whole():
    for bidirectional in (True, False):
        layer = T5Bias(3, bidirectional=bidirectional, rng=0)
        whole = layer.bias(range(200), range(200))
        np.testing.assert_array_equal(layer.bias([199], range(200)), whole[:, -1:])


def test_batched_positions_equal_separate_calls():
    layer = T5Bias(3, max_distance=30, rng=0)
    q, k = rng.integers(0, 99, (3, 4)), rng.integers(0, 99, (3, 5))
    got = layer.bias(q, k)
    assert got.shape == (3, 3, 4, 5)
    for row in range(3):
        np.testing.assert_array_equal(got[row], layer.bias(q[row], k[row]))


def test_left_padded_positions_give_the_unpadded_bias():
    layer, padded = T5Bias(4, rng=0), np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    got = layer.bias(padded, padded)
    np.testing.assert_array_equal(got[0, :, 2:, 2:], layer.bias(range(3), range(3)))


# The gradient


def loss_of(layer, q, k, d):
    return float((layer.bias(q, k).astype(np.float64) * d).sum())


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradient_matches_finite_differences(bidirectional, batch):
    layer = T5Bias(
        2, num_buckets=8, max_distance=20, bidirectional=bidirectional, dtype="float64"
    )
    q, k = rng.integers(0, 40, (*batch, 6)), rng.integers(0, 40, 7)
    bias, pullback = layer.vjp(q, k)
    np.testing.assert_array_equal(bias, layer.bias(q, k))
    d = rng.standard_normal(bias.shape)
    got = pullback(d)["weight"]
    assert got.shape == layer.weight.shape
    for index in np.ndindex(layer.weight.shape):
        saved = layer.weight[index]
        sides = []
        for step in (1e-3, -1e-3):
            layer.weight[index] = saved + step
            sides.append(loss_of(layer, q, k, d))
        layer.weight[index] = saved
        np.testing.assert_allclose(got[index], (sides[0] - sides[1]) / 2e-3, atol=1e-9)


def test_every_used_bucket_gets_a_gradient():
    for bidirectional, unused in ((True, [16]), (False, [])):
        _, pullback = T5Bias(2, bidirectional=bidirectional).vjp(range(300), range(300))
        grad = pullback(np.ones((2, 300, 300)))["weight"]
        assert np.flatnonzero((grad == 0).any(axis=1)).tolist() == unused


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_gradient_of_half_precision_table_is_summed_in_float32(dtype):
    layer = T5Bias(2, init="normal", dtype=dtype, rng=0)
    bias, pullback = layer.vjp(np.zeros(100, int), np.zeros(100, int))
    assert bias.dtype == dtype
    np.testing.assert_array_equal(bias[:, 5, 7], layer.weight[0])
    grad = pullback(np.ones(bias.shape, dtype))["weight"]
    assert grad.dtype == np.float32 and grad[0].tolist() == [10_000.0, 10_000.0]


def test_the_result_is_rounded_to_dtype_once():
    layer = T5Bias(2, init="normal", rng=0)
    full = torch.from_numpy(layer.bias([0], range(50)))
    got = layer.bias([0], range(50), dtype="bfloat16")
    want = full.to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(got.view(np.int16), want)
    assert layer.bias([0], [1], dtype="float64").dtype == np.float64


@pytest.mark.parametrize("layer_dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32", "float64"])
def test_real_positions_give_the_same_dtype_and_bits_as_integers(layer_dtype, dtype):
    layer = T5Bias(2, dtype=layer_dtype, rng=0)
    want = layer.bias([0, 7], range(50), dtype=dtype)
    got = layer.bias([0.0, 7.0], range(50), dtype=dtype)
    assert got.dtype == want.dtype == (dtype or layer_dtype)
    assert got.tobytes() == want.tobytes()


def test_pullback_uses_the_positions_of_the_forward():
    layer, q = T5Bias(2, rng=0), np.arange(40)
    bias, pullback = layer.vjp(q, q)
    want = pullback(np.ones(bias.shape))["weight"]
    q += 1000
    layer.weight += 1
    np.testing.assert_array_equal(pullback(np.ones(bias.shape))["weight"], want)


# NumPy, torch and JAX


def in_float32(real):
    q, k = (rng.integers(-200, 200, n).astype("int32") for n in ((2, 5), 7))
    if real:
        q, k = (q / 8).astype("float32"), (k / 8).astype("float32")
    return q, k, rng.standard_normal((8, 3)).astype("float32")


def run_with(bidirectional, array):
    buckets = array(t5_buckets(8, max_distance=90, bidirectional=bidirectional))

    def run(q, k, weight):
        return t5_bias(q, k, weight=weight, buckets=buckets, bidirectional=bidirectional)

    return run


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("real", [False, True])
def test_torch_and_jax_give_the_same_bits_and_gradients(bidirectional, real):
    q, k, weight = in_float32(real)
    layer = T5Bias(
        3, num_buckets=8, max_distance=90, bidirectional=bidirectional, weight=weight
    )
    want, pullback = layer.vjp(q, k)
    grad = pullback(want)["weight"]
    assert np.abs(grad).max() > 1

    run = run_with(bidirectional, torch.asarray)
    table = torch.asarray(weight).requires_grad_()
    got = run(torch.asarray(q), torch.asarray(k), table)
    np.testing.assert_array_equal(got.detach(), want)
    (got**2 / 2).sum().backward()
    np.testing.assert_allclose(np.asarray(table.grad), grad, rtol=1e-5, atol=1e-5)

    run = run_with(bidirectional, jnp.asarray)
    inputs = [jnp.asarray(x) for x in (q, k, weight)]
    np.testing.assert_array_equal(run(*inputs), want)
    np.testing.assert_array_equal(jax.jit(run)(*inputs), want)
    got = jax.grad(lambda w: (run(inputs[0], inputs[1], w) ** 2 / 2).sum())(inputs[2])
    np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("real", [False, True])
def test_torch_compiles_the_bias_without_graph_breaks(real):
    inputs = in_float32(real)
    run = run_with(True, torch.asarray)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    got = compiled(*map(torch.asarray, inputs))
    np.testing.assert_array_equal(got, run_with(True, np.asarray)(*inputs))


def test_relative_positions_of_integers_and_reals_are_real():
    got = relative_positions(np.array([3], "int32"), np.array([1.5], "float32"))
    assert got.dtype == np.float32 and got.item() == -1.5
    tensors = relative_positions(torch.tensor([3]), torch.tensor([1.5], dtype=torch.half))
    assert tensors.dtype == torch.float32 and tensors.item() == -1.5


# The layer


def test_layers_do_not_share_tables():
    a = T5Bias(2, num_buckets=8, max_distance=16, rng=0)
    b = T5Bias(2, num_buckets=8, max_distance=64, rng=0)
    np.testing.assert_array_equal(a.weight, b.weight)
    first = a.bias([0], range(64))
    assert (b.bias([0], range(64)) != first).any()
    b.weight[:] = 7
    np.testing.assert_array_equal(a.bias([0], range(64)), first)


def test_config_and_state_rebuild_the_layer():
    layer = T5Bias(
        3, num_buckets=6, max_distance=9, bidirectional=False, dtype="bfloat16", rng=3
    )
    rebuilt = T5Bias(**json.loads(json.dumps(layer.config())))
    rebuilt.load_state_dict(layer.state_dict())
    assert repr(rebuilt) == repr(layer) and list(rebuilt.state_dict()) == ["weight"]
    np.testing.assert_array_equal(rebuilt.bias([5], range(9)), layer.bias([5], range(9)))


def test_a_given_table_is_not_copied_and_a_new_one_follows_its_seed():
    weight = np.zeros((32, 4), np.float32)
    assert T5Bias(4, weight=weight).weight is weight
    assert T5Bias(4, weight=weight, dtype="float16").weight.dtype == np.float16
    a, b, c = (T5Bias(4, init="normal", rng=seed).weight for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).any() and 0.7 < a.std() < 1.3
    assert (T5Bias(4, init="zeros").weight == 0).all()


@pytest.mark.rejects
@pytest.mark.parametrize("num_heads", [0, -1])
def test_rejects_num_heads_below_one(num_heads):
    with pytest.raises(ValueError, match=f"num_heads must be positive, got {num_heads}"):
        T5Bias(num_heads)


@pytest.mark.rejects
@pytest.mark.parametrize("num_buckets", [2, 33])
def test_rejects_an_odd_number_of_bidirectional_buckets(num_buckets):
    rule = f"must be even and at least 4 if bidirectional, got {num_buckets}"
    with pytest.raises(ValueError, match=f"num_buckets {rule}"):
        T5Bias(2, num_buckets=num_buckets)


@pytest.mark.rejects
def test_rejects_too_few_buckets():
    with pytest.raises(ValueError, match="num_buckets must be positive, got 0"):
        T5Bias(2, num_buckets=0)
    with pytest.raises(ValueError, match="num_buckets must be at least 2, got 1"):
        T5Bias(2, num_buckets=1, bidirectional=False)


@pytest.mark.rejects
def test_rejects_a_max_distance_within_the_exact_buckets():
    with pytest.raises(ValueError, match="max_distance must be greater than 8, .*, got 8"):
        T5Bias(2, max_distance=8)
    with pytest.raises(ValueError, match="max_distance must be greater than 16, .*, got 9"):
        T5Bias(2, max_distance=9, bidirectional=False)
    with pytest.raises(ValueError, match="max_distance must be positive, got 0"):
        T5Bias(2, max_distance=0)


@pytest.mark.rejects
def test_rejects_a_table_of_another_shape_or_dtype():
    with pytest.raises(
        ValueError, match=r"weight must have shape \(32, 2\), got \(2, 32\)"
    ):
        T5Bias(2, weight=np.zeros((2, 32)))
    with pytest.raises(TypeError, match="weight must be real, got int64"):
        T5Bias(2, weight=np.zeros((32, 2), np.int64))


@pytest.mark.rejects
def test_rejects_invalid_positions_and_gradients():
    layer = T5Bias(2)
    with pytest.raises(TypeError, match="k_positions must be integers or reals, got bool"):
        layer.bias([0], [False])
    with pytest.raises(ValueError, match="q_positions must be finite, got inf"):
        layer.bias([np.inf], [0])
    _, pullback = layer.vjp([0], [0, 1])
    with pytest.raises(
        ValueError, match=r"dbias must have shape \(2, 1, 2\), got \(2, 2\)"
    ):
        pullback(np.zeros((2, 2)))
