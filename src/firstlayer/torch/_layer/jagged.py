"""Calls of the complete layer with jagged tensors, computed from their values.

The values of all sequences are one long sequence, whose positions start again wherever a
sequence does. No operator then needs to support jagged tensors.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...embeddings.ragged import bag_indices
from ...positions.ids import plain_offset, resolve
from .._positions.arguments import positions_tensor, signed
from .._table.lookup import is_jagged
from .._tensors.errors import WrongValue

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer


def jagged_tokens(ids: Any, inputs_embeds: Any) -> Any:
    """Return the ids or vectors that give the jagged shape of a call, or None."""
    tokens, ndim = (ids, 2) if inputs_embeds is None else (inputs_embeds, 3)
    if not isinstance(tokens, Tensor) or not tokens.is_nested:
        return None
    return tokens if tokens.dim() == ndim and is_jagged(tokens) else None


def flat_arguments(
    layer: "EmbeddingLayer", tokens: Any, *, positions: Any, offset: Any, **others: Any
) -> dict[str, Any]:
    """Return the arguments of the call on the values of all sequences.

    Args:
        layer: The layer.
        tokens: From :func:`jagged_tokens`.
        positions: Jagged positions, or None for positions that start again.
        offset: Number of preceding positions, for all sequences or for each.
        others: Arguments that are None or jagged like ``tokens``.
    """
    flat = {name: _values(name, value, tokens) for name, value in others.items()}
    if layer.position is None:
        return flat
    if positions is None:
        total = tokens.values().shape[0]
        return {**flat, "positions": _restarting(tokens.offsets(), total, offset)}
    resolve(positions, offset=plain_offset(offset), steps=None)
    return {**flat, "positions": _values("positions", positions, tokens)}


def _restarting(bounds: Tensor, total: int, offset: Any) -> Tensor:
    """Return ``offset, offset + 1, …`` for each sequence, ``total`` numbers in all."""
    steps = torch.arange(total, device=bounds.device)
    rows = bag_indices(bounds, steps)
    steps = steps - bounds[rows]
    offset = plain_offset(offset)
    if type(offset) is int:
        return steps + offset
    shift = signed(positions_tensor(offset, device=bounds.device, name="offset"))
    if shift.dim() and tuple(shift.shape) != (bounds.shape[0] - 1,):
        raise WrongValue(
            f"offset must be a number or have shape ({bounds.shape[0] - 1},), "
            f"got shape {tuple(shift.shape)}"
        )
    if shift.is_floating_point() and shift.dtype.itemsize < 4:
        shift = shift.float()  # Integers plus a half-precision offset would round.
    return steps + (shift[rows] if shift.dim() else shift)


def _values(name: str, value: Any, tokens: Any) -> Any:
    if value is None or value is tokens:
        return value if value is None else value.values()
    if not isinstance(value, Tensor) or not value.is_nested or not is_jagged(value):
        raise WrongValue(f"{name} must be jagged like the tokens, got {_kind(value)}")
    bounds, other = tokens.offsets(), value.offsets()  # pyright: ignore
    if other is not bounds and not torch.equal(other, bounds):
        raise WrongValue(
            f"{name} must have the offsets {bounds.tolist()} of the tokens, "
            f"got {other.tolist()}"
        )
    return value.values()


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"layout {value.layout}"
    return type(value).__name__
