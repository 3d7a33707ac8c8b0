"""What the layers that add a vector at each position share: which position is whose."""

from typing import Any

import numpy as np

from .._check import is_float
from ..positions.ids import check_axes, check_fit
from ._module import native_byte_order, resolve_positions


def vectors(x: Any, embedding_dim: int, *, name: str = "x") -> np.ndarray:
    """Return ``x`` as an array of real vectors of that width."""
    x = np.asarray(x)
    if not is_float(x.dtype):
        raise TypeError(f"{name} must be real, got {x.dtype.name}")
    if x.ndim < 2 or x.shape[-1] != embedding_dim:
        want = f"(..., length, {embedding_dim})"
        raise ValueError(f"{name} must have shape {want}, got {x.shape}")
    return native_byte_order(x)


def positions_of(
    shape: tuple[int, ...], *, positions: Any, offset: Any, axes: int = 1
) -> np.ndarray:
    """Return positions for vectors of this shape, of a shape that belongs to them.

    Args:
        shape: Of the vectors, ``(..., length, embedding_dim)``.
        positions: What the caller gave; None is ``0, 1, …`` moved on by ``offset``.
        offset: How many positions came before, a number or one per row.
        axes: How many coordinates a position has; if more than one they come first.
    """
    if axes > 1 and positions is None:
        raise ValueError(f"positions must be given when axes is {axes}, got None")
    found = resolve_positions(shape[-2], positions=positions, offset=offset)
    if axes > 1:
        check_axes(found, axes)
    check_fit(found.shape if axes == 1 else found.shape[1:], shape)
    return found


def gradient_of(y: np.ndarray, dy: Any) -> np.ndarray:
    """Return ``dy`` as an array, of the shape of the output it is the gradient of."""
    dy = np.asarray(dy)
    if dy.shape != y.shape:
        raise ValueError(f"dy must have shape {y.shape}, got {dy.shape}")
    return native_byte_order(dy)
