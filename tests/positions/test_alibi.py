"""ALiBi: slopes, bias, half precision, other libraries."""

import json
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays, integer_dtypes
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from firstlayer.numpy.alibi import AlibiBias
from firstlayer.positions.alibi import alibi_bias, alibi_slopes

with warnings.catch_warnings():
    # Importing it calls torch.jit.script, which is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.x_transformers import AlibiPositionalBias

rng = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def formula(q, k, slopes, symmetric):
    """Return the bias in float64, one element at a time."""
    out = np.empty((len(slopes), len(q), len(k)))
    for h, slope in enumerate(slopes):
        for i, m in enumerate(q):
            for j, n in enumerate(k):
                out[h, i, j] = -slope * (abs(m - n) if symmetric else m - n)
    return out


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# The slopes


@pytest.mark.parametrize("num_heads", [1, 2, 8, 64])
@pytest.mark.parametrize("max_bias", [8.0, 5.0])
def test_slopes_of_a_power_of_two_are_a_geometric_sequence(num_heads, max_bias):
    slopes = alibi_slopes(num_heads, max_bias=max_bias)
    np.testing.assert_allclose(slopes[-1], 2.0**-max_bias)
    np.testing.assert_allclose(slopes[1:] / slopes[:-1], slopes[0])


def test_slopes_of_eight_heads_match_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("num_heads", [*range(1, 35), 40, 63, 65, 112])
def test_slopes_match_x_transformers(num_heads):
    want = AlibiPositionalBias._get_slopes(num_heads)
    np.testing.assert_allclose(alibi_slopes(num_heads), want, rtol=1e-13)


@pytest.mark.parametrize("num_heads", [3, 12, 16, 40])
@pytest.mark.parametrize("max_bias", [8.0, 4.5])
def test_slopes_match_mpt_at_any_max_bias(num_heads, max_bias):
    last_row = build_mpt_alibi_tensor(num_heads, 2, alibi_bias_max=max_bias)
    want = -last_row[:, 0, 0].numpy()
    np.testing.assert_allclose(alibi_slopes(num_heads, max_bias=max_bias), want, rtol=1e-6)


def test_factor_divides_distances():
    q, k = np.arange(5), np.arange(9)
    stretched = AlibiBias(6, factor=4.0).bias(4 * q, 4 * k, dtype="float64")
    np.testing.assert_allclose(stretched, AlibiBias(6).bias(q, k, dtype="float64"))


# The bias


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_heads", [8, 5])
def test_bias_matches_formula(symmetric, num_heads):
    q, k = [7, 0, 300], [0, 7, 12, 256, -5]
    layer = AlibiBias(num_heads, symmetric=symmetric, max_bias=6.0)
    want = formula(q, k, alibi_slopes(num_heads, max_bias=6.0), symmetric)
    np.testing.assert_allclose(layer.bias(q, k), want, rtol=2e-7)
    np.testing.assert_allclose(layer(q, k, dtype="float64"), want, rtol=1e-15)


@pytest.mark.parametrize("symmetric", [False, True])
def test_bias_depends_on_relative_position_only(symmetric):
    layer, q, k = AlibiBias(12, symmetric=symmetric), np.arange(50), np.arange(70)
    here = layer.bias(q, k)
    for start in (1, -1_000_003, 2**24 - 1, 2**31, 2**52):
        np.testing.assert_array_equal(layer.bias(q + start, k + start), here)


def test_bias_decays_with_distance_and_is_zero_on_the_diagonal():
    causal = AlibiBias(6).bias(range(40), range(40))
    assert (np.diff(causal, axis=-1) > 0).all()
    symmetric = AlibiBias(6, symmetric=True).bias(range(40), range(40))
    assert (np.diff(symmetric[:, 0], axis=-1) < 0).all()
    np.testing.assert_array_equal(symmetric, symmetric.swapaxes(-1, -2))
    for bias in (causal, symmetric):
        assert (np.diagonal(bias, axis1=-2, axis2=-1) == 0).all()


def test_causal_and_symmetric_agree_on_keys_before_the_query():
    causal = AlibiBias(6).bias(range(20), range(20))
    symmetric = AlibiBias(6, symmetric=True).bias(range(20), range(20))
    np.testing.assert_array_equal(np.tril(causal), np.tril(symmetric))
    np.testing.assert_array_equal(np.triu(causal), -np.triu(symmetric))


@given(st.data())
def test_bias_of_any_integer_dtype_matches_formula(data):
    positions = arrays(
        data.draw(integer_dtypes() | st.just(np.dtype("u1")) | st.just(np.dtype("u4"))),
        st.integers(0, 4),
        elements=st.integers(0, 127),
    )
    q, k = data.draw(positions), data.draw(positions)
    symmetric, heads = data.draw(st.booleans()), data.draw(st.integers(1, 9))
    got = AlibiBias(heads, symmetric=symmetric).bias(q, k)
    want = formula(q.tolist(), k.tolist(), alibi_slopes(heads), symmetric)
    np.testing.assert_allclose(got, want, rtol=2e-7)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "i1"])
