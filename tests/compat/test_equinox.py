"""Equinox's documented embedding example and semantics.

Golden values from equinox 0.13.8.
"""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from firstlayer.compat.equinox import Embedding, RotaryPositionalEmbedding

rng = np.random.default_rng(0)
KEY = jax.random.key(0)


class TransformerBlock(eqx.Module):
    """The example of the documentation, with its omissions filled in."""

    mha_attention: eqx.nn.MultiheadAttention
    rope_embeddings: Any

    def __init__(self, rope_embeddings, *, key):
        self.mha_attention = eqx.nn.MultiheadAttention(4, 32, key=key)
        self.rope_embeddings = rope_embeddings

    def __call__(self, x: Float[Array, "seq_length size"]):
        def process_heads(
            query_heads: Float[Array, "seq_length num_heads qk_size"],
            key_heads: Float[Array, "seq_length num_heads qk_size"],
            value_heads: Float[Array, "seq_length num_heads vo_size"],
        ) -> tuple[
            Float[Array, "seq_length num_heads qk_size"],
            Float[Array, "seq_length num_heads qk_size"],
            Float[Array, "seq_length num_heads vo_size"],
        ]:
            query_heads = jax.vmap(self.rope_embeddings, in_axes=1, out_axes=1)(query_heads)
            key_heads = jax.vmap(self.rope_embeddings, in_axes=1, out_axes=1)(key_heads)

            return query_heads, key_heads, value_heads

        x = self.mha_attention(x, x, x, process_heads=process_heads)
        return x


X = rng.standard_normal((9, 32)).astype("float32")


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_example_transformer_block(theta):
    eqx.clear_caches()
    theirs = eqx.nn.RotaryPositionalEmbedding(8, theta)
    want = TransformerBlock(theirs, key=KEY)(jnp.asarray(X))
    block = TransformerBlock(RotaryPositionalEmbedding(8, theta), key=KEY)
    run = block if theta == 10_000.0 else eqx.filter_jit(block)
    got = run(jnp.asarray(X))
    np.testing.assert_allclose(got, want, atol=1e-6)
    eqx.clear_caches()


def test_example_is_differentiable():
    block = TransformerBlock(RotaryPositionalEmbedding(8), key=KEY)
    grad = eqx.filter_jit(eqx.filter_grad(lambda block, x: (block(x) ** 2).sum()))
    grads = grad(block, X)
    assert len(jax.tree.leaves(grads)) == 4
    assert all(jnp.abs(leaf).sum() > 0 for leaf in jax.tree.leaves(grads))


# Embedding.


def test_drawn_table_equals_equinox():
    ours, theirs = Embedding(20, 3, key=KEY), eqx.nn.Embedding(20, 3, key=KEY)
    assert (ours.num_embeddings, ours.embedding_size) == (20, 3)
    assert np.array_equal(ours.weight, theirs.weight)
    ids = jnp.array([3, 19, 0, 3])
    assert np.array_equal(jax.vmap(ours)(ids), jax.vmap(theirs)(ids))
    assert np.array_equal(ours(jnp.array(5)), theirs(jnp.array(5)))
    assert np.array_equal(ours(ids, key=KEY), theirs.weight[ids])


def test_given_table_is_used_and_cast():
    table = rng.standard_normal((5, 2)).astype("float32")
    ours = Embedding(weight=jnp.asarray(table))
    assert (ours.num_embeddings, ours.embedding_size) == (5, 2)
    assert np.array_equal(ours(np.int8(4)), table[4])
    assert np.array_equal(Embedding(weight=table.tolist())(4), table[4])  # pyright: ignore
    half = Embedding(weight=jnp.asarray(table), dtype=jnp.bfloat16)
    assert half.weight.dtype == jnp.bfloat16
    assert Embedding(5, 2, dtype=jnp.float16, key=KEY).weight.dtype == jnp.float16


def test_gradients_equal_equinox():
    ours, theirs = Embedding(20, 3, key=KEY), eqx.nn.Embedding(20, 3, key=KEY)
    ids, dy = jnp.array([3, 19, 3]), jnp.asarray(rng.standard_normal((3, 3)), jnp.float32)

    def loss(layer):
        return (jax.vmap(layer)(ids) * dy).sum()

    got = eqx.filter_grad(loss)(ours).weight
    np.testing.assert_allclose(got, eqx.filter_grad(loss)(theirs).weight, atol=1e-6)


