"""Rotation by the compiled kernels, for eager CPU tensors, with its backward.

The backward is the inverse rotation. A gradient that the kernels cannot take, such as the
batched gradient of a vectorized Jacobian, is rotated by torch operators with the same
result to the bit.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ... import kernels
from ..._check import positions_in_reach
from ...positions.ids import plain_offset, resolve
from ...positions.phases import LIMIT
from ...positions.rotary import inverse_phases, over_heads, rotate_rows
from .._tensors.memory import (
    array_of,
    is_plain_cpu,
    kernel_eligible,
    tensor_of,
    threads_of_torch,
)

#: Largest number of features that a kernel processes on one thread in any case.
SINGLE_THREAD_FEATURES = 2**17
#: Dtypes that NumPy adds to int64 without promotion to float64.
INTEGER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint32,
)


def integer_positions(
    x: Float[Tensor, "*lead head_dim"],
    *,
    positions: Any,
    offset: Any,
    heads_axis: int | None,
) -> Integer[np.ndarray, "*seq"] | None:
    """Return integer positions as a NumPy array that broadcasts against ``x``.

    Returns None if they are not concrete integers. NumPy, because in a decoding step the
    overhead of tensor operators would exceed the computation.

    Args:
        x: Queries or keys.
        positions: Given positions; None is ``offset, offset + 1, …``.
        offset: Number of preceding positions, or one number per row.
        heads_axis: -3, -2 or None; see :func:`firstlayer.positions.rotary.over_heads`.
    """
    length = x.shape[-2 if heads_axis != -2 else -3]
    if positions is None and type(offset) is int and -LIMIT < offset <= LIMIT - length:
        steps = np.arange(offset, offset + length)
        return steps if heads_axis != -2 else steps[:, None]
    arrays = []
    for value in (positions, plain_offset(offset)):
        if isinstance(value, Tensor):
            if value.dtype not in INTEGER_DTYPES or not is_plain_cpu(value):
                return None
            value = value.numpy()
        elif value is not None and type(value) is not int:
            return None
        arrays.append(value)
    steps = np.arange(length) if positions is None else None
    resolved = resolve(arrays[0], offset=arrays[1], steps=steps)
    checked = positions_in_reach(resolved, LIMIT)
    return over_heads(checked, x, heads_axis=heads_axis).astype(np.int64, copy=False)


def integer_phases(
    positions: Integer[np.ndarray, "*seq"], tables: Float[np.ndarray, "2 3 256 pairs"]
) -> Float[np.ndarray, "positions 2*pairs"]:
    """Return one row per position: the cosines of all pairs, then the sines."""
    with _threads(positions.size * tables.shape[-1]):
        return kernels.digit_phases(np.ascontiguousarray(positions).reshape(-1), tables)


def rotate_fused(
    x: Float[Tensor, "*lead head_dim"],
    phases: Float[np.ndarray, "positions cosines_and_sines"],
    seq: tuple[int, ...],
    *,
    read_half: bool,
    write_half: bool,
) -> Float[Tensor, "*lead head_dim"]:
    """Return ``x`` rotated by the kernels, in its dtype and memory layout.

    Args:
        x: Queries or keys that the kernels can read.
        phases: One row per position of ``seq``, in the compute dtype of ``x``.
        seq: Shape of the positions, broadcastable against ``x.shape[:-1]``.
        read_half: Pair ``i`` of ``x`` is features ``i`` and ``i + pairs`` instead of
            ``2 * i`` and ``2 * i + 1``.
        write_half: The same for the output.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _Rotation.apply(x, phases, seq, read_half, write_half)  # pyright: ignore
    return _run_kernel(x, phases, seq, read_half, write_half)


class _Rotation(torch.autograd.Function):
    """Rotation with a backward that is itself differentiable, to any order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, phases: np.ndarray, seq: Any, read: bool, write: bool
    ) -> Tensor:
        ctx.phases, ctx.seq, ctx.read, ctx.write = phases, seq, read, write
        return _run_kernel(x, phases, seq, read, write)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inverse, dy = inverse_phases(ctx.phases), grads[0]
        if kernel_eligible(dy):
            dx = rotate_fused(
                dy, inverse, ctx.seq, read_half=ctx.write, write_half=ctx.read
            )
        else:
            dx = _run_operators(dy, inverse.reshape(*ctx.seq, -1), ctx.write, ctx.read)
        return dx, None, None, None, None


def _run_kernel(
    x: Tensor, phases: np.ndarray, seq: tuple[int, ...], read_half: bool, write_half: bool
) -> Tensor:
    with _threads(x.numel()):
        out = rotate_rows(
            array_of(x), phases, seq, read_half=read_half, write_half=write_half
        )
    return tensor_of(out)


def _run_operators(
    x: Tensor, phases: np.ndarray, read_half: bool, write_half: bool
) -> Tensor:
    both = torch.from_numpy(phases).to(x.device)
    # The vmap of batched gradients supports chunk, split and cat, but neither torch.concat
    # nor a slice of a whole axis.
    cos, sin = both.chunk(2, dim=-1)
    features, rest = x.split([both.shape[-1], x.shape[-1] - both.shape[-1]], dim=-1)
    upcast = features.to(both.dtype)
    if read_half:
        a, b = upcast.chunk(2, dim=-1)
    else:
        a, b = upcast[..., 0::2], upcast[..., 1::2]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if not write_half:
        parts = [torch.stack(parts, dim=-1).reshape(features.shape)]
    return torch.cat([*(part.to(x.dtype) for part in parts), rest], dim=-1)


def _threads(features: int) -> AbstractContextManager[None]:
    return threads_of_torch() if features > SINGLE_THREAD_FEATURES else nullcontext()
