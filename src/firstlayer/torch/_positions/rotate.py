"""Rotation on the kernels, eager on the CPU, with a gradient that is a rotation back.

The forward runs here only on what the kernels take. A gradient may be anything else, such
as the batched one of a Jacobian, and is then turned by plain operators, to the same bits.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ... import kernels
from ..._check import positions_in_reach
from ...positions.ids import resolve
from ...positions.phases import LIMIT
from ...positions.rotary import over_heads
from ...positions.rotary_rows import inverse_phases, rotated
from .._tensors.memory import (
    array_of,
    is_plain_cpu,
    kernel_eligible,
    tensor_of,
    threads_of_torch,
)

#: Up to this many features a kernel runs on one thread anyway.
ALONE = 2**17
#: Those that NumPy adds to others without making them reals.
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint32)


def whole_positions(
    x: Float[Tensor, "*lead head_dim"], *, positions: Any, offset: Any, heads_axis: int
) -> Integer[np.ndarray, "*lined"] | None:
    """Return whole positions on the host, lined up with ``x``; None if they are not so.

    A step of decoding is too short for operators on tensors.

    Args:
        x: Queries or keys.
        positions: What the caller gave; None is ``0, 1, …`` moved on by ``offset``.
        offset: How many positions came before, a number or one per row.
        heads_axis: As in :func:`firstlayer.positions.rotary.over_heads`.
    """
    length = x.shape[-2 if heads_axis == -3 else -3]
    if positions is None and type(offset) is int and -LIMIT < offset <= LIMIT - length:
        steps = np.arange(offset, offset + length)
        return steps if heads_axis == -3 else steps[:, None]
    found = []
    for value in (positions, offset):
        if isinstance(value, Tensor):
            if value.dtype not in WHOLE or not is_plain_cpu(value):
                return None
            value = value.numpy()
        elif value is not None and type(value) is not int:
            return None
        found.append(value)
    steps = np.arange(length) if positions is None else None
    whole = positions_in_reach(resolve(found[0], offset=found[1], steps=steps), LIMIT)
    return over_heads(whole, x, heads_axis=heads_axis).astype(np.int64, copy=False)


def integer_phases(
    positions: Integer[np.ndarray, "*lined"], tables: Float[np.ndarray, "2 3 256 pairs"]
) -> Float[np.ndarray, "turns 2*pairs"]:
    """Return the cosines of all pairs, then the sines, one row for each position."""
    with _threads(positions.size * tables.shape[-1]):
        return kernels.digit_phases(np.ascontiguousarray(positions).reshape(-1), tables)


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
        x: Queries or keys that kernels may run on.
        turn: As many turns as ``seq`` has places, in the dtype ``x`` is worked on in.
        seq: The shape that, broadcast to that of ``x`` without its features, says which
            turn is whose.
        read_half: Whether pair ``i`` of ``x`` is features ``i`` and ``i + pairs``;
            otherwise it is ``2 * i`` and ``2 * i + 1``.
        write_half: The same for the result.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _Turned.apply(x, turn, seq, read_half, write_half)  # pyright: ignore
    return _rotated(x, turn, seq, read_half, write_half)


class _Turned(torch.autograd.Function):
    """A linear map, whose gradient is the turn back: differentiable as often as wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, turn: np.ndarray, seq: Any, read: bool, write: bool
    ) -> Tensor:
        ctx.turn, ctx.seq, ctx.read, ctx.write = turn, seq, read, write
        return _rotated(x, turn, seq, read, write)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back, dy = inverse_phases(ctx.turn), grads[0]
        if kernel_eligible(dy):
            dx = turned(dy, back, ctx.seq, read_half=ctx.write, write_half=ctx.read)
        else:
            dx = _turned(dy, back.reshape(*ctx.seq, -1), ctx.write, ctx.read)
        return dx, None, None, None, None


def _rotated(
    x: Tensor, turn: np.ndarray, seq: tuple[int, ...], read_half: bool, write_half: bool
) -> Tensor:
    with _threads(x.numel()):
        found = rotated(array_of(x), turn, seq, read_half=read_half, write_half=write_half)
    return tensor_of(found)


def _turned(x: Tensor, phases: np.ndarray, read_half: bool, write_half: bool) -> Tensor:
    turn = torch.from_numpy(phases).to(x.device)
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


def _threads(features: int) -> AbstractContextManager[None]:
    return threads_of_torch() if features > ALONE else nullcontext()
