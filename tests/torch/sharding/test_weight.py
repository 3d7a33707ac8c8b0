"""The parameter of a sharded layer in other code: right for a part, or an error."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import embedding, embedding_bag, linear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer, functional
from firstlayer.torch.optim import AveragedRows, RowAdamW, clip_grad_norm_
from firstlayer.torch.sharding import shard_columns, shard_rows

ROWS, WIDTH = 11, 4
IDS = torch.tensor([[1, 2, 10], [6, 6, 0]])


def table(**options: Any) -> Any:
    weight = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH).sin()
    return Embedding(ROWS, WIDTH, _weight=weight, **options)


def shared(layer: Any, weight: Any) -> Any:
    """Return a layer with the parameter of another."""
    layer.weight = weight
    return layer


def whole(layer: Any) -> Any:
    return layer.state_dict()["weight"].full_tensor()


def read_elsewhere(rank: Any, columns: bool, trained: bool) -> list[str]:
    layer = (shard_columns if columns else shard_rows)(table(sparse=True), rank.mesh)
    weight = layer.weight
    if trained:
        optimizer = RowAdamW(layer.parameters(), lr=0.1)
        layer(IDS).sum().backward()
        optimizer.step()
    x, whole_layer = torch.ones(2, WIDTH), EmbeddingLayer(ROWS, WIDTH, position=None)
    shared(whole_layer.token, weight)
    calls: list[Callable[[], Any]] = [
        lambda: shared(nn.Linear(WIDTH, ROWS), weight)(x),
        lambda: linear(x, weight),
        lambda: x @ weight.T,
        lambda: weight @ x.T,
        lambda: linear(x.double(), weight.double()),
        lambda: torch.einsum("bd,vd->bv", x, weight),
        lambda: shared(Embedding(ROWS, WIDTH), weight).logits(x[:, : weight.shape[1]]),
        lambda: embedding(IDS, weight),
        lambda: embedding_bag(IDS, weight),
        lambda: functional.embedding(IDS, weight, sparse=True),
        lambda: weight[0],
        lambda: weight.index_select(0, IDS[0]),
        lambda: list(weight),
        lambda: shared(nn.Embedding(ROWS, WIDTH), weight)(IDS),
        lambda: shared(Embedding(ROWS, WIDTH), weight)(IDS),
        lambda: shared(Embedding(ROWS, WIDTH, sparse=True), weight)(IDS),
        lambda: shared(Embedding(ROWS, WIDTH, max_norm=1.0), weight)(IDS),
        lambda: shared(EmbeddingBag(ROWS, WIDTH, sparse=True), weight)(IDS),
        lambda: whole_layer(IDS),
        lambda: shard_rows(shared(Embedding(ROWS, WIDTH), weight), rank.mesh),
        lambda: weight.sum(),
        lambda: weight.square().mean(),
        lambda: weight.norm(),
        lambda: torch.linalg.vector_norm(weight),
        lambda: torch.nn.utils.get_total_norm([weight]),
        lambda: nn.init.normal_(weight),
        lambda: nn.init.xavier_uniform_(weight),
    ]
    before = weight.detach().clone()
    messages = []
    for call in calls:
        with pytest.raises((TypeError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    assert torch.equal(weight.detach(), before)
    return messages


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_code_that_needs_the_whole_table_is_an_error(processes, columns, trained):
    first, _ = processes.run(read_elsewhere, columns, trained, size=2)
    part = "columns 0 to 2 of 4" if columns else "rows 0 to 6 of 11"
    assert first[0] == (
        f"linear needs the whole table, but this rank has {part}; call the layer's "
        "logits, or give the linear layer to shard_rows as head"
    )
    others = [text for text in first if f"but this rank has {part}; " not in text]
    kind = "RowShardParameter" if trained else "ShardParameter"
    assert others == [
        "shard_rows needs a table that is an ordinary parameter without an optimizer, "
        f"got {kind}"
    ]


def clip(rank: Any) -> None:
    layer, want = shard_rows(table(), rank.mesh), table()
    for each in (layer, want):
        each(IDS).square().sum().backward()
    with pytest.raises(TypeError, match="the norm of the gradient of a sharded table"):
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    norm = clip_grad_norm_(layer.parameters(), 0.5)
    torch.testing.assert_close(norm, clip_grad_norm_(want.parameters(), 0.5))
    torch.testing.assert_close(
        layer.weight.grad.detach(), layer.shard.part(want.weight.grad)
    )
    # Further gradients are added to the same tensor.
    layer(IDS).sum().backward()
    with pytest.raises(TypeError, match="needs all ranks"):
        layer.weight.grad.norm()


def test_the_norm_of_a_dense_gradient_counts_all_ranks(processes):
    processes.run(clip, size=2)


def train_elsewhere(rank: Any, name: str) -> None:
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "sparse sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "sparse adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
        "rows": lambda p: RowAdamW(p, lr=0.1, weight_decay=0.1),
    }
    options = {"sparse": "sparse" in name or name == "rows"}
    layers = [shard_rows(table(**options), rank.mesh), table(**options)]
    averages = []
    for layer in layers:
        optimizer = optimizers[name](layer.parameters())
        average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        for step in range(3):
            optimizer.zero_grad()
            layer((IDS + step) % ROWS).sin().sum().backward()
            optimizer.step()
            average.update_parameters(layer)
        averages.append(average.module)
    torch.testing.assert_close(whole(layers[0]), layers[1].weight.detach())
    torch.testing.assert_close(whole(averages[0]), averages[1].weight.detach())
    # A vector of this rank's entries, and back.
    vector = parameters_to_vector(layers[0].parameters())
    assert vector.numel() == layers[0].weight.numel()
    vector_to_parameters(vector + 1, layers[0].parameters())
    torch.testing.assert_close(whole(layers[0]), layers[1].weight.detach() + 1)


def average_rows(rank: Any) -> None:
    layers = [shard_rows(table(sparse=True), rank.mesh), table(sparse=True)]
    found = []
    for layer in layers:
        optimizer = RowAdamW(layer.parameters(), lr=0.1, weight_decay=0.2)
        averaged = AveragedRows(optimizer, decay=0.6)
        for step in range(3):
            optimizer.zero_grad()
            layer((IDS + step) % ROWS).sin().sum().backward()
            optimizer.step()
            averaged.update_parameters()
        with averaged.swapped():
            found.append(layer(IDS).detach())
        if layer is layers[0]:
            with pytest.raises(
                RuntimeError, match=r"lookup needs .*; call the layer inside"
            ):
                averaged.lookup(layer.weight, IDS)
            with pytest.raises(
                RuntimeError, match=r"row_step needs the whole .*; call ste"
            ):
                optimizer.row_step(layer.weight)
    torch.testing.assert_close(*found)


def test_averages_of_a_sharded_table_equal_those_of_the_whole(processes):
    processes.run(average_rows, size=2)


@pytest.mark.parametrize("name", ["sgd", "sparse sgd", "adamw", "sparse adam", "rows"])
def test_optimizers_and_averages_of_torch_are_right_for_a_part(processes, name):
    processes.run(train_elsewhere, name, size=2)


def keep_part(rank: Any) -> None:
    layer = shard_rows(table(), rank.mesh)
    kept = layer.weight
    layer(IDS).sum().backward()
    assert kept.grad is not None
    grad = copy.deepcopy(kept.grad)
    assert torch.equal(grad, kept.grad) and grad.data_ptr() != kept.grad.data_ptr()
    with pytest.raises(TypeError, match="needs all ranks"):
        grad.norm()
    first, second = copy.deepcopy([kept, kept])
    assert first is second and first.is_leaf and first.requires_grad
    assert torch.equal(first, kept) and first.data_ptr() != kept.data_ptr()
    for x in (kept, kept.grad, layer):
        with pytest.raises(TypeError, match=r"cannot be pickled; save its .* state_dict"):
            pickle.dumps(x)
    layers = copy.deepcopy(layer), layer.to(torch.float64), layer.to(torch.float32)
    for weight in (first, *(changed.weight for changed in layers)):
        with pytest.raises(RuntimeError, match="needs the whole table"):
            linear(torch.ones(1, WIDTH), weight)
    assert layer.weight is kept
    nn.init.zeros_(layer.weight)
    assert whole(layer).eq(0).all() and type(layer.weight.detach()) is torch.Tensor


def test_copies_and_casts_are_checked_as_well(processes):
    processes.run(keep_part, size=2)


def read_whole(rank: Any) -> None:
    layer = shard_rows(table(), rank.mesh)
    x = torch.ones(2, WIDTH)
    assert torch.equal(linear(x, layer.weight), layer.logits(x))
    assert layer.weight[3].shape == (WIDTH,)


def test_one_rank_has_the_whole_table(processes):
    processes.run(read_whole, size=1)


def wrap(rank: Any) -> None:
    # Parts of the same shape, which DDP takes for copies of one parameter.
    model = nn.Sequential(shard_rows(Embedding(8, WIDTH), rank.mesh), nn.Linear(WIDTH, 2))
    wrapped = DistributedDataParallel(model, process_group=rank.mesh.get_group())
    with pytest.raises(RuntimeError, match="name the table in _set_params_and_buffers_to"):
        wrapped(IDS % 8)
    for layer in (shard_rows(table(), rank.mesh), shard_columns(table(), rank.mesh)):
        model = nn.Sequential(layer, nn.Linear(WIDTH, 2))
        with pytest.raises(RuntimeError, match="needs the whole table|ignored_params=shar"):
            fully_shard(model, mesh=rank.mesh)
            model(IDS)


def test_wrappers_that_take_a_part_for_a_parameter_are_errors(processes):
    processes.run(wrap, size=2)
