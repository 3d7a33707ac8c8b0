"""How the parameters of a layer come to be: given by the caller, or drawn with a key."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ..._array import compute_dtype
from ..._check import check_real, float_dtype, one_of

Key = PRNGKeyArray | Any
#: A name, or what ``jax.nn.initializers`` makes: a function of key, shape and dtype.
Init = str | Callable[[Any, tuple[int, ...], Any], Any]

#: With standard deviation 0.02, as GPT-2 and BERT draw their positions.
small_normal = jax.nn.initializers.normal(0.02)


def table_dtype(dtype: Any) -> np.dtype:
    """Return the dtype a table shall have; None is JAX's default, float32 or float64.

    Example:
        >>> table_dtype(jnp.bfloat16).name
        'bfloat16'
    """
    found = np.dtype(jnp.result_type(float)) if dtype is None else float_dtype(dtype)
    if found == np.float64 and jnp.result_type(float) != found:
        raise ValueError("dtype float64 needs jax.config.update('jax_enable_x64', True)")
    return found


def given(
    value: Float[Any, "..."], shape: tuple[int, ...], *, dtype: Any, name: str = "weight"
) -> Float[Array, "..."]:
    """Return ``value`` as a parameter of that shape; NumPy's memory is copied.

    Args:
        value: What the caller gave.
        shape: The shape it must have.
        dtype: None keeps the one it has, or the nearest that JAX has.
        name: What it is called in the sentence.
    """
    array = value if isinstance(value, jax.Array) else np.array(value)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    check_real(array, name=name, whole=dtype is not None)
    if isinstance(array, np.ndarray):
        # JAX takes no bytes in another machine's order.
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return jnp.asarray(array, None if dtype is None else table_dtype(dtype))


def drawn(
    shape: tuple[int, ...], *, init: Init, key: Key | None, dtype: Any
) -> Float[Array, "..."]:
    """Return a new parameter.

    Args:
        shape: Of the parameter.
        init: ``"normal"`` (standard deviation 1), ``"uniform"`` (within 0.05),
            ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02), ``"zeros"``, or
            a function of key, shape and dtype, as ``jax.nn.initializers`` makes them.
        key: What is drawn with.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.

    Example:
        >>> drawn((3, 2), init="xavier", key=jax.random.key(0), dtype="float16").dtype
        dtype('float16')
    """
    make = INITS[one_of("init", init, tuple(INITS))] if isinstance(init, str) else init
    if not callable(make):
        raise TypeError(f"init must be a name or a function, got {type(init).__name__}")
    found = table_dtype(dtype)
    if key is None:
        raise ValueError("key must be given to draw parameters, got None")
    # Drawn wide and rounded once, as everything is.
    table = jnp.asarray(make(key, shape, jnp.dtype(compute_dtype(found))))
    if table.shape != shape:
        raise ValueError(f"init must return an array of shape {shape}, got {table.shape}")
    return table.astype(found)


def _uniform(key: Any, shape: tuple[int, ...], dtype: Any, limit: float = 0.05) -> Array:
    return jax.random.uniform(key, shape, dtype, minval=-limit, maxval=limit)


def _xavier(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return _uniform(key, shape, dtype, limit=float(np.sqrt(6.0 / max(1, sum(shape)))))


def _truncated(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * 0.02


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.zeros(shape, dtype)


INITS = {
    "normal": jax.random.normal,
    "uniform": _uniform,
    "xavier": _xavier,
    "truncated_normal": _truncated,
    "zeros": _zeros,
}
