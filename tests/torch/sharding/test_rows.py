"""Lookups, gradients and steps of tables whose rows are sharded."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdagrad, RowAdamW, RowSGD, clip_grad_norm_
from firstlayer.torch.sharding import shard_columns, shard_rows, traffic
from tests.support.traced_memory import peak_since, start_peak, tracing

ROWS, WIDTH = 11, 4
LAYOUTS = {"differ": None, "replicated": Replicate(), "scattered": Replicate()}


def table(*, dtype: Any = None, **options: Any) -> Any:
    """Return a table of 11 rows with a row gradient."""
    weight = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) / 10
    return Embedding(
        ROWS,
        WIDTH,
        _weight=weight.to(dtype or torch.float32),
        **{"sparse": True, **options},
    )


def batch(rank: int, step: int = 0) -> Any:
    """Return ids that differ by rank, in shape too."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (3, 5 + rank), generator=generator)


def loss_of(rows: Any, rank: int) -> Any:
    """Return a loss whose gradient differs by entry and by rank."""
    factors = torch.arange(rows.numel(), dtype=torch.float32).view(rows.shape) / 50
    return (rows.float().sin() * (factors + rank)).sum()


def whole_gradient(layer: Any) -> Any:
    """Return the gradient of all ranks' rows."""
    grad = layer.weight.grad
    dense = grad.to_dense() if grad.is_sparse else grad
    return layer.shard.to_dtensor(torch.Tensor(dense)).full_tensor()


def look_up(rank: Any, options: Any) -> Any:
    layer: Any = shard_rows(table(**options), rank.mesh)
    rows = layer(batch(rank.rank))
    loss_of(rows, rank.rank).backward()
    grad = layer.weight.grad
    assert grad.is_sparse == layer.sparse and grad.shape == layer.weight.shape
    touched = len(grad._indices()[0]) if grad.is_sparse else 0
    return rows.detach(), whole_gradient(layer), touched, layer.weight.detach()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 7},
        {"sparse": False, "padding_idx": 0},
        {"max_norm": 3.0, "norm_type": 1.5, "padding_idx": -1},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_lookup_equals_that_of_one_process(processes, size, options):
    results = processes.run(look_up, options, size=size)
    reference = table(**options)
    want = [reference(batch(rank)) for rank in range(size)]
    losses: Any = [loss_of(rows, rank) / size for rank, rows in enumerate(want)]
    torch.stack(losses).sum().backward()
    grad = reference.weight.grad
    close: Any = {"rtol": 1e-2, "atol": 1e-2} if "dtype" in options else {}
    for (rows, whole, _, _), wanted in zip(results, want, strict=True):
        if "max_norm" in options:
            # Torch's powers depend on the place of a number in its tensor.
            torch.testing.assert_close(rows, wanted, rtol=1e-6, atol=0)
        else:
            assert torch.equal(rows, wanted)
        torch.testing.assert_close(whole, grad.to_dense(), **close)
    if grad.is_sparse:
        # Owners have gradients of the rows that were looked up, and of no others.
        ids = torch.cat([batch(rank).reshape(-1) for rank in range(size)]).unique()
        ids = ids[ids != (-1 if layer_padding(options) is None else layer_padding(options))]
        assert sum(touched for _, _, touched, _ in results) == len(ids)
    # max_norm rescales the rows with a gradient, and no others.
    weight = torch.cat([part for *_, part in results])
    torch.testing.assert_close(weight, reference.weight.detach(), rtol=1e-6, atol=0)


def layer_padding(options: Any) -> Any:
    """Return the padding id, counted from the front."""
    return table(**options).padding_idx


def look_up_replicated(rank: Any, options: Any, output: Any) -> Any:
    layer: Any = shard_rows(
        table(**options), rank.mesh, input_layouts=Replicate(), output_layouts=output
    )
    rows = layer(batch(0))
    part = rows
    if output is not None:
        # The loss of a part, with the factors of that part.
        parts = [torch.zeros_like(p) for p in torch.empty(3, 5, WIDTH).chunk(2, output.dim)]
        parts = [p if n != rank.rank else rows for n, p in enumerate(parts)]
        part = torch.cat(parts, output.dim)
    loss_of(part, 2).backward()
    return rows.detach(), whole_gradient(layer)


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("output", [None, Shard(1)])
def test_replicated_ids_give_the_gradient_of_one_process(processes, options, output):
    if output is not None:
        options = {"padding_idx": 8}
    results = processes.run(look_up_replicated, options, output, size=2)
    reference = table(**options)
    rows = reference(batch(0))
    loss_of(rows, 2).backward()
    want = [rows, rows] if output is None else rows.chunk(2, output.dim)
    for (got, whole), wanted in zip(results, want, strict=True):
        assert torch.equal(got, wanted)
        torch.testing.assert_close(whole, reference.weight.grad.to_dense())


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: RowAdamW(p, lr=0.1, weight_decay=0.2, betas=(0.7, 0.9)),
    "sgd": lambda p: RowSGD(p, lr=0.01, momentum=0.8, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: RowAdagrad(p, lr=0.3, lr_decay=0.1),
}