def test_gradients_of_repeated_ids_do_not_saturate():
    layer = Embedding(5, 2, dtype=jnp.bfloat16, key=KEY)
    ids = jnp.full(3000, 3)
    grad = eqx.filter_grad(lambda layer: layer(ids).sum(dtype=jnp.float32))(layer)
    assert grad.weight[3].tolist() == [3008.0, 3008.0]  # 3000 rounded to bfloat16


def test_traced_id_out_of_range_gives_nan_and_no_gradient():
    layer, ids = Embedding(5, 2, key=KEY), jnp.array([7, -6, 4])
    rows = eqx.filter_jit(layer)(ids)
    assert np.isnan(rows[:2]).all() and np.array_equal(rows[2], layer.weight[4])

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(layer, ids):
        return jnp.nansum(jax.vmap(layer)(ids))

    assert np.array_equal(grad(layer, ids).weight.sum(1), [0, 0, 0, 0, 2])


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_negative_ids_count_from_the_end_as_in_equinox(dtype):
    theirs = eqx.nn.Embedding(200, 3, key=KEY)
    ours = Embedding(weight=theirs.weight)
    ids = np.array([-1, -100, 0, 127, -128], dtype)
    want = np.stack([theirs(int(i)) for i in ids])
    assert np.array_equal(want[0], theirs.weight[199])
    assert np.array_equal(ours(-1), want[0]) and np.array_equal(ours(ids), want)
    assert np.array_equal(ours(jnp.asarray(ids)), want)
    assert np.array_equal(jax.jit(jax.vmap(ours))(jnp.asarray(ids)), want)

    def total(layer, ids):
        return jnp.sum(jax.vmap(layer)(ids) ** 2)

    grad = eqx.filter_jit(eqx.filter_grad(total))
    got, expected = grad(ours, jnp.asarray(ids)), grad(theirs, jnp.asarray(ids))
    np.testing.assert_allclose(got.weight, expected.weight, rtol=1e-6)


def test_leaves_written_by_equinox_load():
    theirs, file = eqx.nn.Embedding(20, 3, key=KEY), io.BytesIO()
    eqx.tree_serialise_leaves(file, theirs)
    file.seek(0)
    ours = eqx.tree_deserialise_leaves(file, Embedding(20, 3, key=jax.random.key(1)))
    assert np.array_equal(ours.weight, theirs.weight)


@pytest.mark.rejects
def test_embedding_rejects_bad_arguments():
    layer = Embedding(5, 2, key=KEY)
    with pytest.raises(IndexError, match="ids is 7, but num_embeddings is 5"):
        layer(jnp.array(7))
    with pytest.raises(IndexError, match=r"ids\[1\] is -6, but num_embeddings is 5"):
        layer(jnp.array([0, -6]))
    with pytest.raises(TypeError, match="ids must be integers, got bool"):
        layer(jnp.array(True))
    with pytest.raises(ValueError, match="give num_embeddings and embedding_size, or"):
        Embedding(5, key=KEY)
    with pytest.raises(ValueError, match="key must be given"):
        Embedding(5, 2)
    with pytest.raises(ValueError, match="num_embeddings must be at least 0, got -1"):
        Embedding(-1, 2, key=KEY)
    with pytest.raises(ValueError, match=r"embedding_size\), got \(3,\)"):
        Embedding(weight=jnp.ones(3))
    with pytest.raises(ValueError, match=r"weight must have shape \(4, 2\), got \(5, 2\)"):
        Embedding(4, 2, weight=jnp.ones((5, 2)))


# Rotary.


