"""Optimizer state of one table, and the step that each of its rows is at.

The state holds the table itself. While it is trained, some rows are stale, so the model has
a :class:`DetachedTable` in its place, which cannot be read: code that walks over the arrays
of a model (averages of weights, files) finds no stale rows.

Rows are gathered, updated out of place and scattered back. With donated buffers XLA writes
them in place, provided that a scatter depends on every gather of its array: otherwise it
copies the array. All passes over a whole table therefore gather and scatter rows by id as
well, in chunks.
"""

from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from ..._array import axis_specs, compute_dtype
from .._module import compiled, upcast
from .._row_copies import read_rows, write_rows
from .._row_shards import RowShards
from .._sharding import with_specs
from .._table import TableModule
from .._table_rows import RowSubset
from .execution import Execution, RowsAndState
from .missed_steps import MissedSteps, check_array

# Rows per pass when every row is caught up: no temporary array is as large as the table.
CHUNK = 1 << 12


class DetachedTable(eqx.Module):
    """Stands in a model for a table that the optimizer state holds. Has no arrays.

    Reading it is a RuntimeError, because rows of the table may be stale.

    Args:
        shape: Shape of the table.
        dtype: Dtype of the table.
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @classmethod
    def of(cls, weight: Float[Array, "rows width"]) -> Self:
        """Return the stand-in for a table."""
        return cls(weight.shape, weight.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes of the table."""
        return 2

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(jax.Array, name) and not name.startswith("_"):
            self._raise()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __jax_array__(self) -> NoReturn:
        self._raise()

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        self._raise()

    def __getitem__(self, index: Any) -> NoReturn:
        self._raise()

    def _raise(self) -> NoReturn:
        raise RuntimeError(
            f"this table of shape {self.shape} is in the optimizer state, where rows may "
            "be stale; look ids up in optimizer.gather(model, state, ids), or read the "
            "table in optimizer.flush(model, state)"
        )


