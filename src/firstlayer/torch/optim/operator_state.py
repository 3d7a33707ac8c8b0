"""Optimizer state of a table on any device, updated by torch operators.

Does what :class:`firstlayer.optim.table_state.TableState` does with kernels: a step updates
the rows that have a gradient, and the other rows become stale until they catch up
(:mod:`.stale_tensors`). A step does not wait for the device.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._check import out_of_range
from ..._interrupts import held_interrupts
from ...optim.missed_steps import MissedSteps, host_values
from ...optim.row_average import refuse_swapped
from ...optim.rule import Options, update_rows
from .._tensors.memory import is_plain_cpu, tensor_of
from . import rule_ops
from .device_steps import DeviceSteps
from .row_operators import Rows, read_rows, write_number, write_rows
from .row_tensors import RowTensors, resized_rows
from .stale_tensors import StaleTensors
from .tensor_average import TensorAverage


class OperatorState(StaleTensors):
    """State of a table under a row optimizer, updated by torch operators.

    Args:
        parameter: Table. Only a weak reference to it is kept.
        rule: Update rule.
        options: Current options of the rule.
        stochastic_rounding: Round a bfloat16 table up or down at random.
        state: Tensors to continue from, on the device of the table.
        step: Number of steps taken before ``state`` was saved.
    """

    def check_step(
        self,
        ids: Tensor | None,
        gradient: Tensor,
        *,
        options: Options,
        ids_name: str = "ids",
    ) -> None:
        """Raise an error unless :meth:`step` can run to its end; change nothing.

        Values of ids are checked on the CPU only. Other devices check them on access.

        Args:
            ids: As in :meth:`step`.
            gradient: As in :meth:`step`.
            options: As in :meth:`step`.
            ids_name: Name of the ids in error messages.
        """
        self.rule.check(options)
        refuse_swapped(self.averages, "a step must not be taken")
        self.check(self.row_tensors())
        shape = self.shape if ids is None else (ids.shape[0], self.shape[1])
        if tuple(gradient.shape) != shape:
            raise ValueError(
                f"the gradient must have shape {shape}, got {tuple(gradient.shape)}"
            )
        if ids is not None and ids.numel() and is_plain_cpu(ids):
            if not bool((ids[1:] > ids[:-1]).all()):
                raise ValueError(f"{ids_name} must be ascending, each once")
            rows = self.shape[0]
            if ids[0] < 0 or ids[-1] >= rows:
                bound = "the number of rows"
                raise out_of_range(ids.numpy(), rows, name=ids_name, bound=bound)

    def step(self, ids: Tensor | None, gradient: Tensor, *, options: Options) -> None:
        """Update the rows that have a gradient, in place; the others become stale.

        The arguments have passed :meth:`check_step`, and the caller holds interrupts back.

        Args:
            ids: Rows that have a gradient, each once; None for all.
            gradient: Gradient of each of these rows.
            options: Options of the rule in this step.
        """
        with self.lock, torch.no_grad():
            self._prepare_step(ids, options)
            tensors = self.row_tensors()
            values = self.record_step(options, every_row=ids is None)
            generator = self._generator(2 * self.step_count + 1)
            for rows, part, state in self._updated_rows(tensors, ids):
                weight = read_rows(tensors.table, rows, self.dtype)
                part = read_rows(gradient, part, self.dtype)
                new = update_rows(rule_ops, self.rule, values, weight, part, state)
                self.write_weight(tensors, rows, new[0], generator)
                tensors.write_state(rows, new[1:])
                write_number(tensors.row_steps, rows, self.event_count)
            if self.is_caught_up:
                self.restart(options)

    def resize_rows(self, kept: Tensor, num_rows: int, options: Options) -> None:
        """Follow a table whose rows were selected, reordered or added.

        The caller resizes the averages.

        Args:
            kept: For each of the first rows of the table, its number before.
            num_rows: Number of rows of the table, the rows after ``kept`` being new.
            options: Options of the rule, for the state of new rows.
        """
        self.check_resize()
        with held_interrupts(), self.lock, torch.no_grad():
            self.write_deferred()
            kept, initial = kept.to(self.device), self.rule.initial_state(options)
            self.state = {
                name: resized_rows(x, kept, num_rows, initial.get(name, 0.0))
                for name, x in self.state.items()
            }
            self.row_steps = resized_rows(self.row_steps, kept, num_rows, self.event_count)
            self.shape = num_rows, self.shape[1]
            self.state_shape = num_rows, self.state_shape[1]
            self.tensors.clear()

    def reset_rows(self, rows: np.ndarray) -> None:
        """Give rows the state of a new table's rows, and no missed steps.

        Args:
            rows: Rows, whose weights are as the caller has written them.
        """
        with held_interrupts(), self.lock, torch.no_grad():
            self.check_reset()
            self.write_deferred()
            index = torch.as_tensor(rows, device=self.device)
            for name, x in self.state.items():
                x.index_fill_(0, index, self._initial_state.get(name, 0.0))
            self.row_steps.index_fill_(0, index, self.event_count)
            for average in self.averages:
                table = self.row_tensors().table
                write_rows(average.tensor, index, read_rows(table, index, self.dtype))

    def continue_from(self, other: Any) -> None:
        """Take over which rows of the table are stale, and the steps they missed.

        Args:
            other: State of the same table, an :class:`OperatorState` or a
                :class:`firstlayer.torch.optim.parameter_state.ParameterState`.
        """
        row_steps = other.row_steps
        if not isinstance(row_steps, Tensor):
            row_steps = tensor_of(row_steps)
        self.row_steps = row_steps.to(self.device)
        self.step_count, self.base_step = other.step_count, other.base_step
        self.event_count, self.averages = other.event_count, other.averages
        self.missed, self._missed_moves = other.missed, other._missed_moves
        last_step_event = self.base_step + self.missed.last_step_column
        # Steps recorded before every row caught up count from an earlier event.
        self.last_step_event = min(last_step_event, self.event_count)
        for average in self.averages:
            average.move_to(self.device)
        self.device_steps = DeviceSteps(self.missed, self.dtype, self.device)

    def make_room(self) -> None:
        """Catch every row up if no further event can be recorded.

        Raises if :meth:`update_average` cannot follow.
        """
        if self.missed.is_full:
            self.catch_up()

    def update_average(self, average: TensorAverage, decay: float) -> None:
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
            self.device_steps.is_current = False

    def averaged_rows(self, average: TensorAverage, ids: Tensor) -> Tensor:
        """Return rows of an average after its missed updates; the table stays as it is.

        Args:
            average: Average of this table.
            ids: Rows to return, in range and possibly repeated.
        """
        with self.lock, torch.no_grad():
            self.write_deferred()
            rows = self.as_rows(ids)
            if average not in self.averages or self.is_caught_up:
                return average.tensor.index_select(0, rows)
            tensors = self.row_tensors()
            self.check(tensors)
            return self._caught_up_average(average, tensors, rows)

    def record_step(self, options: Options, *, every_row: bool) -> Any:
        """Count a step, which other rows miss unless every row is updated.

        Returns:
            Numbers of the step.
        """
        step = self.step_count + 1
        values = host_values(self.rule, options, step)
        is_noop = self.is_caught_up and self.rule.is_noop_without_gradient(options)
        is_lazy = self.rule.lazy
        self.step_count, self.event_count = step, self.event_count + 1
        self.last_step_event = self.event_count
        if not every_row and (self.averages or not is_lazy and not is_noop):
            self.missed.record(values, options, step, is_lazy=is_lazy)
            for average in self.averages:
                average.add_column(self.missed)
            self.device_steps.is_current = False
            if not is_lazy and self.rule.moves_without_gradient(options):
                self._missed_moves = True
        else:
            # No row becomes stale.
            self.base_step = self.event_count
        return values

    def restart(self, options: Options) -> None:
        """Forget the recorded steps, when every row is up to date."""
        self.missed.restart(options, self.step_count)
        self._start_averages()
        self.device_steps.is_current = self._missed_moves = False

    def _prepare_step(self, ids: Tensor | None, options: Options) -> None:
        """Catch up the rows to be updated, and all rows if they cannot stay stale."""
        tensors = self.row_tensors()
        is_changed = self.rule.frozen_options(options) != self.missed.frozen_options
        if self.missed.is_full or is_changed or ids is None:
            self.catch_up_tensors(tensors, None)
        self._add_missing_tensors(options)
        if is_changed:
            self.missed = MissedSteps(self.rule, options, self.step_count)
            self.device_steps = DeviceSteps(self.missed, self.dtype, self.device)
            self._adapt_state(options)
        if self.is_caught_up:
            self.restart(options)
        elif self.averages or not self._missed_moves:
            # Rows with a stale state may have been read without catching up, and averages
            # may have been updated since rows were read. All other rows have caught up when
            # they were read.
            self.catch_up_tensors(tensors, ids)

    def _updated_rows(
        self, tensors: RowTensors, ids: Tensor | None
    ) -> Iterator[tuple[Rows, Rows, list[Tensor]]]:
        """Yield rows of ``ids``, or all as ranges, their places, and their state.

        Args:
            tensors: Table and state.
            ids: Rows, each once; None for all.
        """
        deferred = self._deferred
        if deferred is not None and ids is not None and torch.equal(ids, deferred.rows):
            self._deferred, lo = None, 0
            places = deferred.is_stale.nonzero().flatten()
            others = deferred.is_stale.logical_not().nonzero().flatten()
            for rows, state in deferred.current_parts(tensors):
                hi = lo + rows.shape[0]
                yield rows, places[lo:hi] if others.numel() else slice(lo, hi), state
                lo = hi
            for _, part in self._chunks(others):
                rows = ids.index_select(0, others[part])
                state = [read_rows(x, rows, self.dtype) for x in tensors.state]
                yield rows, others[part], state
            return
        self.write_deferred(tensors)
        for rows, part in self._chunks(ids):
            yield rows, part, [read_rows(x, rows, self.dtype) for x in tensors.state]
