"""Lucid's Embedding documentation, example by example, with its arguments and errors."""

import numpy as np
import pytest
import torch

import firstlayer.compat.lucid as lucid
import firstlayer.compat.lucid.linalg
import firstlayer.compat.lucid.nn as nn

F = nn.functional
rng = np.random.default_rng(0)


def test_example_simple_token_embedding():
    emb = nn.Embedding(num_embeddings=100, embedding_dim=16)
    idx = lucid.tensor([[1, 5, 3], [0, 2, 7]], dtype=lucid.int64)
    y = emb(idx)
    assert y.shape == (2, 3, 16)
    assert np.array_equal(y, emb.weight[[[1, 5, 3], [0, 2, 7]]])
    assert np.array_equal(emb.forward(idx), y)


def test_example_padding_idx():
    emb_pad = nn.Embedding(50, 8, padding_idx=0)
    # Row 0 is always zero and never updated
    assert (float(lucid.linalg.norm(emb_pad.weight[0])) == 0.0) is True
    idx2 = lucid.tensor([0, 3, 0, 7], dtype=lucid.int64)
    assert emb_pad(idx2).shape == (4, 8)
    y, pull = emb_pad.vjp(idx2)
    assert pull(np.ones_like(y))["weight"].ids.tolist() == [3, 7]
    emb_pad.weight[:] = 1.0
    assert (emb_pad(idx2)[[0, 2]] == 0).all() and (emb_pad(idx2)[[1, 3]] == 1).all()


# Each argument, as documented.


def test_the_table_is_drawn_from_a_standard_normal():
    weight = nn.Embedding(2000, 50, rng=1).weight
    assert weight.dtype == np.float32
    assert abs(weight.mean()) < 0.01 and abs(weight.std() - 1) < 0.01
    assert np.array_equal(weight, nn.Embedding(2000, 50, rng=1).weight)
    assert nn.Embedding(3, 2, dtype=lucid.float64).weight.dtype == np.float64


def test_negative_padding_idx_wraps():
    emb = nn.Embedding(50, 8, padding_idx=-2)
    assert emb.padding_idx == 48 and (emb.weight[48] == 0).all()
    assert nn.EmbeddingBag(50, 8, padding_idx=-2).padding_idx == 48


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_rows_beyond_max_norm_are_rescaled_in_place(p):
    emb = nn.Embedding(40, 6, max_norm=2.0, norm_type=p, rng=0)
    emb.weight[::2] *= 0.2
    before = emb.weight.copy()
    size = np.linalg.norm(before, ord=p, axis=1, keepdims=True)
    assert (size > 2).any() and (size < 2).any()
    want = np.where(size > 2, before * 2 / size, before)
    y = emb([3])
    np.testing.assert_allclose(emb.weight, want, rtol=1e-6)
    assert np.array_equal(emb.weight[size[:, 0] < 2], before[size[:, 0] < 2])
    assert np.array_equal(y[0], emb.weight[3])


def test_table_with_max_norm_and_padding_trains():
    emb = nn.Embedding(10, 4, padding_idx=0, max_norm=1.5, rng=0)
    ids, target = np.array([0, 1, 2, 2, 3]), rng.standard_normal((5, 4)) * 0.4
    losses = []
    for _ in range(60):
        y, pull = emb.vjp(ids)
        losses.append(float(((y - target)[1:] ** 2).sum()))
        grad = pull(2 * (y - target))["weight"]
        emb.weight[grad.ids] -= 0.1 * grad.values
    assert losses[-1] < 0.5 * losses[0] and (emb.weight[0] == 0).all()
    best = target[2:4].mean(0)
    np.testing.assert_allclose(emb.weight[2], best, atol=1e-4)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_scale_grad_by_freq_divides_by_frequency(padding_idx):
    # Not supported by Lucid; compared with torch 2.13.
    ids = np.array([[1, 2, 2], [2, 5, 1]])
    emb = nn.Embedding(8, 4, padding_idx, scale_grad_by_freq=True)
    twin = torch.nn.Embedding(8, 4, padding_idx, scale_grad_by_freq=True)
    dy = rng.standard_normal((2, 3, 4)).astype("float32")
    y, pull = emb.vjp(ids)
    # Counts are per call.
    emb.vjp([[1, 1, 1, 1]])
    twin(torch.from_numpy(ids)).backward(torch.from_numpy(dy))
    assert twin.weight.grad is not None
    want = twin.weight.grad.numpy()
    np.testing.assert_allclose(pull(dy)["weight"].dense(8), want, atol=1e-6)


