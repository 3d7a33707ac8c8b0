"""Bags of tables whose rows or columns are sharded."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from firstlayer.torch import EmbeddingBag
from firstlayer.torch.sharding import shard_columns, shard_rows, traffic

ROWS, WIDTH = 13, 3


def table(*, dtype: Any = torch.float32, **options: Any) -> Any:
    weight = torch.arange(ROWS * WIDTH, dtype=dtype).view(ROWS, WIDTH).sin() * 2
    return EmbeddingBag(ROWS, WIDTH, _weight=weight, **{"sparse": True, **options})


def arguments(rank: int, kind: str) -> Any:
    """Return the arguments of a rank; bags differ in number and length."""
    generator = torch.Generator().manual_seed(rank)
    if kind == "2-D":
        return (torch.randint(0, ROWS, (4 + rank, 5), generator=generator),)
    ids = torch.randint(0, ROWS, (10,), generator=generator)
    offsets = torch.tensor([0, 3, 3, 7 + rank])
    if kind == "offsets":
        return ids, offsets
    weights = torch.rand(10, generator=generator).requires_grad_()
    return ids, offsets, weights


def pooled(layer: Any, rank: int, kind: str) -> Any:
    """Return the output of a rank, and the gradient of its weights."""
    given = arguments(rank, kind)
    out = layer(*given)
    factors = torch.arange(out.numel(), dtype=out.dtype).view(out.shape) / 7 + rank
    return out, (out * factors).sum(), given[-1]


def pool(rank: Any, options: Any, kind: str, replicated: bool, columns: bool) -> Any:
    layout = Replicate() if replicated else None
    function: Any = shard_columns if columns else shard_rows
    layer = function(table(**options), rank.mesh, input_layouts=layout)
    out, loss, weights = pooled(layer, 0 if replicated else rank.rank, kind)
    loss.backward()
    grad = layer.weight.grad
    dense = torch.Tensor(grad.to_dense() if grad.is_sparse else grad)
    whole = layer.shard.to_dtensor(dense).full_tensor()
    return out.detach(), whole, weights.grad, layer.weight.detach(), layer.training


OPTIONS = [
    {"mode": "sum", "padding_idx": 4},
    {"mode": "mean", "padding_idx": -1},
    {"mode": "max"},
    {"mode": "mean", "scale_grad_by_freq": True},
    {"mode": "sum", "max_norm": 1.7, "norm_type": 3.0},
    {"mode": "mean", "sparse": False},
]


CASES = [
    *[(options, kind, False) for options in OPTIONS for kind in ("2-D", "weights")],
    (OPTIONS[0], "offsets", False),
    *[(options, "weights", True) for options in (*OPTIONS[:3], OPTIONS[5])],
    (OPTIONS[0], "2-D", True),
]


@pytest.mark.parametrize(("options", "kind", "columns"), CASES, ids=str)
def test_bags_equal_those_of_one_process(processes, options, kind, columns):
    # Of three columns on four ranks, the last rank has none.
    for size, replicated in ((2, False), (4, False), (2, True)):
        results = processes.run(pool, options, kind, replicated, columns, size=size)
        reference = table(**options)
        ranks = [0] if replicated else list(range(size))
        if options.get("scale_grad_by_freq") and len(ranks) > 1:
            # As with DDP, each rank counts how often its own ids occur.
            want, grads = [], []
            for rank in ranks:
                reference.zero_grad()
                want.append(pooled(reference, rank, kind))
                want[-1][1].backward()
                grads.append(reference.weight.grad.to_dense() / size)
            gradient = torch.stack(grads).sum(0)
        else:
            want = [pooled(reference, rank, kind) for rank in ranks]
            (torch.stack([loss for _, loss, _ in want]).sum() / len(ranks)).backward()
            gradient = reference.weight.grad.to_dense()
        for rank, (out, whole, d_weights, _, _) in enumerate(results):
            wanted, _, weights = want[0 if replicated else rank]
            torch.testing.assert_close(out, wanted.detach(), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(whole, gradient, atol=1e-5, rtol=1e-5)
            if kind == "weights":
                factor = 1 if options.get("scale_grad_by_freq") else len(ranks)
                torch.testing.assert_close(d_weights, weights.grad * factor)
        stored = torch.cat([part for *_, part, _ in results], int(columns))
        torch.testing.assert_close(stored, reference.weight.detach())


def pool_half(rank: Any, columns: bool) -> Any:
    function: Any = shard_columns if columns else shard_rows
    layer = function(table(dtype=torch.bfloat16, mode="sum"), rank.mesh)
    out = layer(torch.tensor([list(range(ROWS)) * 20]))
    return out.detach()


@pytest.mark.parametrize("columns", [False, True])
def test_half_precision_is_rounded_once(processes, columns):
    for out in processes.run(pool_half, columns, size=2):
        exact = table(dtype=torch.bfloat16).weight.detach().double().sum(0) * 20
        assert torch.equal(out[0], exact.float().to(torch.bfloat16))


def send_bags(rank: Any, mode: str) -> Any:
    layer: Any = shard_rows(table(mode=mode), rank.mesh)
    # Rank 0 has rows 0 to 6. Each bag has ids of both.
    before = traffic(layer)
    layer(torch.tensor([[0, 1, 2, 8, 9, 10]] * 2)).sum().backward()
    return traffic(layer) - before


def test_pooled_vectors_are_sent_and_not_rows(processes):
    for sent in processes.run(send_bags, "mean", size=2):
        # Two bags: three ids and a length each, one vector, one gradient.
        assert (sent.ids, sent.rows, sent.gradients) == (2 * 28, 8 * WIDTH, 8 * WIDTH)
    for sent in processes.run(send_bags, "max", size=2):
        assert (sent.ids, sent.rows, sent.gradients) == (24, 12 * WIDTH, 12 * WIDTH)


def raise_errors(rank: Any, mode: str, columns: bool) -> Any:
    function: Any = shard_columns if columns else shard_rows
    layer = function(table(mode=mode), rank.mesh)
    ids, messages = torch.tensor([1, 2, 3]), []
    for wrong in (
        (torch.tensor([1, 13]), torch.tensor([0])),
        (ids, torch.tensor([1, 2])),
        (ids,),
        (ids, torch.tensor([0]), torch.ones(2)),
    ):
        try:
            layer(*(wrong if rank.rank else (ids, torch.tensor([0, 2]))))
        except (IndexError, ValueError) as error:
            messages.append(str(error))
    return messages, layer(ids[None]).detach()


@pytest.mark.parametrize(
    ("mode", "columns"), [("sum", False), ("max", False), ("max", True)]
)
def test_an_error_of_one_rank_is_raised_by_all(processes, mode, columns):
    for messages, out in processes.run(raise_errors, mode, columns, size=2):
        assert messages == [
            "ids[1] is 13, but num_embeddings is 13, on rank 1",
            "offsets must begin with 0, got 1, on rank 1",
            "offsets must be given for ids of 1 axis, got None, on rank 1",
            "per_sample_weights must have the shape (3,) of ids, got (2,), on rank 1",
        ]
        want = table(mode=mode)(torch.tensor([[1, 2, 3]])).detach()
        torch.testing.assert_close(out, want)


def mix_weights(rank: Any, columns: bool) -> Any:
    function: Any = shard_columns if columns else shard_rows
    layer = function(table(mode="sum"), rank.mesh)
    # One rank without weights, one with constants, two that train them.
    weights = [None, torch.ones(1, 4) * 2, *torch.full((2, 1, 4), 3.0)][rank.rank]
    if rank.rank >= 2 and weights is not None:
        weights.requires_grad_()
    out = layer(torch.tensor([[1, 5, 9, 12]]), per_sample_weights=weights)
    out.sum().backward()
    return out.detach(), None if weights is None else weights.grad


@pytest.mark.parametrize("columns", [False, True])
def test_ranks_may_differ_in_weights(processes, columns):
    rows = table().weight.detach()[[1, 5, 9, 12]]
    results = processes.run(mix_weights, columns, size=4)
    for factor, (out, _) in zip((1, 2, 3, 3), results, strict=True):
        torch.testing.assert_close(out[0], rows.sum(0) * factor)
    assert results[0][1] is None and results[1][1] is None
    for _, grad in results[2:]:
        torch.testing.assert_close(grad[0], rows.sum(1))
