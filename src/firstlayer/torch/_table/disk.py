"""Tables of torch layers that are trained on disk.

The table is a Parameter over the mapped file of a training store, which is its attribute
``row_store``. Row optimizers journal the rows that they change; the functions here do so
for other writes, raise an error for casts and moves, which would take the table out of its
file, and put the commit instead of the values into state dicts.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...optim.rule import Options, Rule
from ...optim.stored_state import resumed_state
from ...stores.training import TrainingStore
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, tensor_of
from ..optim.parameter_state import ParameterState
from ..optim.stored import store_of

Layer = TypeVar("Layer")

#: Suffix of a table's name in a state dict for the reference to its store.
REFERENCE = ".store"

# Module state: a hook that torch calls before the step of every optimizer, installed with
# the first table on disk.
_step_hooks: list[Any] = []


def layer_on_disk(
    layer_class: Callable[..., Layer], store: TrainingStore, **options: Any
) -> Layer:
    """Return a layer whose table is that of a training store, with sparse gradients.

    Args:
        layer_class: Class of the layer.
        store: The store.
        options: Further arguments of the layer.
    """
    for name in ("_weight", "device", "dtype"):
        if options.get(name) is not None:
            raise TypeError(f"{name} must not be given, since the table is in {store.path}")
    options = {"sparse": True, **options}
    layer: Any = layer_class(*store.shape, _weight=tensor_of(store.array), **options)
    parameter = layer.weight

    def refuse(*arguments: Any) -> Any:
        raise _refusal(store, "copied or pickled")

    # ``copy`` and ``pickle`` find these on the instance before they look at its class.
    names = {"row_store": store, "__deepcopy__": refuse, "__reduce_ex__": refuse}
    vars(parameter).update(names)
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_check_optimizer))

    def state(rule: Rule, options: Options, **arguments: Any) -> ParameterState:
        return ParameterState(parameter, rule, options=options, **arguments)

    # Rows may be stale from an earlier run, and no optimizer may follow.
    resumed = resumed_state(store, state)
    if resumed is not None:
        resumed.attach()
    return layer


def before_write(weight: Any, rows: Tensor | int | None = None) -> None:
    """Journal rows of a table that are about to change, if it is on disk.

    Args:
        weight: The table.
        rows: Row numbers; None for all.
    """
    store = store_of(weight)
    if store is not None:
        if isinstance(rows, int):
            rows = torch.tensor([rows], device="cpu")
        index = None if rows is None else array_of(rows.contiguous())
        store.before_write(None if index is None else index.astype(np.int64))


def refuse_resize(weight: Any) -> None:
    """Raise an error if a table is on disk, or if averages replace its weights."""
    store = store_of(weight)
    if store is not None:
        raise _refusal(store, "resized")
    state = vars(weight).get("table_state")
    if state is not None:
        with torch_errors():
            state.check_resize()


def is_left_in_place(weight: Any, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a table is on disk, so that ``Module._apply`` must skip it.

    A function that would cast it or move it to another device is a TypeError.
    """
    store = store_of(weight)
    if store is None:
        return False
    probe = torch.empty(1, dtype=weight.dtype, device=weight.device)
    result = fn(probe)
    if result.dtype != probe.dtype or result.device != probe.device:
        raise _refusal(store, f"cast or moved to {result.dtype} on {result.device}")
    return True


def save_reference(weight: Any, destination: dict[str, Any], name: str) -> bool:
    """Put path and commit into a state dict if a table is on disk; return whether it is.

    Args:
        weight: The table.
        destination: State dict.
        name: Name of the table in it.
    """
    store = store_of(weight)
    if store is None:
        return False
    destination[name + REFERENCE] = tensor_of(store.reference())
    return True


def load_reference(
    weight: Any,
    state: dict[str, Any],
    name: str,
    errors: list[str],
    *,
    is_assigned: bool = False,
) -> bool:
    """Return a store to the commit in a state dict; return False if there is none.

    Args:
        weight: The table.
        state: State dict.
        name: Name of the table in it.
        errors: List that a message is appended to if the store cannot return.
        is_assigned: Whether tensors of the state dict replace the parameters.
    """
    store = store_of(weight)
    if store is None:
        return False
    if name + REFERENCE not in state:
        if name in state and is_assigned:
            errors.append(str(_refusal(store, "replaced by assign=True")))
            return True
        if name in state:
            store.before_write()
        return False
    try:
        value = state[name + REFERENCE]
        array = array_of(value.cpu()) if isinstance(value, Tensor) else value
        store.load_reference(array, name=name + REFERENCE)
    except ValueError as error:
        errors.append(str(error))
    return True


def _refusal(store: TrainingStore, action: str) -> TypeError:
    return TypeError(
        f"a table on the store at {store.path} cannot be {action}; use state_dict(), or "
        "copy its values to a layer in memory"
    )


def _check_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise TypeError if an optimizer would write to a table on disk unjournalled."""
    from ..optim.row_optimizer import RowOptimizer

    if isinstance(optimizer, RowOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            store = store_of(parameter)
            if store is not None and parameter.grad is not None:
                raise TypeError(
                    f"the table on the store at {store.path} must be trained by a row "
                    f"optimizer of firstlayer.torch.optim, got {type(optimizer).__name__}"
                )
