"""Optimizer state of one table, and the step that each of its rows is at.

The state holds the table itself. While it is trained, some rows are stale, so the model has
a :class:`DetachedTable` in its place, which cannot be read: code that walks over the arrays
of a model (averages of weights, files) finds no stale rows.

Rows are gathered, updated out of place and scattered back. With donated buffers XLA writes
them in place, provided that a scatter depends on every gather of its array: otherwise it
copies the array. All passes over a whole table therefore gather and scatter rows by id as
well, in chunks.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ..._array import compute_dtype
from .._lookup import RowSubset
from .._module import upcast
from .execution import Execution, RowsAndState
from .missed_steps import MissedSteps, check_array

# Rows per pass when every row is caught up: no temporary array is as large as the table.
CHUNK = 1 << 12
# True of the ids of a gather, and of those of a chunk; lets XLA read and write in order.
_INDEX_HINTS: dict[str, Any] = {"indices_are_sorted": True, "unique_indices": True}


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
    """

    weight: Float[Array, "rows width"]
    arrays: dict[str, Float[Array, "rows _"]]
    row_steps: Int32[Array, " rows"]
    caught_up: Int32[Array, ""]

    @classmethod
    def of(cls, weight: Float[Array, "rows width"], execution: Execution) -> Self:
        """Return the state of a table before the first step."""
        rows, width = weight.shape
        shape = rows, execution.rule.state_width(width)
        arrays = {
            name: jnp.full(shape, value, compute_dtype(weight.dtype))
            for name, value in execution.initial_state.items()
        }
        row_steps = jnp.full(rows, -1, jnp.int32)
        return cls(weight, arrays, row_steps, jnp.zeros((), jnp.int32))

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

    def rows(
        self,
        ids: Int32[Array, " n"],
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> RowsAndState:
        """Return rows and their state in the compute dtype, caught up.

        Args:
            ids: Ids of the rows. Those beyond the table give rows of zeros.
            execution: The rule.
            missed: The steps that stale rows have missed.
            step: Number of steps taken.
        """
        weight = upcast(_gather(self.weight, ids))
        rows = weight, *(_gather(array, ids) for array in self._state(execution))
        if missed is None:
            return rows
        last = _gather(self.row_steps, ids)
        at = jnp.where(ids < len(self.row_steps), jnp.maximum(last, self.caught_up), step)
        return missed.catch_up(execution, rows, at, last >= 0, step)

    def update(
        self,
        subset: RowSubset,
        gradient: Float[Array, "n width"],
        values: Any,
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> Self:
        """Return the table after a step in which some rows have a gradient.

        Args:
            subset: Ids of these rows, and the rows, caught up.
            gradient: Their gradients.
            values: Numbers of the step.
            execution: The rule.
            missed: The steps that stale rows had missed before this one.
            step: Number of steps taken before this one.
        """
        ids = subset.ids
        _, *state = self.rows(ids, execution, missed, step)
        weight, gradient = upcast(subset.values), upcast(gradient)
        weight, *state = execution.update(values, weight, gradient, tuple(state))
        # The maximum is the new step, but makes the write depend on the read.
        row_steps = jnp.maximum(_gather(self.row_steps, ids), step + 1)
        return type(self)(
            _scatter(self.weight, ids, weight),
            self._with_rows(execution, ids, state),
            _scatter(self.row_steps, ids, row_steps),
            self.caught_up if missed is not None else step + 1,
        )

    def update_all(
        self,
        weight: Float[Array, "rows width"],
        gradient: Float[Array, "rows width"],
        values: Any,
        execution: Execution,
        missed: MissedSteps | None,
        step: Int32[Array, ""],
    ) -> Self:
        """Return the table after a step in which every row has a gradient.

        Args:
            weight: The table, with every row caught up.
            gradient: Its gradient.
            values: Numbers of the step.
            execution: The rule.
            missed: The steps that stale rows had missed before this one.
            step: Number of steps taken before this one.
        """
        table = self.catch_up(execution, missed, step)
        state = table._state(execution)
        new = execution.update(values, upcast(weight), upcast(gradient), state)
        return type(self)(
            new[0].astype(weight.dtype),
            dict(zip(execution.initial_state, new[1:], strict=True)),
            jnp.zeros_like(self.row_steps) + (step + 1),
            step + 1,
        )

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
        size = min(CHUNK, len(self.row_steps))
        count = -(-len(self.row_steps) // max(size, 1))
        # A loop with no iterations copies nothing, unlike a conditional.
        count = jnp.where(when & (self.caught_up < step), count, 0)

        def catch_up_chunk(chunk: Int32[Array, ""], table: Self) -> Self:
            ids = chunk * size + jnp.arange(size, dtype=jnp.int32)
            weight, *state = table.rows(ids, execution, missed, step)
            return type(self)(
                _scatter(table.weight, ids, weight),
                table._with_rows(execution, ids, state),
                table.row_steps,
                table.caught_up,
            )

        table = jax.lax.fori_loop(0, count, catch_up_chunk, self)
        caught_up = jnp.where(when, step, self.caught_up)
        return eqx.tree_at(lambda one: one.caught_up, table, caught_up)

    def reset_rows(
        self,
        ids: Int32[Array, " n"],
        values: Float[Array, "n width"],
        execution: Execution,
        step: Int32[Array, ""],
    ) -> Self:
        """Return the table with new values in some rows, whose state is a new table's.

        Args:
            ids: The rows, ascending; those beyond the table are left out.
            values: Their values.
            execution: The rule.
            step: Number of steps taken.
        """
        zeros = jnp.zeros((ids.size, execution.rule.state_width(self.weight.shape[1])))
        state = [zeros + value for value in execution.initial_state.values()]
        steps = jnp.zeros(ids.size, jnp.int32) + step
        return type(self)(
            _scatter(self.weight, ids, values),
            self._with_rows(execution, ids, state),
            _scatter(self.row_steps, ids, steps),
            self.caught_up,
        )

    def _state(self, execution: Execution) -> tuple[Float[Array, "rows _"], ...]:
        """Return the arrays in the rule's order; JAX sorts the keys of dictionaries."""
        return tuple(self.arrays[name] for name in execution.initial_state)

    def _with_rows(
        self, execution: Execution, ids: Int32[Array, " n"], state: Sequence[Array]
    ) -> dict[str, Float[Array, "rows _"]]:
        """Return the arrays with rows written to them."""
        return {
            name: _scatter(self.arrays[name], ids, rows)
            for name, rows in zip(execution.initial_state, state, strict=True)
        }


def _gather(array: Array, ids: Int32[Array, " n"]) -> Array:
    return array.at[ids].get(mode="fill", fill_value=0, **_INDEX_HINTS)


def _scatter(array: Array, ids: Int32[Array, " n"], rows: Array) -> Array:
    return array.at[ids].set(rows.astype(array.dtype), mode="drop", **_INDEX_HINTS)