class TableState(eqx.Module):
    """A table, its optimizer state and the step that each row is at.

    Args:
        weight: The table. Some of its rows are stale.
        arrays: Optimizer state of the rows, by name.
        row_steps: Step at which each row last had a gradient; -1 for none.
        caught_up: Step at which every row was last up to date.
        num_rows: Number of rows, without those of zeros at the end of a sharded table.
        shards: Shards of the table, if its layer shards it.
    """

    weight: Float[Array, "rows width"]
    arrays: dict[str, Float[Array, "rows _"]]
    row_steps: Int32[Array, " rows"]
    caught_up: Int32[Array, ""]
    num_rows: int = eqx.field(static=True)
    shards: RowShards | None = eqx.field(static=True)

    @classmethod
    def of(cls, module: TableModule, execution: Execution) -> Self:
        """Return the state of the table of a module before the first step."""
        weight, place = module.weight, module.sharding
        rows, width = weight.shape
        shape = rows, execution.rule.state_width(width)
        if place is not None and shape != weight.shape:
            # One number for each row.
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[:1]))
        arrays = {
            name: jnp.full(shape, value, compute_dtype(weight.dtype), device=place)
            for name, value in execution.initial_state.items()
        }
        if place is not None:
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[:1]))
        row_steps = jnp.full(rows, -1, jnp.int32, device=place)
        shards = RowShards.of(module.sharding)
        start = jnp.zeros((), jnp.int32)
        return cls(weight, arrays, row_steps, start, module.num_embeddings, shards)

    def check(self, execution: Execution) -> None:
        """Raise ValueError unless the arrays are those of the rule and fit the table."""
        rows, width = self.weight.shape
        if sorted(self.arrays) != sorted(execution.initial_state):
            raise ValueError(
                f"the state must have the arrays {sorted(execution.initial_state)} of this "
                f"rule, got {sorted(self.arrays)}"
            )
        shape = rows, execution.rule.state_width(width)
        for name, array in self.arrays.items():
            check_array(name, array, shape, compute_dtype(self.weight.dtype))
        check_array("row_steps", self.row_steps, (rows,), "int32")

    def gather(
        self,
        ids: Int32[Array, " n"],
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> Float[Array, "n width"]:
        """Return rows in the table's dtype, caught up.

        Args:
            ids: Ids of the rows. Those beyond the table give rows of zeros.
            execution: The rule.
            missed: The steps that stale rows have missed.
            step: Number of steps taken.
        """
        args = ids, missed, step
        if self.shards is None:
            return RowRange(self, 0, self.num_rows).gather(execution, *args)
        return _gather_shards(execution, self, *args)

    def update(
        self,
        subset: RowSubset,
        gradient: Float[Array, "n width"],
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> Self:
        """Return the table after a step in which some rows have a gradient.

        Args:
            subset: Ids of these rows, and the rows, caught up.
            gradient: Their gradients.
            execution: The rule.
            missed: The steps that stale rows had missed before this one.
            step: Number of steps taken before this one.
        """
        return self._on_shards("update", execution, subset, gradient, missed, step)

    def update_all(
        self,
        weight: Float[Array, "rows width"],
        gradient: Float[Array, "rows width"],
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> Self:
        """Return the table after a step in which every row has a gradient.

        Args:
            weight: The table, with every row caught up.
            gradient: Its gradient.
            execution: The rule.
            missed: The steps that stale rows had missed before this one.
            step: Number of steps taken before this one.
        """
        table = self.catch_up(execution, missed, step)

        def run(step: Array, table: TableState, weight: Array, gradient: Array) -> Any:
            values, state = execution.step_values(step + 1), table._state(execution)
            new = execution.update(values, upcast(weight), upcast(gradient), state)
            if len(weight) > self.num_rows:
                # Rows of zeros at the end stay zeros, whatever the rule.
                is_row = jnp.arange(len(weight))[:, None] < self.num_rows
                pairs = zip(new, (upcast(weight), *state), strict=True)
                new = tuple(jnp.where(is_row, one, other) for one, other in pairs)
            return table._replace(
                new[0].astype(weight.dtype),
                dict(zip(execution.initial_state, new[1:], strict=True)),
                jnp.zeros_like(table.row_steps) + (step + 1),
                step + 1,
            )

        return with_specs(run, step, table, weight, gradient, specs=table._specs())

    def catch_up(
        self,
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
        *,
        when: Bool[Array, ""] | bool = True,
    ) -> Self:
        """Return the table with every row caught up, or unchanged.

        Args:
            execution: The rule.
            missed: The steps that stale rows have missed.
            step: Number of steps taken.
            when: Whether to catch up.
        """
        if missed is None:
            return self
        return self._on_shards("catch_up", execution, missed, step, jnp.asarray(when))

    def _on_shards(self, method: str, execution: Execution, *args: Any) -> Any:
        """Return the table that a method of :class:`RowRange` returns, by shard."""
        if self.shards is None:
            rows = RowRange(self, 0, self.num_rows)
            return getattr(rows, method)(execution, *args)
        return _update_shards(method, execution, self, *args)

    def _shard_specs(self) -> Any:
        """Return the specifications of the arrays of one shard."""
        shards: Any = self.shards
        rows = shards.spec
        return jax.tree.map(lambda leaf: rows if leaf.ndim else PartitionSpec(), self)

    def _specs(self) -> Any:
        """Return the specifications of the arrays on an explicit mesh."""
        return jax.tree.map(lambda leaf: PartitionSpec(*axis_specs(leaf)), self)

    def _replace(
        self,
        weight: Float[Array, "rows width"],
        arrays: dict[str, Float[Array, "rows _"]],
        row_steps: Int32[Array, " rows"],
        caught_up: Int32[Array, ""],
    ) -> Self:
        """Return the same table with other arrays."""
        own = weight, arrays, row_steps, caught_up
        return type(self)(*own, num_rows=self.num_rows, shards=self.shards)

    def reset_rows(
        self,
        ids: Int32[Array, " n"],
        values: Float[Array, "n width"],
        execution: Execution,
        step: Int32[Array, ""],
    ) -> Self:
        """Return the table with new values in some rows, whose state is a new table's.

        Not for sharded tables, which have no ids to give rows to.

        Args:
            ids: The rows, ascending; those beyond the table are left out.
            values: Their values.
            execution: The rule.
            step: Number of steps taken.
        """
        zeros = jnp.zeros((ids.size, execution.rule.state_width(self.weight.shape[1])))
        state = [zeros + value for value in execution.initial_state.values()]
        steps = jnp.zeros(ids.size, jnp.int32) + step
        arrays = {
            name: write_rows(self.arrays[name], ids, rows)
            for name, rows in zip(execution.initial_state, state, strict=True)
        }
        return self._replace(
            write_rows(self.weight, ids, values),
            arrays,
            write_rows(self.row_steps, ids, steps),
            self.caught_up,
        )

    def _state(self, execution: Execution) -> tuple[Float[Array, "rows _"], ...]:
        """Return the arrays in the rule's order; JAX sorts the keys of dictionaries."""
        return tuple(self.arrays[name] for name in execution.initial_state)


class RowRange(NamedTuple):
    """The rows of a table, or of one of its shards, within a compiled function.

    Args:
        table: The arrays.
        first: Number of the first row.
        end: Number of rows; there may be rows of zeros after them.
    """

    table: TableState
    first: Int32[Array, ""] | int
    end: Int32[Array, ""] | int

    @classmethod
    def of_shard(cls, table: TableState, shards: RowShards) -> Self:
        """Return the rows of this shard, whose arrays are those of ``table``."""
        first = shards.first_row(len(table.row_steps))
        return cls(table, first, table.num_rows - first)

    def read(
        self,
        index: Int32[Array, " n"],
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> RowsAndState:
        """Return rows and their state in the compute dtype, caught up.

        Args:
            index: Index of each row, ascending. Rows of zeros for an index out of range.
            execution: The rule.
            missed: The steps that stale rows have missed.
            step: Number of steps taken.
        """
        table = self.table
        weight = upcast(read_rows(table.weight, index))
        rows = weight, *(read_rows(array, index) for array in table._state(execution))
        if missed is None:
            return rows
        last, count = read_rows(table.row_steps, index), len(table.row_steps)
        is_row = (index >= 0) & (index < jnp.minimum(self.end, count))
        at = jnp.where(is_row, jnp.maximum(last, table.caught_up), step)
        return missed.catch_up(execution, rows, at, last >= 0, step)

    def gather(
        self,
        execution: Execution,
        ids: Int32[Array, " n"],
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> Float[Array, "n width"]:
        """Return rows in the table's dtype, caught up; zeros for ids without a row here."""
        weight, *_ = self.read(ids - self.first, execution, missed, step)
        return weight.astype(self.table.weight.dtype)

    def update(
        self,
        execution: Execution,
        subset: RowSubset,
        gradient: Float[Array, "n width"],
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> TableState:
        """Return the table after a step in which some rows have a gradient."""
        index, table = subset.ids - self.first, self.table
        _, *state = self.read(index, execution, missed, step)
        values = execution.step_values(step + 1)
        weight, gradient = upcast(subset.values), upcast(gradient)
        new = execution.update(values, weight, gradient, tuple(state))
        # The maximum is the new step, but makes the write depend on the read.
        row_steps = jnp.maximum(read_rows(table.row_steps, index), step + 1)
        return self.write(
            execution,
            index,
            new,
            row_steps=write_rows(table.row_steps, index, row_steps),
            caught_up=table.caught_up if missed is not None else step + 1,
        )

    def write(
        self,
        execution: Execution,
        index: Int32[Array, " n"],
        rows: RowsAndState,
        *,
        row_steps: Int32[Array, " rows"],
        caught_up: Int32[Array, ""],
    ) -> TableState:
        """Return the table with rows and their state written to it."""
        table, (weight, *state) = self.table, rows
        arrays = {
            name: write_rows(table.arrays[name], index, own)
            for name, own in zip(execution.initial_state, state, strict=True)
        }
        return table._replace(
            write_rows(table.weight, index, weight), arrays, row_steps, caught_up
        )

    def catch_up(
        self,
        execution: Execution,
        missed: MissedSteps,
        step: Int32[Array, ""],
        when: Bool[Array, ""],
    ) -> TableState:
        """Return the table with every row caught up, or unchanged."""
        size = min(CHUNK, len(self.table.row_steps))
        count = -(-len(self.table.row_steps) // max(size, 1))
        # A loop with no iterations copies nothing, unlike a conditional.
        count = jnp.where(when & (self.table.caught_up < step), count, 0)

        def catch_up_chunk(chunk: Int32[Array, ""], table: TableState) -> TableState:
            index = chunk * size + jnp.arange(size, dtype=jnp.int32)
            own = self._replace(table=table)
            return own.write(
                execution,
                index,
                own.read(index, execution, missed, step),
                row_steps=table.row_steps,
                caught_up=table.caught_up,
            )

        table = jax.lax.fori_loop(0, count, catch_up_chunk, self.table)
        caught_up = jnp.where(when, step, table.caught_up)
        return eqx.tree_at(lambda one: one.caught_up, table, caught_up)


@partial(compiled, static_argnums=0)
def _gather_shards(execution: Execution, table: TableState, *args: Any) -> Array:
    """Return caught-up rows of a sharded table: the sum of what each shard has."""
    shards: Any = table.shards

    def run(table: TableState, *args: Any) -> Array:
        return shards.sum(RowRange.of_shard(table, shards).gather(execution, *args))

    in_specs = (table._shard_specs(), *[PartitionSpec()] * len(args))
    mapped = shards.map(run, in_specs=in_specs, out_specs=PartitionSpec())
    columns = PartitionSpec(None, axis_specs(table.weight)[1])
    return with_specs(mapped, table, *args, specs=columns)


@partial(compiled, static_argnums=(0, 1))
def _update_shards(
    method: str, execution: Execution, table: TableState, *args: Any
) -> TableState:
    """Return a sharded table, each shard changed by a method of :class:`RowRange`."""
    shards: Any = table.shards

    def run(table: TableState, *args: Any) -> TableState:
        return getattr(RowRange.of_shard(table, shards), method)(execution, *args)

    specs = table._shard_specs()
    in_specs = (specs, *[PartitionSpec()] * len(args))
    mapped = shards.map(run, in_specs=in_specs, out_specs=specs)
    return with_specs(mapped, table, *args, specs=table._specs())
