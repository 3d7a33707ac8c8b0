"""Parameters of a layer: converted from the caller's arrays, or drawn with a key."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray

from .._array import compute_dtype
from .._check import check_real, float_dtype, not_masked, one_of
from ._module import native
from ._row_shards import place_table

Key = PRNGKeyArray | Any
#: A name, or a function of key, shape and dtype as in ``jax.nn.initializers``.
Init = str | Callable[[Any, tuple[int, ...], Any], Any]

#: Standard deviation 0.02, as in GPT-2 and BERT.
small_normal = jax.nn.initializers.normal(0.02)


def table_dtype(dtype: Any) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype; None is JAX's default, float32 or float64.

    Example:
        >>> table_dtype(jnp.bfloat16).name
        'bfloat16'
    """
    checked = np.dtype(jnp.result_type(float)) if dtype is None else float_dtype(dtype)
    if checked == np.float64 and jnp.result_type(float) != checked:
        raise ValueError("dtype float64 needs jax.config.update('jax_enable_x64', True)")
    return checked


def given_parameter(
    value: Float[Any, "..."],
    shape: tuple[int, ...],
    *,
    dtype: Any,
    name: str = "weight",
    sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    """Return the caller's array as a parameter. NumPy arrays are copied.

    Args:
        value: The caller's array.
        shape: Shape that it must have.
        dtype: Dtype of the parameter; None is that of the array.
        name: Name of the array in error messages.
        sharding: Where to place a table on a mesh; None is where JAX places arrays.
    """
    array = (
        value if isinstance(value, jax.Array) else np.array(not_masked(value, name=name))
    )
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    check_real(array, name=name, whole=dtype is not None)
    if isinstance(array, np.ndarray):
        array = native(array)
    if sharding is not None:
        own = array.dtype if isinstance(array, jax.Array) else jnp.asarray(array[:0]).dtype
        return place_table(array, sharding, own if dtype is None else table_dtype(dtype))
    return jnp.asarray(array, None if dtype is None else table_dtype(dtype))


def check_parameters(layer: Any, **shapes: tuple[int, ...]) -> None:
    """Raise unless the parameters of a layer have these shapes.

    Called within a compiled function, where it costs nothing: a parameter may have been
    replaced by ``eqx.tree_at``, and would be broadcast or read out of range.

    Args:
        layer: The layer.
        **shapes: Shape of each parameter, by the name of its field.
    """
    for name, shape in shapes.items():
        found = tuple(np.shape(getattr(layer, name)))
        if found != shape:
            raise ValueError(f"{name} must have shape {shape}, got {found}")


def draw_parameter(
    shape: tuple[int, ...], *, init: Init, key: Key | None, dtype: Any
) -> Float[Array, "..."]:
    """Return a new parameter.

    Args:
        shape: Shape of the parameter.
        init: ``"normal"`` (standard deviation 1), ``"uniform"`` (within 0.05),
            ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02), ``"zeros"``, or
            a function of key, shape and dtype as in ``jax.nn.initializers``.
        key: Random key.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.

    Example:
        >>> key = jax.random.key(0)
        >>> draw_parameter((3, 2), init="xavier", key=key, dtype="float16").dtype
        dtype('float16')
    """
    draw = INITS[one_of("init", init, tuple(INITS))] if isinstance(init, str) else init
    if not callable(draw):
        raise TypeError(f"init must be a name or a function, got {type(init).__name__}")
    dtype = table_dtype(dtype)
    if key is None:
        raise ValueError("key must be given to draw parameters, got None")
    # Half precision is drawn in float32 and rounded once.
    table = jnp.asarray(draw(key, shape, jnp.dtype(compute_dtype(dtype))))
    if table.shape != shape:
        raise ValueError(f"init must return an array of shape {shape}, got {table.shape}")
    return table.astype(dtype)


def _uniform(key: Any, shape: tuple[int, ...], dtype: Any, limit: float = 0.05) -> Array:
    return jax.random.uniform(key, shape, dtype, minval=-limit, maxval=limit)


def _xavier(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return _uniform(key, shape, dtype, limit=float(np.sqrt(6.0 / max(1, sum(shape)))))


def _truncated_normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * 0.02


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.zeros(shape, dtype)


INITS = {
    "normal": jax.random.normal,
    "uniform": _uniform,
    "xavier": _xavier,
    "truncated_normal": _truncated_normal,
    "zeros": _zeros,
}
