"""The gradient of a shard: averaged over ranks with other batches, as DDP averages."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._table.lookup import LookupOptions
from .exchange import Exchange


@dataclass(frozen=True)
class GradientAverage:
    """Average of a shard's gradient over ranks.

    Args:
        batches: Number of ranks whose batches differ. Gradients are divided by it.
        replicas: Collectives of the ranks with the same shard, or None if there is one.
    """

    batches: int
    replicas: Exchange | None

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the average of a sparse or dense gradient."""
        if self.replicas is not None:
            gradient = _sum_over_replicas(gradient, self.replicas)
        if self.batches == 1:
            return gradient
        if not gradient.is_sparse:
            return gradient / self.batches
        return torch.sparse_coo_tensor(
            gradient._indices(),
            gradient._values() / self.batches,
            gradient.shape,
            check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
        )


def with_averaged_gradient(
    weight: Float[Tensor, "rows width"], average: GradientAverage
) -> Float[Tensor, "rows width"]:
    """Return the weight as an ordinary tensor, whose gradient is averaged."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight.detach()
    return _Averaged.apply(weight, average)  # pyright: ignore


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, average: GradientAverage) -> Tensor:
        ctx.average = average
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.average(grads[0]), None


def _sum_over_replicas(gradient: Tensor, replicas: Exchange) -> Tensor:
    if not gradient.is_sparse:
        return replicas.all_reduce(gradient, kind="gradients")
    ids, values = gradient._indices()[0], gradient._values()
    numbers = [[len(ids)]] * replicas.size
    received = replicas.counts(numbers, error=None, device=values.device)
    counts = [count for (count,) in received]
    # Every replica adds in the order of ranks, so that all have the same bits.
    every_id = torch.cat(replicas.all_gather(ids, counts, kind="gradients"))
    every_value = torch.cat(replicas.all_gather(values, counts, kind="gradients"))
    options = LookupOptions(gradient.shape[0], gradient.dtype, sparse=True)
    return options.gradient(every_id, every_value)
