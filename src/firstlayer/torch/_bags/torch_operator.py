"""Bags pooled by torch's operator, where it gives the same result faster."""

from typing import Any

import torch
from torch import Tensor

from ..._check import changed_ids
from ...embeddings.bag import MODES
from .._table.lookup import INDEX, LookupOptions
from .._tensors.dtypes import HALF
from .._tensors.errors import OutOfRange
from .._tensors.memory import kernel_eligible, tensor_of
from .kernels import PooledBags, PooledRows
from .options import BagOptions, checked_bags

# Up to this size (ids times width), torch's handling of padding costs less than a kernel
# call.
SMALL_BAGS = 1 << 15


def is_stock(ids: Tensor, weight: Tensor, options: BagOptions) -> bool:
    """Return whether torch's operator gives the same result, rounded the same, faster."""
    small = ids.numel() * weight.shape[1] <= SMALL_BAGS
    return (
        (small or options.padding_idx is None)
        and options.mode != "max"
        and weight.dtype not in HALF
        and ids.dtype in INDEX
        and ids.ndim == 2
        and ids.numel() * weight.shape[1] > 0
    )


def pool_by_torch(
    weight: Tensor, ids: Tensor, options: BagOptions, gathered: Tensor | None
) -> Tensor:
    try:
        if weight.requires_grad and torch.is_grad_enabled():
            return _TorchBags.apply(weight, ids, options, gathered)  # pyright: ignore
        if gathered is not None:
            return _pool_gathered(weight, ids, options, gathered)
        return _torch_bags(weight, ids, options, trained=False)[0]
    except RuntimeError as error:
        # Raises an error that names the id if one is out of range.
        checked_bags(ids, options.lookup_options(weight), options)
        # Torch's message depends on the dtype and on the CPU.
        messages = "valid range", "Expected idx", "Expected i < index_size"
        if not any(words in str(error) for words in messages):
            raise
        # Another thread has changed the ids again.
        raise OutOfRange(*changed_ids(len(weight)).args) from None


def _torch_bags(
    weight: Tensor, ids: Tensor, options: BagOptions, *, trained: bool
) -> tuple[Tensor, ...]:
    """Return the result of torch's operator, followed by the inputs of its backward."""
    # A copy for the backward: torch's does not check ids that were changed in between.
    flat = ids.reshape(-1)
    flat = flat.clone() if trained else flat.contiguous()
    skip = -1 if options.padding_idx is None else options.padding_idx
    length, like = ids.shape[1], {"dtype": ids.dtype, "device": ids.device}
    offsets = torch.arange(0, ids.numel(), length, **like)
    mode = MODES.index(options.mode)
    y, *rest = torch._embedding_bag(  # pyright: ignore
        weight, flat, offsets, False, mode, False, None, False, skip
    )
    return y, flat, offsets, *rest


def _pool_gathered(
    weight: Tensor, ids: Tensor, options: BagOptions, gathered: Tensor
) -> Tensor:
    """Return what torch's operator returns, from rows that were gathered before."""
    bags = checked_bags(ids, options.lookup_options(weight), options)
    return tensor_of(PooledRows.of(weight, bags, gathered).pool(options.mode)[0])


class _TorchBags(torch.autograd.Function):
    """Bags pooled by torch's operator."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        options: BagOptions,
        gathered: Tensor | None,
    ) -> Tensor:
        table = weight
        if gathered is not None:
            # The inputs of the backward do not depend on the rows: one zero stands for all.
            table = weight.new_zeros(1, 1).expand(len(weight), 1)
        y, *rest = _torch_bags(table, ids, options, trained=True)
        if gathered is not None:
            y = _pool_gathered(weight, ids, options, gathered)
        ctx.save_for_backward(ids, *rest)
        ctx.options, ctx.lookup_options = options, options.lookup_options(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids, *rest), options = ctx.saved_tensors, ctx.options
        table: LookupOptions = ctx.lookup_options
        if (
            torch.is_grad_enabled()
            or not kernel_eligible(grads[0])
            or table.needs_own_backward
        ):
            bags = checked_bags(ids, table, options)
            pooled = PooledBags(bags, options.mode, None, table, bags.ids)
            gradient, _ = pooled.gradients(grads[0], None, table=None, trained=True)
            return gradient, None, None, None
        skip = -1 if options.padding_idx is None else options.padding_idx
        gradient = torch.ops.aten._embedding_bag_backward(
            grads[0], *rest, table.num_embeddings, False, MODES.index(options.mode), False,
            None, skip,
        )  # fmt: skip
        return gradient, None, None, None
