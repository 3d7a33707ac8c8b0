"""``max_norm``: scaled outputs and stored rows."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import numpy as np
import pytest
import torch
from torch import nn

from firstlayer.embeddings.token import clip_norms
from firstlayer.torch._table import max_norm
from firstlayer.torch.functional import embedding
from firstlayer.torch.token import Embedding
from tests.support.gradients import central_difference
from tests.support.torch_tables import DTYPES, ids_of, same_bits


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_max_norm_scales_the_output_and_not_the_table(norm_type, dtype):
    layer = Embedding(8, 5, max_norm=1.5, norm_type=norm_type, dtype=dtype)
    layer.weight.data[0] *= 0.01
    before, ids = layer.weight.detach().clone(), torch.tensor([[0, 1], [7, 1]])
    upcast = before[ids].double()
    norms = torch.linalg.vector_norm(upcast, norm_type, dim=-1, keepdim=True)
    want = (upcast * torch.clamp(1.5 / norms, max=1)).to(dtype)
    for got in (
        layer(ids),
        embedding(ids, layer.weight, max_norm=1.5, norm_type=norm_type),
    ):
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert same_bits(got[0, 0], before[0])
    assert same_bits(layer.weight, before)
    with torch.no_grad():
        assert same_bits(layer(ids), layer(ids).detach())


@pytest.mark.parametrize("sparse, decay", [(False, 0.0), (False, 0.5), (True, 0.0)])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_training_with_max_norm_equals_torch(sparse, decay, padding_idx):
    options = {"max_norm": 1.0, "sparse": sparse, "padding_idx": padding_idx}
    ours = Embedding(10, 4, **options)
    theirs = nn.Embedding(10, 4, **options)
    theirs.load_state_dict(ours.state_dict())
    rule = {"lr": 0.3, "weight_decay": decay}
    optimizers = [torch.optim.SGD(m.parameters(), **rule) for m in (ours, theirs)]
    target = torch.randn(6, 4)
    for step in range(8):
        # Rows that are too long and not looked up decay unscaled.
        ids = torch.randint(0, 10 if step % 2 else 4, (6,))
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            ((layer(ids) - target) ** 2).sum().backward()
            optimizer.step()
    everything = torch.arange(10)
    torch.testing.assert_close(ours(everything), theirs(everything), atol=2e-6, rtol=0)


def test_stored_rows_are_scaled_when_their_gradient_is_accumulated():
    dense, rows = (Embedding(6, 3, max_norm=1.0, sparse=sparse) for sparse in (False, True))
    want = torch.full((6,), 27.0**0.5).index_fill(0, ids_of(1), 1.0)
    for layer in (dense, rows):
        nn.init.constant_(layer.weight, 3.0)
        layer(ids_of(1, 1)).sum().backward()
        torch.testing.assert_close(layer.weight.detach().norm(dim=1), want)


def test_replicas_scale_the_same_rows(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layer = Embedding(6, 3, max_norm=1.0, sparse=True)
    nn.init.constant_(layer.weight, 3.0)
    layer(ids_of(1)).sum().backward()
    assert torch.allclose(layer.weight.norm(dim=1), torch.ones(6))
    assert max_norm.rows_with_gradient(layer.weight) is None


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_max_norm_with_a_tied_head_sums_the_gradients_of_both_uses(head_first, padding_idx):
    layer = Embedding(5, 3, max_norm=1.0, padding_idx=padding_idx, dtype=torch.float64)
    stored = layer.weight.detach().clone().numpy()
    used = clip_norms(stored, max_norm=1.0)
    ids, h = np.array([1, 4, 4]), np.random.default_rng(1).standard_normal((2, 3))

    def loss():
        return float((used[ids] ** 3).sum() + ((h @ stored.T) ** 2).sum())

    if head_first:
        total = (layer.logits(torch.from_numpy(h)) ** 2).sum()
        total = total + (layer(torch.from_numpy(ids)) ** 3).sum()
    else:
        total = (layer(torch.from_numpy(ids)) ** 3).sum()
        total = total + (layer.logits(torch.from_numpy(h)) ** 2).sum()
    total.backward()
    want = central_difference(loss, used) + central_difference(loss, stored)
    np.testing.assert_allclose(layer.weight.grad.numpy(), want, atol=1e-6)
    assert layer.weight.detach().norm(dim=1).max() <= 1 + 1e-12


@pytest.mark.rejects
@pytest.mark.parametrize("row", [-1, 5])
def test_project_checks_ids(row):
    layer = Embedding(5, 3, max_norm=1.0)
    with pytest.raises(IndexError, match=rf"ids\[1\] is {row}, but num_embeddings is 5"):
        layer.project(torch.tensor([0, row]))


def test_project_scales_the_given_rows_or_all():
    layer = Embedding(5, 3, max_norm=1.0, padding_idx=3, norm_type=1.0)
    nn.init.constant_(layer.weight, 1.0)
    layer.project(torch.tensor([4, 4], dtype=torch.uint8))
    third = pytest.approx(1 / 3)
    assert layer.weight[:, 0].tolist() == [1, 1, 1, 1, third]
    layer.project()
    assert layer.weight[:, 0].tolist() == [third] * 5
    plain = Embedding(5, 3)
    before = plain.weight.detach().clone()
    plain.project()
    assert torch.equal(plain.weight, before)
