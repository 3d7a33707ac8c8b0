"""Bags of rows: sums, means and maxima, with gradients of every order.

What a bag gives is said in :mod:`firstlayer.embeddings.bag`. Eager on the CPU it runs on the kernels, the
backward too, or on torch's own operator where that means the same and is faster;
everything that watches operators, and a backward that is to be differentiated itself, gets
the same mathematics in plain operators.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ..._array import compute_dtype
from ...embeddings.bag import MODES, pool_ragged
from ...embeddings.ragged import Bags, bag_bounds, flatten_bags
from .._table.lookup import HALF, INDEX, Table, as_index
from .._tensors.errors import torch_classes
from .._tensors.memory import (
    array_of,
    array_of_table,
    concrete,
    fusable,
    tensor_of,
    threads_of_torch,
)
from .gradients import Gradients
from .operators import How, in_operators

# Up to here (ids times width) what torch does about padding costs less than a kernel call.
FEW = 1 << 15


def pool_bags(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    offsets: Integer[Tensor, " bags"] | None,
    weights: Tensor | None,
    how: How,
) -> Float[Tensor, "bags embedding_dim"]:
    """Return a row for each bag; see :func:`firstlayer.torch.functional.embedding_bag`."""
    if concrete(*(x for x in (ids, offsets, weights) if x is not None)):
        if how.max_norm is None and fusable(weight) and weight.is_contiguous():
            if offsets is None and weights is None and _is_stock(ids, weight, how=how):
                return _by_torch(weight, ids, how=how)
            bags = _bags(ids, how.table(weight), offsets=offsets, weights=weights, how=how)
            return _on_kernels(weight, weights, ids=ids, bags=bags, how=how)
        _bags(ids, how.table(weight), offsets=offsets, weights=weights, how=how)
    elif (ids.ndim, offsets is None) not in ((1, False), (2, True)):
        with torch_classes():
            bag_bounds(tuple(ids.shape), None if offsets is None else np.array([0]))
    index = as_index(ids)
    return in_operators(index, weight, offsets=offsets, weights=weights, how=how)


def _bags(
    ids: Tensor,
    table: Table,
    *,
    how: How,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
) -> Bags:
    with torch_classes():
        return flatten_bags(
            array_of(ids),
            None if offsets is None else array_of(offsets),
            num_embeddings=table.num_embeddings,
            weights=None if weights is None else array_of(weights),
            padding_idx=how.padding_idx,
            include_last_offset=how.include_last_offset,
            dtype=compute_dtype(table.dtype),
        )


def _on_kernels(
    weight: Tensor, weights: Tensor | None, *, ids: Tensor, bags: Bags, how: How
) -> Tensor:
    wanted = weight.requires_grad or (weights is not None and weights.requires_grad)
    if wanted and torch.is_grad_enabled():
        return _Pool.apply(weight, weights, ids, bags, how)  # pyright: ignore
    with threads_of_torch():
        return tensor_of(pool_ragged(array_of_table(weight), bags, mode=how.mode)[0])


class _Pool(torch.autograd.Function):
    """Bags pooled by the kernels."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, weights: Tensor | None, ids: Tensor, bags: Bags, how: How
    ) -> Tensor:
        # The ids are saved to notice a write to them: `bags` may lie in their memory.
        table = weight if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weights, table, ids)
        with threads_of_torch():
            y, winners = pool_ragged(array_of_table(weight), bags, mode=how.mode)
        ctx.gradients = Gradients(bags, how.mode, winners, how.table(weight))
        return tensor_of(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, table, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]
        made = ctx.gradients.of(grads[0], weights, table=table, wanted=wanted)
        return *made, None, None, None


def _is_stock(ids: Tensor, weight: Tensor, *, how: How) -> bool:
    """Tell whether torch's operator means the same, rounds the same and is faster."""
    few = ids.numel() * weight.shape[1] <= FEW
    return (
        (few or how.padding_idx is None)
        and how.mode != "max"
        and weight.dtype not in HALF
        and ids.dtype in INDEX
        and ids.ndim == 2
        and ids.numel() * weight.shape[1] > 0
    )


def _by_torch(weight: Tensor, ids: Tensor, *, how: How) -> Tensor:
    try:
        if weight.requires_grad and torch.is_grad_enabled():
            return _Stock.apply(weight, ids, how)  # pyright: ignore
        return _stock(weight, ids, how=how)[0]
    except RuntimeError:
        _bags(ids, how.table(weight), how=how)
        raise


def _stock(weight: Tensor, ids: Tensor, *, how: How) -> tuple[Tensor, ...]:
    """Return what torch's operator does, and after it what its backward takes."""
    flat = ids.reshape(-1).contiguous()
    skip = -1 if how.padding_idx is None else how.padding_idx
    length, like = ids.shape[1], {"dtype": ids.dtype, "device": ids.device}
    offsets = torch.arange(0, ids.numel(), length, **like)
    mode = MODES.index(how.mode)
    y, *rest = torch._embedding_bag(  # pyright: ignore
        weight, flat, offsets, False, mode, False, None, False, skip
    )
    return y, flat, offsets, *rest


class _Stock(torch.autograd.Function):
    """Bags pooled by torch's operator."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, how: How) -> Tensor:
        y, *rest = _stock(weight, ids, how=how)
        ctx.save_for_backward(ids, *rest)
        ctx.how, ctx.table = how, how.table(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids, *rest), how, table = ctx.saved_tensors, ctx.how, ctx.table
        if torch.is_grad_enabled() or not fusable(grads[0]) or table.is_special:
            bags = _bags(ids, table, how=how)
            gradients = Gradients(bags, how.mode, None, table)
            return gradients.of(grads[0], None, table=None, wanted=True)[0], None, None
        skip = -1 if how.padding_idx is None else how.padding_idx
        gradient = torch.ops.aten._embedding_bag_backward(
            grads[0], *rest, table.num_embeddings, False, MODES.index(how.mode), False,
            None, skip,
        )  # fmt: skip
        return gradient, None, None
