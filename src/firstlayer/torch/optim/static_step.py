"""Lookups and steps of a static size by torch operators, for compiled code.

Numbers that change from step to step are tensors (:class:`~.row_tensors.StepTensors`). The
host writes them in ``begin_lookup`` and ``begin_step``. The code in between is traced.
"""

import torch
from torch import Tensor

from ..._interrupts import held_interrupts
from ...optim.missed_steps import host_values
from ...optim.rule import ArrayOps, Options, update_rows
from .operator_state import OperatorState
from .row_operators import sum_by_id_static
from .row_tensors import RowTensors, StepTensors
from .stale_tensors import where_rows


def new_step_tensors(state: OperatorState) -> StepTensors:
    """Return memory for the numbers of a step."""
    count = len(state.missed.step_values)
    return StepTensors(
        state.device_steps.coefficients,
        torch.zeros(count, dtype=state.dtype, device=state.device),
        torch.zeros(3, dtype=torch.int64, device=state.device),
    )


def begin_lookup(
    state: OperatorState, tensors: RowTensors, numbers: StepTensors, ids: Tensor
) -> None:
    """Send the coefficients of missed steps to the device, for a lookup.

    The rows of ``ids`` catch up if steps have to be replayed.

    Args:
        state: State of the table.
        tensors: Tensors of ``state.row_tensors()`` or copies that will replace them.
        numbers: Coefficients and steps to write.
        ids: Rows that will be read or updated; negative ids are ignored.
    """
    with held_interrupts(), state.lock, torch.no_grad():
        state.check(tensors)
        state.write_deferred(tensors)
        steps = state.device_steps
        steps.update()
        if steps.replays:
            state.catch_up_tensors(tensors, state.as_rows(ids))
            state.write_deferred(tensors)
        events = state.base_step, state.event_count, state.last_step_event
        steps.send(torch.tensor(events, device="cpu"), numbers.steps)
        if numbers.coefficients is not steps.coefficients:
            numbers.coefficients.copy_(steps.coefficients)


def begin_step(
    state: OperatorState,
    tensors: RowTensors,
    numbers: StepTensors,
    ids: Tensor,
    options: Options,
) -> None:
    """Send the numbers of a step to the device.

    Every row catches up if no further step can be recorded.

    Args:
        state: As in :func:`begin_lookup`.
        tensors: As in :func:`begin_lookup`.
        numbers: Numbers to write.
        ids: As in :func:`begin_lookup`.
        options: Options of the rule in this step.
    """
    with held_interrupts(), state.lock, torch.no_grad():
        state.rule.check(options)
        frozen = state.rule.frozen_options(options)
        if frozen != state.missed.frozen_options:
            raise ValueError(
                f"options {state.missed.frozen_options} must not change between the "
                f"calls of a RowStep, got {frozen}; call row_step again"
            )
        if state.missed.is_full:
            state.check(tensors)
            state.catch_up_tensors(tensors, None)
        if state.is_caught_up:
            state.restart(options)
        elif state.averages:
            state.check(tensors)
            state.catch_up_tensors(tensors, state.as_rows(ids))
        begin_lookup(state, tensors, numbers, ids)
        values = host_values(state.rule, options, state.step_count + 1)
        host = torch.tensor(values, dtype=state.dtype, device="cpu")
        state.device_steps.send(host, numbers.values)


def static_lookup(
    state: OperatorState, tensors: RowTensors, numbers: StepTensors, ids: Tensor
) -> Tensor:
    """Return rows after their missed steps.

    Args:
        state: As in :func:`begin_lookup`.
        tensors: Tensors of ``state.row_tensors()``.
        numbers: Numbers written by :func:`begin_lookup`.
        ids: Rows, possibly repeated; a negative id reads row 0.
    """
    weight = state.caught_up(tensors, ids.clamp(min=0), numbers)[0]
    return weight.to(tensors.table.dtype)


def static_step(
    state: OperatorState,
    tensors: RowTensors,
    numbers: StepTensors,
    ids: Tensor,
    gradient: Tensor,
) -> None:
    """Catch up and update rows. All sizes follow from the number of ids.

    Args:
        state: As in :func:`begin_lookup`.
        tensors: Tensors of ``state.row_tensors()``.
        numbers: Numbers of the step, written by :func:`begin_step`.
        ids: Rows, possibly repeated; entries with a negative id are left out.
        gradient: Gradient for each id.
    """
    rows, sums = sum_by_id_static(ids, gradient.to(state.dtype))
    has_gradient, rows = rows >= 0, rows.clamp(min=0)
    old = state.caught_up(tensors, rows, numbers)
    values = type(state.missed.step_values)(*numbers.values.unbind())
    new = update_rows(ArrayOps(torch), state.rule, values, old[0], sums, old[1:])
    weight, *others = where_rows(has_gradient, new, old)
    state.write_weight(tensors, rows, weight, None)
    tensors.write_state(rows, others)
    tensors.row_steps.index_copy_(0, rows, numbers.steps[1] + has_gradient)


def end_step(state: OperatorState, options: Options) -> None:
    """Record a step, after :func:`static_step`."""
    with held_interrupts(), state.lock:
        state.record_step(options, every_row=False)
        if state.is_caught_up:
            state.restart(options)
