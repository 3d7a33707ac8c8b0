"""Rows that the kernels of the row optimizers update."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, eq=False)
class RowSlice:
    """Rows of a table and of the optimizer state, which are updated in place together.

    Args:
        weight: Array that contains the rows. Half precision is computed in float32 and
            rounded to nearest.
        weight_rows: Indices (int64) of the rows in ``weight``.
        state_rows: Indices (int64) of the same rows in the arrays of the state.
        state: Arrays of the optimizer state, in the order of the rule.
    """

    weight: np.ndarray
    weight_rows: np.ndarray
    state_rows: np.ndarray
    state: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class StaleRows(RowSlice):
    """Rows that missed steps.

    Args:
        from_step: For each row, the recorded step at which it was last updated: its column
            of the coefficients.
        has_state: For each row of the table, whether its state may be nonzero.
    """

    from_step: np.ndarray
    has_state: np.ndarray


class RecordedSteps(Protocol):
    """Recorded steps that rows missed; see ``firstlayer.optim.missed_steps``."""

    #: Named tuple of the coefficients.
    kind: Any
    #: Numbers of a step, for their types.
    step_values: Any
    #: Coefficients of each recorded step, a column each.
    all_coefficients: np.ndarray
    #: Numbers of each recorded step, a column each, for steps that are replayed.
    all_steps: np.ndarray

    @property
    def replays(self) -> bool:
        """Whether some missed steps may have to be replayed one by one."""
        ...
