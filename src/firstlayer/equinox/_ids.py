"""Ids of a call, and their checks on the host.

Ids in host memory are checked there, before JAX truncates 64 bits to 32: one out of range
is an IndexError that names it. Traced ids cannot raise, and checking ids on an accelerator
would wait for it in every call: :func:`firstlayer.equinox._lookup.check_ids` masks them.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32, Integer

from .._check import ids_in_range, integers
from ._module import is_on_host

#: Largest number of rows whose numbers fit in int32.
MAX_ROWS = 2**31 - 1


class IdsArgument(eqx.Module):
    """The ids of a call.

    Args:
        ids: The ids, where the caller placed them.
        in_range: Whether the host has checked them.
    """

    ids: Integer[Array, "*batch"]
    in_range: bool = eqx.field(static=True)


def ids_argument(
    ids: Any, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> IdsArgument:
    """Return the ids of a call, checked if the host can read them.

    Args:
        ids: Integers of any dtype and shape, or nested lists of them.
        num_embeddings: Number of rows of the complete table.
        name: Name of the ids in error messages.
        bound: Name of the number of rows in error messages.
    """
    if ids is None:
        raise TypeError(f"{name} must be integers, got None")
    if num_embeddings > MAX_ROWS:
        raise ValueError(
            f"a table of {num_embeddings} rows can be read by Embedding.from_store with "
            "ids on the host only: compiled code has row numbers of 32 bits"
        )
    values = host_values(ids)
    if values is None:
        return IdsArgument(traced_integers(ids, name=name), False)
    checked = ids_in_range(values, num_embeddings, name=name, bound=bound)
    if not isinstance(ids, jax.Array):
        ids = checked.astype(np.int32)
    return IdsArgument(ids, True)


def host_values(x: Any) -> np.ndarray | Any | None:
    """Return the values of ``x`` if they are in host memory, else None.

    A NumPy array inside an eager ``vmap`` is still a NumPy array with all of its bits; the
    first operation on it would truncate them.
    """
    inner = x
    while isinstance(inner, Tracer):
        inner = getattr(inner, "val", None)
    if isinstance(x, Tracer):
        return inner if isinstance(inner, np.ndarray) else None
    if not isinstance(x, jax.Array):
        return x
    return np.asarray(x) if is_on_host(x) else None


def call_values(x: Any) -> np.ndarray | Any | None:
    """Return the values of ``x`` in this call if they are in host memory, else None.

    Unlike :func:`host_values`, nothing for a NumPy array inside an eager ``vmap``, whose
    values are those of all mapped calls.
    """
    return None if isinstance(x, Tracer) else host_values(x)


def traced_integers(ids: Any, *, name: str = "ids") -> Integer[Array, "*batch"]:
    """Return ``ids`` if their dtype is an integer dtype, else raise a TypeError."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {ids.dtype.name}")
    return ids


def as_int32(ids: Integer[Array, "*batch"]) -> Int32[Array, "*batch"]:
    """Return ``ids`` as int32. Larger ones become the largest int32, no other id."""
    limits = jnp.iinfo(jnp.int32)
    if ids.dtype.itemsize >= 4 and ids.dtype != jnp.int32:
        ids = jnp.minimum(ids, limits.max)
        if ids.dtype.kind == "i":
            ids = jnp.maximum(ids, limits.min)
    return ids.astype(jnp.int32)


def is_token(ids: Any, padding_idx: int | None) -> Bool[Array, "*batch"]:
    """Return True where an id is not padding."""
    ids = traced_integers(ids) if isinstance(ids, jax.Array) else integers(ids)
    if padding_idx is None:
        return jnp.ones(ids.shape, bool)
    if ids.dtype.itemsize < 4:
        ids = ids.astype(np.int32)  # padding_idx may not fit into int8
    return jnp.asarray(ids != padding_idx)


def mask_and(
    a: Bool[Array, "*batch"] | None, b: Bool[Array, "*batch"] | None
) -> Bool[Array, "*batch"] | None:
    """Return ``a & b``, where None is a mask of True."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
