"""lrnnx's documentation, example by example, and its documented promises."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

from firstlayer import positions as position_ids
from firstlayer.compat.lrnnx import LRU, Classifier, PositionEmbedding, TokenEmbedding
from firstlayer.compat.lrnnx.classifier import pooled

# Examples of the documentation, in its order.


def test_example_class_definition_and_forward():
    embedding = TokenEmbedding(
        vocab_size=50000, embedding_dim=512, padding_idx=0, use_position=False, dropout=0.1
    )
    token_ids = torch.tensor([[3, 49999, 0]])
    embeddings = embedding.eval().forward(token_ids)
    assert torch.equal(embeddings, embedding.token_embedding.weight[token_ids])


def test_example_basic_token_embeddings():
    # Create token embedding (no positional embeddings)
    embedding = TokenEmbedding(
        vocab_size=10000, embedding_dim=256, padding_idx=0, dropout=0.1
    )
    # Input token IDs
    token_ids = torch.randint(0, 10000, (4, 50))  # (batch=4, seq_len=50)
    # Get embeddings
    embeddings = embedding(token_ids)
    assert embeddings.shape == (4, 50, 256)
    kept = embeddings != 0
    rows = embedding.token_embedding.weight[token_ids] / 0.9
    torch.testing.assert_close(embeddings[kept], rows[kept])
    assert 0.09 < (~kept[token_ids != 0]).float().mean() < 0.11


def test_example_token_and_positional_embeddings():
    # Create token embedding with learned positional embeddings
    embedding = TokenEmbedding(
        vocab_size=50000,
        embedding_dim=512,
        padding_idx=0,
        max_position_embeddings=2048,
        use_position=True,  # Enable positional embeddings
        dropout=0.1,
    )
    # Input token IDs
    token_ids = torch.randint(1, 50000, (8, 100))
    # Get embeddings (token + position)
    embeddings = embedding(token_ids)
    assert embeddings.shape == (8, 100, 512)
    assert embedding.position_embedding is not None
    rows = embedding.token_embedding(token_ids)
    added = embedding.position_embedding(torch.arange(100))
    torch.testing.assert_close(embedding.eval()(token_ids), rows + added)


def test_example_variable_length_sequences_with_padding():
    # Create embedding with padding
    embedding = TokenEmbedding(
        vocab_size=10000,
        embedding_dim=256,
        padding_idx=0,  # Token ID 0 is padding
        dropout=0.1,
    )
    # Create padded batch
    token_ids = torch.tensor([
        [1, 2, 3, 4, 0, 0],  # Length 4, padded to 6
        [5, 6, 7, 8, 9, 10],  # Length 6
        [11, 12, 0, 0, 0, 0],  # Length 2, padded to 6
    ])
    # Embeddings for padding tokens will be zero
    embeddings = embedding(token_ids)
    assert embeddings.shape == (3, 6, 256)
    assert embeddings[0, 4:].sum() == 0  # (padding positions)
    assert (embeddings[token_ids == 0] == 0).all()
    assert (embeddings[token_ids != 0].abs().sum(-1) > 0).all()


def test_example_position_embedding():
    # Create positional embedding
    pos_embedding = PositionEmbedding(max_position_embeddings=1024, embedding_dim=256)
    # Create position indices
    seq_len = 50
    positions = torch.arange(seq_len).unsqueeze(0)  # (1, 50)
    # Get positional embeddings
    pos_emb = pos_embedding(positions)
    assert torch.equal(pos_emb[0], pos_embedding.position_embedding.weight[:50])
    # Manually add to token embeddings
    token_emb = torch.randn(4, 50, 256)
    combined = token_emb + pos_emb
    assert combined.shape == (4, 50, 256)


def test_example_with_classifier():
    model = Classifier(
        input_dim=0,  # Ignored when vocab_size is set
        num_classes=10,
        d_model=256,
        vocab_size=10000,
        embedding_dim=256,
        padding_idx=0,
        # The classifier internally uses TokenEmbedding
        lrnn_params={"d_model": 256, "d_state": 64},
    )
    assert isinstance(model.embedding, TokenEmbedding)
    logits = model(torch.randint(0, 10000, (3, 12)))
    logits.logsumexp(-1).sum().backward()
    assert logits.shape == (3, 10)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_example_custom_embedding_pipeline():
    class CustomModel(nn.Module):
        def __init__(self):
            super().__init__()
            # Token embeddings only
            self.token_emb = TokenEmbedding(
                vocab_size=10000,
                embedding_dim=256,
                padding_idx=0,
                use_position=False,  # No positional embeddings
            )
            # Recurrent layer (doesn't need positional info)
            self.lru = LRU(d_model=256, d_state=64)

        def forward(self, token_ids):
            x = self.token_emb(token_ids)
            x = self.lru(x)
            return x

    model = CustomModel().eval()
    one, other = model(torch.tensor([[5, 7, 9], [7, 5, 9]]))
    # The last steps saw the same tokens in a different order.
    assert (one[-1] - other[-1]).abs().max() > 1e-3


# Documented behaviour of padding.


def padded(**options) -> TokenEmbedding:
    return TokenEmbedding(
        20,
        4,
        padding_idx=0,
        max_position_embeddings=6,
        use_position=True,
        **{"dropout": 0.0, **options},
    )


IDS = torch.tensor([[3, 5, 0, 0, 0, 0], [3, 5, 7, 0, 0, 0]])


def test_padding_is_zero_and_gets_no_gradient_with_positions():
    embedding = padded()
    out = embedding(IDS)
    assert (out[IDS == 0] == 0).all() and (out[IDS != 0].abs().sum(-1) > 0).all()
    (out * torch.randn_like(out)).sum().backward()
    place = embedding.position_embedding
    assert place is not None
    used = place.position_embedding.weight.grad
    assert used is not None
    assert used.abs().sum(-1).ne(0).tolist() == [True, True, True, False, False, False]
    grad = embedding.token_embedding.weight.grad
    assert grad is not None and (grad[0] == 0).all() and (grad[3] != 0).all()


def test_padding_output_is_zero_whatever_its_row_holds():
    for embedding in (padded(), TokenEmbedding(20, 4, padding_idx=0, dropout=0.0)):
        weight = embedding.token_embedding.weight
        assert (weight[0] == 0).all()
        nn.init.ones_(weight)
        assert (embedding(IDS)[IDS == 0] == 0).all()
        optimizer = torch.optim.AdamW(embedding.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            embedding(IDS).pow(2).sum().backward()
            optimizer.step()
        assert (embedding(IDS)[IDS == 0] == 0).all()
        # Three steps of decay without gradient, as in torch.
        torch.testing.assert_close(weight[0], torch.full((4,), 0.95**3))


def test_left_padding_with_mask_positions_equals_right_padding():
    embedding, left = padded(), torch.tensor([[0, 0, 3, 5, 7, 2]])
    at = position_ids.from_mask((left != 0).numpy())
    right = torch.tensor([[3, 5, 7, 2, 0, 0]])
    out = embedding(left, torch.from_numpy(at))
    torch.testing.assert_close(out[:, 2:], embedding(right)[:, :4])
    assert not torch.allclose(embedding(left)[:, 2:], embedding(right)[:, :4])


def test_unbatched_sequence_with_positions():
    embedding = padded()
    assert torch.equal(embedding(IDS[1]), embedding(IDS)[1])


def test_single_token_with_offset_equals_full_sequence():
    embedding = padded()
    assert torch.equal(embedding(IDS[1:, 2:3], offset=2), embedding(IDS[1:])[:, 2:3])


def test_lrnnx_checkpoint_loads():
    # The names and shapes of lrnnx 1.0.0.post1, whose layers are torch's.
    state = {
        "token_embedding.weight": nn.Embedding(20, 4, padding_idx=0).weight.data,
        "position_embedding.position_embedding.weight": nn.Embedding(6, 4).weight.data,
    }
    embedding = padded()
    embedding.load_state_dict(state)
    want = state["token_embedding.weight"][IDS]
    want = want + state["position_embedding.position_embedding.weight"]
    kept = IDS != 0
    torch.testing.assert_close(embedding(IDS)[kept], want[kept])


def test_sizes_are_attributes_and_negative_padding_idx_wraps():
    embedding = TokenEmbedding(20, 4, padding_idx=-1)
    assert (embedding.vocab_size, embedding.embedding_dim) == (20, 4)
    assert embedding.padding_idx == 19 and embedding.position_embedding is None
    # max_position_embeddings without use_position adds no positions.
    assert TokenEmbedding(20, 4, None, 6).position_embedding is None


@pytest.mark.rejects
def test_embeddings_reject_bad_arguments():
    with pytest.raises(ValueError, match="use_position needs max_position_embeddings"):
        TokenEmbedding(20, 4, use_position=True)
    with pytest.raises(ValueError, match=r"dropout must be between 0 and 1, got 1\.5"):
        TokenEmbedding(20, 4, dropout=1.5)
    with pytest.raises(ValueError, match="smaller than max_positions 6, got 6"):
        padded()(torch.ones(1, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="smaller than max_positions 6, got 9"):
        PositionEmbedding(6, 4)(torch.tensor([9]))
    with pytest.raises(IndexError, match=r"ids\[0, 1\] is 20, but num_embeddings is 20"):
        padded()(torch.tensor([[1, 20]]))


# The recurrent unit.


def one_by_one(lru: LRU, x: np.ndarray) -> np.ndarray:
    """Return the outputs by the definition, in NumPy's complex128."""
    p = {name: value.detach().double().numpy() for name, value in lru.named_parameters()}
    decay = np.exp(-np.exp(p["nu_log"]) + 1j * np.exp(p["theta_log"]))
    into = (p["B_re"] + 1j * p["B_im"]) * np.exp(p["gamma_log"])[:, None]
    out, state = np.empty_like(x), np.zeros((len(x), lru.d_state), complex)
    for t in range(x.shape[1]):
        state = decay * state + x[:, t] @ into.T
        out[:, t] = (state @ (p["C_re"] + 1j * p["C_im"]).T).real + p["D"] * x[:, t]
    return out


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_lru_forward_and_step_equal_the_recurrence(length):
    torch.manual_seed(length)
    lru = LRU(6, 5, r_min=0.5, r_max=0.99, max_phase=1.0).double()
    x = torch.randn(3, length, 6, dtype=torch.float64)
    want = one_by_one(lru, x.numpy())
    np.testing.assert_allclose(lru(x).detach().numpy(), want, atol=1e-12)
    cache = lru.allocate_inference_cache(3)
    for t in range(length):
        y, cache = lru.step(x[:, t], cache)
        np.testing.assert_allclose(y.detach().numpy(), want[:, t], atol=1e-12)


