"""Which position is whose: what the caller gave, or 0, 1, … moved on by an offset.

Positions that are concrete on the CPU are checked and refused in the core's own sentences.
On other devices, under ``torch.compile``, ``torch.export`` and ``torch.func`` nothing is
looked at, for that would wait for the device or break the graph: what is out of reach is
NaN there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..._check import positions_array, positions_in_reach
from ...positions.ids import check_axes, check_fit, plain_offset, resolve
from ...positions.phases import LIMIT
from .._tensors.dtypes import dtype_name
from .._tensors.memory import is_plain_cpu

Positions = Shaped[Tensor, "..."] | Sequence[Any] | int | float
Offset = Shaped[Tensor, "..."] | Sequence[Any] | int | float


def positions_tensor(
    value: Any, *, device: torch.device, name: str = "positions"
) -> Shaped[Tensor, "*seq"]:
    """Return ``value`` as a tensor of integers or reals; anything else is a TypeError."""
    if isinstance(value, Tensor):
        found = value
    else:
        if isinstance(value, range):
            return torch.arange(value.start, value.stop, value.step, device=device)
        try:
            found = torch.as_tensor(value, device=device)
        except (TypeError, RuntimeError):
            positions_array(value, name=name)
            raise
        if found.is_floating_point() and found.dtype.itemsize < 4:
            # Python's numbers come in torch's default dtype, which may be a half one.
            found = torch.as_tensor(value, device=device, dtype=torch.float32)
    if found.dtype == torch.bool or found.is_complex():
        raise TypeError(f"{name} must be integers or reals, got {dtype_name(found.dtype)}")
    return found


def positions_for(
    x: Tensor, *, length: int, positions: Any, offset: Any
) -> Shaped[Tensor, "*seq"]:
    """Return those given, or ``0, 1, …`` moved on by ``offset``, on the device of ``x``."""
    if positions is not None:
        positions = positions_tensor(positions, device=x.device)
    offset = plain_offset(offset)
    if type(offset) is not int:
        offset = positions_tensor(offset, device=x.device, name="offset")
        offset = signed(offset)
        if offset.is_floating_point() and offset.dtype.itemsize < 4:
            offset = offset.float()  # the sum would be in half precision
    steps = None if positions is not None else torch.arange(length, device=x.device)
    return resolve(positions, offset=offset, steps=steps)


def positions_of(
    x: Float[Tensor, "*batch length embedding_dim"],
    *,
    positions: Any,
    offset: Any,
    axes: int = 1,
) -> Shaped[Tensor, "*seq"]:
    """Return positions for vectors, of a shape that belongs to them.

    Args:
        x: The vectors.
        positions: What the caller gave; None is ``0, 1, …`` moved on by ``offset``.
        offset: How many positions came before, a number or one per row.
        axes: How many coordinates a position has; if more than one they come first.
    """
    if axes > 1 and positions is None:
        raise ValueError(f"positions must be given when axes is {axes}, got None")
    found = positions_for(x, length=x.shape[-2], positions=positions, offset=offset)
    if axes > 1:
        check_axes(found, axes)
    check_fit(tuple(found.shape if axes == 1 else found.shape[1:]), tuple(x.shape))
    return found


def in_reach(positions: Tensor, *, name: str = "positions") -> Shaped[Tensor, "*seq"]:
    """Return positions whose digits can be taken, once concrete ones have been checked."""
    if is_plain_cpu(positions):
        positions_in_reach(on_host(positions), LIMIT, name=name)
    return signed(positions)


def on_host(positions: Tensor) -> np.ndarray:
    """Return concrete positions as NumPy has them, half precision widened."""
    found = positions.detach()
    if found.is_floating_point() and found.dtype.itemsize < 4:
        found = found.float()
    return found.numpy()


def check_vectors(
    x: Tensor, width: int, *, axes: tuple[str, ...] = ("length",), name: str = "x"
) -> None:
    """Refuse what are not real vectors of that width, with those axes before the last."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be real, got {dtype_name(x.dtype)}")
    if x.ndim <= len(axes) or x.shape[-1] != width:
        want = f"(..., {', '.join(axes)}, {width})"
        raise ValueError(f"{name} must have shape {want}, got {tuple(x.shape)}")


def signed(positions: Shaped[Tensor, "*seq"]) -> Shaped[Tensor, "*seq"]:
    """Return positions that torch can compare and add: unsigned types as int64."""
    if positions.dtype in (torch.uint16, torch.uint32):
        return positions.to(torch.int64)
    if positions.dtype == torch.uint64:
        wrapped = positions.view(torch.int64)  # what does not fit is out of any reach
        return torch.where(wrapped < 0, torch.iinfo(torch.int64).max, wrapped)
    return positions
