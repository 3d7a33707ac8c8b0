"""Optimizer state of one table, and the step that each of its rows is at.

A step updates the rows that have a gradient; the other rows become stale. Code that is
about to read rows calls :meth:`TableState.catch_up`, which applies the missed steps to the
stale ones among them, in place. Rows that are up to date are not written, so a row keeps
the value that was read until the next step.

A step or a catch-up changes weights, state and counters together. Arguments are checked
before anything changes, and Ctrl-C is held back until everything has, so a table is left
as it was before the call or as it is after it.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from .. import kernels
from .._array import compute_dtype
from .._check import is_float, out_of_range
from .._interrupts import held_interrupts
from ..kernels.optim.row_slice import RowSlice, StaleRows
from ..stores.training import TrainingStore
from .missed_steps import MissedSteps, host_values
from .row_average import RowAverage, refuse_swapped
from .rule import Options, Rule, State
from .stored_state import RetiredState, StoredState

# Rows per pass when every row is updated: no temporary array is as large as the table.
CHUNK = 1 << 14
# Number of steps that a state may have. Steps are int64 and must not overflow.
MAX_STEP = 1 << 62


class TableState:
    """State of a table under a row optimizer.

    Arrays of zeros are allocated in the table's shape; the operating system provides memory
    for a row when it is first written.

    Args:
        rule: Update rule.
        table: Returns the table; its memory may move between calls.
        options: Current options of the rule.
        stochastic_rounding: Round a bfloat16 table up or down at random.
        state: Arrays to continue from.
        step: Number of steps taken before ``state`` was saved.
        store: Store of the table if it is trained on disk. The arrays are then files of the
            store, and the state continues from the one that the store has.
    """

    def __init__(
        self,
        rule: Rule,
        table: Callable[[], Float[np.ndarray, "rows width"]],
        *,
        options: Options,
        stochastic_rounding: bool = False,
        state: State | None = None,
        step: int = 0,
        store: TrainingStore | None = None,
    ) -> None:
        rule.check(options)
        self.rule, self.table = rule, table
        self.stochastic_rounding = stochastic_rounding
        weight = table()
        self.shape, self.dtype = weight.shape, np.dtype(compute_dtype(weight.dtype))
        self._table_dtype = weight.dtype
        #: Shape of each array of the state.
        self.state_shape = self.shape[0], rule.state_width(self.shape[1])
        #: Arrays of the optimizer state, by name.
        self.state: State = {} if state is None else state
        #: For each row, whether its state may be nonzero.
        self.has_state = np.full(self.shape[0], state is not None)
        #: Number of steps taken.
        self.step_count = step
        #: Number of events: steps, and updates of an average.
        self.event_count = step
        #: For each row, the event it is at; smaller values stand for ``base_step``.
        self.row_steps = np.zeros(self.shape[0], np.int64)
        #: Event at which every row was last up to date. ``missed`` counts from here.
        self.base_step = step
        #: Averages of the rows, which are caught up before rows are written.
        self.averages: weakref.WeakSet[RowAverage] = weakref.WeakSet()
        #: Whether a recorded step moves the weights of rows without a gradient.
        self._missed_moves = False
        self.missed = MissedSteps(rule, options, step)
        self.lock = threading.RLock()
        #: Journals rows before they change, if the table is trained on disk.
        self.stored: StoredState | RetiredState | None = None
        if store is not None:
            self.stored = StoredState(self, store, state, step)
        self._add_missing_arrays(options)
        self._check_arrays()
        if state is not None:
            self._adapt_state(options)

    @property
    def is_in_use(self) -> bool:
        """Whether no other optimizer has taken over a table on disk."""
        return not isinstance(self.stored, RetiredState)

    @property
    def is_caught_up(self) -> bool:
        """Whether weight, state and average of every row are up to date."""
        return self.base_step == self.event_count

    @property
    def has_stale_weights(self) -> bool:
        """Whether the weight of some row may be out of date.

        False if only the state of rows is stale, as under RMSprop without momentum. Such
        rows may be read, but must catch up before a step with a gradient.
        """
        return self.base_step != self.event_count and self._missed_moves

    @property
    def needs_catch_up(self) -> bool:
        """Whether rows must catch up before they are read or written.

        Averages need the weights of the steps that they have missed.
        """
        return self.has_stale_weights or bool(self.averages) and not self.is_caught_up

    def catch_up(
        self,
        ids: Int64[np.ndarray, " n"] | None = None,
        *,
        table: Float[np.ndarray, "rows width"] | None = None,
    ) -> None:
        """Apply the missed steps to stale rows, in place.

        Args:
            ids: Rows to bring up to date, possibly repeated; None for all.
            table: Copy of the table to write to, which will replace the table.
        """
        if self.is_caught_up:
            return
        with held_interrupts(), self.lock:
            table = self._checked(self.table() if table is None else table)
            self._check_arrays()
            self._catch_up(table, ids)

    def caught_up_rows(
        self,
        ids: Int64[np.ndarray, " n"],
        *,
        table: Float[np.ndarray, "rows width"] | None = None,
    ) -> Float[np.ndarray, "n width"]:
        """Return rows as they are after their missed steps; nothing is written.

        Args:
            ids: Rows to return, possibly repeated. An id out of range is an IndexError.
            table: Copy of the table to read from.
        """
        # A copy: another thread may change the ids.
        ids = np.array(ids, np.int64)
        with self.lock:
            table = self.table() if table is None else table
            table = self._checked(table, writable=False)
            self._check_arrays()
            rows = kernels.gather_rows(table, ids)
            if rows is None:
                raise out_of_range(ids, self.shape[0])
            if self.has_stale_weights:
                row_steps = self.row_steps[ids]
                places = np.flatnonzero(self._is_stale(row_steps))
                self._correct(rows, places, ids[places], row_steps[places])
            return rows

    def _correct(
        self,
        copies: np.ndarray,
        places: np.ndarray,
        rows: np.ndarray,
        row_steps: np.ndarray,
    ) -> None:
        """Apply the missed steps to copies of ``rows`` at ``places``, not to the state."""
        if places.size:
            weight, weight_rows = self._to_update(copies, places)
            stale = self._stale_rows(weight, weight_rows, rows, row_steps)
            kernels.catch_up_rows(stale, self.missed, writes_state=False)
            if weight is not copies:
                # Rounded as the rows will be when they catch up in place.
                seed = 2 * self.step_count if self.stochastic_rounding else None
                kernels.store_rows(weight, copies, places, noise=seed, noise_rows=rows)

    def first_stale(self, ids: Int64[np.ndarray, " n"] | None = None) -> int | None:
        """Return the first row of ``ids``, or of all, whose weight is stale, or None."""
        if not self.has_stale_weights:
            return None
        row_steps = self.row_steps if ids is None else self.row_steps[ids]
        stale = np.flatnonzero(self._is_stale(row_steps))
        if not stale.size:
            return None
        return int(stale[0] if ids is None else ids[stale[0]])

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
            gradient = np.ascontiguousarray(gradient, self.dtype)
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

    def attach_average(self, average: RowAverage) -> None:
        """Catch an average up before rows are written, from now on.

        No row may have missed an update of an average that is new here.
        """
        with self.lock:
            if average not in self.averages:
                average.start(self.missed)
                self.averages.add(average)

    def update_average(self, average: RowAverage, decay: float) -> None:
        """Record an update of an average; rows apply it when they are next written.

        Args:
            average: Average of this table.
            decay: The average becomes ``decay`` times itself plus ``1 − decay`` times the
                weights.
        """
        with held_interrupts(), self.lock:
            if self.missed.is_full:
                self._catch_up(self._checked(self.table()), None)
            if self.is_caught_up:
                self.missed.restart_at_last_column()
                self._start_averages()
                self._missed_moves = False
            self.attach_average(average)
            average.record(self.missed, decay)
            for other in self.averages:
                if other is not average:
                    other.add_column(self.missed)
            self.event_count += 1

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

        Kept rows keep their state and the steps they have missed.

        Args:
            kept: For each of the first rows of the table, its number before.
            num_rows: Number of rows of the table, the rows after ``kept`` being new.
            options: Options of the rule, for the state of new rows.
        """
        if self.stored is not None:
            raise TypeError("the rows of a table on disk cannot be resized or reordered")
        if self.averages:
            raise ValueError("a table must not be resized while AveragedRows averages it")
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
            refuse_swapped(self.averages, "rows must not be reset")
            self._check_arrays()
            self._before_write(rows)
            for name, array in self.state.items():
                array[rows] = self._initial_state.get(name, 0.0)
            self.has_state[rows] = False
            self.row_steps[rows] = self.event_count
            for average in self.averages:
                average.values[rows] = self._checked(self.table())[rows]

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
            # Now, since a full disk must not end a step halfway.
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

    def _before_write(self, rows: np.ndarray | None) -> None:
        if self.stored is not None:
            self.stored.before_write(rows)

    def on_restored(self) -> None:
        """Adapt to a store that has returned to an earlier commit."""

    def _restart(self, options: Options) -> None:
        self.missed.restart(options, self.step_count)
        self._start_averages()
        self._missed_moves = False

    def _start_averages(self) -> None:
        for average in self.averages:
            average.start(self.missed)

    def _is_stale(self, row_steps: np.ndarray) -> np.ndarray:
        """Return whether each row, at an event, missed a step."""
        columns = np.maximum(row_steps - self.base_step, 0)
        return self.missed.step_numbers[columns] != self.step_count

    def _adapt_state(self, options: Options) -> None:
        """Adjust the state to frozen options that may be new; no row is stale."""
        self._before_write(None)
        for lo in range(0, self.shape[0], CHUNK):
            part = {name: array[lo : lo + CHUNK] for name, array in self.state.items()}
            for name, new in self.rule.adapted_state(np, options, part).items():
                part[name][:] = new

    def _catch_up(self, table: np.ndarray, ids: np.ndarray | None) -> None:
        """Apply the missed steps to the stale rows among ``ids``, or to all."""
        if self.is_caught_up:
            return
        if ids is not None:
            stale = kernels.stale_rows(ids, self.row_steps, self.event_count)
            self._catch_up_rows(table, *stale)
            return
        for lo in range(0, self.shape[0], CHUNK):
            hi = min(lo + CHUNK, self.shape[0])
            stale = kernels.stale_range(lo, hi, self.row_steps, self.event_count)
            self._catch_up_rows(table, *stale)
        self.base_step = self.event_count

    def _catch_up_rows(
        self, table: np.ndarray, rows: np.ndarray, row_steps: np.ndarray
    ) -> None:
        if not rows.size:
            return
        self._before_write(rows)
        weight, weight_rows = self._to_update(table, rows)
        stale = self._stale_rows(weight, weight_rows, rows, row_steps)
        for average in self.averages:
            average.catch_up(stale, self.missed)
        kernels.catch_up_rows(stale, self.missed)
        self._store(weight, table, rows, rounding_seed=2 * self.step_count)
        kernels.mark_rows(rows, self.row_steps, self.event_count)

    def _stale_rows(
        self,
        weight: np.ndarray,
        weight_rows: np.ndarray,
        state_rows: np.ndarray,
        row_steps: np.ndarray,
    ) -> StaleRows:
        """Return rows and the steps they missed, as the kernels take them."""
        state = tuple(self.state[name] for name in self.missed.names)
        from_step = np.maximum(row_steps - self.base_step, 0)
        return StaleRows(weight, weight_rows, state_rows, state, from_step, self.has_state)

    def _update_rows(
        self, table: np.ndarray, rows: np.ndarray, gradient: np.ndarray, values: Any
    ) -> None:
        self._before_write(rows)
        self.has_state[rows] = True
        if not self.is_caught_up:
            # Otherwise every row is at ``base_step``, whatever its number.
            self.row_steps[rows] = self.event_count
        weight, weight_rows = self._to_update(table, rows)
        state = tuple(self.state[name] for name in self.missed.names)
        kernels.update_rows(RowSlice(weight, weight_rows, rows, state), gradient, values)
        self._store(weight, table, rows, rounding_seed=2 * self.step_count + 1)

    def _upcast(self, table: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an array in the compute dtype with the rows, and their indices in it."""
        if table.dtype == self.dtype:
            return table, rows
        return kernels.upcast_rows(table, rows), np.arange(rows.size)

    def _to_update(
        self, table: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return an array with the rows that kernels update, and their indices in it.

        Kernels round half precision to nearest themselves. Stochastic rounding and averages
        need the rows in float32, which :meth:`_store` writes back.
        """
        if self.stochastic_rounding or self.averages:
            return self._upcast(table, rows)
        return table, rows

    def _store(
        self, weight: np.ndarray, table: np.ndarray, rows: np.ndarray, *, rounding_seed: int
    ) -> None:
        """Write rows that were upcast back to the table."""
        if weight is not table:
            seed = rounding_seed if self.stochastic_rounding else None
            kernels.store_rows(weight, table, rows, noise=seed)

    def _checked(self, weight: np.ndarray, *, writable: bool = True) -> np.ndarray:
        """Return the table if it still fits the state and can be written."""
        dtype = weight.dtype
        fits = dtype == self._table_dtype or (
            is_float(dtype) and dtype.isnative and compute_dtype(dtype) == self.dtype.name
        )
        if weight.shape != self.shape or not fits:
            raise ValueError(
                f"the table must stay {self.shape} in {self.dtype.name} as its state is, "
                f"got {weight.shape} in {dtype.name}; make a new optimizer"
            )
        if writable and not weight.flags.writeable:
            raise ValueError("the table must be writable to be trained, got it read-only")
        return weight

    def _check_arrays(self) -> None:
        """Raise ValueError unless every array of the state fits the table.

        Kernels write to the arrays unchecked, and the arrays can be replaced by others.
        """
        for name, array in self.state.items():
            if array.shape != self.state_shape or array.dtype != self.dtype:
                raise ValueError(
                    f"{name} must be {self.state_shape} in {self.dtype.name} "
                    f"as the table is, got {array.shape} in {array.dtype.name}"
                )
            if not array.flags.carray:
                raise ValueError(f"{name} must be contiguous and writable, got it not so")

    def _add_missing_arrays(self, options: Options) -> None:
        #: Initial value of each array of the state.
        self._initial_state = self.rule.initial_state(options)
        for name, value in self._initial_state.items():
            if name in self.state:
                continue
            if self.stored is not None:
                self.state[name] = self.stored.new_array(name, value)
            else:
                zeros = np.zeros(self.state_shape, self.dtype)
                self.state[name] = np.full_like(zeros, value) if value else zeros


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


def checked_step(name: str, value: Any) -> int:
    """Return a saved number of steps as an int, or raise a ValueError.

    Args:
        name: Name of the number in the error message.
        value: Number, or array of one, of any dtype: files have int32, int64 and float32.

    Example:
        >>> checked_step("step", np.float32(7))
        7
        >>> checked_step("step", -1)
        Traceback (most recent call last):
        ...
        ValueError: step must be a whole number from 0 to 2**62, got -1
    """
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, bool) and 0 <= number <= MAX_STEP:
            if number == int(number):
                return int(number)
    raise ValueError(f"{name} must be a whole number from 0 to 2**62, got {value}")


def check_stored_step(state: TableState, value: Any, *, name: str) -> None:
    """Raise ValueError unless a table on disk is at the step of a saved optimizer.

    Args:
        state: State of the table.
        value: Saved number of steps.
        name: Name of the number in the error message.
    """
    if checked_step(name, value) != state.step_count:
        raise ValueError(
            f"{name} must be {state.step_count} as in the store of the table, got {value}; "
            "open the store at the commit of that step first"
        )


def check_names(
    rule: Rule, names: Iterable[str], *, required: set[str], owner: str
) -> None:
    """Raise ValueError unless a state has the required arrays and none of another rule.

    Args:
        rule: Update rule.
        names: Names of the saved arrays.
        required: Names that must be among them.
        owner: Description of the parameter in the error message.
    """
    names = set(names)
    if required - names or names - rule.array_names:
        expected = sorted(required or rule.array_names)
        raise ValueError(
            f"the state of {owner} must have the arrays {expected}, got {sorted(names)}"
        )
