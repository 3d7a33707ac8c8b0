"""The complete layer on the kernels, eager on the CPU: forward and backward.

The forward computes each output row once and writes it once. The backward computes it
again, instead of saving several arrays of the output's size; only the mean and the inverse
standard deviation of each row are saved. A gradient that is batched or itself
differentiated is computed by plain operators.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ... import kernels
from ..._check import all_in_range
from ...embeddings.layer import (
    add_embeddings,
    empty_statistics,
    normalize_rows,
    normalize_rows_backward,
)
from ...embeddings.layer_gradients import layer_gradients
from ...embeddings.row_gradient import RowGradient
from .._table.lookup import LookupOptions, lookup
from .._tensors.dtypes import upcast
from .._tensors.errors import OutOfRange, out_of_range_error
from .._tensors.memory import (
    array_of,
    array_of_table,
    kernel_eligible,
    request_large_pages,
    tensor_of,
    threads_of_torch,
)
from .._tensors.row_parameter import without_catch_up

T = TypeVar("T")


class LayerTensors(NamedTuple, Generic[T]):
    """Tensors of one call, their arrays, or their gradients, by name.

    Args:
        token_table: The token table, or precomputed token vectors.
        token_rows: Row of each token. Like the other rows int64, contiguous, of any shape.
        position_table: Table of positions.
        position_rows: Row of each token. Fewer rows than tokens are repeated.
        segment_table: Table of segments.
        segment_rows: Row of each token. Fewer rows than tokens are repeated.
        norm_weight: Weight of the LayerNorm.
        norm_bias: Bias of the LayerNorm.
        mask: False for tokens whose output is zero.

    Absent tensors are None.
    """

    token_table: T
    token_rows: T
    position_table: T | None = None
    position_rows: T | None = None
    segment_table: T | None = None
    segment_rows: T | None = None
    norm_weight: T | None = None
    norm_bias: T | None = None
    mask: T | None = None


class LayerOptions(NamedTuple):
    """Values of one call that are not tensors.

    Args:
        token: Options of the token table. None if it has one row for each token, in order.
        position: Options of the position table, or None.
        segment: Options of the segment table, or None.
        scale: Factor of token rows.
        eps: Epsilon of the LayerNorm.
        dtype: Dtype of the output.
    """

    token: LookupOptions | None
    position: LookupOptions | None
    segment: LookupOptions | None
    scale: float
    eps: float
    dtype: torch.dtype


class LayerInputs(NamedTuple):
    """Inputs of the kernels for one call.

    Args:
        tensors: Tensors of the call.
        options: Its other values.
        position_rows: Rows of positions that follow from the offset, instead of a tensor of
            them; in range.
    """

    tensors: LayerTensors[Tensor]
    options: LayerOptions
    position_rows: range | None


def fused_layer(
    inputs: LayerInputs,
    *,
    lead: tuple[int, ...],
    may_overwrite: bool = False,
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return the layer's output, before dropout and before padding is zeroed.

    Args:
        inputs: Inputs of the kernels.
        lead: Shape of the output without its last axis.
        may_overwrite: Whether the token table has one row for each token, in order, which
            only this call reads: the output may take its memory.
    """
    tensors, options, rows = inputs
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                forward = partial(_forward, options=options, lead=lead, positions=rows)
                return _FusedLayer.apply(options, forward, rows, *tensors)  # pyright: ignore
    out = None
    if may_overwrite and tensors.token_table.dtype is options.dtype:
        # The kernel reads all of a row before it writes the row. Rows decoded a moment ago
        # are still in the cache, and further memory of their size would evict them.
        out = tensors.token_table.view(*lead, -1)
    return _forward(tensors, options=options, lead=lead, positions=rows, out=out)


