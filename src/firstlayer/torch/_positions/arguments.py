"""Position arguments of the torch layers: conversion, default positions and checks.

Concrete positions on the CPU are checked. On other devices and under ``torch.compile``,
``torch.export`` and ``torch.func`` values are not read, because that would synchronize with
the device or break the graph; positions beyond the limit give NaN there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..._check import not_masked, positions_array, positions_in_reach
from ...positions.ids import check_axes, check_fit, plain_offset, resolve
from ...positions.phases import LIMIT
from .._tensors.dtypes import dtype_name
from .._tensors.memory import is_plain_cpu

Positions = Shaped[Tensor, "..."] | Sequence[Any] | int | float
Offset = Shaped[Tensor, "..."] | Sequence[Any] | int | float


def positions_tensor(
    value: Any, *, device: torch.device, name: str = "positions"
) -> Shaped[Tensor, "*seq"]:
    """Return ``value`` as a tensor of integers or floats, or raise a TypeError."""
    if isinstance(value, Tensor):
        positions = value
    else:
        if isinstance(value, range):
            return torch.arange(value.start, value.stop, value.step, device=device)
        not_masked(value, name=name)
        try:
            positions = torch.as_tensor(value, device=device)
        except (TypeError, RuntimeError, ValueError, OverflowError):
            # Scalars of some NumPy dtypes, or an error with a clearer message.
            positions = torch.as_tensor(positions_array(value, name=name), device=device)
        if positions.is_floating_point() and positions.dtype.itemsize < 4:
            # Python floats get torch's default dtype, which may be half precision.
            positions = torch.as_tensor(value, device=device, dtype=torch.float32)
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(
            f"{name} must be integers or reals, got {dtype_name(positions.dtype)}"
        )
    return positions


def positions_for(
    x: Tensor, *, length: int, positions: Any, offset: Any
) -> Shaped[Tensor, "*seq"]:
    """Return the given positions, or ``offset, offset + 1, …``, on the device of ``x``."""
    if positions is not None:
        positions = positions_tensor(positions, device=x.device)
    offset = plain_offset(offset)
    if type(offset) is not int:
        offset = positions_tensor(offset, device=x.device, name="offset")
        offset = signed(offset)
        if offset.is_floating_point() and offset.dtype.itemsize < 4:
            offset = offset.float()  # Integers plus a half-precision offset would round.
    steps = None if positions is not None else torch.arange(length, device=x.device)
    return resolve(positions, offset=offset, steps=steps)


def positions_of(
    x: Float[Tensor, "*batch length embedding_dim"],
    *,
    positions: Any,
    offset: Any,
    axes: int = 1,
) -> Shaped[Tensor, "*seq"]:
    """Return the positions of ``x``, checked against its shape.

    Args:
        x: Vectors.
        positions: Given positions; None is ``offset, offset + 1, …``.
        offset: Number of preceding positions, or one number per row.
        axes: Number of coordinates per position. If greater than 1, coordinates are on the
            first axis.
    """
    if axes > 1 and positions is None:
        raise ValueError(f"positions must be given when axes is {axes}, got None")
    positions = positions_for(x, length=x.shape[-2], positions=positions, offset=offset)
    if axes > 1:
        check_axes(positions, axes)
    check_fit(tuple(positions.shape if axes == 1 else positions.shape[1:]), tuple(x.shape))
    return positions


def in_reach(positions: Tensor, *, name: str = "positions") -> Shaped[Tensor, "*seq"]:
    """Return ``positions`` in a signed dtype; concrete ones must be within the limit."""
    if is_plain_cpu(positions):
        positions_in_reach(on_host(positions), LIMIT, name=name)
    return signed(positions)


def on_host(positions: Tensor) -> np.ndarray:
    """Return concrete positions as a NumPy array, half precision upcast to float32."""
    positions = positions.detach()
    if positions.is_floating_point() and positions.dtype.itemsize < 4:
        positions = positions.float()
    return positions.numpy()


def check_vectors(
    x: Tensor, width: int, *, axes: tuple[str, ...] = ("length",), name: str = "x"
) -> None:
    """Raise unless ``x`` is a dense real tensor of shape ``(..., *axes, width)``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be real, got {dtype_name(x.dtype)}")
    if x.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pass {name}.values() and "
            "the position of each vector"
        )
    if x.ndim <= len(axes) or x.shape[-1] != width:
        expected = f"(..., {', '.join(axes)}, {width})"
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")


def check_width(rows: Tensor, embedding_dim: int, *, name: str) -> None:
    """Raise if rows of the table ``name`` are not ``embedding_dim`` wide.

    A table may have been replaced. Rows of width 1 would be broadcast.
    """
    if rows.shape[-1] != embedding_dim:
        raise ValueError(
            f"{name} must have embedding_dim {embedding_dim} columns, got {rows.shape[-1]}"
        )


def signed(positions: Shaped[Tensor, "*seq"]) -> Shaped[Tensor, "*seq"]:
    """Return unsigned positions as int64, since torch cannot compare or add them."""
    if positions.dtype in (torch.uint16, torch.uint32):
        return positions.to(torch.int64)
    if positions.dtype == torch.uint64:
        # Values that wrapped to negative become the largest int64, beyond any limit.
        wrapped = positions.view(torch.int64)
        return torch.where(wrapped < 0, torch.iinfo(torch.int64).max, wrapped)
    return positions