def train(layer: Any, ranks: Any, name: str, size: int, is_sharded: bool) -> Any:
    """Train with a schedule, clipping and a tied head; return losses and weights."""
    linear = torch.nn.Linear(WIDTH, WIDTH)
    torch.nn.init.constant_(linear.weight, 0.1)
    torch.nn.init.constant_(linear.bias, 0.2)
    parameters = [layer.weight, *linear.parameters()]
    optimizer = OPTIMIZERS[name](parameters)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    losses, norms = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss: Any = 0.0
        for rank in ranks:
            x = linear(layer(batch(rank, step)))
            loss = loss + loss_of(x, rank) / 30 / (1 if is_sharded else size)
            if step % 3 == 2:
                loss = loss + layer.logits(x).square().mean() / (1 if is_sharded else size)
        loss.backward()
        loss = loss.detach()
        if is_sharded:
            for p in linear.parameters():
                grad: Any = p.grad
                torch.distributed.all_reduce(grad, group=layer.exchange.group)
                grad /= size
            torch.distributed.all_reduce(loss, group=layer.exchange.group)
            loss = loss / size
        norms.append(float(clip_grad_norm_(parameters, 0.5)))
        optimizer.step()
        schedule.step()
        losses.append(float(loss))
    return losses, norms, layer, linear.weight.detach()


def train_sharded(rank: Any, name: str) -> Any:
    layer: Any = shard_rows(table(padding_idx=1), rank.mesh)
    size = rank.mesh.size()
    losses, norms, layer, other = train(layer, [rank.rank], name, size, True)
    return losses, norms, layer.state_dict()["weight"].full_tensor(), other