def test_narrow_and_unsigned_positions_do_not_wrap(dtype):
    q, k = np.array([100, 0], dtype), np.array([0, 127], dtype)
    slopes = alibi_slopes(2).astype("float32")
    for array in (np.asarray, torch.asarray, jnp.asarray):
        got = alibi_bias(array(q), array(k), slopes=array(slopes))
        np.testing.assert_array_equal(got[0], [[-100 / 16, 27 / 16], [0, 127 / 16]])


def test_extreme_positions_do_not_wrap():
    layer, far = AlibiBias(8), np.array([2**64 - 1], np.uint64)
    np.testing.assert_array_equal(layer.bias(far, far - np.uint64(2))[0], [[-1.0]])
    q, k = np.array([2**31 - 1], np.int32), np.array([-(2**31)], np.int32)
    np.testing.assert_array_equal(layer.bias(q, k)[0], [[-(2.0**31)]])


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_half_precision_positions_are_upcast_before_subtraction(dtype):
    q, k = np.array([0.25, 3.5, 250.0]).astype(dtype), np.array([1.5, 0.75]).astype(dtype)
    got = AlibiBias(4, symmetric=True).bias(q, k)
    want = formula(q.tolist(), k.tolist(), alibi_slopes(4), True)
    np.testing.assert_array_equal(got, want)
    mixed = AlibiBias(4).bias([2, 7], k)
    want = formula([2, 7], k.tolist(), alibi_slopes(4), False)
    np.testing.assert_array_equal(mixed, want)


# Positions


def test_bias_of_one_query_is_a_row_of_the_whole():
    layer = AlibiBias(6)
    whole = layer.bias(range(100), range(100))
    np.testing.assert_array_equal(layer.bias([99], range(100)), whole[:, -1:])


def test_batched_positions_equal_separate_calls():
    layer, q, k = AlibiBias(3), rng.integers(0, 99, (3, 4)), rng.integers(0, 99, (3, 5))
    got = layer.bias(q, k)
    assert got.shape == (3, 3, 4, 5)
    for row in range(3):
        np.testing.assert_array_equal(got[row], layer.bias(q[row], k[row]))
    np.testing.assert_array_equal(layer.bias(q[0], k), layer.bias(np.tile(q[0], (3, 1)), k))
    np.testing.assert_array_equal(layer.bias(q, k[:1]), layer.bias(q, k[0]))


def test_left_padded_positions_give_the_unpadded_bias():
    layer, padded = AlibiBias(4), np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    got = layer.bias(padded, padded)
    np.testing.assert_array_equal(got[0, :, 2:, 2:], layer.bias(range(3), range(3)))


# Half precision


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_heads", [8, 12])
def test_half_precision_is_float32_rounded_once(dtype, num_heads):
    layer, keys = AlibiBias(num_heads, symmetric=True), np.arange(0, 60_000, 7)
    full = layer.bias([59_999], keys)
    got = layer.bias([59_999], keys, dtype=dtype)
    torch_rounded = torch.from_numpy(full).to(getattr(torch, dtype)).view(torch.int16)
    np.testing.assert_array_equal(got.view(np.int16), torch_rounded.numpy())


def test_bfloat16_bias_is_exact_near_the_diagonal_of_long_sequences():
    layer, last = AlibiBias(8), 1_000_000
    near = layer.bias([last], np.arange(last - 256, last + 1), dtype="bfloat16")
    want = -np.arange(256, -1, -1) * alibi_slopes(8)[:, None, None]
    np.testing.assert_array_equal(near.astype(np.float64), want)


def test_half_precision_slopes_give_float32_bias():
    slopes = alibi_slopes(8).astype(BFLOAT16)
    got = alibi_bias(np.array([0]), np.arange(1000), slopes=slopes)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[0, 0], np.arange(1000) / 2)


# Other libraries


@pytest.mark.parametrize("num_heads", [8, 6])
def test_attention_matches_bloom(num_heads):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    key_only = build_alibi_tensor(mask, num_heads, torch.float32)
    key_only = key_only.reshape(2, num_heads, 1, 9).numpy()
    positions = ((mask.cumsum(-1) - 1) * mask).numpy()
    ours = AlibiBias(num_heads).bias(positions, positions)
    scores = rng.standard_normal((2, num_heads, 9, 9))
    hidden = np.tril(np.ones((9, 9))) * mask.numpy()[:, None, None] == 0
    scores[np.broadcast_to(hidden, scores.shape)] = -1e9
    got, want = softmax(scores + ours), softmax(scores + key_only)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(got[1, :, 3:], want[1, :, 3:], atol=1e-6)


