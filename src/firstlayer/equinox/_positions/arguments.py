"""Which position is whose: what the caller gave, or 0, 1, … moved on by an offset.

Positions that are concrete are looked at on the host, before JAX makes 32 bits of 64, and
refused in the core's own sentences. Under ``jit``, ``vmap``, ``scan`` and where they are
differentiated nothing can be raised: what is out of reach is NaN there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ..._array import is_real
from ..._check import FLOATS, positions_array, positions_in_reach
from ...positions.ids import check_axes, check_fit, from_offset, plain_offset, resolve
from ...positions.phases import LIMIT
from .._module import concrete, upcast
from .._table.lookup import on_host

Positions = Shaped[Array, "..."] | Shaped[np.ndarray, "..."] | Sequence[Any] | int | float
Offset = Positions
#: What refuses concrete positions, given them on the host.
Check = Callable[[np.ndarray], Any]


def positions_for(
    length: int, *, positions: Any, offset: Any, check: Check
) -> Shaped[Array, "*seq"]:
    """Return those given, or ``0, 1, …`` moved on by ``offset``, once they are checked.

    Args:
        length: How many positions there are if none are given.
        positions: What the caller gave, or None.
        offset: How many positions came before, a number or one per row.
        check: Called with them if they are concrete.
    """
    offset = plain_offset(offset)
    if isinstance(offset, bool) or not isinstance(offset, int):
        offset = arrived(offset, name="offset")
    if positions is not None:
        return checked(resolve(arrived(positions), offset=offset, steps=None), check)
    if not isinstance(length, int):
        # A size that jax.export leaves open: nothing can be looked at.
        offset = jnp.asarray(offset)
    if isinstance(offset, jax.Array):
        if isinstance(length, int) and length:
            _check_seen(offset, lambda seen: [check(seen), check(seen + (length - 1))])
        before = upcast(offset) if is_real(offset) else _signed(offset)
        return from_offset(jnp.arange(length, dtype=before.dtype), before)
    host = from_offset(np.arange(length), offset)
    if is_real(host):
        return checked(host, check)
    check(host)
    # Counted by JAX: a long array would be a constant of every compiled program.
    before = jnp.asarray(np.asarray(offset).astype(np.int32))
    return from_offset(jnp.arange(length, dtype=jnp.int32), before)


def positions_of(
    x: Float[Array, "*batch length embedding_dim"],
    *,
    positions: Any,
    offset: Any,
    check: Check,
    axes: int = 1,
) -> Shaped[Array, "*seq"]:
    """Return positions for vectors, of a shape that belongs to them.

    Args:
        x: The vectors.
        positions: What the caller gave; None is ``0, 1, …`` moved on by ``offset``.
        offset: How many positions came before, a number or one per row.
        check: Called with them if they are concrete.
        axes: How many coordinates a position has; if more than one they come first.
    """
    if axes > 1 and positions is None:
        raise ValueError(f"positions must be given when axes is {axes}, got None")
    found = positions_for(x.shape[-2], positions=positions, offset=offset, check=check)
    if axes > 1:
        check_axes(found, axes)
    check_fit(found.shape if axes == 1 else found.shape[1:], x.shape)
    return found


def arrived(value: Any, *, name: str = "positions") -> Shaped[Any, "..."]:
    """Return positions as NumPy has them if they are concrete, else as they are."""
    if concrete(value):
        return positions_array(value, name=name)
    if value.dtype.kind in "iu" or value.dtype.name in FLOATS:
        return value
    raise TypeError(f"{name} must be integers or reals, got {value.dtype.name}")


def checked(positions: Shaped[Any, "*seq"], check: Check) -> Shaped[Array, "*seq"]:
    """Return positions as JAX has them, once ``check`` has seen those on the host."""
    if isinstance(positions, jax.Array):
        _check_seen(positions, check)
        return positions
    check(positions)
    if not is_real(positions):
        positions = positions.astype(np.int32)  # as every one that is in reach fits
    return jnp.asarray(positions)


def in_reach(positions: Shaped[np.ndarray, "..."], *, name: str = "positions") -> None:
    """Refuse positions that the tables of :mod:`firstlayer.positions.phases` do not reach."""
    positions_in_reach(positions, LIMIT, name=name)


def vectors(
    x: Any, width: int, *, axes: tuple[str, ...] = ("length",), name: str = "x"
) -> Float[Array, "..."]:
    """Return ``x`` as real vectors of that width, with those axes before the last."""
    found = x if isinstance(x, jax.Array) else np.asarray(x)
    if found.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be real, got {found.dtype.name}")
    if found.ndim <= len(axes) or found.shape[-1] != width:
        want = f"(..., {', '.join(axes)}, {width})"
        raise ValueError(f"{name} must have shape {want}, got {found.shape}")
    return jnp.asarray(found)


def _check_seen(positions: Shaped[Array, "*seq"], check: Check) -> None:
    # An eager vmap holds NumPy's array itself, whose high bits JAX is about to drop.
    seen = on_host(positions)
    if seen is not None:
        check(np.asarray(seen))


def _signed(offset: Shaped[Array, "*rows"]) -> Shaped[Array, "*rows"]:
    """Return a traced offset in a dtype that positions can be counted in."""
    size = max(offset.dtype.itemsize, 4)
    whole = jnp.iinfo(f"int{8 * size}")
    if offset.dtype.kind == "u" and offset.dtype.itemsize == size:
        offset = jnp.minimum(offset, whole.max)  # what does not fit is out of any reach
    return offset.astype(whole.dtype)