@pytest.mark.filterwarnings("ignore:the gradient of a table of:UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_one_two_and_four_processes_agrees(processes, name):
    for size in (1, 2, 4):
        results = processes.run(train_sharded, name, size=size)
        losses, norms, layer, other = train(
            table(padding_idx=1), range(size), name, size, False
        )
        for got in results:
            assert got[0] == pytest.approx(losses, rel=1e-4)
            assert got[1] == pytest.approx(norms, rel=1e-4)
            torch.testing.assert_close(got[2], layer.weight.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got[3], other, rtol=1e-4, atol=1e-5)


def raise_errors(rank: Any) -> Any:
    layer: Any = shard_rows(table(), rank.mesh)
    messages = []
    wrong: Any = torch.tensor([[3, 1], [2, 11]])
    for ids in (wrong, torch.ones(2), [1, 2], wrong.to(torch.int16), torch.tensor([-1])):
        try:
            layer(ids if rank.rank == 2 else torch.tensor([1, 2]))
        except (IndexError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    # The exchange is in order after the errors.
    return messages, layer(torch.tensor([5])).detach()


def test_an_error_of_one_rank_is_raised_by_all(processes):
    for messages, rows in processes.run(raise_errors, size=4):
        assert messages == [
            "OutOfRange: ids[1, 1] is 11, but num_embeddings is 11, on rank 2",
            "WrongType: ids must be integers, got float32, on rank 2",
            "WrongType: ids must be a tensor, got list, on rank 2",
            "OutOfRange: ids[1, 1] is 11, but num_embeddings is 11, on rank 2",
            "OutOfRange: ids[0] is -1, but num_embeddings is 11, on rank 2",
        ]
        assert torch.equal(rows, table().weight[5:6])


def count_bytes(rank: Any) -> Any:
    layer: Any = shard_rows(table(), rank.mesh)
    ids = torch.tensor([[0, 1, 1, 10], [9, 10, 0, 0]][rank.rank])
    before = traffic(layer)
    layer(ids).sum().backward()
    return traffic(layer) - before


def test_traffic_counts_remote_ids_rows_and_gradients(processes):
    # Rank 0 owns rows 0 to 5. Rank 0 asks for one remote row, rank 1 also.
    for sent in processes.run(count_bytes, size=2):
        assert (sent.ids, sent.rows, sent.gradients) == (8, 4 * WIDTH, 4 * WIDTH)
        assert sent.counts == 16 and sent.total == 24 + 8 * WIDTH


def few_rows(rank: Any) -> Any:
    weight = torch.arange(6.0).view(2, 3)
    layer: Any = shard_rows(Embedding(2, 3, sparse=True, _weight=weight.clone()), rank.mesh)
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    # Ranks 2 and 3 have no rows, and rank 3 has no ids.
    ids = torch.tensor([0, 1, 1, 0] if rank.rank < 3 else [], dtype=torch.int64)
    rows = layer(ids)
    rows.sum().backward()
    optimizer.step()
    return rows.detach(), layer.state_dict()["weight"].full_tensor()


def test_ranks_without_rows_or_ids_take_part(processes):
    weight = torch.arange(6.0).view(2, 3)
    *results, empty = processes.run(few_rows, size=4)
    reference = torch.nn.Embedding(2, 3, _weight=weight.clone())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    (reference(torch.tensor([0, 1, 1, 0])).sum() * 3 / 4).backward()
    optimizer.step()
    for _, whole in [*results, empty]:
        torch.testing.assert_close(whole, reference.weight.detach())
    assert empty[0].shape == (0, 3) and torch.equal(results[0][0], weight[[0, 1, 1, 0]])


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest new tensor."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.largest = weight.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            values = x._values() if isinstance(x, torch.Tensor) and x.is_sparse else x
            if isinstance(values, torch.Tensor):
                storage = values.untyped_storage()
                if storage.data_ptr() != self.weight:
                    self.largest = max(self.largest, storage.nbytes())
        return out


def measure_memory(rank: Any, replicated: bool) -> Any:
    layout = Replicate() if replicated else None
    layer: Any = Embedding(100_000, 8, sparse=True)
    shard_rows(layer, rank.mesh, input_layouts=layout)
    optimizer = RowAdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0 if replicated else rank.rank)
    with tracing():
        for _ in range(3):
            ids = torch.randint(0, 100_000, (64,), generator=generator)
            largest = LargestTensor(layer.weight)
            start = start_peak()
            with largest:
                layer(ids).square().sum().backward()
                clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            peak = peak_since(start)
            optimizer.zero_grad()
    return largest.largest, peak


@pytest.mark.parametrize("replicated", [False, True])
def test_memory_of_a_step_follows_the_batch(processes, replicated):
    # A shard has 1.6 MB, and 128 rows have 4 KB.
    for largest, peak in processes.run(measure_memory, replicated, size=2):
        assert 0 < largest <= 16_384
        assert peak < 200_000


def check_random_lookups(rank: Any, seeds: range) -> None:
    dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16
    id_dtypes = torch.int64, torch.int32, torch.uint8, torch.int16
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rows, width, dtype = *rng.integers(1, 40, 2).tolist(), dtypes[seed % 4]
        weight = torch.from_numpy(rng.standard_normal((rows, width))).to(dtype)
        padding = int(rng.integers(rows)) if seed % 3 else None
        shapes = [tuple(rng.integers(0, 5, rng.integers(0, 4))) for _ in range(4)]
        every = [torch.from_numpy(rng.integers(0, rows, shape)) for shape in shapes]
        factors = [torch.from_numpy(rng.standard_normal((*s, width))) for s in shapes]
        layer: Any = Embedding(
            rows, width, padding_idx=padding, sparse=bool(seed % 2), _weight=weight.clone()
        )
        (shard_rows, shard_columns)[seed // 8 % 2](layer, rank.mesh)
        assert sum(layer.shard.layout.counts) == (width if seed // 8 % 2 else rows)
        ids = torch.as_tensor(every[rank.rank]).to(id_dtypes[seed // 4 % 4])
        out = layer(ids)
        assert out.dtype == dtype and torch.equal(out, weight[every[rank.rank]])
        close = {4: 1e-4, 8: 1e-10, 2: 5e-2}[dtype.itemsize]
        x = torch.as_tensor(factors[rank.rank]).to(dtype)
        logits = layer.logits(x).detach()
        torch.testing.assert_close(logits, x @ weight.T, rtol=close, atol=close)
        (out.double() * factors[rank.rank]).sum().backward()
        want = torch.zeros(rows, width, dtype=torch.float64)
        for each, factor in zip(every, factors, strict=True):
            want.index_add_(0, each.reshape(-1), factor.reshape(-1, width))
        if padding is not None:
            want[padding] = 0
        got = whole_gradient(layer).double()
        torch.testing.assert_close(got, want / 4, rtol=close, atol=close)


def test_lookups_of_any_shape_and_dtype(processes):
    processes.run(check_random_lookups, range(24), size=4)
