"""Outputs on explicit meshes, whose axes are part of the types of arrays.

JAX does not infer the sharding of a gather on an explicit mesh. A layer runs such an
operation with automatic axes, and its result has the sharding of the caller's
``out_sharding``, or by default that of the ids and of the columns of the table.
"""

from collections.abc import Callable
from functools import partial
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
    return with_specs(function, *args, specs=spec, mesh=mesh)


def with_specs(
    function: Callable[..., Any], *args: Any, specs: Any, mesh: Any = None
) -> Any:
    """Return ``function(*args)``, with these shardings if the mesh has explicit axes.

    Args:
        function: Function of the arguments, traced with automatic axes.
        *args: Trees of arrays.
        specs: Tree of the specifications of the results.
        mesh: The mesh; None is that of the arguments.
    """
    mesh = explicit_mesh(*jax.tree.leaves(args)) if mesh is None else mesh
    if mesh is None:
        return function(*args)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    axes = mesh.explicit_axes
    return auto_axes(function, axes=axes, out_sharding=shardings)(*args)


def with_table_sharding(
    function: Callable[..., Any],
    weight: Array,
    *args: Any,
    sharding: NamedSharding,
    out_sharding: OutSharding,
    default: Callable[[], Spec],
) -> Any:
    """Return ``function(spec, weight, *args)`` of a table that its layer shards.

    Args:
        function: Function of the specification of the result, of the table and of the
            other arguments, traced with automatic axes. The specification is None if JAX
            chooses it.
        weight: The table.
        *args: Trees of arrays.
        sharding: Sharding of the table.
        out_sharding: The caller's sharding of the result, or None.
        default: Returns the specification of the result on a mesh with explicit axes, if
            ``out_sharding`` is None.
    """
    is_named = isinstance(out_sharding, NamedSharding)
    mesh, spec = sharding.mesh, out_sharding.spec if is_named else out_sharding
    if mesh.abstract_mesh.explicit_axes:
        spec = PartitionSpec(*_unique(default())) if spec is None else spec
        return with_specs(partial(function, (*spec,)), weight, *args, specs=spec)
    # The gradient of the table has the sharding of the table.
    weight = jax.lax.with_sharding_constraint(weight, sharding)
    if spec is None:
        return function(None, weight, *args)
    out = function((*spec,), weight, *args)
    return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, spec))


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
    if mesh is None or not any(mesh_axes(entry) for entry in specs):
        return None
    specs = specs[x.ndim - len(rows) :]
    entries = [None if size == 1 else spec for size, spec in zip(rows, specs, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _unique(spec: Spec) -> Spec:
    """Return ``spec`` if no mesh axis occurs twice in it."""
    names = [name for entry in spec for name in mesh_axes(entry)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"out_sharding must be given where mesh axis {name!r} shards both the "
                f"argument and the table, got None"
            )
    return spec


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """Return the names of the mesh axes in an entry of a specification."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
