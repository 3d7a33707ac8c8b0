"""Rows that the kernels of the row optimizers update."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RowSlice:
    """Rows of a table and of the optimizer state, which are updated in place together.

    Args:
        weight: Array that contains the rows, float32 or float64.
        weight_rows: Indices (int64) of the rows in ``weight``.
        state_rows: Indices (int64) of the same rows in the arrays of the state.
        state: Arrays of the optimizer state, under torch's names.
    """

    weight: np.ndarray
    weight_rows: np.ndarray
    state_rows: np.ndarray
    state: dict[str, np.ndarray]

    def array(self, name: str, *, used: bool = True) -> np.ndarray:
        """Return an array of the state, or an empty one if it is absent or not used."""
        array = self.state.get(name) if used else None
        return np.empty((0, 0), self.weight.dtype) if array is None else array

    def scalars(self, *values: float) -> tuple[np.floating, ...]:
        """Return numbers in the compute dtype."""
        dtype = self.weight.dtype.type
        return tuple(dtype(value) for value in values)


@dataclass(frozen=True, eq=False)
class StaleRows(RowSlice):
    """Rows that missed steps.

    Args:
        from_step: For each row, the recorded step at which it was last updated: its column
            of the coefficients; see :mod:`firstlayer.kernels.optim.coefficients`.
        has_state: For each row of the table, whether its state may be nonzero.
    """

    from_step: np.ndarray
    has_state: np.ndarray
