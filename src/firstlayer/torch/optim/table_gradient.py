"""Gradient of a table in a step: its ids and values, checked against the table's state."""

from typing import Any

import numpy as np
from torch import Tensor

from .._tensors.dtypes import upcast
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, is_plain_cpu
from .._tensors.shard import is_distributed
from .new_state import State
from .operator_state import OperatorState
from .row_operators import sum_by_id
from .sparse_gradient import rows_of
from .stale_tensors import stale_row_message


def table_gradient(state: State, grad: Tensor, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the ids and values of a gradient; ids are None if it is dense.

    They are tensors for an OperatorState, and arrays otherwise. Raises an error unless a
    step with them can run to its end, or if a row was read while stale. In distributed
    runs, stale rows catch up instead.

    Args:
        state: State of the table.
        grad: Gradient of the table.
        options: Options of the rule in this step.
    """
    ids: Any
    if isinstance(state, OperatorState):
        ids, values = _summed(grad) if grad.is_sparse else (None, grad)
    elif grad.is_sparse:
        rows = rows_of(grad)
        # A copy: another thread may change the ids after the check.
        ids, values = rows.ids.astype(np.int64), rows.values
    else:
        ids, values = None, array_of(grad.contiguous())
    with torch_errors():
        state.check_step(ids, values, options=options, ids_name="grad.indices()[0]")  # pyright: ignore
    if is_distributed() and state.has_stale_weights:
        # Other processes may have read these rows.
        if isinstance(state, OperatorState):
            state.catch_up_rows(ids)
        else:
            state.catch_up(ids)
    row = state.first_stale(_nonzero_rows(state, values) if ids is None else ids)
    if row is not None:
        raise RuntimeError(stale_row_message(row))
    return ids, values


def _nonzero_rows(state: State, values: Any) -> Any:
    """Return the rows of a dense gradient that are not zero, or None for all.

    Lookups with a dense gradient read only some rows, and the others may be stale.
    """
    if not state.has_stale_weights:
        return None
    if isinstance(values, Tensor):
        # Their number would have to be read from another device.
        is_on_host = is_plain_cpu(values)
        return values.any(dim=1).nonzero().flatten() if is_on_host else None
    return np.flatnonzero(values.any(axis=1))


def _summed(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids of a sparse gradient, each once, and the sum of the values of each.

    Waits for the device if the gradient is not coalesced.
    """
    ids, values = grad._indices(), upcast(grad._values())
    if ids.shape[0] != 1:
        raise ValueError(f"a row gradient has one sparse axis, got {ids.shape[0]}")
    return (ids[0], values) if grad.is_coalesced() else sum_by_id(ids[0], values)