def test_gradients_of_repeated_ids_are_summed():
    emb = nn.Embedding(6, 3)
    y, pull = emb.vjp([[1, 2], [2, 5]])
    sums = pull(np.ones_like(y))["weight"].dense(6).sum(1)
    assert sums.tolist() == [0, 3, 6, 0, 0, 3]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_ids_of_any_integer_dtype_are_looked_up(dtype):
    emb = nn.Embedding(100, 3)
    idx = lucid.tensor([[99, 0]], dtype=getattr(lucid, dtype))
    assert idx.dtype == np.dtype(dtype)
    assert np.array_equal(emb(idx), emb.weight[[[99, 0]]])


def test_bool_and_empty_ids():
    emb, bag = nn.Embedding(4, 3), nn.EmbeddingBag(4, 3, mode="sum")
    assert np.array_equal(emb(np.array([True, False])), emb.weight[[1, 0]])
    assert emb.vjp(np.array([True]))[0].shape == (1, 3)
    assert np.array_equal(bag(np.array([[True, True]]))[0], 2 * bag.weight[1])
    assert emb([]).shape == (0, 3)


def test_extra_repr_shows_non_default_arguments():
    emb = nn.Embedding(10, 3, padding_idx=-1, max_norm=2.0, norm_type=1.0)
    assert emb.extra_repr() == "10, 3, padding_idx=9, max_norm=2.0, norm_type=1.0"
    assert repr(nn.Embedding(10, 3)) == "Embedding(10, 3)"
    assert repr(nn.EmbeddingBag(10, 3, mode="sum")) == "EmbeddingBag(10, 3, mode='sum')"


# Bags, compared with torch 2.13; Lucid ignores some of these arguments.


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_equal_torch_with_offsets_norms_and_padding(mode, last):
    bag = nn.EmbeddingBag(
        10,
        4,
        max_norm=1.5,
        norm_type=1.0,
        mode=mode,
        sparse=True,
        padding_idx=3,
        include_last_offset=last,
        rng=0,
    )
    twin = torch.nn.EmbeddingBag(
        10, 4, 1.5, 1.0, mode=mode, padding_idx=3, include_last_offset=last
    )
    with torch.no_grad():
        twin.weight.copy_(torch.from_numpy(bag.weight))
    ids, offsets = np.array([1, 3, 4, 9, 4]), np.array([0, 2, 5] if last else [0, 2])
    dy = rng.standard_normal((2, 4)).astype("float32")
    y, pull = bag.vjp(ids, offsets)
    want = twin(torch.from_numpy(ids), torch.from_numpy(offsets))
    want.backward(torch.from_numpy(dy))
    np.testing.assert_allclose(y, want.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(bag.forward(ids, offsets), y)
    assert twin.weight.grad is not None
    got = pull(dy)["weight"].dense(10)
    np.testing.assert_allclose(got, twin.weight.grad.numpy(), atol=1e-6)


def test_bags_with_weights_and_frequencies():
    bag = nn.EmbeddingBag(10, 4, scale_grad_by_freq=True, mode="sum", rng=0)
    ids, weights = np.array([[1, 1, 2]]), np.array([[0.5, 2.0, 3.0]], "float32")
    y, pull = bag.vjp(ids, None, weights)
    np.testing.assert_allclose(y[0], 2.5 * bag.weight[1] + 3 * bag.weight[2], rtol=1e-6)
    grads = pull(np.ones_like(y))
    np.testing.assert_allclose(grads["weight"].values[:, 0], [1.25, 3.0])
    np.testing.assert_allclose(
        grads["per_sample_weights"][0], bag.weight[ids[0]].sum(1), rtol=1e-6
    )


# Positions.


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_sinusoids_equal_the_formula(base):
    pe = nn.SinusoidalEmbedding(3000, 8, base=base)
    at = np.arange(3000.0)[:, None] * base ** (-np.arange(0, 8, 2) / 8)
    want = np.stack([np.sin(at), np.cos(at)], -1).reshape(3000, 8)
    np.testing.assert_allclose(pe(), want, atol=2.5e-7)
    assert pe.forward() is pe.pe and pe.pe.dtype == np.float32
    other = nn.SinusoidalEmbedding(3000, 8)
    assert np.array_equal(other(), pe()) == (base == 10_000.0)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary_tables_have_equal_halves(base):
    cos, sin = nn.RotaryEmbedding(8, 3000, base)()
    at = np.arange(3000.0)[:, None] * base ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.tile(np.cos(at), 2), atol=2.5e-7)
    np.testing.assert_allclose(sin, np.tile(np.sin(at), 2), atol=2.5e-7)
    again = nn.RotaryEmbedding(8, 3000, base).forward()
    assert np.array_equal(again[0], cos) and np.array_equal(again[1], sin)