def recorded_layer(
    forward: Callable[[LayerTensors[Any], np.ndarray | None], Tensor],
    tensors: LayerTensors[Tensor],
    options: LayerOptions,
    *,
    position_rows: range | None,
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return the layer's output with its gradient, with less overhead.

    Args:
        forward: Computes the output from tensors, and fills the statistics of its rows.
        tensors: Tensors of the call, of which at least one needs a gradient. None may be a
            wrapper of ``torch.func``.
        options: Options of the call.
        position_rows: As in :class:`LayerInputs`. Calls with and without a plan save the
            same tensors, as recomputation under ``torch.utils.checkpoint`` requires.
    """
    return _apply(options, forward, position_rows, *tensors)


class _FusedLayer(torch.autograd.Function):
    """The fused layer as one differentiable function of :class:`LayerTensors`."""

    @staticmethod
    def forward(
        ctx: Any,
        options: LayerOptions,
        forward: Callable[[LayerTensors[Any], np.ndarray | None], Tensor],
        position_rows: range | None,
        *args: Tensor | None,
    ) -> Tensor:
        ctx.options, ctx.position_rows, ctx.unsaved = options, position_rows, {}
        tensors: LayerTensors[Any] = LayerTensors(*args)
        saved, statistics = tensors, None
        if tensors.norm_weight is None:
            # The backward reads only the shapes of the tables, so they may change before.
            ctx.unsaved = _tables_without_values(tensors, options)
            saved = tensors._replace(**dict.fromkeys(ctx.unsaved))
        else:
            number = np.float64 if options.dtype is torch.float64 else np.float32
            statistics = empty_statistics(tensors.token_rows.numel(), number)
        ctx.statistics = statistics
        ctx.save_for_backward(*saved)
        return forward(tensors, statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        options, rows = ctx.options, ctx.position_rows
        tensors: LayerTensors[Any] = LayerTensors(*ctx.saved_tensors)
        if ctx.unsaved:
            tensors = tensors._replace(**ctx.unsaved)
        needed, dy = LayerTensors(*ctx.needs_input_grad[3:]), grads[0]
        # The rows read here were up to date in the forward. Autograd raises if a step has
        # changed them since.
        with without_catch_up():
            if kernel_eligible(dy) and not torch.is_grad_enabled():
                gradients = _backward_by_kernels(
                    tensors,
                    options,
                    dy=dy,
                    needed=needed,
                    statistics=ctx.statistics,
                    positions=rows,
                )
            else:
                if rows is not None:
                    positions = torch.arange(rows.start, rows.stop, device=dy.device)
                    tensors = tensors._replace(position_rows=positions)
                dy = dy.reshape(-1, dy.shape[-1])
                gradients = _backward_by_operators(tensors, options, dy=dy, needed=needed)
        return None, None, None, *gradients


# The method of Function also unwraps tensors of torch.func, which takes microseconds.
_apply: Any = super(torch.autograd.Function, _FusedLayer).apply  # pyright: ignore


def _tables_without_values(
    tensors: LayerTensors[Tensor], options: LayerOptions
) -> dict[str, Tensor | None]:
    """Return the tables by field name, with token vectors replaced by an empty tensor.

    Parameters exist anyway; token vectors would stay in memory as long as the graph.
    """
    token = tensors.token_table
    return {
        "token_table": token if options.token else token.new_empty((0, token.shape[1])),
        "position_table": tensors.position_table,
        "segment_table": tensors.segment_table,
    }


def _forward(
    tensors: LayerTensors[Tensor],
    statistics: np.ndarray | None = None,
    *,
    options: LayerOptions,
    lead: tuple[int, ...],
    positions: range | None,
    out: Tensor | None = None,
) -> Tensor:
    width = tensors.token_table.shape[1]
    if out is None:
        out = torch.empty((*lead, width), dtype=options.dtype, device="cpu")
        request_large_pages(out)
    norm, weight, bias = None, tensors.norm_weight, tensors.norm_bias
    if weight is not None and bias is not None:
        norm = array_of_table(weight), array_of_table(bias), options.eps
    with threads_of_torch():
        in_range = kernels.layer_forward(
            _pair(tensors.token_table, tensors.token_rows),
            position=_positions(tensors, positions),
            segment=_pair(tensors.segment_table, tensors.segment_rows),
            scale=options.scale,
            norm=norm,
            out=array_of(out).reshape(-1, width),
            statistics=statistics,
        )
    if not in_range:
        raise _out_of_range(tensors)
    return out


def _out_of_range(tensors: LayerTensors[Tensor]) -> OutOfRange:
    """Return the error that names the first row out of range."""
    for name, table, rows in (
        ("positions", tensors.position_table, tensors.position_rows),
        ("segments", tensors.segment_table, tensors.segment_rows),
    ):
        if table is not None and rows is not None:
            if not all_in_range(array_of(rows), len(table)):
                bound = "the number of rows"
                return out_of_range_error(rows, len(table), name=name, bound=bound)
    return out_of_range_error(tensors.token_rows, len(tensors.token_table))


def _backward_by_kernels(
    tensors: LayerTensors[Tensor],
    options: LayerOptions,
    *,
    dy: Tensor,
    needed: LayerTensors[bool],
    statistics: np.ndarray | None,
    positions: range | None,
) -> LayerTensors[Tensor | None]:
    token, position, mask, norm = options.token, options.position, tensors.mask, None
    if tensors.norm_weight is not None and statistics is not None:
        norm = array_of_table(tensors.norm_weight), statistics
    with threads_of_torch():
        gradients = layer_gradients(
            _pair(tensors.token_table, tensors.token_rows),
            position=_positions(tensors, positions),
            segment=_pair(tensors.segment_table, tensors.segment_rows),
            scale=options.scale,
            norm=norm,
            dy=array_of(dy.contiguous()).reshape(-1, dy.shape[-1]),
            by_id=token is not None,
            token_padding=None if token is None else token.padding_idx,
            position_padding=None if position is None else position.padding_idx,
            mask=None if mask is None else array_of(mask).reshape(-1),
        )
    return LayerTensors(
        token_table=_as_tensor(gradients.token, token, needed.token_table),
        token_rows=None,
        position_table=_as_tensor(gradients.position, position, needed.position_table),
        segment_table=_as_tensor(gradients.segment, options.segment, needed.segment_table),
        norm_weight=_like(gradients.norm_weight, tensors.norm_weight),
        norm_bias=_like(gradients.norm_bias, tensors.norm_bias),
    )


def _backward_by_operators(
    tensors: LayerTensors[Tensor],
    options: LayerOptions,
    *,
    dy: Tensor,
    needed: LayerTensors[bool],
) -> LayerTensors[Tensor | None]:
    dy, d_weight, d_bias = upcast(dy), None, None
    weight, bias = tensors.norm_weight, tensors.norm_bias
    if weight is not None and bias is not None:
        total = _sum_of_rows(tensors, options, count=len(dy))
        y, factor = normalize_rows(total, eps=options.eps)
        d_weight, d_bias = (dy * y).sum(0).to(weight.dtype), dy.sum(0).to(bias.dtype)
        dy = normalize_rows_backward(dy * upcast(weight), y, factor)
    d_token = dy if options.scale == 1.0 else dy * options.scale
    if options.token is not None:
        d_token = _sum_by_row(d_token, tensors.token_rows, options.token)
    return LayerTensors(
        token_table=d_token if needed.token_table else None,
        token_rows=None,
        position_table=_sum_by_row(dy, tensors.position_rows, options.position),
        segment_table=_sum_by_row(dy, tensors.segment_rows, options.segment),
        norm_weight=d_weight,
        norm_bias=d_bias,
    )


def _sum_of_rows(
    tensors: LayerTensors[Tensor], options: LayerOptions, *, count: int
) -> Tensor:
    """Return the input of the LayerNorm for ``count`` tokens, by operators."""
    parts = (
        (tensors.token_table, tensors.token_rows, options.token),
        (tensors.position_table, tensors.position_rows, options.position),
        (tensors.segment_table, tensors.segment_rows, options.segment),
    )
    rows = [
        lookup(
            _repeated(index, count),
            table,
            padding_idx=lookup_options and lookup_options.padding_idx,
            sparse=lookup_options is not None and lookup_options.sparse,
            upcast_output=True,
        )
        for table, index, lookup_options in parts
        if table is not None and index is not None
    ]
    total = add_embeddings(*rows, scale=options.scale != 1.0)
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


def _pair(table: Tensor | None, rows: Tensor | None) -> Any:
    """Return a table and its flat rows as arrays; None if either is absent."""
    if table is None or rows is None:
        return None
    return array_of_table(table), array_of(rows).reshape(-1)


def _positions(tensors: LayerTensors[Tensor], rows: range | None) -> Any:
    """Return the table of positions and its rows as arrays, or None."""
    table = tensors.position_table
    if table is None or rows is None:
        return _pair(table, tensors.position_rows)
    return array_of_table(table), np.arange(rows.start, rows.stop)


def _as_tensor(
    gradient: RowGradient | np.ndarray | None,
    options: LookupOptions | None,
    needed: bool | None,
) -> Tensor | None:
    if gradient is None or not needed:
        return None
    if isinstance(gradient, np.ndarray):
        return tensor_of(gradient, dtype=options and options.dtype)
    return options.to_tensor(gradient)  # pyright: ignore


def _like(gradient: np.ndarray | None, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else tensor_of(gradient, dtype=parameter.dtype)
