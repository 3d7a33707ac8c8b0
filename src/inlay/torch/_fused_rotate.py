"""Rotation on the kernels, eager on the CPU, with a gradient that is a rotation back.

The forward runs here only on what the kernels take. A gradient may be anything else, such
as the batched one of a Jacobian, and is then turned by plain operators, to the same bits.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from .. import kernels
from ..turns import axial_turns, turns
from ._fused import array_of, fusable, tensor_of, threads_of_torch
from ._positions import on_host


def turn_at(
    positions: Shaped[Tensor, "*seq"],
    tables: Float[Tensor, "*axes 2 3 256 pairs"],
    rates: Float[Tensor, "*axes pairs"],
) -> Float[Tensor, "turns 2*pairs"]:
    """Return the cosines of all pairs, then the sines, one row for each position.

    Args:
        positions: Concrete; with several coordinates, they come first.
        tables: Digit tables in the dtype of the result.
        rates: The frequencies, likewise.
    """
    if rates.ndim == 2:
        flat = positions.reshape(positions.shape[0], -1)
        return torch.cat(axial_turns(flat, tables, rates), dim=-1)
    if positions.is_floating_point():
        return torch.cat(turns(positions.reshape(-1), tables, rates), dim=-1)
    whole = np.ascontiguousarray(on_host(positions), np.int64).reshape(-1)
    with threads_of_torch():
        return torch.from_numpy(kernels.turns(whole, tables.numpy()))


def turned(
    x: Float[Tensor, "*lead head_dim"],
    turn: Float[Tensor, "turns cosines_and_sines"],
    seq: tuple[int, ...],
    *,
    read_half: bool,
    write_half: bool,
) -> Float[Tensor, "*lead head_dim"]:
    """Return ``x`` turned, in its dtype and laid out in memory as it is.

    Args:
        x: Queries or keys.
        turn: As many turns as ``seq`` has places.
        seq: The shape that, broadcast to that of ``x`` without its features, says which
            turn is whose.
        read_half: Whether pair ``i`` of ``x`` is features ``i`` and ``i + pairs``;
            otherwise it is ``2 * i`` and ``2 * i + 1``.
        write_half: The same for the result.
    """
    if fusable(x):
        return _Turned.apply(x, turn, seq, read_half, write_half)  # pyright: ignore
    wide = _turned(x.to(turn.dtype), turn.reshape(*seq, -1), read_half, write_half)
    return wide.to(x.dtype)


class _Turned(torch.autograd.Function):
    """A linear map, whose gradient is the turn back: differentiable as often as wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, turn: Tensor, seq: Any, read: bool, write: bool
    ) -> Tensor:
        ctx.turn, ctx.seq, ctx.read, ctx.write = turn, seq, read, write
        return _rotated(x, turn, seq, read_half=read, write_half=write)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.turn.chunk(2, dim=-1)
        back = torch.cat([cos, -sin], dim=-1)
        dx = turned(grads[0], back, ctx.seq, read_half=ctx.write, write_half=ctx.read)
        return dx, None, None, None, None


def _rotated(
    x: Tensor, turn: Tensor, seq: tuple[int, ...], *, read_half: bool, write_half: bool
) -> Tensor:
    # Heads are often a transposed view; taken as they lie, nothing is copied for them.
    order = sorted(range(x.ndim - 1), key=lambda axis: -x.stride(axis))
    moved = x.permute(*order, -1).contiguous()
    index = np.arange(len(turn)).reshape(seq)
    which = np.broadcast_to(index, x.shape[:-1]).transpose(order).flatten()
    rows = moved.reshape(-1, x.shape[-1])
    with threads_of_torch():
        out = kernels.rotate(
            array_of(rows),
            turn.numpy(),
            which=which,
            read_half=read_half,
            write_half=write_half,
        )
    back = tensor_of(out).reshape(moved.shape)
    return back.permute(*np.argsort(order).tolist(), -1)


def _turned(x: Tensor, turn: Tensor, read_half: bool, write_half: bool) -> Tensor:
    # Operators that autograd's own vmap, of batched gradients, knows: neither torch.concat
    # nor a slice of everything.
    cos, sin = turn.chunk(2, dim=-1)
    part, rest = x.split([turn.shape[-1], x.shape[-1] - turn.shape[-1]], dim=-1)
    a, b = part.chunk(2, dim=-1) if read_half else (part[..., 0::2], part[..., 1::2])
    pair = [a * cos - b * sin, b * cos + a * sin]
    if not write_half:
        pair = [torch.stack(pair, dim=-1).reshape(part.shape)]
    return torch.cat([*pair, rest], dim=-1)