def test_two_thetas_in_one_process_are_independent():
    a, b = RotaryPositionalEmbedding(8), RotaryPositionalEmbedding(8, theta=5e5)
    x = jnp.ones((8, 8))
    first = a(x)
    assert np.abs(first - b(x)).max() > 0.3
    b(jnp.ones((16, 8)))
    assert np.array_equal(a(x), first)

    @eqx.filter_jit
    def both(a, b, x):
        return a(x), b(x)

    for got, want in zip(both(a, b, x), (first, b(x)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_features_are_paired_by_halves():
    y = RotaryPositionalEmbedding(4)(jnp.eye(4)[:1].repeat(2, axis=0))[1]
    np.testing.assert_allclose(y, [np.cos(1), 0, np.sin(1), 0], atol=1e-6)


def test_phases_are_accurate_at_large_positions():
    layer = RotaryPositionalEmbedding(4, theta=100.0)
    y = layer(jnp.ones((2, 4)), offset=131_070)
    at = np.arange(131_070, 131_072)[:, None] * np.array([1.0, 0.1])
    want = np.concatenate([np.cos(at) - np.sin(at), np.cos(at) + np.sin(at)], 1)
    np.testing.assert_allclose(y, want, atol=1e-6)


def test_single_token_with_offset_equals_full_sequence():
    layer, x = RotaryPositionalEmbedding(8), jnp.asarray(X[:, :8])
    whole = np.asarray(layer(x))
    np.testing.assert_allclose(layer(X[5:6, :8], offset=5), whole[5:6], atol=1e-6)
    step = jax.jit(lambda x, n: layer(x, offset=n))
    np.testing.assert_allclose(step(X[5:6, :8], 5), whole[5:6], atol=1e-6)
    np.testing.assert_allclose(layer(np.stack([X, X])[..., :8])[1], whole, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, of_x",
    [
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float16),
    ],
)
def test_output_dtypes_equal_equinox(dtype, of_x):
    eqx.clear_caches()
    x = jnp.asarray(X[:, :8], of_x)
    want = eqx.nn.RotaryPositionalEmbedding(8, dtype=dtype)(x)
    got = RotaryPositionalEmbedding(8, dtype=dtype)(x)
    assert got.dtype == want.dtype == of_x
    tolerance = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6}
    worst = max(tolerance[jnp.dtype(d).name] for d in (dtype, of_x))
    np.testing.assert_allclose(
        np.asarray(got, "float64"), np.asarray(want, "float64"), atol=worst * 2
    )
    eqx.clear_caches()


def test_cosines_and_sines_are_rounded_to_dtype():
    x = np.zeros((9, 8), "float32")
    x[:, 0] = 1.0
    half = np.asarray(RotaryPositionalEmbedding(8, dtype=jnp.float16)(x))
    whole = np.asarray(RotaryPositionalEmbedding(8)(x))
    assert np.array_equal(half, whole.astype("float16").astype("float32"))
    assert not np.array_equal(half, whole)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize(
    "size, end, theta", [(8, 50, 10_000.0), (6, 3, 500.0), (0, 4, 9.0)]
)
def test_precomputed_phases_equal_equinox(size, end, theta, dtype):
    theirs = eqx.nn.RotaryPositionalEmbedding.precompute_freqs_cis(size, end, theta, dtype)
    ours = RotaryPositionalEmbedding.precompute_freqs_cis(size, end, theta, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-3
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape == (end, size // 2) and a.dtype == b.dtype == dtype
        np.testing.assert_allclose(a, b, atol=tolerance)
    x = jnp.arange(12.0).reshape(2, 6)
    got = RotaryPositionalEmbedding.rotate_half(x)
    assert np.array_equal(got, eqx.nn.RotaryPositionalEmbedding.rotate_half(x))


def test_rotary_has_no_parameters_and_accepts_zero_width():
    assert not jax.tree.leaves(eqx.filter(RotaryPositionalEmbedding(8), eqx.is_array))
    assert RotaryPositionalEmbedding(0)(jnp.ones((3, 0))).shape == (3, 0)
    layer = RotaryPositionalEmbedding(8, 100.0, jnp.float16)
    assert (layer.embedding_size, layer.theta) == (8, 100.0)
    assert layer.dtype == jnp.float16 and layer == RotaryPositionalEmbedding(
        8, 100.0, jnp.float16
    )


@pytest.mark.rejects
def test_rotary_rejects_bad_arguments():
    with pytest.raises(ValueError, match="embedding_size must be even, got 3"):
        RotaryPositionalEmbedding.precompute_freqs_cis(3, 2, 10.0, jnp.float32)
    with pytest.raises(ValueError, match="end must be at least 0, got -1"):
        RotaryPositionalEmbedding.precompute_freqs_cis(4, -1, 10.0, jnp.float32)
    layer = RotaryPositionalEmbedding(8)
    with pytest.raises(ValueError, match="^embedding_size must be even, got 7"):
        RotaryPositionalEmbedding(7)
    with pytest.raises(ValueError, match="^embedding_size must be at least 0, got -2"):
        RotaryPositionalEmbedding(-2)
    with pytest.raises(ValueError, match=r"\(\.\.\., length, 8\), got \(3, 6\)"):
        layer(jnp.ones((3, 6)))
    with pytest.raises(ValueError, match=r"\(\.\.\., length, 8\), got \(8,\)"):
        layer(jnp.ones(8))
    with pytest.raises(TypeError, match="x must be real, got int32"):
        layer(jnp.ones((3, 8), jnp.int32))
    with pytest.raises(ValueError, match="smaller than 16777216 in size"):
        layer(jnp.ones((3, 8)), offset=2**24)
