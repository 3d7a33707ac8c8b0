"""The complete layer on the kernels, eager on the CPU: forward and backward.

The forward computes each output row once and writes it once. The backward computes it
again, instead of saving several arrays of the output's size. A gradient that is batched or
itself differentiated is computed by plain operators.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ... import kernels
from ...embeddings.layer import combine, standardise, standardise_backward
from ...embeddings.layer_gradients import layer_gradients
from ...embeddings.row_gradient import RowGradient
from .._table.lookup import LookupOptions, lookup
from .._tensors.dtypes import upcast
from .._tensors.errors import out_of_range_error
from .._tensors.memory import (
    array_of,
    array_of_table,
    kernel_eligible,
    request_large_pages,
    tensor_of,
    threads_of_torch,
)


class TableRows(NamedTuple):
    """A table, the row of it for each token, and the options of its gradient.

    ``options`` is None if the table has one row for each token, in order.
    """

    table: Tensor
    rows: Tensor
    options: LookupOptions | None


class LayerTensors(NamedTuple):
    """Tensors of one call, or their gradients. Absent ones are None.

    Args:
        token_table: The token table, or token vectors from elsewhere.
        token_rows: Row of each token. Like the other rows int64, contiguous, of any shape.
        position_table: Table of positions.
        position_rows: Row of each token. Fewer rows than tokens are repeated.
        segment_table: Table of segments.
        segment_rows: Row of each token. Fewer rows than tokens are repeated.
        norm_weight: Weight of the LayerNorm.
        norm_bias: Bias of the LayerNorm.
        mask: False for tokens whose output is zero.
    """

    token_table: Any
    token_rows: Any = None
    position_table: Tensor | None = None
    position_rows: Tensor | None = None
    segment_table: Tensor | None = None
    segment_rows: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    mask: Tensor | None = None


class LayerOptions(NamedTuple):
    """Values of one call that are not tensors.

    Args:
        token: Options of the token table. None if it has one row for each token, in order.
        position: Options of the position table, or None.
        segment: Options of the segment table, or None.
        scale: Factor of token rows.
        eps: Epsilon of the LayerNorm.
        shape: Shape of the output.
        dtype: Dtype of the output.
    """

    token: LookupOptions | None
    position: LookupOptions | None
    segment: LookupOptions | None
    scale: float
    eps: float
    shape: tuple[int, ...]
    dtype: torch.dtype


def fused_layer(
    tensors: LayerTensors, options: LayerOptions
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return the layer's output, before dropout and before padding is zeroed."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return _FusedLayer.apply(options, *tensors)  # pyright: ignore
    return _forward(tensors, options)


class _FusedLayer(torch.autograd.Function):
    """The fused layer as one differentiable function of :class:`LayerTensors`."""

    @staticmethod
    def forward(ctx: Any, options: LayerOptions, *args: Tensor | None) -> Tensor:
        tensors = LayerTensors(*args)  # pyright: ignore
        saved, ctx.unsaved = tensors, {}
        if tensors.norm_weight is None:
            # The backward reads only the shapes of the tables, so they may change before.
            ctx.unsaved = _tables_without_values(tensors, options)
            saved = tensors._replace(**dict.fromkeys(ctx.unsaved))
        ctx.save_for_backward(*saved)
        ctx.options = options
        return _forward(tensors, options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        options = ctx.options
        tensors = LayerTensors(*ctx.saved_tensors)._replace(**ctx.unsaved)
        needed = LayerTensors(*ctx.needs_input_grad[1:])
        dy = grads[0].reshape(-1, options.shape[-1])
        by_kernels = kernel_eligible(dy) and not torch.is_grad_enabled()
        backward = _backward_by_kernels if by_kernels else _backward_by_operators
        return None, *backward(tensors, options, dy=dy, needed=needed)


def _tables_without_values(
    tensors: LayerTensors, options: LayerOptions
) -> dict[str, Tensor | None]:
    """Return the tables by field name, with token vectors replaced by an empty tensor.

    Parameters exist anyway; token vectors would stay in memory as long as the graph.
    """
    token: Any = tensors.token_table
    return {
        "token_table": token if options.token else token.new_empty((0, token.shape[1])),
        "position_table": tensors.position_table,
        "segment_table": tensors.segment_table,
    }


def _forward(tensors: LayerTensors, options: LayerOptions) -> Tensor:
    out = torch.empty(options.shape, dtype=options.dtype, device="cpu")
    request_large_pages(out)
    norm = None
    if tensors.norm_weight is not None and tensors.norm_bias is not None:
        weight, bias = array_of_table(tensors.norm_weight), array_of_table(tensors.norm_bias)
        norm = weight, bias, options.eps
    table, rows = tensors.token_table, tensors.token_rows
    with threads_of_torch():
        in_range = kernels.layer_forward(
            _arrays(table, rows),
            position=_arrays_or_none(tensors.position_table, tensors.position_rows),
            segment=_arrays_or_none(tensors.segment_table, tensors.segment_rows),
            scale=options.scale,
            norm=norm,
            out=array_of(out).reshape(-1, options.shape[-1]),
        )
    if not in_range:
        raise out_of_range_error(rows, len(table))
    return out


def _backward_by_kernels(
    tensors: LayerTensors, options: LayerOptions, *, dy: Tensor, needed: LayerTensors
) -> LayerTensors:
    norm = None
    if tensors.norm_weight is not None:
        norm = array_of_table(tensors.norm_weight), options.eps
    with threads_of_torch():
        gradients = layer_gradients(
            _arrays(tensors.token_table, tensors.token_rows),
            position=_arrays_or_none(tensors.position_table, tensors.position_rows),
            segment=_arrays_or_none(tensors.segment_table, tensors.segment_rows),
            scale=options.scale,
            norm=norm,
            dy=array_of(dy.contiguous()),
            by_id=options.token is not None,
            token_padding=options.token and options.token.padding_idx,
            position_padding=options.position and options.position.padding_idx,
            mask=None if tensors.mask is None else array_of(tensors.mask).reshape(-1),
        )
    return LayerTensors(
        token_table=_as_tensor(gradients.token, options.token, needed.token_table),
        position_table=_as_tensor(
            gradients.position, options.position, needed.position_table
        ),
        segment_table=_as_tensor(gradients.segment, options.segment, needed.segment_table),
        norm_weight=_like(gradients.norm_weight, tensors.norm_weight),
        norm_bias=_like(gradients.norm_bias, tensors.norm_bias),
    )


def _backward_by_operators(
    tensors: LayerTensors, options: LayerOptions, *, dy: Tensor, needed: LayerTensors
) -> LayerTensors:
    dy, d_weight, d_bias = upcast(dy), None, None
    weight, bias = tensors.norm_weight, tensors.norm_bias
    if weight is not None and bias is not None:
        total = _sum_of_rows(tensors, options, count=len(dy))
        y, factor = standardise(total, eps=options.eps)
        d_weight, d_bias = (dy * y).sum(0).to(weight.dtype), dy.sum(0).to(bias.dtype)
        dy = standardise_backward(dy * upcast(weight), y, factor)
    d_token = dy if options.scale == 1.0 else dy * options.scale
    if options.token is not None:
        d_token = _sum_by_row(d_token, tensors.token_rows, options.token)
    return LayerTensors(
        token_table=d_token if needed.token_table else None,
        position_table=_sum_by_row(dy, tensors.position_rows, options.position),
        segment_table=_sum_by_row(dy, tensors.segment_rows, options.segment),
        norm_weight=d_weight,
        norm_bias=d_bias,
    )


def _sum_of_rows(tensors: LayerTensors, options: LayerOptions, *, count: int) -> Tensor:
    """Return the input of the LayerNorm for ``count`` tokens, by operators."""
    parts = [
        TableRows(tensors.token_table, tensors.token_rows, options.token),
        TableRows(tensors.position_table, tensors.position_rows, options.position),
        TableRows(tensors.segment_table, tensors.segment_rows, options.segment),
    ]
    rows = [
        lookup(
            _repeated(part.rows, count),
            part.table,
            padding_idx=part.options and part.options.padding_idx,
            sparse=part.options is not None and part.options.sparse,
            upcast_output=True,
        )
        for part in parts
        if part.table is not None
    ]
    total = combine(*rows, scale=options.scale != 1.0)
    if tensors.mask is None:
        return total
    # See EmbeddingLayer._by_modules.
    steps = torch.arange(total.shape[-1], dtype=total.dtype, device=total.device)
    return torch.where(tensors.mask.reshape(-1, 1), total, steps)


def _sum_by_row(
    dy: Tensor, rows: Tensor | None, options: LookupOptions | None
) -> Tensor | None:
    if rows is None or options is None:
        return None
    return options.gradient(_repeated(rows, len(dy)), dy)


def _repeated(rows: Tensor, count: int) -> Tensor:
    return rows.reshape(-1).repeat(count // rows.numel())


def _arrays(table: Tensor, rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return array_of_table(table), array_of(rows).reshape(-1)


def _arrays_or_none(
    table: Tensor | None, rows: Tensor | None
) -> tuple[np.ndarray, np.ndarray] | None:
    return None if table is None or rows is None else _arrays(table, rows)


def _as_tensor(
    gradient: RowGradient | np.ndarray | None, options: LookupOptions | None, needed: Any
) -> Tensor | None:
    if gradient is None or not needed:
        return None
    if isinstance(gradient, np.ndarray):
        return tensor_of(gradient, dtype=options and options.dtype)
    return options.to_tensor(gradient)  # pyright: ignore


def _like(gradient: np.ndarray | None, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else tensor_of(gradient, dtype=parameter.dtype)
