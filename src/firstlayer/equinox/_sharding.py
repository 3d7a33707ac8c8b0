"""Outputs on explicit meshes, whose axes are part of the types of arrays.

JAX does not infer the sharding of a gather on an explicit mesh. A layer runs such an
operation with automatic axes, and its result has the sharding of the caller's
``out_sharding``, or by default that of the ids and of the columns of the table.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array

from .._array import axis_specs, explicit_mesh

#: An ``out_sharding`` argument, as in ``jax.numpy``'s own functions.
OutSharding = NamedSharding | PartitionSpec | None
#: Mesh axes of each axis of an array.
Spec = tuple[Any, ...]


def with_sharding(
    function: Callable[..., Any],
    *args: Any,
    out_sharding: OutSharding,
    default: Callable[[], Spec],
) -> Any:
    """Return ``function(*args)``, with this sharding if the mesh has explicit axes.

    Args:
        function: Function of the arguments, traced with automatic axes.
        *args: Trees of arrays.
        out_sharding: The caller's sharding of the result, or None.
        default: Returns the specification of the result if ``out_sharding`` is None.
    """
    mesh = explicit_mesh(*jax.tree.leaves(args))
    if isinstance(out_sharding, NamedSharding):
        mesh, out_sharding = out_sharding.mesh.abstract_mesh, out_sharding.spec
    elif mesh is None and out_sharding is not None:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh is None:
        return function(*args)
    if not mesh.explicit_axes:
        raise ValueError(f"out_sharding needs a mesh with explicit axes, got {mesh}")
    spec = PartitionSpec(*_unique(default())) if out_sharding is None else out_sharding
    sharded = auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=NamedSharding(mesh, spec)
    )
    return sharded(*args)


def table_spec(ids: Array, weight: Array) -> Spec:
    """Return the specification of rows: that of the ids, then that of the columns."""
    return (*axis_specs(ids), axis_specs(weight)[1])


def sharding_like(x: Array, rows: tuple[int, ...]) -> OutSharding:
    """Return the sharding of rows that are added to ``x``; None if ``x`` has none.

    Args:
        x: The vectors.
        rows: Shape of the rows, which broadcasts to that of ``x``.
    """
    mesh, specs = explicit_mesh(x), axis_specs(x)
    if mesh is None or not any(_names(entry) for entry in specs):
        return None
    specs = specs[x.ndim - len(rows) :]
    entries = [None if size == 1 else spec for size, spec in zip(rows, specs, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _unique(spec: Spec) -> Spec:
    """Return ``spec`` if no mesh axis occurs twice in it."""
    names = [name for entry in spec for name in _names(entry)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"out_sharding must be given where mesh axis {name!r} shards both the ids "
                f"and the columns of the table, got None"
            )
    return spec


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
