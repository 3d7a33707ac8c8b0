"""State of a row optimizer on the parameter that it trains.

While a row optimizer in ``mode="exact"`` trains a table, ``parameter.table_state`` is a
:class:`ParameterState`. Code that is about to read rows calls :func:`catch_up`. Copying or
pickling the parameter catches up first, and the copy has no ``table_state``. In compiled
code, catching up is one operator that mutates the table.
"""

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

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

#: Instance attributes of a parameter that is trained by rows: ``table_state`` is its
#: ParameterState; ``copy`` and ``pickle`` find the other two on the instance before they
#: look at its class.
NAMES = ("table_state", "__deepcopy__", "__reduce_ex__")

# Larger whole numbers are rounded in float32.
EXACT_IN_FLOAT32 = 1 << 24

# Module state: every living ParameterState by number. A compiled operator takes only
# tensors and numbers as arguments, so it finds the state by its number. The references are
# weak: an entry disappears with its state.
_by_number: "weakref.WeakValueDictionary[int, ParameterState]"
_by_number = weakref.WeakValueDictionary()
_numbers = itertools.count()


class ParameterState(TableState):
    """State of a parameter under a row optimizer.

    Args:
        parameter: Table. Only a weak reference to it is kept.
        rule: Update rule.
        options: Current options of the rule.
        arguments: Further arguments of :class:`firstlayer.optim.table_state.TableState`.
    """

    def __init__(
        self, parameter: Tensor, rule: Rule, *, options: Options, **arguments: Any
    ) -> None:
        # The closure refers to the weak reference, not to ``self``: no reference cycle.
        owner = self._owner = weakref.ref(parameter)
        super().__init__(
            rule, lambda: _array_of(_alive(owner)), options=options, **arguments
        )
        #: Tensors over the memory of the state's arrays, by name, and their addresses.
        self.tensors: dict[str, tuple[Tensor, int]] = {}
        self._step_tensor: Tensor | None = None
        #: Ids of lookups whose rows catch up in the table before the next step.
        self.deferred_ids: list[np.ndarray] = []
        self.number = next(_numbers)
        _by_number[self.number] = self

    @property
    def parameter(self) -> Tensor:
        """Table."""
        return _alive(self._owner)

    def publish(self, state: dict[str, Any]) -> None:
        """Write the arrays and the number of steps to a parameter's torch state."""
        for name, array in self.state.items():
            if name not in self.tensors:
                tensor = tensor_of(array)
                self.tensors[name] = tensor, tensor.data_ptr()
            state[name] = self.tensors[name][0]
        step = self._step_tensor
        if step is None or self.step_count > EXACT_IN_FLOAT32:
            step = self._step_tensor = step_tensor(self.step_count)
        else:
            # In place, as torch's optimizers do.
            step.fill_(self.step_count)
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
        values = self, self._deepcopy, self._reduce
        vars(parameter).update(zip(NAMES, values, strict=True))

    def defer_catch_up(self, ids: np.ndarray) -> None:
        """Catch up rows that were read from a copy later, but before the next step.

        Another thread may call :meth:`catch_up_deferred` in the meantime. Whoever reads the
        rows from the table first catches them up, and the result is the same.
        """
        self.deferred_ids.append(ids)

    def catch_up_deferred(self) -> None:
        """Catch up the rows of :meth:`defer_catch_up`."""
        if not self.deferred_ids:
            return
        with held_interrupts(), self.lock:
            # Another tensor of the same memory, which lives as long as it is written to.
            with torch._C.DisableTorchFunctionSubclass():
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

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        self.catch_up()
        parameter = self.parameter
        return type(parameter).__deepcopy__(parameter, memo)

    def _reduce(self, protocol: Any) -> Any:
        self.catch_up()
        parameter = self.parameter
        plain = Parameter(parameter.data, parameter.requires_grad)
        others = {key: value for key, value in vars(parameter).items() if key not in NAMES}
        vars(plain).update(others)
        return plain.__reduce_ex__(protocol)


def detach(parameter: Tensor) -> None:
    """Bring every row up to date and remove the state from the parameter."""
    table_state = getattr(parameter, "table_state", None)
    if isinstance(table_state, ParameterState):
        table_state.catch_up()
        for name in NAMES:
            vars(parameter).pop(name, None)


def catch_up(weight: Tensor, ids: Tensor | None = None) -> None:
    """Bring stale rows of a table up to date before they are read, in place.

    Does nothing if no row optimizer trains the table.

    Args:
        weight: Table.
        ids: Rows that will be read; None for all.
    """
    table_state = getattr(weight, "table_state", None)
    # Not a test for None: a traced proxy of a table has every attribute.
    if not isinstance(table_state, ParameterState):
        return
    if torch.compiler.is_compiling():
        # An exported program has no optimizer.
        if not torch.compiler.is_exporting():
            with torch.no_grad():
                torch.ops.firstlayer.catch_up(weight, ids, table_state.number)
    elif table_state.has_stale_weights:
        table_state.catch_up(_index(ids))


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


def _array_of(weight: Tensor) -> np.ndarray:
    """Return a table as an array of the same memory, or raise if it has none."""
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
            f"{needed * weight.itemsize} bytes, got {weight.untyped_storage().nbytes()}"
        )
    return array_of_table(weight)


def _index(ids: Tensor | None) -> np.ndarray | None:
    """Return ids as kernels take them, or None if their values cannot be read."""
    if ids is None or not is_plain_cpu(ids):
        return None
    return np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)


@torch.library.custom_op("firstlayer::catch_up", mutates_args=("weight",))
def _catch_up_operator(weight: Tensor, ids: Tensor | None, number: int) -> None:
    table_state = _by_number.get(number)
    if table_state is not None and table_state.has_stale_weights:
        # Writes to the given tensor, not to the parameter: compiled code may pass a copy
        # and copy it back.
        table_state.catch_up(_index(ids), table=_array_of(weight))


@_catch_up_operator.register_fake
def _(weight: Tensor, ids: Tensor | None, number: int) -> None:
    return None
