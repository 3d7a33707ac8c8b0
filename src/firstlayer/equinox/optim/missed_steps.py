"""The steps that stale rows have missed, in arrays of a fixed size.

See :mod:`firstlayer.optim.missed_steps` for the coefficients. They are float64 numbers,
stored as pairs of 32-bit integers: while 64-bit types are disabled, JAX rounds float64
arrays to float32 in many places, among them ``jnp.asarray`` and restored checkpoints.
"""

from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float64, Int32, UInt32

from ..._array import x64_enabled
from .execution import Execution, JaxOps, RowsAndState


class MissedSteps(eqx.Module):
    """Steps recorded since every row was last up to date.

    Column ``k`` of the coefficients catches up a row that was last updated at recorded step
    ``k``; column 0 is for rows not updated since then.

    Args:
        start: Number of the step at which every row was up to date.
        coefficients: Coefficients for each recorded step.
        steps: Numbers of each recorded step, for rules that may replay steps; else None.
    """

    start: Int32[Array, ""]
    coefficients: UInt32[Array, "coefficients columns 2"]
    steps: UInt32[Array, "numbers columns 2"] | None

    @classmethod
    def of(cls, execution: Execution, *, size: int) -> Self | None:
        """Return a record without steps; None if missed steps are no-ops.

        Args:
            execution: The rule.
            size: Largest number of steps that it can hold.
        """
        kind = execution.coefficients_class
        if kind is None:
            return None
        start = jnp.zeros((), jnp.int32)
        caught_up = execution.caught_up_coefficients(start)
        steps = execution.step_values(start + 1) if kind.replays else None
        return cls(
            start,
            _columns(caught_up, size + 1),
            None if steps is None else _columns(steps, size + 1),
        )

    def check(self, execution: Execution) -> None:
        """Raise ValueError unless the arrays are those of the rule."""
        kind, columns = execution.coefficients_class, self.coefficients.shape[1]
        shape = len(kind._fields), columns, 2
        check_array("coefficients", self.coefficients, shape, "uint32")
        if self.steps is not None:
            shape = len(execution.step_class._fields), columns, 2
            check_array("steps", self.steps, shape, "uint32")

    def is_full(self, step: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return whether no further step can be recorded after ``step``."""
        return step - self.start == self.coefficients.shape[1] - 1

    def record(self, execution: Execution, values: Any, step: Int32[Array, ""]) -> Self:
        """Return the record with one more step.

        Args:
            execution: The rule.
            values: Numbers of the step.
            step: Number of the step, from 1.
        """
        kind, column, steps = execution.coefficients_class, step - self.start, self.steps
        with x64_enabled():
            advanced = kind(*_from_bits(self.coefficients)).advance(JaxOps(), values)
            coefficients = _to_bits(jnp.stack(advanced))
        caught_up = execution.caught_up_coefficients(step)
        coefficients = _set_column(coefficients, column, caught_up)
        if steps is not None:
            steps = _set_column(steps, column, values)
        return type(self)(self.start, coefficients, steps)

    def restart(
        self, execution: Execution, step: Int32[Array, ""], *, when: Bool[Array, ""]
    ) -> Self:
        """Return the record without its steps, or unchanged.

        Args:
            execution: The rule.
            step: Number of the last step, after which every row is up to date.
            when: Whether to discard the steps.
        """
        # Writing beyond the last column changes nothing.
        column = jnp.where(when, 0, self.coefficients.shape[1])
        caught_up = execution.caught_up_coefficients(step)
        coefficients = _set_column(self.coefficients, column, caught_up)
        return type(self)(jnp.where(when, step, self.start), coefficients, self.steps)

    def catch_up(
        self,
        execution: Execution,
        rows: RowsAndState,
        row_steps: Int32[Array, " n"],
        has_state: Bool[Array, " n"],
        step: Int32[Array, ""],
    ) -> RowsAndState:
        """Return rows and their state after the steps that they have missed.

        Args:
            execution: The rule.
            rows: The rows and their state, in the compute dtype.
            row_steps: Step that each row is at.
            has_state: Whether the state of each row may be nonzero.
            step: Number of steps taken.
        """
        column = row_steps - self.start
        if self.steps is not None:
            column, rows = self._replay(execution, rows, column, has_state)
        with x64_enabled():
            own = _from_bits(self.coefficients)[:, column, None]
        return _where(row_steps < step, execution.catch_up(own, rows, has_state), rows)

    def _replay(
        self,
        execution: Execution,
        rows: RowsAndState,
        column: Int32[Array, " n"],
        has_state: Bool[Array, " n"],
    ) -> tuple[Int32[Array, " n"], RowsAndState]:
        """Replay missed steps one by one, up to one whose coefficients are accurate.

        Returns:
            The recorded step that each row is at then, and the rows.
        """
        kind, steps = execution.coefficients_class, _from_bits(self.steps)
        with x64_enabled():
            is_accurate = kind(*_from_bits(self.coefficients)).is_accurate(jnp)

        def is_behind(column: Int32[Array, " n"]) -> Bool[Array, " n"]:
            return has_state & ~is_accurate[column]

        def replay(
            carry: tuple[Int32[Array, " n"], RowsAndState],
        ) -> tuple[Int32[Array, " n"], RowsAndState]:
            column, (weight, *state) = carry
            with x64_enabled():
                values = steps[:, column + 1, None]
            new = execution.update(values, weight, jnp.zeros_like(weight), tuple(state))
            behind = is_behind(column)
            return column + behind, _where(behind, new, (weight, *state))

        return jax.lax.while_loop(
            lambda carry: is_behind(carry[0]).any(), replay, (column, rows)
        )


def check_array(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raise ValueError unless an array of the state has this shape and dtype."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{name} must be {shape} in {dtype}, got {array.shape} in {array.dtype}"
        )


def _where(mask: Bool[Array, " n"], new: RowsAndState, old: RowsAndState) -> RowsAndState:
    pairs = zip(new, old, strict=True)
    return tuple(jnp.where(mask[:, None], one, other) for one, other in pairs)


def _from_bits(bits: Any) -> Float64[Array, "*shape"]:
    with x64_enabled():
        return jax.lax.bitcast_convert_type(bits, jnp.float64)


def _to_bits(numbers: Any) -> UInt32[Array, "*shape 2"]:
    with x64_enabled():
        return jax.lax.bitcast_convert_type(jnp.asarray(numbers, jnp.float64), jnp.uint32)


def _columns(numbers: Any, count: int) -> UInt32[Array, "n columns 2"]:
    """Return as many equal columns of these numbers."""
    bits = _to_bits(numbers)
    return jnp.tile(bits[:, None], (1, count, 1))


def _set_column(
    bits: UInt32[Array, "n columns 2"], column: Int32[Array, ""], numbers: Any
) -> UInt32[Array, "n columns 2"]:
    return bits.at[:, column].set(_to_bits(numbers), mode="drop")
