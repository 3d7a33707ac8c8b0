"""Linear functions of the tensors of all ranks, with gradients.

``counts`` has the number of columns of each rank, ``nums`` the number of vectors.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import Exchange


class _Collective(torch.autograd.Function):
    """A linear function of all ranks' tensors, and the one that its gradient takes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.run = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.run(grads[0]), None, None


def collective(
    x: Tensor,
    *,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return ``forward(x)``, whose gradient is ``backward`` of the result's gradient.

    Args:
        x: Tensor.
        forward: Linear function of the tensors of all ranks.
        backward: Its transpose.
    """
    return _Collective.apply(x, forward, backward)  # pyright: ignore


def sum_over_ranks(
    x: Float[Tensor, "*shape"], exchange: Exchange
) -> Float[Tensor, "*shape"]:
    """Return the sum of every rank's values, for a result that all ranks use alike.

    Their gradients of the result are equal, so each is the gradient of the sum.
    """
    return collective(
        x,
        forward=lambda x: exchange.all_reduce(x, kind="rows"),
        backward=lambda gradient: gradient,
    )


def sum_gradient_over_ranks(
    x: Float[Tensor, "*shape"], exchange: Exchange
) -> Float[Tensor, "*shape"]:
    """Return ``x``; its gradient is the sum of every rank's."""
    return collective(
        x,
        forward=lambda x: x.view_as(x),
        backward=lambda gradient: exchange.all_reduce(gradient, kind="gradients"),
    )


def scatter_sum(
    x: Float[Tensor, "*shape"], axis: int, counts: list[int], exchange: Exchange
) -> Float[Tensor, "*part"]:
    """Return this rank's part, along an axis, of the sum over ranks.

    Args:
        x: Tensor of the same shape on every rank.
        axis: Axis that is divided.
        counts: Length of each rank's part.
        exchange: Collectives of the ranks.
    """
    mine = [counts[exchange.rank]] * exchange.size

    def forward(x: Tensor) -> Tensor:
        moved = x.movedim(axis, 0)
        parts = exchange.all_to_all(moved, sent=counts, received=mine, kind="rows")
        parts = parts.view(exchange.size, mine[0], *moved.shape[1:])
        return parts.sum(0).movedim(0, axis)

    def backward(gradient: Tensor) -> Tensor:
        moved = gradient.movedim(axis, 0).contiguous()
        parts = exchange.all_gather(moved, counts, kind="gradients")
        return torch.cat(parts).movedim(0, axis)

    return collective(x, forward=forward, backward=backward)


def gather_batches(
    x: Float[Tensor, "mine width"], nums: list[int], exchange: Exchange
) -> Float[Tensor, "all width"]:
    """Return the vectors of all ranks; their gradients are summed over ranks."""
    mine = [nums[exchange.rank]] * exchange.size

    def backward(gradient: Tensor) -> Tensor:
        parts = exchange.all_to_all(gradient, sent=nums, received=mine, kind="gradients")
        return parts.view(exchange.size, mine[0], gradient.shape[1]).sum(0)

    return collective(
        x,
        forward=lambda x: torch.cat(exchange.all_gather(x, nums, kind="rows")),
        backward=backward,
    )


def return_columns(
    own: Float[Tensor, "all columns"],
    nums: list[int],
    counts: list[int],
    exchange: Exchange,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "mine all_columns"]:
    """Return each rank all columns of its vectors, of which each rank has some.

    Args:
        own: This rank's columns of all ranks' vectors.
        nums: Number of vectors of each rank.
        counts: Number of columns of each rank.
        exchange: Collectives of the ranks.
        dtype: Dtype in which they are sent; None is that of ``own``.
    """
    num, count = nums[exchange.rank], counts[exchange.rank]
    there, back = [n * count for n in nums], [num * n for n in counts]

    def forward(own: Tensor) -> Tensor:
        flat = own.reshape(-1).to(dtype or own.dtype)
        flat = exchange.all_to_all(flat, sent=there, received=back, kind="rows")
        parts = zip(flat.split(back), counts, strict=True)
        return torch.cat([part.view(num, n) for part, n in parts], 1).to(own.dtype)

    def backward(gradient: Tensor) -> Tensor:
        flat = torch.cat([part.reshape(-1) for part in gradient.split(counts, 1)])
        flat = exchange.all_to_all(flat, sent=back, received=there, kind="gradients")
        return flat.view(sum(nums), count)

    return collective(own, forward=forward, backward=backward)


def gather_columns(
    own: Float[Tensor, "*batch columns"], counts: list[int], exchange: Exchange
) -> Float[Tensor, "*batch all_columns"]:
    """Return all columns of vectors that every rank has, of which each has some."""
    start = sum(counts[: exchange.rank])
    stop = start + counts[exchange.rank]

    def forward(own: Tensor) -> Tensor:
        moved = own.movedim(-1, 0).contiguous()
        return torch.cat(exchange.all_gather(moved, counts, kind="rows")).movedim(0, -1)

    return collective(own, forward=forward, backward=lambda d: d[..., start:stop])
