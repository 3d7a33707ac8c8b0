"""What every layer of this face has: a config, named parameters, numbers nobody trains.

A layer is an :class:`equinox.Module`, a frozen tree of arrays: what changes one returns
another. Its options are static fields, and so are the tables that they make
(:mod:`firstlayer.equinox._constant`). Arrays that are trained are floating-point leaves. What is
not trained and cannot be made again (padding rows, drawn frequencies) is a leaf too, the
int32 with the same bits, so that ``eqx.tree_serialise_leaves`` stores it and no optimizer,
no weight decay, no cast of a model's reals and no ``eqx.is_inexact_array`` takes it for a
parameter. With ``eqx.is_array`` optax' Adam refuses integers.
"""

import dataclasses
from typing import Any, ClassVar, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int32

from .._array import compute_dtype
from .._check import check_real

Layer = TypeVar("Layer", bound=eqx.Module)


class Module(eqx.Module):
    """Base of the Equinox layers. Holds no state of its own."""

    #: What tensor names begin with in a file: ``"token."`` for a table of tokens.
    prefix: ClassVar[str] = ""

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one, as plain values."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        """Return the arrays that are trained, by name."""
        return {}

    def with_parameters(self, parameters: dict[str, Any]) -> Self:
        """Return a layer like this one with other parameters.

        Args:
            parameters: An array for each name in :meth:`parameters`, of the same shape. It
                is rounded to the layer's dtype. A padding row in it becomes what padding
                is.
        """
        mine = self.parameters()
        missing, unknown = (
            sorted(mine.keys() - parameters),
            sorted(parameters.keys() - mine),
        )
        if missing or unknown:
            raise ValueError(
                f"parameters must have exactly the names {sorted(mine)}; "
                f"missing {missing}, unknown {unknown}"
            )
        for name, value in mine.items():
            if np.shape(parameters[name]) != value.shape:
                raise ValueError(
                    f"parameters[{name!r}] must have shape {value.shape}, "
                    f"got {np.shape(parameters[name])}"
                )
            check_real(parameters[name], name=f"parameters[{name!r}]")
        return self._filled({
            name: jnp.array(parameters[name], mine[name].dtype) for name in mine
        })

    def _filled(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        """Return a copy with these parameters, whose names and shapes are right.

        To be overridden where a parameter is not simply a field of that name.
        """
        return replaced(self, **parameters)


def replaced(layer: Layer, **fields: Any) -> Layer:
    """Return a copy of a layer with other values in some of its fields, static ones too.

    Example:
        >>> linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> replaced(linear, bias=None, use_bias=False).use_bias
        False
    """
    new = object.__new__(type(layer))
    for field in dataclasses.fields(layer):
        value = fields.pop(field.name) if field.name in fields else vars(layer)[field.name]
        object.__setattr__(new, field.name, value)
    if fields:
        raise TypeError(f"{type(layer).__name__} has no fields {sorted(fields)}")
    return new


def bits_of(numbers: Float[Any, "*shape"]) -> Int32[Array, "*bits"]:
    """Return numbers as the int32 with the same bits, for a field that nobody trains.

    Half precision is widened to float32; a float64 takes two integers, on a last axis.

    Example:
        >>> bits_of(np.array([0.0, 1.0], np.float32)).tolist()
        [0, 1065353216]
    """
    wide = numbers.astype(compute_dtype(numbers.dtype))
    if isinstance(wide, np.ndarray):
        whole = np.ascontiguousarray(wide)
        last = (2,) if whole.dtype.itemsize == 8 else ()
        return jnp.array(whole.view(np.int32).reshape(*whole.shape, *last))
    return jax.lax.bitcast_convert_type(wide, jnp.int32)


def floats_of(
    bits: Int32[Array, "*bits"], dtype: Any, *, kept: str = "float32"
) -> Float[Array, "*shape"]:
    """Return the numbers behind :func:`bits_of`, to work with numbers of ``dtype``.

    Args:
        bits: What :func:`bits_of` returned.
        dtype: Of what they meet: they come in float64 for float64, else in float32.
        kept: What they were before: ``"float32"`` or ``"float64"``.

    Example:
        >>> floats_of(bits_of(np.array([0.5], np.float32)), jnp.bfloat16)
        Array([0.5], dtype=float32)
    """
    numbers = jax.lax.bitcast_convert_type(bits, jnp.dtype(kept))
    return numbers.astype(compute_dtype(dtype))


def upcast(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return ``x`` in the dtype that its numbers are worked on in: float32 or float64."""
    return x.astype(compute_dtype(x.dtype))


def concrete(x: Any) -> bool:
    """Tell whether the values of ``x`` are there to be looked at, and checked.

    They are not under ``jit``, ``vmap``, ``scan`` or ``grad`` with respect to them, and not
    in an array that is spread over several hosts.
    """
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
