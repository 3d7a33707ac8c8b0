"""Rotation on the kernels, eager on the CPU, with a gradient that is a rotation back.

The forward runs here only on what the kernels take. A gradient may be anything else, such
as the batched one of a Jacobian, and is then turned by plain operators, to the same bits.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .. import kernels
from ._fused import array_of, fusable, tensor_of, threads_of_torch


def whole_turns(
    positions: Integer[np.ndarray, "*seq"], tables: Float[Tensor, "2 3 256 pairs"]
) -> Float[np.ndarray, "turns 2*pairs"]:
    """Return the cosines of all pairs, then the sines, one row for each position.

    Args:
        positions: Whole numbers, within reach.
        tables: Digit tables in the dtype of the result.
    """
    whole = np.ascontiguousarray(positions, np.int64).reshape(-1)
    with threads_of_torch():
        return kernels.turns(whole, tables.numpy())


def turned(
    x: Float[Tensor, "*lead head_dim"],
    turn: Float[np.ndarray, "turns cosines_and_sines"],
    seq: tuple[int, ...],
    *,
    read_half: bool,
    write_half: bool,
) -> Float[Tensor, "*lead head_dim"]:
    """Return ``x`` turned, in its dtype and laid out in memory as it is.

    Args:
        x: Queries or keys.
        turn: As many turns as ``seq`` has places, in the dtype ``x`` is worked on in.
        seq: The shape that, broadcast to that of ``x`` without its features, says which
            turn is whose.
        read_half: Whether pair ``i`` of ``x`` is features ``i`` and ``i + pairs``;
            otherwise it is ``2 * i`` and ``2 * i + 1``.
        write_half: The same for the result.
    """
    if not fusable(x):
        return _turned(x, turn.reshape(*seq, -1), read_half, write_half)
    if x.requires_grad and torch.is_grad_enabled():
        return _Turned.apply(x, turn, seq, read_half, write_half)  # pyright: ignore
    return _rotated(x, turn, seq, read_half=read_half, write_half=write_half)


class _Turned(torch.autograd.Function):
    """A linear map, whose gradient is the turn back: differentiable as often as wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, turn: np.ndarray, seq: Any, read: bool, write: bool
    ) -> Tensor:
        ctx.turn, ctx.seq, ctx.read, ctx.write = turn, seq, read, write
        return _rotated(x, turn, seq, read_half=read, write_half=write)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = np.split(ctx.turn, 2, axis=-1)
        back = np.concatenate([cos, -sin], axis=-1)
        dx = turned(grads[0], back, ctx.seq, read_half=ctx.write, write_half=ctx.read)
        return dx, None, None, None, None


def _rotated(
    x: Tensor, turn: np.ndarray, seq: tuple[int, ...], *, read_half: bool, write_half: bool
) -> Tensor:
    array, lead = array_of(x), x.ndim - 1
    # Heads are often a transposed view; taken as they lie, nothing is copied for them.
    order = sorted(range(lead), key=lambda axis: -array.strides[axis])
    back = sorted(range(lead), key=order.__getitem__)
    moved = np.ascontiguousarray(array.transpose(*order, lead))
    which = np.empty(moved.shape[:-1], np.int64)
    which.transpose(back)[...] = np.arange(len(turn)).reshape(seq)
    with threads_of_torch():
        out = kernels.rotate(
            moved.reshape(which.size, x.shape[-1]),
            turn,
            which=which.reshape(-1),
            read_half=read_half,
            write_half=write_half,
        )
    return tensor_of(out.reshape(moved.shape).transpose(*back, lead))


def _turned(x: Tensor, turns: np.ndarray, read_half: bool, write_half: bool) -> Tensor:
    turn = torch.from_numpy(turns).to(x.device)
    # Operators that autograd's own vmap, of batched gradients, knows: neither torch.concat
    # nor a slice of everything.
    cos, sin = turn.chunk(2, dim=-1)
    part, rest = x.split([turn.shape[-1], x.shape[-1] - turn.shape[-1]], dim=-1)
    wide = part.to(turn.dtype)
    a, b = wide.chunk(2, dim=-1) if read_half else (wide[..., 0::2], wide[..., 1::2])
    pair = [a * cos - b * sin, b * cos + a * sin]
    if not write_half:
        pair = [torch.stack(pair, dim=-1).reshape(part.shape)]
    return torch.cat([*(each.to(x.dtype) for each in pair), rest], dim=-1)
