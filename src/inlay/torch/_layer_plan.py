"""Which tables and rows a call of the complete layer is made of, for the kernels.

Modules are looked through, not called, so this is only for modules that nobody is watching
or has changed, and for parameters that are ordinary memory.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .._array import repeating
from ..learned import check_positions
from ._call import Call
from ._fused import FLOATS, concrete, fusable
from ._fused_layer import Part, Plan
from ._lookup import Table
from ._optim_pending import settle
from ._positions import on_host, positions_of, signed
from ._tables import work
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions
from .token import Embedding


def plan_of(layer: Any, call: Call, *, dtype: torch.dtype) -> Plan | None:
    """Return what the kernels are to do for this call, or None if they may not run.

    Args:
        layer: The complete layer.
        call: Its arguments.
        dtype: Of the output.
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
    first = _token(token, call)
    if first is None:
        return None
    second = None
    if position is not None:
        second = _position(position, call, like=weights[0])
        if second is None:
            return None
    return Plan(
        first,
        second,
        None if segment is None else _segment(segment, call),
        () if norm is None else tuple(weights[-2:]),
        token.embedding_dim**0.5 if layer.scale else 1.0,
        0.0 if norm is None else norm.eps,
        dtype,
        call.mask,
    )


def _own(token: Any, position: Any, segment: Any, *, norm: Any) -> bool:
    """Tell whether the parts are what they were made as."""
    return (
        type(token) is Embedding
        and token.max_norm is None
        and not token.scale_grad_by_freq
        and type(position) in (LearnedPositions, SinusoidalPositions, type(None))
        and type(segment) in (Embedding, type(None))
        and (norm is None or (type(norm) is nn.LayerNorm and norm.bias is not None))
    )


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
    fit = [(token.weight, (token.num_embeddings, width))]
    if segment is not None:
        fit.append((segment.weight, (segment.num_embeddings, width)))
    if type(position) is LearnedPositions:
        fit.append((position.weight, (position.max_positions + position.row_offset, width)))
    if norm is not None:
        fit += [(norm.weight, (width,)), (norm.bias, (width,))]
    dtype = fit[0][0].dtype
    for weight, shape in fit:
        if weight.dtype != dtype or weight.shape != shape or not weight.is_contiguous():
            return None
    return [weight for weight, _ in fit] if dtype in FLOATS else None


def _given(call: Call) -> list[Tensor]:
    given = call.ids, call.embeds, call.segments, call.mask
    return [x for x in given if x is not None]


def _token(token: Any, call: Call) -> Part | None:
    weight = token.weight
    if call.embeds is not None:
        if not fusable(call.embeds):
            return None
        wide = call.embeds.to(work(weight.dtype))
        table = wide.reshape(-1, token.embedding_dim).contiguous()
        return Part(table, torch.arange(len(table), device="cpu"), None)
    settle(weight, call.ids)
    if token._prepared(weight) is not None:
        return None
    return _part(token, call.ids, call.lead, sparse=token.sparse)


def _segment(segment: Any, call: Call) -> Part:
    settle(segment.weight, call.segments)
    segment._prepared(segment.weight)
    return _part(segment, call.segments, call.lead, sparse=segment.sparse)


def _position(position: Any, call: Call, *, like: Tensor) -> Part | None:
    learned = type(position) is LearnedPositions and position.scale == 1.0
    if learned and call.positions is None and type(call.offset) is int:
        rows = _counted(position, call.offset, call.lead[-1])
        if rows is not None:
            return _part(position, rows, call.lead)
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
    made = position.encode(found, dtype=work(like.dtype))
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
    return torch.arange(first, first + length, device="cpu")


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
    return _part(position, rows, lead)


def _part(module: Any, rows: Any, lead: tuple[int, ...], *, sparse: bool = False) -> Part:
    weight = module.weight
    how = Table(len(weight), weight.dtype, module.padding_idx, False, sparse)
    return Part(weight, _rows(rows, lead), how)


def _rows(rows: Tensor, lead: tuple[int, ...]) -> Tensor:
    return repeating(rows.to(torch.int64), lead).contiguous()
