"""TinyTorch's module 11: its own tests and examples, and gradients everywhere."""

import copy
import math
import pickle
import weakref

import numpy as np
import pytest
import torch

from firstlayer.compat.tinytorch import (
    Embedding,
    EmbeddingLayer,
    PositionalEncoding,
    Tensor,
    analyze_embedding_memory_scaling,
    analyze_embedding_performance,
    analyze_positional_encoding_strategies,
    create_sinusoidal_embeddings,
)

rng = np.random.default_rng(0)

# Tests of the original document, in its order and words.


def test_unit_embedding():
    # Test 1: Basic embedding creation and forward pass
    embed = Embedding(vocab_size=100, embed_dim=64)

    # Single sequence
    tokens = Tensor([1, 2, 3])
    output = embed.forward(tokens)

    assert output.shape == (3, 64), f"Expected shape (3, 64), got {output.shape}"
    assert len(embed.parameters()) == 1, "Should have 1 parameter (weight matrix)"
    assert embed.parameters()[0].shape == (100, 64), "Weight matrix has wrong shape"

    # Test 2: Batch processing
    batch_tokens = Tensor([[1, 2, 3], [4, 5, 6]])
    batch_output = embed.forward(batch_tokens)

    assert batch_output.shape == (2, 3, 64)

    # Test 3: Embedding lookup consistency
    single_lookup = embed.forward(Tensor([1]))
    batch_lookup = embed.forward(Tensor([[1]]))

    # Should get same embedding for same token
    assert np.allclose(single_lookup.data[0], batch_lookup.data[0, 0])
    assert np.array_equal(batch_output.data, embed.weight.data[batch_tokens.data])

    # Test 4: Parameter access
    params = embed.parameters()
    assert all(p.requires_grad for p in params), "All parameters should require gradients"


def test_unit_positional_encoding():
    # Test 1: Basic functionality
    pos_enc = PositionalEncoding(max_seq_len=512, embed_dim=64)

    # Create sample embeddings
    embeddings = Tensor(rng.standard_normal((2, 10, 64)))
    output = pos_enc.forward(embeddings)

    assert output.shape == (2, 10, 64), f"Expected shape (2, 10, 64), got {output.shape}"

    # Test 2: Position consistency
    # Same position should always get same encoding
    emb1 = Tensor(np.zeros((1, 5, 64)))
    emb2 = Tensor(np.zeros((1, 5, 64)))

    out1 = pos_enc.forward(emb1)
    out2 = pos_enc.forward(emb2)

    assert np.allclose(out1.data, out2.data), "Position encodings should be consistent"

    # Test 3: Different positions get different encodings
    short_emb = Tensor(np.zeros((1, 3, 64)))
    long_emb = Tensor(np.zeros((1, 5, 64)))

    short_out = pos_enc.forward(short_emb)
    long_out = pos_enc.forward(long_emb)

    # First 3 positions should match
    assert np.allclose(short_out.data, long_out.data[:, :3, :])
    assert np.unique(long_out.data[0], axis=0).shape == (5, 64)

    # Test 4: Parameters
    params = pos_enc.parameters()
    assert len(params) == 1, "Should have 1 parameter (position embeddings)"
    assert params[0].shape == (512, 64), "Position embedding matrix has wrong shape"


def test_unit_sinusoidal_embeddings():
    # Test 1: Basic shape and properties
    pe = create_sinusoidal_embeddings(512, 64)

    assert pe.shape == (512, 64), f"Expected shape (512, 64), got {pe.shape}"

    # Test 2: Position 0 should be mostly zeros and ones
    pos_0 = pe.data[0]

    # Even indices should be sin(0) = 0
    assert np.allclose(pos_0[0::2], 0, atol=1e-6), "Even indices at position 0 should be ~0"

    # Odd indices should be cos(0) = 1
    assert np.allclose(pos_0[1::2], 1, atol=1e-6), "Odd indices at position 0 should be ~1"

    # Test 3: Different positions should have different encodings
    pe_small = create_sinusoidal_embeddings(10, 8)

    # Check that consecutive positions are different
    for i in range(9):
        assert not np.allclose(pe_small.data[i], pe_small.data[i + 1])

    # Test 4: Frequency properties
    # Higher dimensions should have lower frequencies (change more slowly)
    pe_test = create_sinusoidal_embeddings(100, 16)

    # First dimension should change faster than last dimension
    first_dim_changes = np.sum(np.abs(np.diff(pe_test.data[:10, 0])))
    last_dim_changes = np.sum(np.abs(np.diff(pe_test.data[:10, -1])))

    assert first_dim_changes > last_dim_changes

    # Test 5: Odd embed_dim handling
    pe_odd = create_sinusoidal_embeddings(10, 7)
    assert pe_odd.shape == (10, 7), "Should handle odd embedding dimensions"


