"""Coefficients that catch up a stale row in one pass, however many steps it missed.

Without a gradient, many steps of most rules have the effect of one: a few coefficients, the
same for every column, that depend only on the step at which the row was last updated.
:class:`MissedSteps` stores these coefficients for every such step, and each recorded step
advances all of them, so that schedules of learning rate, momentum and decay are followed
exactly. Lipton and Elkan 2015 (https://arxiv.org/abs/1505.06449) do so for SGD with decay.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from ..kernels.optim.coefficients import (
    AVERAGE_DECAY,
    BUFFER_FROM_BUFFER,
    BUFFER_FROM_WEIGHT,
    NUM_STEP_VALUES,
    WEIGHT_FROM_BUFFER,
    WEIGHT_FROM_WEIGHT,
)

# Every row catches up after this many steps. Advancing the coefficients of as many steps
# takes microseconds, and the cost of catching up is amortized over them.
MAX_STEPS = 8192


class MissedSteps:
    """Steps recorded since every row was last up to date.

    Column ``k`` of the coefficients catches up a row that was last updated at recorded
    step ``k``; column 0 is for rows not updated since then.

    Args:
        num_coefficients: Number of coefficients per step.
    """

    def __init__(self, num_coefficients: int) -> None:
        #: Coefficients, allocated for the maximum number of steps.
        self.all_coefficients = np.empty((num_coefficients, MAX_STEPS + 1))
        #: Hyperparameters of each step, for rules that replay steps one by one.
        self.all_steps = np.empty((NUM_STEP_VALUES, MAX_STEPS + 1))
        #: Number of recorded steps.
        self.count = 0
        #: Options that are the same in all recorded steps; see ``Rule.frozen_options``.
        self.frozen_options: tuple[Any, ...] = ()

    @property
    def coefficients(self) -> Float64[np.ndarray, "num_coefficients steps"]:
        """Coefficients of the recorded steps, a view."""
        return self.all_coefficients[:, : self.count + 1]

    @property
    def is_full(self) -> bool:
        """Whether no further step can be recorded."""
        return self.count == MAX_STEPS

    def restart(self, coefficients: Any, frozen_options: tuple[Any, ...]) -> None:
        """Discard all steps.

        Args:
            coefficients: Coefficients of a row that is up to date.
            frozen_options: Options that will not change in the recorded steps.
        """
        self.count, self.frozen_options = 0, frozen_options
        self.all_coefficients[:, 0] = coefficients

    def append(self, coefficients: Any, step: Any = 0.0) -> None:
        """Record one more step.

        Args:
            coefficients: Coefficients of a row that is up to date after this step.
            step: Hyperparameters of this step.
        """
        if self.count % 256 == 255:
            # Arithmetic on denormals is slow.
            recorded = self.coefficients
            recorded[np.abs(recorded) < 1e-200] = 0.0
        self.count += 1
        self.all_coefficients[:, self.count] = coefficients
        self.all_steps[:, self.count] = step


def advance_linear(coefficients: np.ndarray, step: Sequence[float]) -> None:
    """Multiply linear coefficients (SGD, RMSprop) in place by those of one more step."""
    bb, bw, wb, ww, average = step
    buffer = coefficients[[BUFFER_FROM_BUFFER, BUFFER_FROM_WEIGHT]]
    weight = coefficients[[WEIGHT_FROM_BUFFER, WEIGHT_FROM_WEIGHT]]
    coefficients[[BUFFER_FROM_BUFFER, BUFFER_FROM_WEIGHT]] = bb * buffer + bw * weight
    coefficients[[WEIGHT_FROM_BUFFER, WEIGHT_FROM_WEIGHT]] = wb * buffer + ww * weight
    coefficients[AVERAGE_DECAY] *= average
