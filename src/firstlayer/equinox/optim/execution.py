"""A rule of :mod:`firstlayer.optim` on JAX arrays, within compiled functions.

Numbers of steps and coefficients of missed steps are computed in float64 under
``jax.enable_x64``, whatever the caller's setting, and rounded to the dtype of the rows that
they are applied to.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Float64, Int32, PyTree

from ..._array import compute_dtype, x64_enabled
from ...optim.rule import TINY, ArrayOps, RowOptions, update_rows
from .._module import upcast

#: Rows of a table and of each array of its state, in the rule's order.
RowsAndState = tuple[Float[Array, "n _"], ...]


class JaxOps(ArrayOps):
    """``jax.numpy`` for the methods of a rule, with a ``matmul`` that keeps float64."""

    def __init__(self) -> None:
        super().__init__(jnp)

    def matmul(
        self, a: Float64[Any, "n m"], b: Float64[Array, "m k"]
    ) -> Float64[Array, "n k"]:
        """Return the product of two matrices.

        ``jnp.matmul`` names the dtype of its result. ``jax.vmap`` of a compiled function
        reads that name outside of :func:`x64_enabled`, where it means float32.
        """
        return jax.lax.dot_general(jnp.asarray(a), b, (((1,), (0,)), ((), ())))


class Execution:
    """A rule and its options.

    Args:
        options: Arguments of the optimizer; ``lr`` may be traced, and a function of the
            number of steps taken before.
    """

    def __init__(self, options: RowOptions) -> None:
        self.rule = options.rule_class(lazy_option="firstlayer.equinox.rows")
        self.options: dict[str, Any] = options.hyperparameters()
        lr = self._lr(0)
        self.rule.check(self.options | {"lr": 0.0 if isinstance(lr, Tracer) else lr})
        #: Names and initial values of the arrays of the state.
        self.initial_state = self.rule.initial_state(self.options)
        #: Class of the coefficients of missed steps; None if such steps are no-ops.
        self.coefficients_class: Any = None
        if not self.rule.is_noop_without_gradient(self.options):
            self.coefficients_class = self.rule.coefficients_class(self.options)
        #: Class of the numbers of a step.
        self.step_class: Any = type(self.step_values(jnp.ones((), jnp.int32)))

    def step_values(self, step: Int32[Array, ""]) -> Any:
        """Return the numbers of a step, a named tuple of floats and float64 scalars.

        Args:
            step: Number of the step, from 1.
        """
        lr = self._lr(step - 1)
        with x64_enabled():
            options = self.options | {"lr": jnp.asarray(lr, jnp.float64)}
            return self.rule.step_values(jnp, options, jnp.asarray(step, jnp.float64))

    def _lr(self, count: Any) -> Any:
        """Return the learning rate after ``count`` steps."""
        lr: float | Callable[[Any], Any] = self.options["lr"]
        return lr(count) if callable(lr) else lr

    def caught_up_coefficients(self, step: Int32[Array, ""]) -> Any:
        """Return the coefficients of a row that is up to date after ``step``."""
        with x64_enabled():
            step = jnp.asarray(step, jnp.float64)
            return self.rule.caught_up_coefficients(jnp, self.options, step)

    def update(
        self,
        values: Any,
        weight: Float[Array, "n width"],
        gradient: Float[Array, "n width"],
        state: RowsAndState,
    ) -> RowsAndState:
        """Return rows and their state after a step with a gradient.

        Args:
            values: Numbers of the step, or columns of the numbers of each row.
            weight: The rows, in the compute dtype.
            gradient: Their gradients.
            state: Their state.
        """
        values = _rounded(self.step_class, values, weight.dtype)
        return update_rows(JaxOps(), self.rule, values, weight, gradient, state)

    def catch_up(
        self,
        coefficients: Float64[Array, "coefficients n 1"],
        rows: RowsAndState,
        has_state: Bool[Array, " n"],
    ) -> RowsAndState:
        """Return rows and their state after the missed steps of these coefficients.

        Args:
            coefficients: Coefficients of each row.
            rows: The rows and their state.
            has_state: Whether the state of each row may be nonzero.
        """
        own = _rounded(self.coefficients_class, coefficients, rows[0].dtype)
        weight, *state = own.catch_up(JaxOps(), *rows)
        # Other coefficients of rows without a state may be inaccurate.
        has_effect = has_state[:, None] | jnp.logical_not(own.keeps_zero_state())
        return jnp.where(has_effect, weight, own.weight_factor * rows[0]), *state

    def init_dense(self, parameters: PyTree) -> dict[str, PyTree]:
        """Return the state of parameters that are not tables, as trees by name."""

        def full(value: float, parameter: Array) -> Array:
            return jnp.full_like(parameter, value, compute_dtype(parameter.dtype))

        return {
            name: jax.tree.map(partial(full, value), parameters)
            for name, value in self.initial_state.items()
        }

    def update_dense(
        self,
        values: Any,
        parameters: PyTree,
        gradients: PyTree,
        state: Mapping[str, PyTree],
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Return parameters that are not tables, and their state, after a step.

        Parameters whose gradient is None do not change.
        """
        leaves, structure = jax.tree.flatten(parameters)
        slopes = structure.flatten_up_to(gradients)
        # Leaves: a layer whose id map was restored has another structure.
        arrays = [jax.tree.leaves(state[name]) for name in self.initial_state]
        for i, (parameter, slope) in enumerate(zip(leaves, slopes, strict=True)):
            if slope is None:
                continue
            weight = upcast(parameter)
            own = _rounded(self.step_class, values, weight.dtype)
            ops = JaxOps()
            slope = own.total_gradient(ops, weight, upcast(slope))
            new = own.update(ops, weight, slope, *(array[i] for array in arrays))
            leaves[i] = new[0].astype(parameter.dtype)
            for array, value in zip(arrays, new[1:], strict=True):
                array[i] = value
        arrays = map(structure.unflatten, arrays)
        state = dict(zip(self.initial_state, arrays, strict=True))
        return structure.unflatten(leaves), state


def _rounded(kind: Any, numbers: Any, dtype: Any) -> Any:
    """Return float64 numbers, or arrays of them, as a named tuple in another dtype."""
    with x64_enabled():
        numbers = jnp.asarray(numbers, jnp.float64)
        # Arithmetic on float32 denormals is slow.
        return kind(*jnp.where(jnp.abs(numbers) < TINY, 0.0, numbers).astype(dtype))
