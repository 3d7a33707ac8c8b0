"""Coefficients that catch up a stale row in one pass, however many steps it missed.

Without a gradient, many steps of most rules have the effect of one: a few coefficients, the
same for every column, that depend only on the step at which the row was last updated.
:class:`MissedSteps` stores these coefficients for every such step, and each recorded step
advances all of them, so that schedules of learning rate, momentum and decay are followed
exactly.
"""

from typing import Any

import numpy as np
from jaxtyping import Float64

from .rule import MissedCoefficients, Options, Rule

# Every row catches up after this many steps. Advancing the coefficients of as many steps
# takes microseconds, and the cost of catching up is amortized over them.
MAX_STEPS = 8192


class MissedSteps:
    """Steps recorded since every row was last up to date.

    Column ``k`` of the coefficients catches up a row that was last updated at recorded
    step ``k``; column 0 is for rows not updated since then.

    Args:
        rule: Update rule.
        options: Options of the rule. The frozen ones do not change in the recorded steps.
        step: Number of steps taken before.
    """

    def __init__(self, rule: Rule, options: Options, step: int) -> None:
        self.rule = rule
        #: Options that the steps were recorded with at the beginning.
        self.options = {name: options[name] for name in options if name != "params"}
        #: Named tuple of the coefficients.
        self.kind: type[MissedCoefficients] = rule.coefficients_class(options)
        #: Names of the arrays that missed steps change, in the rule's order.
        self.names = tuple(rule.initial_state(options))
        #: Options that are the same in all recorded steps; see ``Rule.frozen_options``.
        self.frozen_options = rule.frozen_options(options)
        #: Number of recorded steps.
        self.count = 0
        #: Numbers of a step, for their types; of the options at the beginning.
        self.step_values: Any = host_values(rule, options, step + 1)
        num_coefficients = len(rule.caught_up_coefficients(np, options, step))
        #: Coefficients, allocated for the maximum number of steps.
        self.all_coefficients = np.empty((num_coefficients, MAX_STEPS + 1))
        num_values = len(self.step_values) if self.replays else 0
        #: Numbers of each step, for rules that replay steps one by one; zeros for events
        #: that change nothing.
        self.all_steps = np.empty((num_values, MAX_STEPS + 1))
        #: Number of steps taken before each column was added.
        self.step_numbers = np.empty(MAX_STEPS + 1, np.int64)
        self._set_column(options, step)

    @property
    def replays(self) -> bool:
        """Whether some missed steps may have to be replayed one by one."""
        return self.kind.replays

    @property
    def coefficients(self) -> Float64[np.ndarray, "num_coefficients steps"]:
        """Coefficients of the recorded steps, a view."""
        return self.all_coefficients[:, : self.count + 1]

    @property
    def is_full(self) -> bool:
        """Whether no further step can be recorded."""
        return self.count == MAX_STEPS

    @property
    def last_step_column(self) -> int:
        """Column of the last step; only updates of averages are recorded after it."""
        numbers = self.step_numbers[: self.count + 1]
        return int(np.searchsorted(numbers, numbers[-1]))

    def restart(self, options: Options, step: int) -> None:
        """Discard all steps; the frozen options stay the same."""
        self.count = 0
        self._set_column(options, step)

    def restart_at_last_column(self) -> None:
        """Discard all steps; rows that are up to date have the last column."""
        self.all_coefficients[:, 0] = self.all_coefficients[:, self.count]
        self.step_numbers[0] = self.step_numbers[self.count]
        self.count = 0

    def record(
        self, values: Any, options: Options, step: int, *, is_lazy: bool = False
    ) -> None:
        """Record a step that rows without a gradient miss.

        Args:
            values: Numbers of the step, as floats.
            options: Options of the step.
            step: Number of the step, from 1.
            is_lazy: Whether the step leaves rows without a gradient unchanged.
        """
        recorded = self.coefficients
        if self.count % 256 == 255:
            # Arithmetic on denormals is slow.
            recorded[np.abs(recorded) < 1e-200] = 0.0
        if not is_lazy:
            # A warning that is turned into an error must not end a recording.
            with np.errstate(all="ignore"):
                self.kind.advance_columns(recorded, values)
        self.count += 1
        self._set_column(options, step)
        if self.replays:
            self.all_steps[:, self.count] = 0.0 if is_lazy else values

    def record_pause(self) -> None:
        """Record an event that changes neither weights nor state.

        Rows that are written before and after it have different columns.
        """
        self.count += 1
        last = self.count - 1
        self.all_coefficients[:, self.count] = self.all_coefficients[:, last]
        self.step_numbers[self.count] = self.step_numbers[last]
        # A step whose gradient has the factor 0 is not replayed.
        self.all_steps[:, self.count] = 0.0

    def _set_column(self, options: Options, step: int) -> None:
        """Set the last column to the coefficients of a row that is up to date."""
        caught_up = self.rule.caught_up_coefficients(np, options, step)
        self.all_coefficients[:, self.count] = caught_up
        self.step_numbers[self.count] = step


def host_values(rule: Rule, options: Options, step: int) -> Any:
    """Return the numbers of a step as Python floats.

    Example:
        >>> from firstlayer.optim.adagrad import Adagrad, AdagradOptions
        >>> host_values(Adagrad(), AdagradOptions(lr=0.5).hyperparameters(), 1)
        AdagradStep(sign=1.0, coupled_decay=0.0, lr=0.5, eps=1e-10)
    """
    options = {**options, "lr": float(options["lr"])}
    values = rule.step_values(np, options, step)
    return type(values)(*map(float, values))
