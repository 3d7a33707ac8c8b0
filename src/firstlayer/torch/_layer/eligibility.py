"""Whether the kernels may compute a call of the complete layer, and from which tensors.

These functions mutate nothing. The kernels bypass the forwards of the submodules, so those
must be of known classes, without hooks or overrides, with ordinary parameters.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..._array import repeating
from ...positions.learned import check_positions
from .._positions.arguments import on_host, positions_of, signed
from .._table.lookup import LookupOptions
from .._tensors.dtypes import FLOATS, compute_dtype
from .._tensors.memory import is_plain_cpu
from ..learned import LearnedPositions
from ..sinusoidal import SinusoidalPositions
from ..token import Embedding
from .arguments import LayerArguments
from .fused import LayerInputs, LayerOptions, LayerTensors

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer


class TableRows(NamedTuple):
    """A table, the row of it for each token, and the options of its gradient.

    Rows are a tensor, or a range of positions.
    """

    table: Tensor
    rows: Any
    options: LookupOptions | None


_ABSENT: Any = TableRows(None, None, None)  # pyright: ignore


def kernel_inputs(
    layer: "EmbeddingLayer", arguments: LayerArguments, *, upcast_output: bool
) -> LayerInputs | None:
    """Return the inputs of the fused layer, or None if the call is not eligible."""
    # Read from the dict once: attributes of a module are slow.
    modules: dict[str, Any] = layer._modules
    token: Any = modules.get("token")
    position, segment, norm = map(modules.get, ("position", "segment", "norm"))
    if (
        0 in arguments.lead
        or not _are_standard(token, position, segment, norm)
        or (token.is_stored and arguments.embeds is None)
        or has_hooks(token, position, segment, norm)
    ):
        return None
    weights = _parameters(token, position, segment, norm)
    if weights is None:
        return None
    given = arguments.ids, arguments.embeds, arguments.segments, arguments.mask
    if not is_plain_cpu(*weights.values(), *given):
        return None
    table = weights["token"]
    tokens, positions, segments = _token_rows(token, table, arguments), _ABSENT, _ABSENT
    if position is not None:
        positions = _position_rows(position, weights.get("position"), arguments, table)
    if tokens is None or positions is None:
        return None
    if segment is not None:
        rows = _repeating_rows(arguments.segments, arguments.lead)
        segments = _table_rows(segment, weights["segment"], rows)
    rows = positions.rows
    tensors = LayerTensors(
        token_table=tokens.table,
        token_rows=tokens.rows,
        position_table=positions.table,
        position_rows=None if type(rows) is range else rows,
        segment_table=segments.table,
        segment_rows=segments.rows,
        norm_weight=weights.get("norm_weight"),
        norm_bias=weights.get("norm_bias"),
        mask=arguments.mask,
    )
    options = LayerOptions(
        token=tokens.options,
        position=positions.options,
        segment=segments.options,
        scale=token.embedding_dim**0.5 if layer.scale else 1.0,
        eps=0.0 if norm is None else norm.eps,
        dtype=compute_dtype(table.dtype) if upcast_output else table.dtype,
    )
    return LayerInputs(tensors, options, rows if type(rows) is range else None)


def has_hooks(*modules: nn.Module | None) -> bool:
    """Return whether a module has hooks or an overridden forward."""
    if _has_any_global_hook():
        return True
    for module in modules:
        if module is not None and has_own_hooks(module.__dict__):
            return True
    return False


def has_own_hooks(state: dict[str, Any]) -> bool:
    """Return whether a module, given its dict, has hooks or an overridden forward."""
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    )


def is_idle(dropout: nn.Module | None) -> bool:
    """Return whether dropout changes nothing, apart from hooks of all modules."""
    # Reads the flag of the dropout module, not of the layer: Monte Carlo dropout keeps
    # dropout in training mode during evaluation.
    return (
        type(dropout) is nn.Dropout
        and not (dropout.training and dropout.p > 0)
        and not has_own_hooks(dropout.__dict__)
    )


def _are_standard(token: Any, position: Any, segment: Any, norm: Any) -> bool:
    """Return whether the kernels compute what these modules compute."""
    for table in (token, segment):
        # The rows of a store are read before they are passed to the kernels.
        if table is token and getattr(table, "is_stored", False):
            continue
        if table is not None and (
            type(table) is not Embedding
            or table.max_norm is not None
            or table.scale_grad_by_freq
            or table.output_device is not None
        ):
            return False
    if segment is not None and (segment.sparse or segment.padding_idx is not None):
        return False
    return (
        token is not None
        and type(position) in (LearnedPositions, SinusoidalPositions, type(None))
        and (norm is None or type(norm) is nn.LayerNorm)
    )


def _parameters(
    token: Any, position: Any, segment: Any, norm: Any
) -> dict[str, Tensor] | None:
    """Return all parameters if they are contiguous, of one dtype and of the right shape."""
    width = token.embedding_dim
    expected: list[tuple[str, Any, str, tuple[int, ...]]]
    # A store has no parameter, but a tensor of the dtype of its output.
    expected = [("token", token, "_output", (0,))]
    if not token.is_stored:
        expected = [("token", token, "weight", (token.num_embeddings, width))]
    if segment is not None:
        expected.append(("segment", segment, "weight", (segment.num_embeddings, width)))
    if type(position) is LearnedPositions:
        shape = position.max_positions + position.row_offset, width
        expected.append(("position", position, "weight", shape))
    if norm is not None:
        expected.append(("norm_weight", norm, "weight", (width,)))
        expected.append(("norm_bias", norm, "bias", (width,)))
    parameters, dtype = {}, None
    for name, module, attribute, shape in expected:
        value = module._parameters.get(attribute)
        if value is None:
            # A parametrized weight is not among the parameters.
            value = getattr(module, attribute, None)
            if value is None:
                return None
        dtype = dtype or value.dtype
        if value.shape != shape or value.dtype is not dtype or not value.is_contiguous():
            return None
        parameters[name] = value
    return parameters if dtype in FLOATS else None


def _token_rows(token: Any, table: Tensor, arguments: LayerArguments) -> TableRows | None:
    ids, embeds = arguments.ids, arguments.embeds
    if embeds is not None:
        if embeds.dtype not in FLOATS:
            return None
        vectors = embeds.resolve_neg().to(compute_dtype(table.dtype))
        vectors = vectors.reshape(-1, token.embedding_dim).contiguous()
        return TableRows(vectors, torch.arange(len(vectors), device="cpu"), None)
    if ids is None:
        return None
    rows = ids if ids.dtype is torch.int64 else ids.to(torch.int64)
    return _table_rows(token, table, rows.contiguous(), sparse=token.sparse)


def _position_rows(
    position: Any, weight: Tensor | None, arguments: LayerArguments, token_table: Tensor
) -> TableRows | None:
    lead, offset = arguments.lead, arguments.offset
    # A scaled table is read through encode(), like computed positions.
    weight = weight if weight is not None and position.scale == 1.0 else None
    if weight is not None and arguments.positions is None and type(offset) is int:
        fits = 0 <= offset <= position.max_positions - lead[-1]
        if fits and position.padding_idx is None:
            first = offset + position.row_offset
            return _table_rows(position, weight, range(first, first + lead[-1]))
    positions = positions_of(
        token_table.new_empty(()).expand((*lead, position.embedding_dim)),
        positions=arguments.positions,
        offset=offset,
        axes=getattr(position, "axes", 1),
    )
    if not is_plain_cpu(positions):
        return None
    if weight is not None and not positions.is_floating_point():
        check_positions(
            on_host(positions),
            max_positions=position.max_positions,
            row_offset=position.row_offset,
        )
        rows = signed(positions).to(torch.int64) + position.row_offset
        return _table_rows(position, weight, _repeating_rows(rows, lead))
    # Computed vectors become a table with one row for each position.
    vectors = position.encode(positions, dtype=compute_dtype(token_table.dtype))
    table = vectors.reshape(-1, vectors.shape[-1]).contiguous()
    index = torch.arange(len(table), device="cpu").reshape(vectors.shape[:-1])
    options = LookupOptions(len(table), table.dtype)
    return TableRows(table, _repeating_rows(index, lead), options)


def _table_rows(
    module: Any, weight: Tensor, rows: Tensor | range, *, sparse: bool = False
) -> TableRows:
    options = LookupOptions(
        weight.shape[0], weight.dtype, module.padding_idx, sparse=sparse
    )
    return TableRows(weight, rows, options)


def _repeating_rows(rows: Any, lead: tuple[int, ...]) -> Tensor:
    """Return int64 rows without repetitions along the leading axes."""
    return repeating(rows.to(torch.int64), lead).contiguous()