@pytest.mark.parametrize("base", [10_000.0, 20.0])
def test_sinusoids_of_a_grid_encode_column_then_row(base):
    pe = nn.SinusoidalEmbedding2D(3, 5, 8, base=base)
    assert pe.forward() is pe.pe and pe().shape == (15, 8) and pe.pe.dtype == np.float32
    want = np.zeros((15, 8))
    for row in range(3):
        for column in range(5):
            for half, position in enumerate((column, row)):
                for pair in range(2):
                    angle = position * base ** (-2 * pair / 4)
                    at = half * 4 + pair * 2
                    want[row * 5 + column, at : at + 2] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(pe(), want, atol=2.5e-7)
    assert np.array_equal(F.sinusoidal_embedding_2d(3, 5, 8, base=base), pe())
    table = F.sinusoidal_embedding(5, 4, base=base)
    assert np.array_equal(pe()[5:10, :4], table)


# Functions.


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ids", [None, [3, 0, 7]])
def test_rotary_of_queries_and_keys(interleaved, ids):
    cos, sin = nn.RotaryEmbedding(6, 9, 50.0)()
    q = rng.standard_normal((2, 4, 3, 6))
    k = rng.standard_normal((2, 1, 3, 6)).astype(np.float32)
    got = F.apply_rotary_emb(q, k, cos, sin, ids, interleaved=interleaved)
    at = np.arange(3) if ids is None else np.array(ids)
    for x, y in zip((q, k), got, strict=True):
        assert y.dtype == x.dtype
        for pair in range(3):
            angle = at * 50.0 ** (-2 * pair / 6)
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
            turned = (x[..., i] + 1j * x[..., j]) * np.exp(1j * angle)
            np.testing.assert_allclose(y[..., i], turned.real, atol=1e-6)
            np.testing.assert_allclose(y[..., j], turned.imag, atol=1e-6)


