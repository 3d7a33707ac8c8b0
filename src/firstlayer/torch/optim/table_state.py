"""State of a row optimizer on the parameter that it trains.

While a row optimizer in ``mode="exact"`` trains a table, ``parameter.table_state`` is an
:class:`AttachedState`, and the class of the parameter is
:class:`firstlayer.torch._tensors.row_parameter.RowParameter`, which catches up before any
operation reads or writes values. Firstlayer's lookups catch up only the rows that they
read, by :func:`catch_up`; in evaluation they leave the table as it is and get corrected
rows from :func:`caught_up_rows`. In compiled code, either is one operator.
"""

import itertools
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch.compiler import is_dynamo_compiling, is_exporting

from ..._interrupts import held_interrupts
from ...optim.rule import Options, Rule
from ...optim.table_state import TableState
from .._tensors.errors import check_ids
from .._tensors.memory import (
    array_of,
    array_of_table,
    is_eager,
    is_plain_cpu,
    tensor_of,
    threads_of_torch,
)
from .._tensors.row_parameter import (
    ROW_CLASSES,
    WITHOUT_VALUES,
    is_row_tensor,
    without_catch_up,
)
from .._tensors.worker import is_worker, submit

# Larger whole numbers are rounded in float32.
EXACT_IN_FLOAT32 = 1 << 24

# Module state: every living AttachedState by number. A compiled operator takes only
# tensors and numbers as arguments, so it finds the state by its number. The references are
# weak: an entry disappears with its state.
_by_number: "weakref.WeakValueDictionary[int, AttachedState]"
_by_number = weakref.WeakValueDictionary()
_numbers = itertools.count()


class AttachedState:
    """State of a row optimizer that can be attached to the parameter it belongs to.

    Args:
        parameter: Table. Only a weak reference to it is kept.
    """

    step_count: int
    state: dict[str, Any]
    state_shape: tuple[int, int]
    #: Connection to the store of a table on disk.
    stored: Any = None

    def __init__(self, parameter: Tensor) -> None:
        self._owner = weakref.ref(parameter)
        #: Tensors over the memory of the state's arrays, by name, and their addresses.
        self.tensors: dict[str, tuple[Tensor, int]] = {}
        self._step_tensor: Tensor | None = None
        #: Whether the user was told that the gradient of the table is dense.
        self.has_warned = False
        self.number = next(_numbers)
        _by_number[self.number] = self

    @property
    def parameter(self) -> Tensor:
        """Table."""
        return _alive(self._owner)

    @property
    def has_stale_weights(self) -> bool:
        """Whether the weight of some row may be out of date."""
        raise NotImplementedError

    @property
    def needs_catch_up(self) -> bool:
        """Whether rows must catch up before they are read or written."""
        raise NotImplementedError

    def catch_up_rows(self, ids: Tensor | None, *, table: Tensor | None = None) -> None:
        """Apply the missed steps to stale rows of ``ids``, or to all, in place.

        Args:
            ids: Rows, of any shape and possibly repeated; None for all.
            table: Copy of the table to write to, which will replace the table.
        """
        raise NotImplementedError

    def gather_caught_up(self, ids: Tensor, *, table: Tensor | None = None) -> Tensor:
        """Return rows as they are after the missed steps; change nothing.

        Args:
            ids: Rows, of any shape and in range.
            table: Copy of the table to read from.
        """
        raise NotImplementedError

    def publish(self, state: dict[str, Any], *, step_count: int | None = None) -> None:
        """Write the arrays and the number of steps to a parameter's torch state.

        The arrays of a table on disk are files of its store.

        Args:
            state: The parameter's torch state.
            step_count: Number of steps, if the last is still running; None is the state's.
        """
        step_count = self.step_count if step_count is None else step_count
        if self.stored is not None:
            state.clear()
        arrays = self.state if self.stored is None else {}
        for name, array in arrays.items():
            if name not in self.tensors:
                tensor = array if isinstance(array, Tensor) else tensor_of(array)
                self.tensors[name] = tensor, tensor.data_ptr()
            state[name] = self.tensors[name][0]
        step = self._step_tensor
        if step is None or step_count > EXACT_IN_FLOAT32:
            step = self._step_tensor = step_tensor(step_count)
        else:
            # In place, as torch's optimizers do.
            step.fill_(step_count)
        state["step"] = step

    def is_published(self, state: dict[str, Any]) -> bool:
        """Return whether a parameter's torch state is what :meth:`publish` wrote.

        It is not if a tensor was replaced, or the number of steps changed. Values written
        to the tensors are in the memory of the arrays.
        """
        step = self._step_tensor
        if (
            step is None
            or state.get("step") is not step
            or step.item() != float(self.step_count)
        ):
            return False
        for name, (tensor, address) in self.tensors.items():
            if state.get(name) is not tensor or tensor.data_ptr() != address:
                return False
            if tensor.shape != self.state_shape:
                return False
        return True

    def attach(self) -> None:
        """Put this state on the parameter, in place of a previous one."""
        parameter = self.parameter
        detach(parameter)
        parameter.__class__ = ROW_CLASSES[type(parameter)]
        vars(parameter)["table_state"] = self

    def before_access(self, weight: Tensor, ids: Tensor | None = None) -> None:
        """Bring stale rows up to date before they are read or written.

        Args:
            weight: The parameter that this state is attached to.
            ids: Rows; None for all.
        """
        # Not is_compiling(): the compiler itself reads the parameter eagerly.
        if is_dynamo_compiling():
            # An exported program has no optimizer.
            if not is_exporting():
                with torch.no_grad(), without_catch_up():
                    torch.ops.firstlayer.catch_up(weight, ids, self.number)
        elif self.needs_catch_up:
            tracing = _get_tracing_state()
            if tracing is None:
                self.catch_up_rows(ids)
                return
            # torch.jit.trace would record the operations, and sizes would be tensors.
            torch._C._set_tracing_state(None)  # pyright: ignore
            try:
                self.catch_up_rows(ids)
            finally:
                torch._C._set_tracing_state(tracing)  # pyright: ignore


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
            self, rule, lambda: _array_of(_alive(owner)), options=options, **arguments
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
        parameter, gradient = self.parameter, np.array(gradient, self.dtype)
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
        # Interrupted while it waits, the step is still running.
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

    def first_stale(self, ids: np.ndarray | None = None) -> int | None:
        # Another thread changes row_steps for a moment while it lists stale rows.
        with self.lock:
            return super().first_stale(ids)

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


