"""Arguments of the layers that add a vector at each position."""

from typing import Any

import numpy as np

from .._check import dtype_text, host_array, is_float
from ..positions.ids import check_axes, check_fit
from ._module import checked_gradient, native_byte_order, resolve_positions


def vectors(x: Any, embedding_dim: int, *, name: str = "x") -> np.ndarray:
    """Return ``x`` as an array of real vectors of width ``embedding_dim``."""
    x = host_array(x, name=name)
    if not is_float(x.dtype):
        raise TypeError(f"{name} must be real, got {dtype_text(x.dtype)}")
    if x.ndim < 2 or x.shape[-1] != embedding_dim:
        shape = f"(..., length, {embedding_dim})"
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    return native_byte_order(x)


def positions_of(
    shape: tuple[int, ...], *, positions: Any, offset: Any, axes: int = 1
) -> np.ndarray:
    """Return positions as an array that fits vectors of this shape.

    Args:
        shape: Shape of the vectors, ``(..., length, embedding_dim)``.
        positions: Positions given by the caller; None is ``0, 1, …`` shifted by ``offset``.
        offset: Number of preceding positions, a number or one per row.
        axes: Number of coordinates. More than one are on the first axis.
    """
    if axes > 1 and positions is None:
        raise ValueError(f"positions must be given when axes is {axes}, got None")
    positions = resolve_positions(shape[-2], positions=positions, offset=offset)
    if axes > 1:
        check_axes(positions, axes)
    check_fit(positions.shape if axes == 1 else positions.shape[1:], shape)
    return positions


def gradient_of(y: np.ndarray, dy: Any) -> np.ndarray:
    """Return ``dy`` as an array, or raise if it does not have the shape of ``y``."""
    return checked_gradient(dy, y.shape)