def test_unit_complete_embedding_system():
    # Test 1: Learned positional encoding
    embed_learned = EmbeddingLayer(
        vocab_size=100, embed_dim=64, max_seq_len=128, pos_encoding="learned"
    )

    tokens = Tensor([[1, 2, 3], [4, 5, 6]])
    output_learned = embed_learned.forward(tokens)

    assert output_learned.shape == (2, 3, 64)

    # Test 2: Sinusoidal positional encoding
    embed_sin = EmbeddingLayer(vocab_size=100, embed_dim=64, pos_encoding="sinusoidal")

    output_sin = embed_sin.forward(tokens)
    assert output_sin.shape == (2, 3, 64), "Sinusoidal embedding should have same shape"

    # Test 3: No positional encoding
    embed_none = EmbeddingLayer(vocab_size=100, embed_dim=64, pos_encoding=None)

    output_none = embed_none.forward(tokens)
    assert output_none.shape == (2, 3, 64), "No pos encoding should have same shape"

    # Test 4: 1D input handling
    tokens_1d = Tensor([1, 2, 3])
    output_1d = embed_learned.forward(tokens_1d)

    assert output_1d.shape == (3, 64)
    assert np.array_equal(output_1d.data, output_learned.data[0])

    # Test 5: Embedding scaling
    embed_scaled = EmbeddingLayer(
        vocab_size=100, embed_dim=64, pos_encoding=None, scale_embeddings=True
    )

    # Use same weights to ensure fair comparison
    embed_scaled.token_embedding.weight = embed_none.token_embedding.weight

    output_scaled = embed_scaled.forward(tokens)
    output_unscaled = embed_none.forward(tokens)

    # Scaled version should be sqrt(64) times larger
    scale_factor = math.sqrt(64)
    expected_scaled = output_unscaled.data * scale_factor
    assert np.allclose(output_scaled.data, expected_scaled, rtol=1e-5)

    # Test 6: Parameter counting
    params_learned = embed_learned.parameters()
    params_sin = embed_sin.parameters()
    params_none = embed_none.parameters()

    assert len(params_learned) == 2, "Learned encoding should have 2 parameter tensors"
    assert len(params_sin) == 1, "Sinusoidal encoding should have 1 parameter tensor"
    assert len(params_none) == 1, "No pos encoding should have 1 parameter tensor"


def test_module():
    # Integration Test 1: Realistic NLP pipeline
    # Simulate a small transformer setup
    vocab_size = 1000
    embed_dim = 128
    max_seq_len = 64

    # Create embedding layer
    embed_layer = EmbeddingLayer(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        max_seq_len=max_seq_len,
        pos_encoding="learned",
        scale_embeddings=True,
    )

    # Simulate tokenized sentences
    sentences = [
        [1, 15, 42, 7, 99],  # "the cat sat on mat"
        [23, 7, 15, 88],  # "dog chased the ball"
        [1, 67, 15, 42, 7, 99, 34],  # "the big cat sat on mat here"
    ]

    # Process each sentence
    outputs = []
    for sentence in sentences:
        tokens = Tensor(sentence)
        embedded = embed_layer.forward(tokens)
        outputs.append(embedded)

        # Verify output shape
        expected_shape = (len(sentence), embed_dim)
        assert embedded.shape == expected_shape

    # Integration Test 2: Batch processing with padding
    # Create padded batch (real-world scenario)
    max_len = max(len(s) for s in sentences)
    batch_tokens = []

    for sentence in sentences:
        # Pad with zeros (assuming 0 is padding token)
        padded = sentence + [0] * (max_len - len(sentence))
        batch_tokens.append(padded)

    batch_tensor = Tensor(batch_tokens)  # (3, 7)
    batch_output = embed_layer.forward(batch_tensor)

    assert batch_output.shape == (3, max_len, embed_dim)
    for i, embedded in enumerate(outputs):
        assert np.array_equal(batch_output.data[i, : len(sentences[i])], embedded.data)

    # Integration Test 3: Different positional encoding types
    test_tokens = Tensor([[1, 2, 3, 4, 5]])

    # Test all position encoding types
    for pe_type in ["learned", "sinusoidal", None]:
        embed_test = EmbeddingLayer(vocab_size=100, embed_dim=64, pos_encoding=pe_type)

        output = embed_test.forward(test_tokens)
        assert output.shape == (1, 5, 64), f"PE type {pe_type} failed shape test"

        # Check parameter counts
        assert len(embed_test.parameters()) == (2 if pe_type == "learned" else 1)

    # Integration Test 4: Memory efficiency check
    # Test that we're not creating unnecessary copies
    large_embed = EmbeddingLayer(vocab_size=10000, embed_dim=512)
    test_batch = Tensor(rng.integers(0, 10000, (32, 128)))

    # Multiple forward passes should not accumulate memory (in production)
    first = large_embed.forward(test_batch)
    outputs = [weakref.ref(large_embed.forward(test_batch)) for _ in range(5)]
    assert all(output() is None for output in outputs), "a forward keeps its output alive"
    assert torch.equal(large_embed.forward(test_batch), first)