def test_lru_gradients_equal_finite_differences():
    torch.manual_seed(0)
    lru = LRU(2, 3, r_min=0.2).double()
    values = tuple(p.detach().requires_grad_() for p in lru.parameters())
    names = [name for name, _ in lru.named_parameters()]
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        return torch.func.functional_call(lru, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


def test_lru_initializes_in_the_ring_and_stays_in_the_unit_circle():
    torch.manual_seed(0)
    lru = LRU(4, 2000, r_min=0.6, r_max=0.8, max_phase=0.5)
    decay, into, _ = lru.discretize()
    assert 0.6 <= decay.abs().min() < 0.61 and 0.79 < decay.abs().max() <= 0.8
    assert 0 <= decay.angle().min() < 0.01 and 0.49 < decay.angle().max() <= 0.5
    # Uniform over the ring: half of its area lies beyond radius √0.5.
    assert abs((decay.abs() > math.sqrt(0.5)).float().mean() - 0.5) < 0.05
    # Driven by noise, each entry of the state has the variance of the noise.
    size = into.abs().pow(2).sum(1) / (1 - decay.abs() ** 2)
    assert abs(size.mean() - 1) < 0.05
    with torch.no_grad():
        lru.nu_log.normal_(std=3)
    assert (lru.discretize()[0].abs() < 1).all()


def test_lru_has_the_parameters_of_lrnnx():
    shapes = {name: tuple(p.shape) for name, p in LRU(6, 5).named_parameters()}
    assert shapes == {
        "nu_log": (5,),
        "theta_log": (5,),
        "gamma_log": (5,),
        "B_re": (5, 6),
        "B_im": (5, 6),
        "C_re": (6, 5),
        "C_im": (6, 5),
        "D": (6,),
    }


def test_lru_in_half_precision_computes_in_float32():
    torch.manual_seed(0)
    lru = LRU(6, 5).to(torch.bfloat16)
    x = torch.randn(2, 300, 6).to(torch.bfloat16)
    want = one_by_one(lru, x.double().numpy())
    assert lru(x).dtype == torch.bfloat16
    np.testing.assert_allclose(lru(x).detach().double().numpy(), want, rtol=4e-3, atol=1e-4)


@pytest.mark.rejects
def test_lru_rejects_bad_arguments():
    with pytest.raises(ValueError, match=r"within \[0, 1\], got 0\.9, 0\.5"):
        LRU(4, 4, r_min=0.9, r_max=0.5)
    with pytest.raises(ValueError, match="max_phase must be positive, got 0"):
        LRU(4, 4, max_phase=0)
    with pytest.raises(ValueError, match="d_state must be positive, got 0"):
        LRU(4, 0)
    with pytest.raises(ValueError, match=r"\(batch, length, 4\), got \(2, 3, 5\)"):
        LRU(4, 4)(torch.ones(2, 3, 5))
    with pytest.raises(ValueError, match=r"\(batch, 4\), got \(2, 3, 4\)"):
        lru = LRU(4, 4)
        lru.step(torch.ones(2, 3, 4), lru.allocate_inference_cache(2))
    steps = torch.ones(2, 3)
    with pytest.raises(ValueError, match="integration_timesteps must be None"):
        LRU(4, 4)(torch.ones(2, 3, 4), steps)  # pyright: ignore[reportArgumentType]


# The classifier.


def classifier(**options) -> Classifier:
    torch.manual_seed(0)
    given = {
        "num_classes": 3,
        "d_model": 8,
        "d_state": 6,
        "n_layers": 2,
        "vocab_size": 20,
        **options,
    }
    return Classifier(0, **given).eval()


def test_classifier_has_the_parameters_of_lrnnx():
    lrnn = ["nu_log", "theta_log", "gamma_log", "B_re", "B_im", "C_re", "C_im", "D"]
    block = [f"lrnn.{name}" for name in lrnn] + ["norm.weight", "norm.bias"]
    want = ["embedding.token_embedding.weight", "embed_proj.weight", "embed_proj.bias"]
    want += [f"blocks.0.{name}" for name in block]
    want += [f"final_block.{name}" for name in block]
    want += ["final_block.output_proj.weight", "final_block.output_proj.bias"]
    assert sorted(classifier(embedding_dim=5).state_dict()) == sorted(want)


@pytest.mark.parametrize("pooling", ["last", "mean", "max"])
def test_classifier_equals_blocks_pooling_and_head(pooling):
    model, ids = classifier(pooling=pooling, padding_idx=None), IDS[:, :3]
    x = model.embedding(ids)
    blocks: list[Any] = [model.blocks[0], model.final_block]
    for block in blocks:
        steps = torch.from_numpy(one_by_one(block.lrnn, x.detach().double().numpy()))
        x = block.norm(x + steps.float())
    pools = {"last": x[:, -1], "mean": x.mean(1), "max": x.amax(1)}
    want = model.final_block.output_proj(pools[pooling])
    torch.testing.assert_close(model(ids), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shorten", ["none", "stride", "mean", "max"])
@pytest.mark.parametrize("pooling", ["last", "mean", "max"])
def test_trailing_padding_does_not_change_the_output(pooling, shorten):
    model = classifier(pooling=pooling, intermediate_pooling=shorten, pooling_factor=2)
    alone = torch.cat([model(row[row != 0][None]) for row in IDS])
    torch.testing.assert_close(model(IDS), alone, atol=1e-5, rtol=1e-5)
    # The same with lengths, for inputs without padding ids.
    lengths, noise = torch.tensor([2, 3]), torch.where(IDS == 0, 9, IDS)
    torch.testing.assert_close(model(noise, lengths), alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(noise), alone, atol=1e-3)


def test_vector_input_is_projected_like_embedded_ids():
    model = classifier(embedding_dim=5)
    assert isinstance(model.embed_proj, nn.Linear) and model.has_embedding
    vectors, lengths = model.embedding(IDS), torch.tensor([2, 3])
    torch.testing.assert_close(model(vectors, lengths), model(IDS))
    assert isinstance(classifier().embed_proj, nn.Identity)


def test_feature_input_without_vocabulary():
    torch.manual_seed(0)
    model = Classifier(input_dim=7, num_classes=4, d_model=8, d_state=3, n_layers=1)
    assert not model.has_embedding
    x = torch.randn(2, 9, 7)
    inner = model.eval().final_block(model.input_proj(x), torch.ones(2, 9, dtype=bool))[0]  # pyright: ignore
    torch.testing.assert_close(model(x), model.final_block.output_proj(inner[:, -1]))


def test_regression_output_without_classes():
    assert classifier(num_classes=0, output_dim=5)(IDS).shape == (2, 5)


def test_max_position_embeddings_adds_positions():
    with_positions = classifier(max_position_embeddings=6)
    assert with_positions.embedding.position_embedding is not None
    state = with_positions.state_dict()
    bare = classifier()
    bare.load_state_dict({k: v for k, v in state.items() if "position" not in k})
    assert not torch.allclose(with_positions(IDS), bare(IDS), atol=1e-3)


def test_layer_and_pooling_per_block():
    class Tagged(LRU):
        pass

    model = classifier(
        lrnn_cls=[LRU, Tagged],
        lrnn_params={"d_model": 8, "d_state": 6, "r_min": 0.9},
        intermediate_pooling=["stride", "none"],
        pooling_factor=[2, 3],
    )
    assert type(model.blocks[0].lrnn) is LRU and type(model.final_block.lrnn) is Tagged
    assert model.final_block.lrnn.discretize()[0].abs().min() >= 0.9
    x, mask = model.blocks[0](torch.randn(1, 5, 8), torch.ones(1, 5, dtype=torch.bool))
    assert x.shape == (1, 3, 8) and mask.shape == (1, 3)


@pytest.mark.parametrize("mode", ["last", "mean", "max"])
def test_pooling_a_fully_masked_sequence_gives_zero_and_no_gradient(mode):
    x = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[False, False, False], [True, False, True]])
    y = pooled(x, mask, mode=mode)
    assert (y[0] == 0).all()
    want = {"last": x[1, 2], "mean": x[1, [0, 2]].mean(0), "max": x[1, [0, 2]].amax(0)}
    torch.testing.assert_close(y[1], want[mode])
    y.sum().backward()
    assert x.grad is not None and (x.grad[~mask] == 0).all()


def test_incomplete_last_window_is_pooled():
    model = classifier(intermediate_pooling="mean", pooling_factor=4, n_layers=1)
    x, mask = torch.randn(1, 6, 8), torch.ones(1, 6, dtype=torch.bool)
    steps = model.final_block.norm(x + model.final_block.lrnn(x))
    short, left = model.final_block(x, mask)
    torch.testing.assert_close(short[:, 1], steps[:, 4:].mean(1))
    assert left.tolist() == [[True, True]]


@pytest.mark.rejects
def test_classifier_rejects_bad_arguments():
    with pytest.raises(
        ValueError, match="pooling must be 'last', 'mean' or 'max', got 'a'"
    ):
        classifier(pooling="a")
    with pytest.raises(ValueError, match="'mean' or 'max', got 'sum'"):
        classifier(intermediate_pooling="sum")
    with pytest.raises(ValueError, match="lrnn_cls must have n_layers 2 entries, got 3"):
        classifier(lrnn_cls=[LRU] * 3)
    with pytest.raises(ValueError, match="n_layers must be positive, got 0"):
        classifier(n_layers=0)
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\), got \(3,\)"):
        classifier()(IDS, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="integration_timesteps must be None"):
        classifier()(IDS, None, torch.ones(2, 6))
