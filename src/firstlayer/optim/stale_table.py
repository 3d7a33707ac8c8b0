"""Table whose rows may be stale: the step that each row is at, and catching up.

Code that is about to read rows calls :meth:`StaleTable.catch_up`, which applies the missed
steps to the stale ones among them, in place. Rows that are up to date are not written, so a
row keeps the value that was read until the next step. A catch-up changes weights, state and
counters together.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int64

from .. import kernels
from .._array import compute_dtype
from .._check import is_float, out_of_range
from .._interrupts import held_interrupts
from ..kernels.optim.row_slice import StaleRows
from ..stores.training import TrainingStore
from .missed_steps import MissedSteps
from .rule import Options, Rule, State
from .stored_state import RetiredState, StoredState
from .table_events import TableEvents

# Rows per pass when every row is updated: no temporary array is as large as the table.
CHUNK = 1 << 14


class StaleTable(TableEvents):
    """Table and optimizer state, with the event that each row is at.

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
        super().__init__(MissedSteps(rule, options, step), step)
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
        #: For each row, the event it is at; smaller values stand for ``base_step``.
        self.row_steps = np.zeros(self.shape[0], np.int64)
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
        """Return the smallest row of ``ids``, or of all, whose weight is stale, or None."""
        if not self.has_stale_weights:
            return None
        # Another thread may be catching rows up.
        with self.lock:
            step = self.event_count
            if ids is None:
                rows = kernels.stale_range(0, self.shape[0], self.row_steps, step)[0]
            else:
                rows = kernels.stale_rows(ids, self.row_steps, step)[0]
            # Some may have missed no step, only an update of an average.
            rows = rows[self._is_stale(self.row_steps[rows])]
        return int(rows[0]) if rows.size else None

    def _before_write(self, rows: np.ndarray | None) -> None:
        if self.stored is not None:
            self.stored.before_write(rows)

    def on_restored(self) -> None:
        """Adapt to a store that has returned to an earlier commit."""

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
        self.row_steps[rows] = self.event_count

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
        if weight.shape != self.shape:
            raise ValueError(
                f"the table must stay {self.shape} as its state is, got {weight.shape}; "
                "call resize_rows or make a new optimizer"
            )
        if not fits:
            raise ValueError(
                f"the table must stay in {self.dtype.name} as its state is, got "
                f"{dtype.name}; load its state dict into a new optimizer"
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
                self.state[name] = kernels.aligned_zeros(self.state_shape, self.dtype)
                if value:
                    self.state[name][:] = value