# Docstring examples, and a hand-written training step.


def test_docstring_examples():
    embed = Embedding(vocab_size=100, embed_dim=64)
    tokens = Tensor([[1, 2, 3], [4, 5, 6]])  # batch_size=2, seq_len=3
    output = embed.forward(tokens)
    assert output.shape == (2, 3, 64)

    pos_enc = PositionalEncoding(max_seq_len=512, embed_dim=64)
    embeddings = Tensor(rng.standard_normal((2, 10, 64)))  # (batch, seq, embed)
    output = pos_enc.forward(embeddings)
    want = embeddings.data + pos_enc.position_embeddings.data[:10]
    assert np.array_equal(output.data, want)  # Same shape, but now position-aware

    pe = create_sinusoidal_embeddings(512, 64)
    assert pe.shape == (512, 64)

    embed_layer = EmbeddingLayer(
        vocab_size=50000, embed_dim=512, max_seq_len=2048, pos_encoding="learned"
    )
    tokens = Tensor([[1, 2, 3], [4, 5, 6]])
    output = embed_layer.forward(tokens)
    assert output.shape == (2, 3, 512)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("ids", [[1, 2, 2], [[1, 2, 2], [4, 5, 6]]], ids=["1-D", "2-D"])
@pytest.mark.parametrize("pe", ["learned", "sinusoidal", None])
def test_every_parameter_gets_a_gradient(pe, ids, scale):
    layer = EmbeddingLayer(10, 4, 8, pe, scale)
    d = rng.standard_normal((*np.shape(ids), 4)).astype("float32")
    (layer(Tensor(ids)) * Tensor(d)).sum().backward()
    tokens = np.zeros((10, 4), "float32")
    np.add.at(tokens, np.array(ids), d * (2.0 if scale else 1.0))
    positions = np.zeros((8, 4), "float32")
    positions[:3] = d.reshape(-1, 3, 4).sum(0)
    for parameter, want in zip(layer.parameters(), (tokens, positions), strict=False):
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.data, want, rtol=1e-6)


def test_numpy_updates_train_both_tables():
    torch.manual_seed(0)
    layer = EmbeddingLayer(10, 4, max_seq_len=8)
    tokens, target = Tensor([[1, 2, 3]]), Tensor(rng.standard_normal((1, 3, 4)))
    before = [p.data.copy() for p in layer.parameters()]
    losses = []
    for _ in range(40):
        error = layer(tokens) - target
        loss = (error * error).sum()
        loss.backward()
        losses.append(float(loss.data))
        for param in layer.parameters():
            assert param.grad is not None
            param.data = param.data - 0.1 * param.grad.data
            param.grad = None
    assert losses[-1] < 1e-6 * losses[0]
    moved = [
        np.abs(p.data - old).sum(1) > 0
        for p, old in zip(layer.parameters(), before, strict=True)
    ]
    assert moved[0].nonzero()[0].tolist() == [1, 2, 3]
    assert moved[1].nonzero()[0].tolist() == [0, 1, 2]


