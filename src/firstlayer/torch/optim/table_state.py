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
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch.compiler import is_dynamo_compiling, is_exporting

from .._tensors.errors import check_ids
from .._tensors.memory import is_eager, tensor_of
from .._tensors.row_parameter import (
    ROW_CLASSES,
    WITHOUT_VALUES,
    is_row_tensor,
    without_catch_up,
)

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
        #: Number of exact steps that increased the version of the parameter. Prefetched
        #: rows see these steps in the state, and all other changes in the version.
        self.num_steps_in_version = 0
        self.number = next(_numbers)
        _by_number[self.number] = self

    @property
    def parameter(self) -> Tensor:
        """Table."""
        return alive(self._owner)

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


def alive(owner: "weakref.ref[Tensor]") -> Tensor:
    """Return a parameter, or raise ReferenceError if it no longer exists."""
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


# Compiled code calls these operators with the parameter itself, and they catch up.
WITHOUT_VALUES.update((
    torch.ops.firstlayer.catch_up.default,
    torch.ops.firstlayer.caught_up_rows.default,
))
