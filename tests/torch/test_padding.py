"""The padding row: zero at first, keeps what is written, gets no gradient from lookups."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from firstlayer.torch._table import lookup
from firstlayer.torch.bag import EmbeddingBag
from firstlayer.torch.frozen import PartlyFrozenEmbedding
from firstlayer.torch.layer import EmbeddingLayer
from firstlayer.torch.learned import LearnedPositions
from firstlayer.torch.optim import RowAdamW
from firstlayer.torch.token import Embedding
from tests.support.torch_tables import ids_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


LAYERS = {
    "Embedding": lambda **options: Embedding(4, 3, padding_idx=-3, **options),
    "EmbeddingBag": lambda **options: EmbeddingBag(4, 3, padding_idx=1, **options),
    "LearnedPositions": lambda **options: LearnedPositions(
        2, 3, row_offset=2, padding_idx=1, **options
    ),
    "EmbeddingLayer": lambda **options: EmbeddingLayer(
        4, 3, position=None, padding_idx=1, **options
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_construction_and_reset_parameters_zero_the_padding_row(name):
    layer: Any = LAYERS[name]()
    (weight,) = layer.parameters()
    assert weight[1].tolist() == [0, 0, 0] and weight[[0, 2, 3]].all()
    nn.init.ones_(weight)
    layer.reset_parameters()
    assert weight[1].tolist() == [0, 0, 0] and (weight[[0, 2, 3]] != 1).all()
    empty: Any = LAYERS[name](device="meta")
    empty.to_empty(device="cpu").reset_parameters()
    (weight,) = empty.parameters()
    assert weight[1].tolist() == [0, 0, 0] and weight[[0, 2, 3]].all()


def by_new_data(layer):
    layer.weight.data = layer.weight.data + 1


def by_assignment(layer):
    with torch.no_grad():
        layer.weight[layer.padding_idx] = 7


def by_cast_data(layer):
    layer.weight.data = layer.weight.data.double().add(1)


WRITES = [
    by_new_data,
    by_assignment,
    by_cast_data,
    lambda layer: nn.init.normal_(layer.weight),
    lambda layer: layer.weight.data.copy_(torch.full((4, 3), 3.0)),
    lambda layer: setattr(layer, "weight", nn.Parameter(torch.full((4, 3), 3.0))),
    lambda layer: layer.load_state_dict({"weight": torch.full((4, 3), 3.0)}),
    lambda layer: layer.load_state_dict({"weight": torch.full((4, 3), 3.0)}, assign=True),
    lambda layer: layer.set_padding(torch.tensor([3.0, 4.0, 5.0])),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("cls", [Embedding, EmbeddingBag])
def test_the_padding_row_keeps_what_is_written(write, cls):
    layer = cls(4, 3, padding_idx=2)
    layer(ids_of(2, 0)[None])
    write(layer)
    row = layer.weight[2].detach().clone()
    assert row.any()
    layer(ids_of(2, 0)[None]).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert torch.equal(layer.weight[2], row)
    assert torch.equal(layer.state_dict()["weight"][2], row)
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight[2], row)
    if cls is Embedding:
        assert torch.equal(layer(ids_of(2))[0], row)


def test_given_tables_keep_their_padding_row():
    table = torch.arange(1.0, 13.0).reshape(4, 3)
    layers = [
        Embedding(4, 3, padding_idx=1, _weight=table.clone()),
        Embedding.from_pretrained(table.clone(), padding_idx=1),
        EmbeddingBag(4, 3, padding_idx=1, _weight=table.clone()),
        EmbeddingBag.from_pretrained(table.clone(), padding_idx=1),
        LearnedPositions(2, 3, row_offset=2, padding_idx=1, weight=table.clone()),
        PartlyFrozenEmbedding.from_pretrained(table.clone(), frozen=[0], padding_idx=1),
    ]
    for layer in layers:
        assert torch.equal(layer.weight, table)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}],
)
def test_lookups_pass_no_gradient_to_the_padding_row(
    options, dtype, kernels, compiled, monkeypatch
):
    if kernels:
        monkeypatch.setattr(lookup, "SMALL_TABLE", 0)
    layer = Embedding(5, 3, padding_idx=2, dtype=dtype, **options)
    nn.init.constant_(layer.weight, 0.25)
    call: Any = torch.compile(layer, backend="aot_eager") if compiled else layer
    (call(ids_of(2, 0, 2, 4, 4)) ** 2).sum().backward()
    grad = layer.weight.grad.to_dense()
    assert grad[2].tolist() == [0, 0, 0] and grad[[0, 4]].all()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("sparse", [False, True])
def test_bags_pass_no_gradient_to_the_padding_row(mode, sparse):
    layer = EmbeddingBag(5, 3, padding_idx=2, mode=mode, sparse=sparse)
    layer.set_padding(9.0)
    (layer(ids_of(2, 0, 2, 4)[None]) ** 2).sum().backward()
    grad = layer.weight.grad.to_dense()
    assert grad[2].tolist() == [0, 0, 0] and grad[[0, 4]].any(dim=1).any()


@pytest.mark.parametrize("make", [torch.optim.AdamW, RowAdamW])
def test_optimizers_move_the_padding_row_as_a_row_without_gradient(make):
    rule: Any = {"lr": 0.1, "weight_decay": 0.5}
    ours = Embedding(6, 3, padding_idx=2, sparse=make is RowAdamW)
    theirs = nn.Embedding(6, 3, padding_idx=2)
    ours.set_padding(2.0)
    theirs.load_state_dict(ours.state_dict())
    pairs = [(ours, make(ours.parameters(), **rule))]
    pairs += [(theirs, torch.optim.AdamW(theirs.parameters(), **rule))]
    for step in range(4):
        ids = torch.tensor([2, step, 5]) if step % 2 else torch.tensor([step, 1])
        for layer, optimizer in pairs:
            optimizer.zero_grad()
            layer(ids).square().sum().backward()
            optimizer.step()
    got = ours.state_dict()["weight"]
    torch.testing.assert_close(got, theirs.weight.detach())
    assert got[2, 0].item() == pytest.approx(2 * 0.95**4)


@pytest.mark.parametrize("write", [lambda layer: layer.set_padding(3.0), None])
def test_set_padding_and_reset_catch_up_stale_rows_first(write):
    layer = Embedding(6, 3, padding_idx=2, sparse=True)
    optimizer = RowAdamW(layer.parameters(), lr=0.1, weight_decay=0.5)

    def step():
        optimizer.zero_grad()
        layer(ids_of(1, 4)).sum().backward()
        optimizer.step()

    step()
    step()
    if write is None:
        layer.reset_parameters()
        before = layer.weight.detach().clone()
        optimizer.flush()
        assert torch.equal(layer.weight, before)
        return
    write(layer)
    assert layer(ids_of(2)).tolist() == [[3] * 3]
    optimizer.flush()
    assert layer.weight[2].tolist() == [3] * 3
    step()
    torch.testing.assert_close(layer(ids_of(2)).detach(), torch.full((1, 3), 3 * 0.95))


def test_a_float32_lookup_with_padding_uses_torchs_backward():
    layer = Embedding(4, 3, padding_idx=2)
    assert layer(ids_of(2, 1)).grad_fn.name() == "EmbeddingBackward0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_only_padding_accumulates_with_others(dtype):
    layer = Embedding(20, 4, padding_idx=0, sparse=True, dtype=dtype)
    for ids in ([0], [], [1, 0, 1], [0]):
        layer(torch.tensor(ids, dtype=torch.int64)).sum().backward()
    want = torch.zeros(20, 4, dtype=dtype)
    want[1] = 2
    assert torch.equal(layer.weight.grad.to_dense(), want)


@pytest.mark.parametrize("width", [0, 1])
def test_padding_of_narrow_tables(width):
    layer = Embedding(4, width, padding_idx=1)
    assert torch.equal(layer(ids_of(1)), torch.zeros(1, width))
    layer.set_padding(5.0)
    assert torch.equal(layer(ids_of(1)), torch.full((1, width), 5.0))


def test_padding_idx_may_be_changed_later():
    layer = Embedding(4, 3, dtype=torch.bfloat16)
    for padding_idx, row in ((2, 2), (0, 0), (-1, 3)):
        layer.padding_idx = padding_idx
        layer.zero_grad()
        layer(torch.arange(4)).sum().backward()
        assert layer.weight.grad[:, 0].tolist() == [float(i != row) for i in range(4)]
        layer.set_padding(4.0)
        assert layer.weight[row].tolist() == [4] * 3


def test_two_layers_have_their_own_padding():
    a, b = Embedding(4, 3, padding_idx=1), Embedding(4, 3, padding_idx=2)
    for layer in (a, b):
        nn.init.ones_(layer.weight)
    a.set_padding(5.0)
    b.set_padding(6.0)
    assert a(ids_of(1, 2)).tolist() == [[5, 5, 5], [1, 1, 1]]
    assert b(ids_of(1, 2)).tolist() == [[1, 1, 1], [6, 6, 6]]


def test_mask_is_false_at_padding():
    layer = Embedding(300, 2, padding_idx=-1)
    ids = torch.tensor([1, 299], dtype=torch.uint16)
    assert layer.mask(ids).tolist() == [True, False]
    assert Embedding(300, 2).mask(ids).tolist() == [True, True]


TABLES = [Embedding, partial(PartlyFrozenEmbedding, frozen=[1])]


@pytest.mark.rejects
@pytest.mark.parametrize("build", TABLES)
def test_set_padding_checks_its_argument(build):
    with pytest.raises(ValueError, match="set_padding needs a layer with padding_idx"):
        build(4, 3).set_padding(0.0)
    layer = build(4, 3, padding_idx=0)
    with pytest.raises(ValueError, match=r"a number or have shape \(3,\), got \(2,\)"):
        layer.set_padding(torch.ones(2))
    assert layer(ids_of(0)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("build", TABLES)
def test_set_padding_copies_the_value_without_its_graph(build):
    layer, value = build(4, 3, padding_idx=0), torch.ones(3, requires_grad=True)
    layer.set_padding(value * 2)
    for _ in range(2):
        layer(ids_of(0, 2)).sum().backward()
    assert layer(ids_of(0)).tolist() == [[2, 2, 2]] and value.grad is None