def test_torch_optimizers_train_both_tables():
    layer = EmbeddingLayer(10, 4, max_seq_len=8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(100):
        loss = layer([1, 2, 3]).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert layer([1, 2, 3]).pow(2).sum() < 1e-3


# Documented behaviour.


@pytest.mark.parametrize("max_seq_len", [1, 8])
def test_sinusoidal_positions_extend_beyond_max_seq_len(max_seq_len):
    layer = EmbeddingLayer(10, 6, max_seq_len, "sinusoidal")
    layer.token_embedding.weight.data[:] = 0
    at = np.arange(20)[:, None] / 10_000 ** (np.arange(0, 6, 2) / 6)
    want = np.stack([np.sin(at), np.cos(at)], -1).reshape(20, 6)
    np.testing.assert_allclose(layer([3] * 20).data, want, atol=2.5e-7)
    np.testing.assert_allclose(layer([3], start_pos=19).data[0], want[19], atol=2.5e-7)


def test_sinusoidal_pos_encoding_is_a_tensor_that_is_added():
    layer = EmbeddingLayer(10, 6, max_seq_len=8, pos_encoding="sinusoidal")
    table = layer.pos_encoding
    assert isinstance(table, Tensor) and isinstance(table.data, np.ndarray)
    assert np.array_equal(table.data, create_sinusoidal_embeddings(8, 6).data)
    assert not table.requires_grad
    rows = layer.token_embedding([4, 2]).data
    assert np.array_equal(layer([4, 2], start_pos=6).data, rows + table.data[6:8])
    table.data[:] = 7.0
    assert np.array_equal(layer([[4, 2]]).data[0], rows + np.float32(7.0))


def test_sinusoids_are_accurate_at_large_positions():
    table = create_sinusoidal_embeddings(8192, 512).data
    at = np.arange(8192.0)[:, None] / 10_000 ** (np.arange(0, 512, 2) / 512)
    np.testing.assert_allclose(table[:, 0::2], np.sin(at), atol=2.5e-7)
    np.testing.assert_allclose(table[:, 1::2], np.cos(at), atol=2.5e-7)


def test_odd_width_ends_with_a_sine():
    at = np.arange(10.0)[:, None] / 10_000 ** (np.arange(0, 7, 2) / 7)
    table = create_sinusoidal_embeddings(10, 7).data
    np.testing.assert_allclose(table[:, 0::2], np.sin(at), atol=2.5e-7)
    np.testing.assert_allclose(table[:, 1::2], np.cos(at[:, :3]), atol=2.5e-7)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("vocab_size", [10, 50_000])
def test_initial_positions_are_smaller_than_tokens(vocab_size, scale):
    layer = EmbeddingLayer(vocab_size, 64, 100, scale_embeddings=scale)
    tokens, positions = (np.abs(p.data).max() for p in layer.parameters())
    assert 0.2 * positions < tokens * (8 if scale else 1)
    assert positions < 0.51 * tokens * (8 if scale else 1)


def test_initial_tables_are_within_their_limits():
    tokens = np.abs(Embedding(1000, 24).weight.data).max()
    assert 0.99 < tokens / math.sqrt(6 / 1024) <= 1
    positions = np.abs(PositionalEncoding(1000, 24).position_embeddings.data).max()
    assert 0.99 < positions / math.sqrt(2 / 24) <= 1


def test_single_token_with_start_pos_equals_full_sequence():
    layer = EmbeddingLayer(10, 4, 8)
    assert np.array_equal(layer([[5]], start_pos=2).data, layer([[1, 2, 5]]).data[:, 2:])


def test_ids_with_any_number_of_axes():
    layer, ids = EmbeddingLayer(10, 4, 8), rng.integers(0, 10, (2, 3, 5))
    assert np.array_equal(layer(ids).data[1, 2], layer(ids[1, 2]).data)


def test_tensor_keeps_integers_and_converts_floats_to_float32():
    assert Tensor([16_777_217]).data.tolist() == [16_777_217]
    assert Tensor(np.ones(2)).data.dtype == np.float32
    x = Tensor([1.0, 2.0])
    x.data[0] = 5
    assert x.tolist() == [5.0, 2.0] and type(x + 1) is Tensor


def test_deepcopy_of_tensors_and_layers():
    layer = EmbeddingLayer(10, 4, 8)
    layer([1, 2]).sum().backward()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert np.array_equal(twin([1, 2]).data, layer([1, 2]).data)
        for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
            assert other.requires_grad and mine.data_ptr() != other.data_ptr()
    grad = copy.deepcopy(layer).parameters()[0].grad
    assert grad is not None and grad.data.sum() == 8


def test_reprs_equal_tinytorch():
    layer = EmbeddingLayer(10, 4, 8, "sinusoidal")
    want = "EmbeddingLayer(vocab_size=10, embed_dim=4, pos_encoding='sinusoidal')"
    assert repr(layer) == want
    assert repr(layer.token_embedding) == "Embedding(vocab_size=10, embed_dim=4)"
    assert (
        repr(PositionalEncoding(8, 4)) == "PositionalEncoding(max_seq_len=8, embed_dim=4)"
    )


@pytest.mark.rejects
@pytest.mark.parametrize("kind", [ValueError, IndexError])
def test_error_names_the_id_out_of_range(kind):
    with pytest.raises(kind, match=r"indices\[1\] is 100, but vocab_size is 100"):
        Embedding(100, 4)(Tensor([1, 100]))
    with pytest.raises(kind, match=r"indices\[0, 0\] is -1, but vocab_size is 10"):
        EmbeddingLayer(10, 4)([[-1]])


@pytest.mark.rejects
def test_bad_arguments_are_rejected():
    with pytest.raises(TypeError, match="indices must be integers, got float32"):
        Embedding(10, 4)(Tensor([1.9]))
    with pytest.raises(ValueError, match="'sinusoidal' or None, got 'rotary'"):
        EmbeddingLayer(10, 4, pos_encoding="rotary")  # pyright: ignore
    with pytest.raises(ValueError, match="vocab_size must be positive, got 0"):
        Embedding(0, 4)
    with pytest.raises(ValueError, match="max_seq_len must be positive, got 0"):
        create_sinusoidal_embeddings(0, 4)
    pos_enc = PositionalEncoding(8, 4)
    with pytest.raises(ValueError, match=r"\(batch, seq, 4\), got \(5, 4\)"):
        pos_enc(Tensor(np.zeros((5, 4))))
    with pytest.raises(ValueError, match=r"\(batch, seq, 4\), got \(1, 5, 6\)"):
        pos_enc(Tensor(np.zeros((1, 5, 6))))
    with pytest.raises(ValueError, match="within max_seq_len 8, got 0 to 8"):
        pos_enc(Tensor(np.zeros((1, 9, 4))))
    with pytest.raises(ValueError, match="within max_seq_len 8, got -1 to 0"):
        pos_enc(Tensor(np.zeros((1, 2, 4))), start_pos=-1)


# Analysis functions.


def test_memory_analysis_counts_the_bytes_of_tensors():
    found = analyze_embedding_memory_scaling()
    small, medium, large, gpt3 = found["tables"]
    assert small["bytes"] == small["gradient_bytes"] == 10_000 * 256 * 4
    assert medium["bytes"] == medium["gradient_bytes"] == 50_000 * 512 * 4
    assert large["bytes"] == 100_000 * 1024 * 4 and large["gradient_bytes"] is None
    assert gpt3["parameters"] == 617_558_016 and gpt3["bytes"] == 2_470_232_064
    learned, sinusoidal, none = found["positions"]
    assert learned["bytes"] == 2048 * 512 * 4 and learned["parameters"] == 2048 * 512
    assert sinusoidal["parameters"] == 0 and sinusoidal["bytes"] == 2048 * 512 * 4
    assert none == {"name": None, "parameters": 0, "bytes": 0}


def test_sinusoidal_memory_is_that_of_the_table():
    for n in (10, 1000):
        found = analyze_embedding_memory_scaling([], embed_dim=32, max_seq_len=n)
        assert found["positions"][1]["bytes"] == n * 32 * 4


def test_performance_analysis_times_lookups():
    rows = analyze_embedding_performance()
    assert [row["vocab_size"] for row in rows[::4]] == [1_000, 10_000, 100_000]
    assert [row["batch_size"] for row in rows[:4]] == [1, 16, 64, 256]
    for row in rows:
        tokens = row["tokens_per_second"] * row["milliseconds"] / 1e3
        assert tokens == pytest.approx(row["batch_size"] * 128)
    # Writing 64 MB takes longer than writing 256 kB.
    assert all(rows[i + 3]["milliseconds"] > rows[i]["milliseconds"] for i in (0, 4, 8))
    (small,) = analyze_embedding_performance([7], [2], embed_dim=3, seq_len=5, seconds=0)
    assert small["tokens_per_second"] * small["milliseconds"] == pytest.approx(10_000)


def test_position_analysis_tries_a_longer_sequence():
    learned, sinusoidal, none = analyze_positional_encoding_strategies()
    assert not learned["extends"]
    assert learned["error"] == "positions must be within max_seq_len 512, got 0 to 611"
    assert sinusoidal["extends"] and sinusoidal["error"] is None
    assert none["extends"] and none["variance"] == 0.0
    table = create_sinusoidal_embeddings(512, 256).data
    assert sinusoidal["variance"] == pytest.approx(table.var(axis=0).mean())
    # Uniform within ±√(6 / 257) / 2: the variance is a third of the squared limit.
    assert learned["variance"] == pytest.approx(6 / 257 / 4 / 3, rel=0.05)
