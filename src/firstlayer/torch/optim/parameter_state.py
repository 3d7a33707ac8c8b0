"""State of a contiguous table on the CPU, whose rows kernels update."""

import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
from torch import Tensor

from ..._interrupts import held_interrupts
from ...optim.rule import Options, Rule
from ...optim.table_state import TableState
from .._tensors.memory import (
    array_of,
    array_of_table,
    is_plain_cpu,
    tensor_of,
    threads_of_torch,
)
from .._tensors.row_parameter import without_catch_up
from .._tensors.worker import is_worker, submit
from .table_state import AttachedState, alive, check_class


class ParameterState(TableState, AttachedState):
    """State of a contiguous table on the CPU, whose rows kernels update.

    Args:
        parameter: Table. Only a weak reference to it is kept.
        rule: Update rule.
        options: Current options of the rule.
        arguments: Further arguments of :class:`firstlayer.optim.table_state.TableState`.
    """

    #: Step that the worker takes, until it is known to be done.
    _running: "Future[None] | None" = None

    def __init__(
        self, parameter: Tensor, rule: Rule, *, options: Options, **arguments: Any
    ) -> None:
        AttachedState.__init__(self, parameter)
        # The closure refers to the weak reference, not to ``self``: no reference cycle.
        owner = self._owner
        TableState.__init__(
            self, rule, lambda: _array_of(alive(owner)), options=options, **arguments
        )
        if not rule.lazy:
            check_class(parameter)
        #: Ids of lookups whose rows catch up in the table before the next step.
        self.deferred_ids: list[np.ndarray] = []

    @property
    def is_caught_up(self) -> bool:
        """Whether weight and state of every row are up to date."""
        self.finish_step()
        return super().is_caught_up

    @property
    def has_stale_weights(self) -> bool:
        """Whether the weight of some row may be out of date."""
        self.finish_step()
        return super().has_stale_weights

    def step_in_background(
        self, ids: np.ndarray | None, gradient: np.ndarray, *, options: Options
    ) -> None:
        """Take a step on the worker thread; the next read of the table waits for it.

        Args:
            ids: As in :meth:`firstlayer.optim.table_state.TableState.step`.
            gradient: As there; copied.
            options: As there.
        """
        parameter, gradient = self.parameter, gradient.copy()
        # Schedules write to a tensor of the learning rate in place.
        options = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        if not isinstance(self.lock, _FinishingLock):
            self.lock = _FinishingLock(self)

        def run(_: Tensor = parameter) -> None:
            # The default argument keeps the table alive while it is written to.
            TableState.step(self, ids, gradient, options=options)

        self._running = submit(run)
        if self._running.cancelled():
            self._running = None
            self.step(ids, gradient, options=options)

    def finish_step(self) -> None:
        """Wait for a step that the worker takes, and raise its error, if any."""
        running = self._running
        if running is None or is_worker():
            return
        # An interrupt here leaves the step running, so ``_running`` is reset afterwards.
        error = running.exception()
        self._running = None
        if error is not None:
            # The step was published when it was submitted.
            self.on_restored()
            raise error

    def is_published(self, state: dict[str, Any]) -> bool:
        self.finish_step()
        return super().is_published(state)

    def catch_up_rows(self, ids: Tensor | None, *, table: Tensor | None = None) -> None:
        """Apply the missed steps to stale rows; see :class:`AttachedState`."""
        self.catch_up(_index(ids), table=None if table is None else _array_of(table))

    def gather_caught_up(self, ids: Tensor, *, table: Tensor | None = None) -> Tensor:
        """Return rows after the missed steps; see :class:`AttachedState`."""
        array = None if table is None else _array_of(table)
        index = np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
        with threads_of_torch():
            rows = self.caught_up_rows(index, table=array)
        return tensor_of(rows).view(*ids.shape, self.shape[1])

    def continue_from(self, other: Any) -> None:
        """Take over which rows of the table are stale, and the steps they missed.

        Args:
            other: State of the same table, a :class:`ParameterState` or a
                :class:`firstlayer.torch.optim.operator_state.OperatorState`.
        """
        row_steps = other.row_steps
        if isinstance(row_steps, Tensor):
            row_steps = array_of(row_steps.cpu())
        self.row_steps = row_steps
        self.step_count, self.base_step = other.step_count, other.base_step
        self.event_count = other.event_count
        self.missed, self._missed_moves = other.missed, other._missed_moves
        self.averages = other.averages
        for average in other.averages:
            average.move_to(self.parameter.device)
        if isinstance(other, ParameterState):
            self.deferred_ids = other.deferred_ids

    def on_restored(self) -> None:
        """Publish the number of steps again, which is smaller than it was."""
        if self._step_tensor is not None:
            self._step_tensor.fill_(self.step_count)

    def resize_rows(self, kept: np.ndarray, num_rows: int, options: Options) -> None:
        """Follow a table whose rows were selected, reordered or added."""
        super().resize_rows(kept, num_rows, options)
        self.tensors.clear()
        # All rows were up to date when the table was resized.
        self.deferred_ids.clear()

    def defer_catch_up(self, ids: np.ndarray) -> None:
        """Catch up rows that were read from a copy later, but before the next step.

        Another thread may call :meth:`catch_up_deferred` in the meantime. The first
        read of the rows from the table catches them up, and the result is the same.
        """
        self.deferred_ids.append(ids)

    def catch_up_deferred(self) -> None:
        """Catch up the rows of :meth:`defer_catch_up`."""
        if not self.deferred_ids:
            return
        with held_interrupts(), self.lock:
            # Another tensor of the same memory, which lives as long as it is written to.
            with without_catch_up():
                table = self._checked(_array_of(self.parameter.detach()))
            self._check_arrays()
            while self.deferred_ids:
                super()._catch_up(table, self.deferred_ids[0])
                # Other threads add to the end.
                del self.deferred_ids[0]

    def check_step(self, *args: Any, **options: Any) -> None:
        with threads_of_torch():
            self.catch_up_deferred()
        super().check_step(*args, **options)

    def _catch_up(self, table: np.ndarray, ids: np.ndarray | None) -> None:
        with threads_of_torch():
            super()._catch_up(table, ids)


class _FinishingLock:
    """Lock of a state, entered when the worker has taken the state's step.

    Args:
        state: The state.
    """

    def __init__(self, state: ParameterState) -> None:
        self._state = weakref.proxy(state)
        self._lock: Any = state.lock

    def __enter__(self) -> None:
        self._state.finish_step()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _array_of(weight: Tensor) -> np.ndarray:
    """Return a table as an array of the same memory, or raise if it has none."""
    with without_catch_up():
        if not weight.is_cpu or not weight.is_contiguous():
            raise ValueError(
                "a table must be on the CPU and contiguous, "
                f"got one on {weight.device} with strides {weight.stride()}"
            )
        # The memory can be freed, as FSDP does.
        needed = weight.storage_offset() + weight.numel()
        if weight.untyped_storage().nbytes() < needed * weight.itemsize:
            raise ValueError(
                f"a table must have its memory to be trained, which takes "
                f"{needed * weight.itemsize} bytes, "
                f"got {weight.untyped_storage().nbytes()}"
            )
        return array_of_table(weight)


def _index(ids: Tensor | None) -> np.ndarray | None:
    """Return ids as kernels take them, or None if their values cannot be read."""
    if ids is None or not is_plain_cpu(ids):
        return None
    return np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
