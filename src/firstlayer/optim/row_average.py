"""Exponential moving average of a table's weights; an update costs as much as a batch.

Every update of the average moves the averages of all rows, and rows without a gradient move
in steps that they miss. Both are recorded as events (``TableState.event_count``), and a row
catches its average up before its weight is written. In between, the weight after each
missed step is linear in the row's coefficients (:class:`~.rule.MissedCoefficients`), so the
average after any number of events is

    kept · average + weight of catch_up(averaged coefficients)

where the averaged coefficients of column ``k`` are advanced in every update of the average,
``E ← d · E + (1 − d) · C``, as the average itself is.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import kernels
from ..kernels.optim.row_slice import StaleRows
from .missed_steps import MAX_STEPS, MissedSteps
from .rule import ArrayOps, update_rows


class RowAverage:
    """Average of the rows of one table.

    Args:
        values: Average of each row so far, in the table's shape and compute dtype. It is
            changed in place.
    """

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        #: Number of updates.
        self.count = 0
        #: Whether the averages are in the table, and its weights elsewhere.
        self.is_swapped = False
        self._kept = np.ones(MAX_STEPS + 1)
        # Decay of each event that is an update of the average; NaN for steps.
        self._decays = np.full(MAX_STEPS + 1, np.nan)
        self._coefficients = np.zeros((0, MAX_STEPS + 1))
        # Which coefficients are constants, a column.
        self._is_constant = np.zeros((0, 1), bool)

    @property
    def values(self) -> np.ndarray:
        """Average of each row as of the event that the row is at."""
        return self._values

    def resize_rows(self, kept: np.ndarray, table: np.ndarray) -> None:
        """Follow a table whose rows were selected, reordered or added.

        Args:
            kept: For each of the first rows of the table, its number before.
            table: The table. Averages of the rows after ``kept`` start from their weights.
        """
        values = np.empty(table.shape, self._values.dtype)
        values[: kept.size] = self._values[kept]
        values[kept.size :] = table[kept.size :]
        self._values = values

    def start(self, missed: MissedSteps) -> None:
        """Begin at the last recorded event, with no update missed by any row."""
        if len(self._coefficients) != len(missed.all_coefficients):
            self._coefficients = np.zeros_like(missed.all_coefficients)
        kind: Any = missed.kind
        self._is_constant = np.isin(kind._fields, kind.constants)[:, None]
        self._set_columns(missed, slice(0, missed.count + 1))
        self._decays[: missed.count + 1] = np.nan

    def add_column(self, missed: MissedSteps) -> None:
        """Follow an event that was recorded and does not change the average."""
        self._set_columns(missed, slice(missed.count, missed.count + 1))
        self._decays[missed.count] = np.nan

    def record(self, missed: MissedSteps, decay: float) -> None:
        """Record an update of the average."""
        averaged = self._coefficients[:, : missed.count + 1]
        averaged *= np.where(self._is_constant, 1.0, decay)
        averaged += np.where(self._is_constant, 0.0, 1 - decay) * missed.coefficients
        self._kept[: missed.count + 1] *= decay
        missed.record_pause()
        self.add_column(missed)
        self._decays[missed.count] = decay

    def columns(self, missed: MissedSteps) -> dict[str, np.ndarray]:
        """Return views of the numbers of the recorded events, by name."""
        events = slice(0, missed.count + 1)
        return {
            "average_kept": self._kept[events],
            "average_decays": self._decays[events],
            "average_coefficients": self._coefficients[:, events],
        }

    def catch_up(
        self, rows: StaleRows, missed: MissedSteps, out: np.ndarray | None = None
    ) -> None:
        """Apply the missed updates to the averages of rows, in place.

        Args:
            rows: Rows as of the event that each is at; they are not changed.
            missed: Recorded events.
            out: Averages of these rows, to change instead of ``values``.
        """
        average = self.values if out is None else out
        places = rows.state_rows if out is None else np.arange(len(out))
        is_behind = self._kept[rows.from_step] != 1
        if missed.replays and is_behind.any():
            columns = self._coefficients[:, rows.from_step]
            kind: Any = missed.kind
            is_inaccurate = is_behind & ~kind(*columns).is_accurate(np)
            if is_inaccurate.any():
                part = _part(rows, is_inaccurate)
                chosen = places[is_inaccurate]
                average[chosen] = self._replayed(average[chosen], part, missed)
                is_behind &= ~is_inaccurate
        if is_behind.any():
            if not is_behind.all():
                rows, places = _part(rows, is_behind), places[is_behind]
            coefficients, kept = self._coefficients, self._kept
            kernels.average_rows(average, places, rows, missed.kind, coefficients, kept)

    def _set_columns(self, missed: MissedSteps, columns: slice) -> None:
        """Set columns to those of rows whose averages are up to date."""
        self._kept[columns] = 1.0
        recorded = missed.all_coefficients[:, columns]
        self._coefficients[:, columns] = np.where(self._is_constant, recorded, 0.0)

    def _replayed(
        self, average: np.ndarray, rows: StaleRows, missed: MissedSteps
    ) -> np.ndarray:
        """Return averages of rows, event by event up to accurate coefficients."""
        kind: Any = missed.kind
        weight = rows.weight[rows.weight_rows]
        state = [array[rows.state_rows] for array in rows.state]
        count = missed.count + 1
        is_accurate = kind(*self._coefficients[:, :count]).is_accurate(np)
        # The next accurate column of each; the last is accurate.
        numbers = np.where(is_accurate, np.arange(count), count)
        until = np.minimum.accumulate(numbers[::-1])[::-1][rows.from_step]
        for event in range(int(rows.from_step.min()) + 1, int(until.max()) + 1):
            late = np.flatnonzero((rows.from_step < event) & (event <= until))
            decay = self._decays[event]
            if not np.isnan(decay):
                average[late] += (1 - decay) * (weight[late] - average[late])
            elif missed.all_steps[0, event]:
                values = type(missed.step_values)(*missed.all_steps[:, event].tolist())
                old = weight[late], *(array[late] for array in state)
                zero = np.zeros_like(old[0])
                with np.errstate(all="ignore"):
                    new = update_rows(
                        ArrayOps(np), missed.rule, values, old[0], zero, old[1:]
                    )
                for array, moved in zip((weight, *state), new, strict=True):
                    array[late] = moved
        columns = self._coefficients[:, until][..., None].astype(average.dtype)
        kept = self._kept[until][:, None].astype(average.dtype)
        return kept * average + kind(*columns).catch_up(ArrayOps(np), weight, *state)[0]


def refuse_swapped(averages: Iterable[RowAverage], action: str) -> None:
    """Raise ValueError if averages are in the table.

    Args:
        averages: Averages of tables.
        action: Beginning of the message.
    """
    if any(average.is_swapped for average in averages):
        raise ValueError(f"{action} while averages replace the weights")


def _part(rows: StaleRows, chosen: np.ndarray) -> StaleRows:
    """Return some of the rows."""
    return StaleRows(
        rows.weight,
        rows.weight_rows[chosen],
        rows.state_rows[chosen],
        rows.state,
        rows.from_step[chosen],
        rows.has_state,
    )
