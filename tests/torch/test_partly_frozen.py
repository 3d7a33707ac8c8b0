"""Tables with trained and frozen rows."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import pickle

import numpy as np
import pytest
import torch

from firstlayer.torch.frozen import PartlyFrozenEmbedding
from firstlayer.torch.frozen_rows import FrozenRowsEmbedding
from firstlayer.torch.token import Embedding
from tests.support.gradients import central_difference
from tests.support.torch_tables import ids_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("frozen", [range(3), [5, 1], torch.tensor([0, 7]), [], range(8)])
@pytest.mark.parametrize("padding_idx", [None, -2])
def test_lookup_equals_that_of_a_whole_table(sparse, frozen, padding_idx):
    table = torch.randn(8, 3)
    layer = PartlyFrozenEmbedding.from_pretrained(
        table, frozen=frozen, padding_idx=padding_idx, sparse=sparse
    )
    ids = torch.tensor([[0, 7, 6], [5, 5, 1]], dtype=torch.int16)
    assert torch.equal(layer(ids), table[ids.long()])
    assert torch.equal(layer.weight, table)
    assert list(layer.state_dict()) == ["weight"]
    assert torch.equal(layer.state_dict()["weight"], table)
    assert layer.mask(ids).all() == (padding_idx is None)
    kept = {int(i) for i in frozen} | ({6} if padding_idx is not None else set())
    if len(kept) == 8:
        return
    (layer(ids) ** 2).sum().backward()
    want = torch.zeros(8, 3).index_add(
        0, ids.long().reshape(-1), 2 * table[ids.long()].reshape(-1, 3)
    )
    trained = [i for i in range(8) if i not in kept]
    grad = layer.trained_rows.grad
    torch.testing.assert_close(grad.to_dense(), want[trained])
    if sparse:
        used = sorted({0, 7, 6, 5, 1} - kept)
        assert grad.is_coalesced() and [trained[i] for i in grad.indices()[0]] == used


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cls", [PartlyFrozenEmbedding, FrozenRowsEmbedding])
def test_given_table_keeps_its_dtype_and_device(cls, dtype):
    table = torch.randn(4, 3, dtype=dtype)
    assert torch.equal(cls(4, 3, frozen=[1], _weight=table.clone()).weight, table)
    meta = cls(4, 3, frozen=[1], _weight=table.to("meta"))
    assert meta.weight.dtype is dtype and meta.weight.is_meta


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_no_optimizer_moves_frozen_rows(make):
    layer = PartlyFrozenEmbedding(6, 3, frozen=[0, 4], padding_idx=2)
    before = layer.weight.detach().clone()
    assert before[2].tolist() == [0, 0, 0]
    optimizer = make(layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ((layer(torch.arange(6)) - 1) ** 2).sum().backward()
        (layer.logits(torch.ones(2, 3)) ** 2).sum().backward()
        optimizer.step()
    moved = (layer.weight != before).all(dim=1)
    assert moved.tolist() == [False, True, False, True, False, True]


def test_gradient_and_scale_grad_by_freq():
    table = np.random.default_rng(0).standard_normal((6, 3))
    layer = PartlyFrozenEmbedding.from_pretrained(
        torch.from_numpy(table.copy()), frozen=[1, 3]
    )
    ids = ids_of(5, 1, 5, 0)
    (layer(ids) ** 3).sum().backward()
    want = central_difference(lambda: float((table[ids.numpy()] ** 3).sum()), table)
    np.testing.assert_allclose(
        layer.trained_rows.grad.numpy(), want[[0, 2, 4, 5]], atol=1e-7
    )
    scaled = PartlyFrozenEmbedding(6, 3, frozen=[1, 3], scale_grad_by_freq=True)
    scaled(ids_of(5, 1, 1, 5, 0)).sum().backward()
    assert scaled.trained_rows.grad[:, 0].tolist() == [1, 0, 0, 1]
    half = scaled.bfloat16()
    half.zero_grad()
    half(torch.full((3000,), 5)).sum().backward()
    assert half.trained_rows.grad[:, 0].tolist() == [0, 0, 0, 1]


def test_copy_load_cast_and_resize():
    layer = PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4)
    ids = torch.tensor([4, 1, 0, 5])
    want = layer(ids)
    whole = layer.state_dict()
    fresh = PartlyFrozenEmbedding(6, 3, frozen=[0, 3])
    fresh.load_state_dict(whole)
    assert torch.equal(fresh(ids), want)
    with torch.device("meta"):
        born_meta = PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4)
    assigned = copy.deepcopy(born_meta)
    assigned.load_state_dict(whole, assign=True)
    assert torch.equal(assigned(ids), want)
    emptied = copy.deepcopy(born_meta).to_empty(device="cpu")
    emptied.reset_parameters()
    assert emptied(ids_of(4)).tolist() == [[0, 0, 0]] and emptied(ids_of(1)).abs().sum() > 0
    emptied.load_state_dict(whole)
    plain = Embedding(6, 3)
    plain.load_state_dict(whole)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        emptied,
        plain,
        born_meta.to_empty(device="cpu"),
    ):
        other.load_state_dict(whole)
        assert torch.equal(other(ids), want)
    halved = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(halved(ids), want.bfloat16())
    layer.set_padding(3.0)
    assert layer(ids_of(4, 1)).tolist() == [[3] * 3, want[1].tolist()]
    what = layer.resize(8)
    assert what.added == range(6, 8) and layer.trained_rows.shape == (5, 3)
    assert torch.equal(layer(ids)[1:], want[1:]) and layer(ids_of(7)).shape == (1, 3)
    assert "6, 3, frozen=3 rows, padding_idx=4" in repr(
        PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4)
    )


def test_compiles_and_exports():
    layer, ids = (
        PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4),
        ids_of(4, 1, 0, 5),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), layer(ids))
    compiled(ids).sum().backward()
    assert layer.trained_rows.grad[:, 0].tolist() == [1, 0, 1]
    assert torch.equal(torch.export.export(layer, (ids,)).module()(ids), layer(ids))


@pytest.mark.rejects
def test_invalid_arguments_raise():
    with pytest.raises(IndexError, match=r"frozen\[1\] is 9, but num_embeddings is 6"):
        PartlyFrozenEmbedding(6, 3, frozen=[1, 9])
    layer = PartlyFrozenEmbedding(6, 3, frozen=[1])
    with pytest.raises(IndexError, match=r"ids\[0\] is -1, but num_embeddings is 6"):
        layer(ids_of(-1))
    with pytest.raises(ValueError, match="set_padding needs a layer with padding_idx"):
        layer.set_padding(0.0)
    with pytest.raises(
        RuntimeError, match=r"weight must have shape \(6, 3\), got \(5, 3\)"
    ):
        layer.load_state_dict({"weight": torch.ones(5, 3)})
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        layer.load_state_dict({})
