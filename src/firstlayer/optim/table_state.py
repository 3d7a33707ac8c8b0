"""Optimizer state of one table: steps, averages, and changes of its rows.

A step updates the rows that have a gradient; the other rows become stale until they catch
up (:mod:`.stale_table`).

A step changes weights, state and counters together. Arguments are checked before anything
changes, and Ctrl-C is held back until everything has, so a table is left as it was before
the call or as it is after it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from .. import kernels
from .._check import out_of_range
from .._interrupts import held_interrupts
from ..kernels.optim.row_slice import RowSlice
from .missed_steps import MissedSteps, host_values
from .row_average import RowAverage, refuse_swapped
from .rule import Options
from .stale_table import CHUNK, StaleTable


class TableState(StaleTable):
    """State of a table under a row optimizer; arguments as in :class:`StaleTable`."""

    def step(
        self,
        ids: Int64[np.ndarray, " n"] | None,
        gradient: Float[np.ndarray, "n width"],
        *,
        options: Options,
    ) -> None:
        """Update the rows that have a gradient, in place; the others become stale.

        The arguments have passed :meth:`check_step`, and the caller holds interrupts back.

        Args:
            ids: Rows that have a gradient, ascending and each once; None for all.
            gradient: Gradient of each of these rows.
            options: Options of the rule in this step.
        """
        with self.lock:
            table = self._checked(self.table())
            self._check_arrays()
            # Kernels read the table's own half precision.
            is_own = gradient.dtype == table.dtype
            gradient = np.ascontiguousarray(gradient, None if is_own else self.dtype)
            self._prepare_step(table, ids, options)
            step = self.step_count + 1
            values = host_values(self.rule, options, step)
            is_noop = self.is_caught_up and self.rule.is_noop_without_gradient(options)
            is_lazy = self.rule.lazy
            self.step_count, self.event_count = step, self.event_count + 1
            if ids is not None and (self.averages or not is_lazy and not is_noop):
                self.missed.record(values, options, step, is_lazy=is_lazy)
                for average in self.averages:
                    average.add_column(self.missed)
                if not is_lazy and self.rule.moves_without_gradient(options):
                    self._missed_moves = True
            else:
                # No row becomes stale.
                self.base_step = self.event_count
            for rows, part in _chunks(ids, gradient):
                self._update_rows(table, rows, part, values)
            if self.is_caught_up:
                self._restart(options)

    def make_room(self) -> None:
        """Catch every row up if no further event can be recorded.

        Raises if :meth:`update_average` cannot follow.
        """
        with held_interrupts(), self.lock:
            # Raises if the table is on disk and its store is closed.
            self._before_write(np.zeros(0, np.int64))
            if self.missed.is_full:
                self.catch_up()

    def update_average(self, average: RowAverage, decay: float) -> None:
        """Record an update of an average; rows apply it when they are next written.

        The caller has called :meth:`make_room` and holds interrupts back.

        Args:
            average: Average of this table.
            decay: The average becomes ``decay`` times itself plus ``1 − decay`` times the
                weights.
        """
        with self.lock:
            self._record_average(average, decay)
            average.count += 1

    def swap_average(self, average: RowAverage) -> np.ndarray:
        """Put an average into the table, and return the weights.

        Args:
            average: Average of this table.
        """
        with held_interrupts(), self.lock:
            self.catch_up()
            self._before_write(None)
            self.attach_average(average)
            table = self._checked(self.table())
            weights = table.copy()
            average.is_swapped = True
            table[...] = average.values
            return weights

    def averaged_rows(
        self, average: RowAverage, ids: Int64[np.ndarray, " n"]
    ) -> Float[np.ndarray, "n width"]:
        """Return rows of an average after its missed updates; nothing is written.

        Args:
            average: Average of this table.
            ids: Rows to return, possibly repeated. An id out of range is an IndexError.
        """
        # A copy: another thread may change the ids.
        ids = np.array(ids, np.int64)
        with self.lock:
            rows = kernels.gather_rows(average.values, ids)
            if rows is None:
                raise out_of_range(ids, self.shape[0])
            if average in self.averages and not self.is_caught_up:
                table = self._checked(self.table(), writable=False)
                self._check_arrays()
                weight, weight_rows = self._upcast(table, ids)
                stale = self._stale_rows(weight, weight_rows, ids, self.row_steps[ids])
                average.catch_up(stale, self.missed, out=rows)
            return rows

    def resize_rows(
        self, kept: Int64[np.ndarray, " kept"], num_rows: int, options: Options
    ) -> None:
        """Follow a table whose rows were selected, reordered or added.

        Kept rows keep their state and the steps they have missed. The caller resizes the
        averages.

        Args:
            kept: For each of the first rows of the table, its number before.
            num_rows: Number of rows of the table, the rows after ``kept`` being new.
            options: Options of the rule, for the state of new rows.
        """
        if self.stored is not None:
            raise TypeError("the rows of a table on disk cannot be resized or reordered")
        self.check_resize()
        with held_interrupts(), self.lock:
            initial = self.rule.initial_state(options)
            self.state = {
                name: _resized(array, kept, num_rows, initial.get(name, 0.0))
                for name, array in self.state.items()
            }
            self.row_steps = _resized(self.row_steps, kept, num_rows, self.event_count)
            self.has_state = _resized(self.has_state, kept, num_rows, False)
            self.shape = num_rows, self.shape[1]
            self.state_shape = num_rows, self.state_shape[1]

    def reset_rows(self, rows: Int64[np.ndarray, " n"]) -> None:
        """Give rows the state of a new table's rows, and no missed steps.

        Their weights are as the caller has written them, and averages start from there.

        Args:
            rows: Rows that belong to something else from now on.
        """
        with held_interrupts(), self.lock:
            self.check_reset()
            table = self._checked(self.table())
            self._check_arrays()
            self._before_write(rows)
            for name, array in self.state.items():
                array[rows] = self._initial_state.get(name, 0.0)
            self.has_state[rows] = False
            self.row_steps[rows] = self.event_count
            for average in self.averages:
                average.values[rows] = table[rows]

    def check_step(
        self,
        ids: np.ndarray | None,
        gradient: np.ndarray,
        *,
        options: Options,
        ids_name: str = "ids",
    ) -> None:
        """Raise an error unless :meth:`step` can run to its end; change nothing.

        Kernels write to the rows unchecked. The rows of a table on disk are journalled.

        Args:
            ids: As in :meth:`step`, contiguous int64.
            gradient: As in :meth:`step`.
            options: As in :meth:`step`.
            ids_name: Name of the ids in error messages.
        """
        self.rule.check(options)
        refuse_swapped(self.averages, "a step must not be taken")
        self._checked(self.table())
        self._check_arrays()
        shape = self.shape if ids is None else (ids.size, self.shape[1])
        if gradient.shape != shape:
            raise ValueError(f"the gradient must have shape {shape}, got {gradient.shape}")
        if ids is not None and ids.size:
            if not kernels.ascends(ids):
                raise ValueError(f"{ids_name} must be ascending, each once")
            rows = self.shape[0]
            if ids[0] < 0 or ids[-1] >= rows:
                raise out_of_range(ids, rows, name=ids_name, bound="the number of rows")
        if self.stored is not None:
            # Before anything changes: a full disk must not end a step halfway.
            every_row = ids is None or self._must_catch_up_all(options)
            self.stored.before_write(None if every_row else ids)

    def _prepare_step(
        self, table: np.ndarray, ids: np.ndarray | None, options: Options
    ) -> None:
        """Catch up the rows to be updated, and all rows if they cannot stay stale."""
        is_changed = self.rule.frozen_options(options) != self.missed.frozen_options
        if ids is None or self._must_catch_up_all(options):
            self._catch_up(table, None)
        self._add_missing_arrays(options)
        if is_changed:
            self.missed = MissedSteps(self.rule, options, self.step_count)
            self._adapt_state(options)
        if self.is_caught_up:
            self._restart(options)
        # Rows with a stale state may have been read without catching up.
        self._catch_up(table, ids)

    def _must_catch_up_all(self, options: Options) -> bool:
        """Return whether every row has to be up to date before a step."""
        frozen = self.rule.frozen_options(options)
        return self.missed.is_full or frozen != self.missed.frozen_options

    def _restart(self, options: Options) -> None:
        self.missed.restart(options, self.step_count)
        self._start_averages()
        self._missed_moves = False

    def _update_rows(
        self, table: np.ndarray, rows: np.ndarray, gradient: np.ndarray, values: Any
    ) -> None:
        self._before_write(rows)
        weight, weight_rows = self._to_update(table, rows)
        if weight is not table:
            gradient, _ = self._upcast(gradient, np.arange(rows.size))
        state = tuple(self.state[name] for name in self.missed.names)
        kernels.update_rows(
            RowSlice(weight, weight_rows, rows, state),
            gradient,
            values,
            has_state=self.has_state,
            row_steps=self.row_steps,
            step=self.event_count,
        )
        self._store(weight, table, rows, rounding_seed=2 * self.step_count + 1)


def _chunks(
    ids: np.ndarray | None, gradient: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows and their gradients, in chunks if every row has one."""
    if ids is not None:
        yield ids, gradient
        return
    for lo in range(0, len(gradient), CHUNK):
        part = gradient[lo : lo + CHUNK]
        yield np.arange(lo, lo + len(part)), part


def _resized(
    array: np.ndarray, kept: np.ndarray, num_rows: int, value: float
) -> np.ndarray:
    """Return the kept rows of ``array``, followed by rows of ``value``."""
    out = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    out[: kept.size] = array[kept]
    if value:
        out[kept.size :] = value
    return out
