"""Position arguments: conversion, checks, and counting from an offset.

Positions in host memory are checked there, before JAX truncates 64 bits to 32. Traced
positions, and those on an accelerator, do not raise: the vectors of those out of reach are
NaN. Positions are never moved to another device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import is_real
from .._check import FLOATS, dtype_text, host_array, positions_array, positions_in_reach
from ..positions.ids import check_axes, check_fit, from_offset, plain_offset, resolve
from ..positions.phases import LIMIT
from ._ids import host_values
from ._module import native, upcast

Positions = Shaped[Array, "..."] | Shaped[np.ndarray, "..."] | Sequence[Any] | int | float
Offset = Positions
#: Raises an error for concrete positions that a layer does not support.
Check = Callable[[np.ndarray], Any]


class PositionsArgument(eqx.Module):
    """The positions of a call.

    Args:
        values: Positions, or the offset of the first, where the caller placed them.
        is_offset: Whether ``values`` is an offset.
    """

    values: Shaped[Array, "..."]
    is_offset: bool = eqx.field(static=True)

    def count(self, length: int) -> Shaped[Array, "*seq"]:
        """Return the positions, within a compiled function.

        Args:
            length: Number of positions to count from an offset.
        """
        if not self.is_offset:
            return self.values
        first = upcast(self.values) if is_real(self.values) else _signed(self.values)
        return from_offset(jnp.arange(length, dtype=first.dtype), first)

    def fit(self, x: Float[Array, "..."], *, axes: int = 1) -> Shaped[Array, "*seq"]:
        """Return positions whose shape fits the vectors, within a compiled function.

        Args:
            x: The vectors, ``(..., length, embedding_dim)``.
            axes: Number of coordinates of a position; if more than one, they are the first
                axis.
        """
        at = self.count(x.shape[-2])
        if axes > 1:
            check_axes(at, axes)
        check_fit(at.shape if axes == 1 else at.shape[1:], x.shape)
        return at


def positions_argument(
    length: Any, *, positions: Any, offset: Any, check: Check
) -> PositionsArgument:
    """Return the positions of a call, checked if the host can read them.

    Args:
        length: Number of positions to count if none are given.
        positions: The caller's positions; None is ``0, 1, …`` plus ``offset``.
        offset: Number of positions before the first: a number, or one per row.
        check: Called with positions in host memory.
    """
    offset = plain_offset(offset)
    if isinstance(offset, bool) or not isinstance(offset, int):
        offset = as_positions(offset, name="offset")
    if positions is not None:
        positions = resolve(as_positions(positions), offset=offset, steps=None)
        return PositionsArgument(checked_positions(positions, check), False)
    if not isinstance(offset, jax.Array) and is_real(np.asarray(offset)):
        # Added in float64, and rounded once.
        counted = from_offset(np.arange(length), offset)
        return PositionsArgument(checked_positions(counted, check), False)
    values = host_values(offset)
    if values is not None:
        first = np.asarray(values)
        if first.dtype != np.uint64:
            first = first.astype(np.float64 if is_real(first) else np.int64)
        # The length is symbolic in jax.export.
        last = length - 1 if isinstance(length, int) else 0
        if last >= 0:
            check(np.stack([first, first + last]))
    if not isinstance(offset, jax.Array):
        offset = np.asarray(offset).astype(np.int32)
    return PositionsArgument(offset, True)


def as_positions(value: Any, *, name: str = "positions") -> Shaped[Any, "..."]:
    """Return ``value`` as an array of integers or reals; JAX arrays stay where they are."""
    if not isinstance(value, jax.Array):
        return native(positions_array(value, name=name))
    if value.dtype.kind in "iu" or value.dtype.name in FLOATS:
        return value
    raise TypeError(f"{name} must be integers or reals, got {value.dtype.name}")


def checked_positions(
    value: Any, check: Check, *, name: str = "positions"
) -> Shaped[Any, "*seq"]:
    """Return positions as an array, after ``check`` has seen those in host memory."""
    positions = as_positions(value, name=name)
    values = host_values(positions)
    if values is not None:
        check(np.asarray(values))
    if not isinstance(positions, jax.Array) and not is_real(positions):
        return positions.astype(np.int32)  # checked positions fit into 32 bits
    return positions


def check_reach(positions: Shaped[np.ndarray, "..."], *, name: str = "positions") -> None:
    """Raise an error for positions beyond the tables of
    :mod:`firstlayer.positions.phases`.
    """
    positions_in_reach(positions, LIMIT, name=name)


def checked_vectors(
    x: Any, width: int, *, axes: tuple[str, ...] = ("length",), name: str = "x"
) -> Float[Any, "..."]:
    """Return ``x`` as a real array that ends in ``axes`` and an axis of size ``width``."""
    x = x if isinstance(x, jax.Array) else native(host_array(x, name=name))
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be real, got {dtype_text(x.dtype)}")
    if x.ndim <= len(axes) or x.shape[-1] != width:
        shape = f"(..., {', '.join(axes)}, {width})"
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    return x


def _signed(offset: Shaped[Array, "*rows"]) -> Shaped[Array, "*rows"]:
    """Return an offset in a signed dtype of at least 32 bits."""
    size = max(offset.dtype.itemsize, 4)
    signed = jnp.iinfo(f"int{8 * size}")
    if offset.dtype.kind == "u" and offset.dtype.itemsize == size:
        offset = jnp.minimum(offset, signed.max)  # larger values are out of reach anyway
    return offset.astype(signed.dtype)
