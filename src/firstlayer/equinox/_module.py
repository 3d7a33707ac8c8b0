"""Base class of the Equinox layers: named parameters and a config.

A layer is an immutable :class:`equinox.Module`; a method that changes one returns a new
layer. Trained arrays are floating-point leaves. Options, and tables computed from them
(:mod:`firstlayer.equinox._constant`), are static fields.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .._array import compute_dtype
from .._check import check_real
from ..files.layer_configs import config_of

Layer = TypeVar("Layer", bound=eqx.Module)


class Module(eqx.Module):
    """Base class of the Equinox layers. Has no fields of its own."""

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> from firstlayer.equinox import AlibiBias
            >>> config = AlibiBias(4, max_bias=2.0).config()
            >>> AlibiBias(**config).max_bias
            2.0
        """
        parameters = list(self.parameters().values())
        overrides = {"dtype": parameters[0].dtype.name} if parameters else {}
        return config_of(self, **overrides)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        """Return the trained arrays by name.

        Example:
            >>> from firstlayer.equinox import EmbeddingLayer
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, key=jax.random.key(0))
            >>> list(layer.parameters())
            ['token.weight', 'position.weight']
        """
        return {}

    def with_parameters(self, parameters: dict[str, Any]) -> Self:
        """Return a copy of this layer with other parameters.

        Args:
            parameters: One array for each name in :meth:`parameters`, of the same shape.
                They are rounded to the layer's dtype.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> layer = Embedding(2, 1, key=jax.random.key(0))
            >>> layer.with_parameters({"weight": jnp.ones((2, 1))})([1]).tolist()
            [[1.0]]
        """
        own = self.parameters()
        missing, unknown = sorted(own.keys() - parameters), sorted(parameters.keys() - own)
        if missing or unknown:
            raise ValueError(
                f"parameters must have exactly the names {sorted(own)}; "
                f"missing {missing}, unknown {unknown}"
            )
        for name, value in own.items():
            if np.shape(parameters[name]) != value.shape:
                raise ValueError(
                    f"parameters[{name!r}] must have shape {value.shape}, "
                    f"got {np.shape(parameters[name])}"
                )
            check_real(parameters[name], name=f"parameters[{name!r}]")
        return self._replace_parameters({
            name: jnp.array(parameters[name], own[name].dtype) for name in own
        })

    def _replace_parameters(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        """Return a copy with these parameters, whose names and shapes are checked.

        Overridden where a parameter is not a field of the same name.
        """
        return replace_fields(self, **parameters)


def replace_fields(layer: Layer, **fields: Any) -> Layer:
    """Return a copy of a layer with some fields replaced, static ones included.

    Example:
        >>> linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> replace_fields(linear, bias=None, use_bias=False).use_bias
        False
    """
    new = object.__new__(type(layer))
    for field in dataclasses.fields(layer):
        value = fields.pop(field.name) if field.name in fields else vars(layer)[field.name]
        object.__setattr__(new, field.name, value)
    if fields:
        raise TypeError(f"{type(layer).__name__} has no fields {sorted(fields)}")
    return new


def upcast(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return ``x`` in its compute dtype: float64 for float64, else float32."""
    return x.astype(compute_dtype(x.dtype))


def upcast_together(*arrays: Array) -> list[Array]:
    """Return arrays in one compute dtype, float64 if any is float64."""
    is_float64 = any(x.dtype == jnp.float64 for x in arrays)
    return [x.astype(jnp.float64 if is_float64 else jnp.float32) for x in arrays]


def compiled(
    function: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Callable[..., Any]:
    """Return ``function`` under ``jit``: an eager call of a layer is one operation.

    Without ``inline``, equal calls of one program share one function in its text.

    Args:
        function: Function of arrays and trees of arrays.
        static_argnums: As in ``jax.jit``.
        inline: As in ``jax.jit``.
    """

    broadcasting = _allow_broadcasting(function)
    return jax.jit(broadcasting, static_argnums=static_argnums, inline=inline)


def filter_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return :func:`compiled`, for trees that hold more than arrays."""
    return eqx.filter_jit(_allow_broadcasting(function))


def _allow_broadcasting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any) -> Any:
        # The layers broadcast on purpose, whatever the caller's setting for other code.
        with jax.numpy_rank_promotion("allow"):
            return function(*args)

    return run


def native(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in native byte order; JAX rejects any other."""
    return x.astype(x.dtype.newbyteorder("="), copy=False)


def is_concrete(x: Any) -> bool:
    """Return whether ``x`` has values that the host can read.

    It has none under ``jit``, ``vmap``, ``scan`` or differentiation, nor in an array that
    is sharded over several hosts.
    """
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def is_on_host(x: Any) -> bool:
    """Return whether reading the values of ``x`` copies nothing from an accelerator."""
    if not isinstance(x, jax.Array):
        return True
    return is_concrete(x) and next(iter(x.devices())).platform == "cpu"
