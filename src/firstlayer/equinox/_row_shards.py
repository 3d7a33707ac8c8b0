"""Tables whose rows are sharded over axes of a mesh.

Each shard runs the same function on its own rows (``shard_map``), and one sum over the
shards combines the results. The other axes of the mesh stay automatic, so that ids may be
sharded over them, and the columns of the table too.

JAX shards arrays evenly. A table whose number of rows is not a multiple of the number of
shards has rows of zeros at its end, which no id reads and no step of an optimizer changes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from ._sharding import Spec, mesh_axes


@dataclass(frozen=True)
class RowShards:
    """The shards of a table.

    Args:
        sharding: Sharding of the table, whose rows are sharded.
    """

    sharding: NamedSharding

    @classmethod
    def of(cls, sharding: NamedSharding | None) -> Self | None:
        """Return the shards of a table; None if its rows are not sharded."""
        if sharding is None or not mesh_axes(_entries(sharding)[0]):
            return None
        return cls(sharding)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the rows are sharded over."""
        return mesh_axes(_entries(self.sharding)[0])

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.prod(self.sharding.mesh.shape[axis] for axis in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """Specification of an array of rows that is an argument or result of ``map``."""
        return PartitionSpec(self.axes)

    def map(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return a function that runs once for each shard, within a compiled function.

        Args:
            function: Function of arrays; those with :attr:`spec` are the rows of a shard.
            in_specs: As in ``jax.shard_map``, with the axes of the rows only.
            out_specs: As ``in_specs``, for the result.
        """

        def run(*args: Any) -> Any:
            # shard_map accepts only the mesh that is set, if one is. Its axes may have
            # other types than in the sharding: jax.sharding.auto_axes sets a mesh whose
            # explicit axes are automatic.
            is_set = not jax.sharding.get_abstract_mesh().empty
            mapped = jax.shard_map(
                function,
                mesh=None if is_set else self.sharding.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(self.axes),
            )
            return mapped(*args)

        return run

    def first_row(self, rows: int) -> Int32[Array, ""]:
        """Return the number of the first row of this shard, within :meth:`map`.

        Args:
            rows: Number of rows of a shard.
        """
        return jax.lax.axis_index(self.axes) * rows

    def sum(self, x: Array, *, axis: int | None = None) -> Array:
        """Return the sum of an array over the shards, within :meth:`map`.

        Args:
            x: The array.
            axis: Axis of which each shard gets a part; None if all get the whole sum.
        """
        dtype, x = x.dtype, self.summable(x)
        if axis is None:
            x = jax.lax.psum(x, self.axes)
        else:
            x = jax.lax.psum_scatter(x, self.axes, scatter_dimension=axis, tiled=True)
        return x.astype(dtype)

    def summable(self, x: Array) -> Array:
        """Return an array in a dtype that can be summed over the shards.

        Also for arguments of :meth:`map` that all shards have, because their gradients are
        sums over the shards.
        """
        devices: Any = self.sharding.mesh.devices
        # XLA's CPU compiler aborts on sums in half precision.
        is_cpu = devices.flat[0].platform == "cpu"
        return x.astype(jnp.float32) if is_cpu and x.dtype.itemsize < 4 else x

    def sum_rows(
        self,
        function: Callable[..., Array],
        weight: Float[Array, "rows width"],
        *args: Any,
        shape: tuple[int, ...],
        spec: Spec | None = None,
    ) -> Array:
        """Return the sum over the shards of a function of their rows: one collective.

        Args:
            function: Function of the rows of a shard and of the other arguments.
            weight: The table.
            *args: Other arguments, the same for each shard.
            shape: Shape of the result.
            spec: Specification of the result, if it is known. If it shards an axis of the
                result over the shards of the table, each shard gets its part of the sum.
        """
        axis = self._scattered_axis(shape, spec)
        out = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axes)

        def run(weight: Float[Array, "rows width"], *args: Any) -> Array:
            return self.sum(function(weight, *args), axis=axis)

        in_specs = (self.spec, *[PartitionSpec()] * len(args))
        return self.map(run, in_specs=in_specs, out_specs=out)(weight, *args)

    def _scattered_axis(self, shape: tuple[int, ...], spec: Spec | None) -> int | None:
        for axis, entry in enumerate(spec or ()):
            if set(self.axes) <= {*mesh_axes(entry)} and shape[axis] % self.count == 0:
                return axis
        return None


def check_sharding(sharding: Any, embedding_dim: int) -> NamedSharding | None:
    """Return the sharding of a table, or raise an error unless it can be one.

    Args:
        sharding: The caller's sharding, or None.
        embedding_dim: Number of columns of the table.
    """
    if sharding is None:
        return None
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"sharding must be a NamedSharding, got {type(sharding).__name__}")
    if len(sharding.spec) > 2:
        raise ValueError(f"sharding must be that of a table, got {sharding.spec}")
    sizes = [sharding.mesh.shape[axis] for axis in mesh_axes(_entries(sharding)[1])]
    if embedding_dim % math.prod(sizes):
        raise ValueError(
            f"embedding_dim must be a multiple of the {math.prod(sizes)} shards of the "
            f"columns, got {embedding_dim}"
        )
    return sharding


def padded_rows(rows: int, sharding: NamedSharding | None) -> int:
    """Return the number of rows of a table with rows of zeros at its end, if it has any.

    Example:
        >>> mesh = jax.make_mesh((1,), ("rows",))
        >>> padded_rows(17, NamedSharding(mesh, PartitionSpec("rows")))
        17
    """
    shards = RowShards.of(sharding)
    return rows if shards is None else -(-rows // shards.count) * shards.count


def place_table(
    table: Float[Any, "rows width"], sharding: NamedSharding, dtype: Any
) -> Float[Array, "padded width"]:
    """Return a table on its mesh, with rows of zeros at its end if needed.

    Args:
        table: NumPy or JAX array of all rows.
        sharding: Where to place it.
        dtype: Dtype of the result.
    """
    rows, width = table.shape
    shape = padded_rows(rows, sharding), width
    if isinstance(table, jax.Array):
        table = table.astype(dtype)
        if shape != table.shape:
            table = jnp.pad(table, ((0, shape[0] - rows), (0, 0)))
        return jax.device_put(table, sharding)

    def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(shape[0])
        own = table[index].astype(dtype)
        return np.pad(own, ((0, last - first - len(own)), (0, 0)))

    # Each device gets its own rows; none holds the whole table.
    return jax.make_array_from_callback(shape, sharding, part)


def draw_table(
    draw: Callable[[Any], Float[Array, "rows width"]], key: Any, sharding: NamedSharding
) -> Float[Array, "padded width"]:
    """Return a new table on its mesh, drawn there: no device draws all of it.

    Args:
        draw: Function of the key that returns all rows; traced.
        key: Random key.
        sharding: Where to place it.
    """

    def padded(key: Any) -> Float[Array, "padded width"]:
        table = draw(key)
        extra = padded_rows(len(table), sharding) - len(table)
        return jnp.pad(table, ((0, extra), (0, 0)))

    mesh = sharding.mesh
    # Compiled with automatic axes, where JAX shards whatever the function computes.
    if isinstance(mesh, Mesh):
        kinds = (AxisType.Auto,) * len(mesh.axis_names)
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    automatic = NamedSharding(mesh, sharding.spec)
    return jax.device_put(jax.jit(padded, out_shardings=automatic)(key), sharding)


def replicated_like(sharding: NamedSharding | None) -> NamedSharding | None:
    """Return the sharding of parameters that every device of a table's mesh has."""
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())


def replicate_others(tree: Any, sharding: NamedSharding) -> Any:
    """Return a tree whose arrays are on a mesh: every device has those that were on none.

    Args:
        tree: Tree of arrays and other leaves.
        sharding: Sharding of a table, on its mesh.
    """

    def place(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if not is_array or isinstance(leaf.sharding, NamedSharding):
            return leaf
        return jax.device_put(leaf, replicated_like(sharding))

    return jax.tree.map(place, tree)


def _entries(sharding: NamedSharding) -> Spec:
    """Return the mesh axes of rows and of columns."""
    return (*sharding.spec, None, None)[:2]
