"""Which tables and rows a call of the complete layer is made of, for the kernels.

Modules are looked through, not called, so this is only for modules that nobody is watching
or has changed, and for parameters that are ordinary memory.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..._array import repeating
from ...positions.learned import check_positions
from .._positions.arguments import on_host, positions_of, signed
from .._table.lookup import Table
from .._tensors.buffers import compute_dtype
from .._tensors.errors import check_ids
from .._tensors.memory import FLOATS, concrete, fusable, tensor_of
from ..learned import LearnedPositions
from ..optim.table_state import catch_up
from ..sinusoidal import SinusoidalPositions
from ..token import Embedding
from .arguments import Call
from .fused import Part, Plan


def plan_of(layer: Any, call: Call, *, wide: bool) -> Plan | None:
    """Return what the kernels are to do for this call, or None if they may not run.

    Args:
        layer: The complete layer.
        call: Its arguments.
        wide: Whether the output is to have the dtype of the work.
    """
    # Read once: a module looks its parts up in Python.
    token, position, segment, norm = map(
        layer._modules.get, ("token", "position", "segment", "norm")
    )
    own = _own(token, position, segment, norm=norm)
    if 0 in call.lead or not own or watched(token, position, segment, norm):
        return None
    weights = _weights(token, position, segment, norm=norm)
    if weights is None or not concrete(*weights, *_given(call)):
        return None
    weight = weights[0]
    first, second = _token(token, weight, call), None
    if first is not None and position is not None:
        second = _position(position, call, like=weight)
    if first is None or (second is None and position is not None):
        return None
    return Plan(
        first,
        second,
        None if segment is None else _segment(segment, call),
        () if norm is None else tuple(weights[-2:]),
        weight.shape[1] ** 0.5 if layer.scale else 1.0,
        0.0 if norm is None else norm.eps,
        (*call.lead, weight.shape[1]),
        compute_dtype(weight.dtype) if wide else weight.dtype,
        call.mask,
    )


def _own(token: Any, position: Any, segment: Any, *, norm: Any) -> bool:
    """Tell whether the parts are such that the kernels do all that they would do."""
    if segment is not None:
        plain = _is_plain(segment) and segment.padding_idx is None
        if not plain or segment.sparse:
            return False
    return (
        _is_plain(token)
        and type(position) in (LearnedPositions, SinusoidalPositions, type(None))
        and (norm is None or type(norm) is nn.LayerNorm)
    )


def _is_plain(table: Any) -> bool:
    """Tell whether a table's rows and gradients are used as they are."""
    own = type(table) is Embedding
    return own and table.max_norm is None and not table.scale_grad_by_freq


def watched(*modules: nn.Module | None) -> bool:
    """Tell whether anybody listens to one of the modules, or has replaced what it does."""
    if _has_any_global_hook():
        return True
    for module in modules:
        if module is not None and (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
        ):
            return True
    return False


def _weights(token: Any, position: Any, segment: Any, *, norm: Any) -> list[Any] | None:
    """Return all parameters if they are contiguous, of one dtype and the right shape."""
    width = token.embedding_dim
    found, shapes = [_parameter(token)], [(token.num_embeddings, width)]
    if segment is not None:
        found.append(_parameter(segment))
        shapes.append((segment.num_embeddings, width))
    if type(position) is LearnedPositions:
        found.append(_parameter(position))
        shapes.append((position.max_positions + position.row_offset, width))
    if norm is not None:
        found += [_parameter(norm), _parameter(norm, "bias")]
        shapes += [(width,), (width,)]
    dtype = getattr(found[0], "dtype", None)
    for weight, shape in zip(found, shapes, strict=True):
        if weight is None or weight.dtype is not dtype or weight.shape != shape:
            return None
        if not weight.is_contiguous():
            return None
    return found if dtype in FLOATS else None


def _parameter(module: Any, name: str = "weight") -> Any:
    # Where it mostly is, which is found sooner than by its attribute.
    found = module._parameters.get(name)
    return getattr(module, name, None) if found is None else found


def _given(call: Call) -> list[Tensor]:
    given = call.ids, call.embeds, call.segments, call.mask
    return [x for x in given if x is not None]


def _token(token: Any, weight: Tensor, call: Call) -> Part | None:
    if call.embeds is not None:
        if not fusable(call.embeds):
            return None
        if call.ids is not None:
            check_ids(call.ids, token.num_embeddings)
        wide = call.embeds.resolve_neg().to(compute_dtype(weight.dtype))
        table = wide.reshape(-1, token.embedding_dim).contiguous()
        return Part(table, torch.arange(len(table), device="cpu"), None)
    ids: Any = call.ids
    catch_up(weight, ids)
    if token._prepared(weight) is not None:
        return None
    rows = ids if ids.dtype is torch.int64 else ids.to(torch.int64)
    return _part(token, rows.contiguous(), sparse=token.sparse)


def _segment(segment: Any, call: Call) -> Part:
    catch_up(segment.weight, call.segments)
    return _part(segment, _rows(call.segments, call.lead))


def _position(position: Any, call: Call, *, like: Tensor) -> Part | None:
    learned = type(position) is LearnedPositions and position.scale == 1.0
    if learned and call.positions is None and type(call.offset) is int:
        rows = _counted(position, call.offset, call.lead[-1])
        if rows is not None:
            return _part(position, rows)
    shape = (*call.lead, position.embedding_dim)
    found = positions_of(
        like.new_empty(()).expand(shape),
        positions=call.positions,
        offset=call.offset,
        axes=getattr(position, "axes", 1),
    )
    if not concrete(found):
        return None
    if learned and not found.is_floating_point():
        return _learned(position, found, call.lead)
    made = position.encode(found, dtype=compute_dtype(like.dtype))
    index = torch.arange(made[..., 0].numel(), device="cpu").reshape(made.shape[:-1])
    table = made.reshape(-1, made.shape[-1]).contiguous()
    how = Table(len(table), table.dtype, None, False, False)
    return Part(table, _rows(index, call.lead), how)


def _counted(position: Any, offset: int, length: int) -> Tensor | None:
    """Return the rows of ``length`` positions in a row, if a plain table has them all."""
    within = 0 <= offset <= position.max_positions - length
    if not within or position.padding_idx is not None:
        return None
    first = offset + position.row_offset
    # NumPy is quicker to ask, and knows of no default device.
    return tensor_of(np.arange(first, first + length))


def _learned(position: Any, positions: Tensor, lead: tuple[int, ...]) -> Part | None:
    check_positions(
        on_host(positions),
        max_positions=position.max_positions,
        row_offset=position.row_offset,
    )
    if position.padding_idx is not None:
        if position._row_to_insert(position.weight) is not None:
            return None
    rows = signed(positions).to(torch.int64) + position.row_offset
    return _part(position, _rows(rows, lead))


def _part(module: Any, rows: Any, *, sparse: bool = False) -> Part:
    weight = _parameter(module)
    how = Table(weight.shape[0], weight.dtype, module.padding_idx, False, sparse)
    return Part(weight, rows, how)


def _rows(rows: Any, lead: tuple[int, ...]) -> Tensor:
    return repeating(rows.to(torch.int64), lead).contiguous()
