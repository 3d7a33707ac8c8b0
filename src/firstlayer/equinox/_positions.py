"""Position arguments: conversion, checks, and counting from an offset.

Concrete positions are checked on the host, before JAX truncates 64 bits to 32. Traced
positions cannot raise: the vectors of those out of reach are NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import is_real
from .._check import FLOATS, dtype_text, host_array, positions_array, positions_in_reach
from ..positions.ids import check_axes, check_fit, from_offset, plain_offset, resolve
from ..positions.phases import LIMIT
from ._lookup import host_values
from ._module import is_concrete, upcast

Positions = Shaped[Array, "..."] | Shaped[np.ndarray, "..."] | Sequence[Any] | int | float
Offset = Positions
#: Raises an error for concrete positions that a layer does not support.
Check = Callable[[np.ndarray], Any]


def positions_for(
    length: int, *, positions: Any, offset: Any, check: Check
) -> Shaped[Array, "*seq"]:
    """Return the given positions, or ``0, 1, …`` plus ``offset``.

    Args:
        length: Number of positions to count if none are given.
        positions: The caller's positions, or None.
        offset: Number of positions before the first: a number, or one per row.
        check: Called with the positions if they are concrete.
    """
    offset = plain_offset(offset)
    if isinstance(offset, bool) or not isinstance(offset, int):
        offset = as_positions(offset, name="offset")
    if positions is not None:
        positions = resolve(as_positions(positions), offset=offset, steps=None)
        return checked_positions(positions, check)
    if not isinstance(length, int):
        # A symbolic size of jax.export: no value can be checked.
        offset = jnp.asarray(offset)
    if isinstance(offset, jax.Array):
        if isinstance(length, int) and length:
            last = length - 1
            _check_host_values(offset, lambda first: [check(first), check(first + last)])
        first = upcast(offset) if is_real(offset) else _signed(offset)
        return from_offset(jnp.arange(length, dtype=first.dtype), first)
    host = from_offset(np.arange(length), offset)
    if is_real(host):
        return checked_positions(host, check)
    check(host)
    # Counted by JAX: a long NumPy array would be a constant in every compiled program.
    first = jnp.asarray(np.asarray(offset).astype(np.int32))
    return from_offset(jnp.arange(length, dtype=jnp.int32), first)


def positions_for_vectors(
    x: Float[Array, "*batch length embedding_dim"],
    *,
    positions: Any,
    offset: Any,
    check: Check,
    axes: int = 1,
) -> Shaped[Array, "*seq"]:
    """Return positions whose shape fits the vectors.

    Args:
        x: The vectors.
        positions: The caller's positions; None is ``0, 1, …`` plus ``offset``.
        offset: Number of positions before the first: a number, or one per row.
        check: Called with the positions if they are concrete.
        axes: Number of coordinates of a position; if more than one, they are the first
            axis.
    """
    if axes > 1 and positions is None:
        raise ValueError(f"positions must be given when axes is {axes}, got None")
    at = positions_for(x.shape[-2], positions=positions, offset=offset, check=check)
    if axes > 1:
        check_axes(at, axes)
    check_fit(at.shape if axes == 1 else at.shape[1:], x.shape)
    return at


def as_positions(value: Any, *, name: str = "positions") -> Shaped[Any, "..."]:
    """Return concrete positions as a NumPy array, and traced ones unchanged."""
    if is_concrete(value):
        return positions_array(value, name=name)
    if value.dtype.kind in "iu" or value.dtype.name in FLOATS:
        return value
    raise TypeError(f"{name} must be integers or reals, got {value.dtype.name}")


def checked_positions(
    value: Any, check: Check, *, name: str = "positions"
) -> Shaped[Array, "*seq"]:
    """Return positions as a JAX array, after ``check`` has seen concrete values."""
    positions = as_positions(value, name=name)
    if isinstance(positions, jax.Array):
        _check_host_values(positions, check)
        return positions
    check(positions)
    if not is_real(positions):
        positions = positions.astype(np.int32)  # checked positions fit into 32 bits
    return jnp.asarray(positions)


def check_reach(positions: Shaped[np.ndarray, "..."], *, name: str = "positions") -> None:
    """Raise an error for positions beyond the tables of
    :mod:`firstlayer.positions.phases`.
    """
    positions_in_reach(positions, LIMIT, name=name)


def checked_vectors(
    x: Any, width: int, *, axes: tuple[str, ...] = ("length",), name: str = "x"
) -> Float[Array, "..."]:
    """Return ``x`` as a real array that ends in ``axes`` and an axis of size ``width``."""
    x = x if isinstance(x, jax.Array) else host_array(x, name=name)
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be real, got {dtype_text(x.dtype)}")
    if x.ndim <= len(axes) or x.shape[-1] != width:
        shape = f"(..., {', '.join(axes)}, {width})"
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    return jnp.asarray(x)


def _check_host_values(positions: Shaped[Array, "*seq"], check: Check) -> None:
    # Inside an eager vmap, a NumPy array still has the high bits that JAX will drop.
    values = host_values(positions)
    if values is not None:
        check(np.asarray(values))


def _signed(offset: Shaped[Array, "*rows"]) -> Shaped[Array, "*rows"]:
    """Return a traced offset in a signed dtype of at least 32 bits."""
    size = max(offset.dtype.itemsize, 4)
    signed = jnp.iinfo(f"int{8 * size}")
    if offset.dtype.kind == "u" and offset.dtype.itemsize == size:
        offset = jnp.minimum(offset, signed.max)  # larger values are out of reach anyway
    return offset.astype(signed.dtype)
