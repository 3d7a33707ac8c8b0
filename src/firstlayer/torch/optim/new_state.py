"""States of tables: those of new tables, and those that continue from another."""

from typing import Any

import torch
from torch import Tensor

from ...optim.rule import Rule
from ...optim.saved_state import check_stored_step, checked_step
from ...stores.training import TrainingStore
from .._tensors.dtypes import FLOATS, compute_dtype, dtype_name, upcast
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of
from .operator_state import OperatorState
from .parameter_state import ParameterState
from .saved_state import saved_arrays
from .stored import store_of

#: State of a table.
State = ParameterState | OperatorState


def current_state(
    parameter: Tensor,
    rule: Rule,
    group: dict[str, Any],
    *,
    saved: dict[str, Any],
    known: State | None,
    by_kernels: bool,
) -> State:
    """Return the known state of a table if it is up to date, otherwise a new one.

    Args:
        parameter: Table.
        rule: Update rule.
        group: Parameter group of the table.
        saved: The table's torch state.
        known: State of the table until now.
        by_kernels: Whether kernels update the rows, and not operators. Those of a table on
            disk always do.
    """
    store = store_of(parameter)
    if store is not None:
        return _stored_state(parameter, rule, group, saved=saved, known=known, store=store)
    if known is not None:
        is_random = _rounds_at_random(parameter, group)
        has_changed = (known.rule.lazy, known.stochastic_rounding) != (rule.lazy, is_random)
        if has_changed or not known.is_published(saved):
            # The mode or the state was changed; missed steps belong to the old one.
            known.catch_up()
            known = None
        elif by_kernels and isinstance(known, ParameterState):
            return known
        elif isinstance(known, OperatorState) and known.device == parameter.device:
            if not by_kernels:
                return known
    return _new_state(
        parameter, rule, group, saved=saved, known=known, by_kernels=by_kernels
    )


def _new_state(
    parameter: Tensor,
    rule: Rule,
    group: dict[str, Any],
    *,
    saved: dict[str, Any],
    known: State | None,
    by_kernels: bool,
) -> State:
    """Return a state of a table in memory.

    ``known`` is on another device or in another layout. Its stale rows stay stale.
    """
    if parameter.dtype not in FLOATS or parameter.dim() != 2:
        raise ValueError(
            f"a table must be real and have 2 axes, got {dtype_name(parameter.dtype)} "
            f"{tuple(parameter.shape)}"
        )
    if isinstance(known, OperatorState):
        known.write_deferred()
    arrays = saved_arrays(saved, parameter, rule, required=set(), owner="a table")
    # Copied: the tensors of a loaded state may belong to another optimizer.
    copies: dict[str, Any] = {
        name: value.detach().to(
            "cpu" if by_kernels else parameter.device,
            compute_dtype(parameter.dtype),
            copy=known is None,
            memory_format=torch.contiguous_format,
        )
        for name, value in arrays.items()
    }
    if by_kernels:
        copies = {name: array_of(value) for name, value in copies.items()}
    with torch_errors():
        state = (ParameterState if by_kernels else OperatorState)(
            parameter,
            rule,
            options=group,
            stochastic_rounding=_rounds_at_random(parameter, group),
            state=copies or None,
            step=checked_step("step", saved.get("step", int(bool(arrays)))),
        )
    if known is not None:
        state.continue_from(known)
    return state


def _stored_state(
    parameter: Tensor,
    rule: Rule,
    group: dict[str, Any],
    *,
    saved: dict[str, Any],
    known: State | None,
    store: TrainingStore,
) -> ParameterState:
    """Return the state of a table on disk, which continues from its store."""
    arrays = saved_arrays(saved, parameter, rule, required=set(), owner="a table")
    if not isinstance(known, ParameterState) or not known.is_in_use or arrays:
        # Arrays of a table in memory, which are copied to the store.
        given = {name: array_of(upcast(array)) for name, array in arrays.items()}
        with torch_errors():
            known = ParameterState(
                parameter,
                rule,
                options=group,
                stochastic_rounding=_rounds_at_random(parameter, group),
                state=given or None,
                step=checked_step("step", saved.get("step", int(bool(arrays)))),
                store=store,
            )
    if "step" in saved:
        check_stored_step(known, saved["step"], name="step")
    return known


def _rounds_at_random(parameter: Tensor, group: dict[str, Any]) -> bool:
    return group["stochastic_rounding"] and parameter.dtype == torch.bfloat16