@pytest.mark.parametrize("num_heads", [8, 12])
def test_last_row_matches_mpt(num_heads):
    want = build_mpt_alibi_tensor(num_heads, 33, alibi_bias_max=4).numpy()
    got = AlibiBias(num_heads, max_bias=4.0).bias([32], range(33))
    np.testing.assert_allclose(got, want, rtol=2e-7)


@pytest.mark.parametrize("num_heads", [8, 6])
def test_symmetric_bias_matches_x_transformers(num_heads):
    theirs, ours = AlibiPositionalBias(num_heads), AlibiBias(num_heads, symmetric=True)
    got = ours.bias(range(6, 17), range(17))
    np.testing.assert_allclose(got, theirs(11, 17).numpy(), rtol=2e-7)
    q, k = torch.randint(0, 99, (2, 4)), torch.randint(0, 99, (2, 7))
    want = theirs.forward_custom_pos(q, k).numpy()
    np.testing.assert_allclose(ours.bias(q.numpy(), k.numpy()), want, rtol=2e-7)


# NumPy, torch and JAX


def in_float32(real):
    q, k = (rng.integers(-9, 2**20, n).astype("int32") for n in ((2, 5), 7))
    if real:
        q, k = (q / 8).astype("float32"), (k / 8).astype("float32")
    return q, k, alibi_slopes(6).astype("float32")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("real", [False, True])
def test_torch_and_jax_give_the_same_bits(symmetric, real):
    def run(q, k, slopes):
        return alibi_bias(q, k, slopes=slopes, symmetric=symmetric)

    inputs = in_float32(real)
    want = run(*inputs)
    assert want.dtype == np.float32 and want.shape == (2, 6, 5, 7)
    np.testing.assert_array_equal(run(*map(torch.asarray, inputs)), want)
    for f in (run, jax.jit(run)):
        np.testing.assert_array_equal(f(*map(jnp.asarray, inputs)), want)


@pytest.mark.parametrize("real", [False, True])
def test_torch_compiles_the_bias_without_graph_breaks(real):
    def run(q, k, slopes):
        return alibi_bias(q, k, slopes=slopes, symmetric=True)

    inputs = in_float32(real)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    np.testing.assert_array_equal(compiled(*map(torch.asarray, inputs)), run(*inputs))


# The layer


def test_layers_do_not_share_slopes():
    a, b = AlibiBias(4), AlibiBias(4, max_bias=2.0, symmetric=True, factor=0.5)
    first = a.bias([0], [0, 1])
    assert b.bias([0], [0, 1]).ravel()[1] == -(2.0**-0.5) * 2
    np.testing.assert_array_equal(a.bias([0], [0, 1]), first)
    assert a.slopes[0] == 0.25


def test_config_rebuilds_the_layer_and_there_are_no_parameters():
    layer = AlibiBias(5, symmetric=True, max_bias=6.0, factor=2.0)
    rebuilt = AlibiBias(**json.loads(json.dumps(layer.config())))
    assert repr(rebuilt) == repr(layer)
    np.testing.assert_array_equal(rebuilt.bias([3], [0, 9]), layer.bias([3], [0, 9]))
    assert layer.parameters() == {}


def test_a_subclass_has_the_config_of_its_base():
    class Subclass(AlibiBias):
        pass

    layer = Subclass(5, max_bias=6.0)
    assert layer.config() == AlibiBias(5, max_bias=6.0).config()
    assert repr(layer).startswith("Subclass(num_heads=5, ")


@pytest.mark.rejects
@pytest.mark.parametrize("num_heads", [0, -3])
def test_rejects_num_heads_below_one(num_heads):
    with pytest.raises(ValueError, match=f"num_heads must be positive, got {num_heads}"):
        AlibiBias(num_heads)


@pytest.mark.rejects
@pytest.mark.parametrize("name", ["max_bias", "factor"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rejects_options_that_are_not_positive(name, value):
    with pytest.raises(
        ValueError, match=f"{name} must be positive and finite, got {value}"
    ):
        AlibiBias(2, **{name: value})


@pytest.mark.rejects
def test_rejects_invalid_positions():
    with pytest.raises(TypeError, match="q_positions must be integers or reals, got bool"):
        AlibiBias(2).bias([True], [0])
    with pytest.raises(ValueError, match="k_positions must be finite, got nan"):
        AlibiBias(2).bias([0], [1.0, float("nan")])
    with pytest.raises(ValueError, match=r"q_positions must have shape .*, got \(\)"):
        AlibiBias(2).bias(3, [0])
    with pytest.raises(
        ValueError, match=r"k_positions must have shape .*, got \(1, 1, 2\)"
    ):
        AlibiBias(2).bias([3], [[[0, 1]]])
    with pytest.raises(ValueError, match="must have the same batch, got 2 and 3"):
        AlibiBias(2).bias([[0], [1]], [[0], [1], [2]])


@pytest.mark.rejects
def test_rejects_a_dtype_that_is_not_floating():
    with pytest.raises(TypeError, match="dtype must be .*, got int32"):
        AlibiBias(2).bias([0], [0], dtype="int32")
