"""Lookups, gradients and steps of tables whose rows are sharded."""

import copy

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW
from firstlayer.torch.sharding import shard_rows, traffic

ROWS, WIDTH = 11, 4


def table(**options):
    """Return a table whose values are its row numbers and columns."""
    weight = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) / 10
    options = {"sparse": True, **options}
    return Embedding(ROWS, WIDTH, _weight=weight.to(options.pop("dtype", None)), **options)


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (3, 5 + rank), generator=generator)


def loss_of(rows, rank):
    weights = torch.arange(rows.numel(), dtype=torch.float32).view(rows.shape) / 50
    return (rows.float().sin() * (weights + rank)).sum()


def look_up(rank, options):
    layer = shard_rows(table(**options), rank.mesh)
    rows = layer(batch(rank.rank))
    loss_of(rows, rank.rank).backward()
    grad = layer.weight.grad
    assert grad.is_sparse == layer.sparse and len(grad) == len(layer.weight)
    dense = layer.weight.grad.to_dense() if grad.is_sparse else grad
    whole = layer.shard.to_dtensor(dense).full_tensor()
    nnz = len(grad._indices()[0]) if grad.is_sparse else -1
    return rows.detach(), whole, nnz, layer.weight.detach()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 7},
        {"sparse": False},
        {"max_norm": 3.0, "norm_type": 1.5, "padding_idx": -1},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_lookup_equals_that_of_one_process(processes, size, options):
    results = processes.run(look_up, options, size=size)
    reference = table(**options)
    loss, want = 0, []
    for rank in range(size):
        rows = reference(batch(rank))
        want.append(rows.detach())
        loss = loss + loss_of(rows, rank) / size
    loss.backward()
    grad = reference.weight.grad
    for (rows, whole, _, _), wanted in zip(results, want, strict=True):
        assert torch.equal(rows, wanted)
        close = {"rtol": 2e-2, "atol": 1e-2} if rows.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(whole, grad.to_dense(), **close)
    if grad.is_sparse:
        # Owners have gradients of the rows that were looked up, and of no others.
        ids = torch.cat([batch(rank).reshape(-1) for rank in range(size)]).unique()
        ids = ids[
            ids != (reference.padding_idx if reference.padding_idx is not None else -1)
        ]
        assert sum(nnz for _, _, nnz, _ in results) == len(ids)
    weight = torch.cat([part for *_, part in results])
    torch.testing.assert_close(weight, reference.weight.detach(), rtol=0, atol=0)