def test_rotary_uses_both_halves_of_the_tables_and_positions_of_a_batch():
    # The formula of Lucid's documentation, with tables that are not sinusoids.
    q, k = rng.standard_normal((2, 2, 3, 5, 4))
    q, k = q[None], k[None]
    cos, sin = rng.standard_normal((2, 9, 4))
    got, _ = F.apply_rotary_emb(q, k, cos, sin)
    half = np.concatenate([-q[..., 2:], q[..., :2]], axis=-1)
    np.testing.assert_allclose(got[0], (q * cos[:5] + half * sin[:5])[0], atol=1e-12)
    x = rng.standard_normal((2, 3, 5, 4))
    ids = rng.integers(0, 9, (2, 5))
    _, got = F.apply_rotary_emb(x, x, cos, sin, ids)
    for row in range(2):
        want, _ = F.apply_rotary_emb(x[row], x[row], cos, sin, ids[row])
        assert np.array_equal(got[row], want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functional_lookups_equal_the_layers(dtype):
    table = rng.standard_normal((7, 3)).astype(dtype)
    layer = nn.Embedding(7, 3, padding_idx=-2, max_norm=0.9, norm_type=1.0, dtype=dtype)
    layer.weight[:] = table
    ids = np.array([[5, 1], [6, 6]], np.int8)
    want, given = layer(ids), table.copy()
    got = F.embedding(ids, given, -2, 0.9, 1.0, True, True)
    assert np.array_equal(got, want) and (got[0, 0] == 0).all() and got.dtype == dtype
    assert np.array_equal(given, layer.weight) and not np.array_equal(given, table)
    assert np.array_equal(F.embedding([True, False], table), table[[1, 0]])
    columns = np.asfortranarray(table)
    F.embedding(ids, columns, max_norm=0.9, norm_type=1.0)
    assert np.array_equal(columns, given)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_functional_bags_equal_torch(mode):
    table = rng.standard_normal((7, 3)).astype(np.float32)
    ids, offsets = np.array([1, 2, 6, 6, 0]), np.array([0, 2, 5])
    options = {"mode": mode, "include_last_offset": True, "padding_idx": 6}
    given = table.copy()
    got = F.embedding_bag(ids, given, offsets, 1.2, 3.0, **options)
    theirs = torch.tensor(table)
    want = torch.nn.functional.embedding_bag(
        torch.tensor(ids), theirs, torch.tensor(offsets), 1.2, 3.0, **options
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    norms = (np.abs(given) ** 3).sum(-1) ** (1 / 3)
    assert norms.max() <= 1.2 * (1 + 1e-6) < ((np.abs(table) ** 3).sum(-1) ** (1 / 3)).max()
    weights = rng.standard_normal((2, 2)).astype(np.float32)
    got = F.embedding_bag([[1, 2], [3, 4]], table, mode="sum", per_sample_weights=weights)
    want = (table[[[1, 2], [3, 4]]] * weights[..., None]).sum(1)
    np.testing.assert_allclose(got, want, rtol=1e-5)


# Tensors.


def test_tensor_returns_an_array():
    assert lucid.tensor([1.5]).dtype == np.float32 and lucid.tensor([1]).dtype == np.int64
    x = np.ones(3)
    y = lucid.tensor(x)
    y[0] = 5
    assert y.dtype == np.float64 and x[0] == 1
    assert lucid.tensor(x, lucid.float16).dtype == np.float16


def test_norm_over_all_or_along_an_axis():
    x = rng.standard_normal((3, 4))
    assert lucid.linalg.norm(x) == pytest.approx(np.sqrt((x**2).sum()))
    assert lucid.linalg.norm(x, 1) == pytest.approx(np.abs(x).sum())
    got = firstlayer.compat.lucid.linalg.norm(x, ord=3, axis=1, keepdims=True)
    np.testing.assert_allclose(got, (np.abs(x) ** 3).sum(1, keepdims=True) ** (1 / 3))


@pytest.mark.rejects
def test_bad_arguments_are_rejected():
    with pytest.raises(ValueError, match="embedding_dim must be divisible by 4, got 6"):
        nn.SinusoidalEmbedding2D(2, 2, 6)
    with pytest.raises(ValueError, match="height must be positive, got 0"):
        F.sinusoidal_embedding_2d(0, 2, 4)
    with pytest.raises(ValueError, match="device must be None or 'cpu', got 'metal'"):
        F.sinusoidal_embedding(2, 4, device="metal")
    with pytest.raises(ValueError, match=r"weight must have shape .*, got \(3,\)"):
        F.embedding([0], np.ones(3))
    with pytest.raises(IndexError, match=r"ids\[1\] is 2, but num_embeddings is 2"):
        F.embedding([0, 2], np.ones((2, 3)))
    x, (cos, sin) = np.ones((3, 4)), nn.RotaryEmbedding(4, 2)()
    with pytest.raises(IndexError, match=r"position_ids\[2\] is 2, but the number of pos"):
        F.apply_rotary_emb(x, x, cos, sin)
    with pytest.raises(ValueError, match=r"k must end in 4 features like cos, got shape"):
        F.apply_rotary_emb(x, x[:, :2], cos, sin, [0, 1, 0])
    with pytest.raises(ValueError, match=r"q must be \(..., length, head_dim\)"):
        F.apply_rotary_emb(x, x, cos, sin[:1])
    with pytest.raises(TypeError, match="q must be real, got int64"):
        F.apply_rotary_emb(x.astype(int), x, cos, sin)
    with pytest.raises(IndexError, match=r"ids\[1\] is 100, but num_embeddings is 100"):
        nn.Embedding(100, 4)([0, 100])
    with pytest.raises(IndexError, match=r"ids\[0\] is -1, but num_embeddings is 100"):
        nn.Embedding(100, 4)([-1])
    with pytest.raises(TypeError, match="ids must be integers, got float64"):
        nn.Embedding(100, 4)([1.0])
    with pytest.raises(ValueError, match=r"padding_idx must be in \[-5, 5\)"):
        nn.Embedding(5, 4, padding_idx=5)
    with pytest.raises(ValueError, match="device must be None or 'cpu', got 'metal'"):
        nn.Embedding(5, 4, device="metal")
    with pytest.raises(ValueError, match="device must be None or 'cpu', got 'metal'"):
        nn.EmbeddingBag(5, 4, device="metal")
    with pytest.raises(ValueError, match="mode must be 'sum', 'mean' or 'max', got 'avg'"):
        nn.EmbeddingBag(5, 4, mode="avg")
    with pytest.raises(ValueError, match="embedding_dim must be positive and even, got 7"):
        nn.SinusoidalEmbedding(10, 7)
    with pytest.raises(ValueError, match="head_dim must be positive and even, got 7"):
        nn.RotaryEmbedding(7, 10)
    with pytest.raises(ValueError, match="num_positions must be positive, got 0"):
        nn.SinusoidalEmbedding(0, 8)
    with pytest.raises(ValueError, match="max_position_embeddings must be positive"):
        nn.RotaryEmbedding(8, 0)