def find_state(number: int) -> AttachedState | None:
    """Return the state that has this number, or None if it no longer exists."""
    return _by_number.get(number)


def detach(parameter: Tensor) -> None:
    """Bring every row up to date and remove the state from the parameter."""
    if is_row_tensor(parameter):
        vars(parameter)["table_state"].catch_up_rows(None)
        del vars(parameter)["table_state"]
        plain = {row: plain for plain, row in ROW_CLASSES.items()}
        parameter.__class__ = plain[type(parameter)]


def catch_up(weight: Any, ids: Tensor | None = None) -> None:
    """Bring stale rows of a table up to date before they are read, in place.

    Does nothing if no row optimizer trains the table.

    Args:
        weight: Table.
        ids: Rows that will be read; None for all.
    """
    if is_row_tensor(weight):
        weight.table_state.before_access(weight, ids)
    elif not is_dynamo_compiling() and torch._C._are_functorch_transforms_active():
        inner = _unwrapped(weight)
        if is_row_tensor(inner):
            inner.table_state.before_access(inner)


def reads_out_of_place(weight: Any, ids: Any, *, training: bool) -> bool:
    """Return whether a lookup leaves stale rows as they are and corrects what it returns.

    That is a lookup in evaluation. If it records a gradient, the rows catch up in place: a
    step updates only rows that are up to date.

    Args:
        weight: Table.
        ids: Ids of the lookup.
        training: Whether the layer is in training mode.
    """
    if training or not is_row_tensor(weight) or is_exporting():
        return False
    if not isinstance(ids, Tensor) or ids.is_nested:
        return False
    with without_catch_up():
        if torch.is_grad_enabled() and weight.requires_grad:
            return False
    # Compiled code cannot depend on whether rows are stale at the time.
    if is_dynamo_compiling():
        return True
    is_plain = is_eager() and type(ids) is Tensor
    return is_plain and weight.table_state.has_stale_weights


def caught_up_rows(weight: Any, ids: Tensor) -> Tensor:
    """Return rows as they are after the steps that they missed; the table stays as it is.

    Args:
        weight: Table for which :func:`reads_out_of_place` is true.
        ids: Rows, int64 or int32 of any shape.
    """
    state = weight.table_state
    if is_dynamo_compiling():
        with without_catch_up():
            return torch.ops.firstlayer.caught_up_rows(weight, ids, state.number)
    with without_catch_up():
        check_ids(ids, weight.shape[0])
    return state.gather_caught_up(ids)


def step_tensor(steps: int) -> Tensor:
    """Return a number of steps as torch's optimizers store it.

    Always on the CPU, where reading it does not synchronize a device, and in float32 as
    long as that is exact: bfloat16 cannot represent 257.
    """
    dtype = torch.float32 if steps <= EXACT_IN_FLOAT32 else torch.float64
    return torch.tensor(float(steps), dtype=dtype, device="cpu")


def _alive(owner: "weakref.ref[Tensor]") -> Tensor:
    parameter = owner()
    if parameter is None:
        raise ReferenceError("the parameter of this optimizer state no longer exists")
    return parameter


def check_class(parameter: Tensor) -> None:
    """Raise TypeError if operations on the parameter cannot be made to catch up."""
    cls = type(parameter)
    if cls not in ROW_CLASSES and cls not in ROW_CLASSES.values():
        raise TypeError(
            f'a table must be a torch.nn.Parameter in mode="exact", got {cls.__name__}'
        )


def _unwrapped(x: Any) -> Any:
    """Return the tensor that transforms of ``torch.func`` have wrapped in ``x``."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    while isinstance(x, Tensor) and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


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


@torch.library.custom_op("firstlayer::catch_up", mutates_args=("weight",))
def _catch_up_operator(weight: Tensor, ids: Tensor | None, number: int) -> None:
    state = _by_number.get(number)
    if state is not None and state.needs_catch_up:
        # Writes to the given tensor, not to the parameter: compiled code may pass a copy
        # and copy it back.
        state.catch_up_rows(ids, table=weight)


@_catch_up_operator.register_fake
def _(weight: Tensor, ids: Tensor | None, number: int) -> None:
    return None


@torch.library.custom_op("firstlayer::caught_up_rows", mutates_args=())
def _caught_up_rows_operator(weight: Tensor, ids: Tensor, number: int) -> Tensor:
    state = _by_number.get(number)
    if state is None or not state.has_stale_weights:
        return torch.embedding(weight, ids)
    check_ids(ids, weight.shape[0])
    return state.gather_caught_up(ids, table=weight)


@_caught_up_rows_operator.register_fake
def _(weight: Tensor, ids: Tensor, number: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


# Compiled code calls the operators with the parameter itself.
WITHOUT_VALUES.update((
    torch.ops.firstlayer.catch_up.default,
    torch.ops.firstlayer.caught_up_rows.default,
))
