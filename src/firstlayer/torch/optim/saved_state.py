"""Saved states of optimizers: checks against their parameters, and lost precision."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim.rule import Rule
from ...optim.saved_state import check_names, check_stored_step, checked_step
from .._tensors.dtypes import HALF, dtype_name
from .._tensors.errors import torch_errors


def saved_arrays(
    saved: dict[str, Any],
    parameter: Tensor,
    rule: Rule,
    *,
    required: set[str],
    owner: str,
) -> dict[str, Tensor]:
    """Return the arrays of a parameter's saved state, or raise if they do not fit it.

    Args:
        saved: State of a parameter, as in ``Optimizer.state``.
        parameter: Parameter, which may be a table or not.
        rule: Update rule.
        required: Names of arrays that the state must have.
        owner: Description of the parameter in error messages.
    """
    # torch.optim.SGD without momentum has None for its buffer.
    arrays = {
        name: value
        for name, value in saved.items()
        if name != "step" and (isinstance(value, Tensor) or name in rule.array_names)
    }
    arrays = {name: value for name, value in arrays.items() if value is not None}
    with torch_errors():
        check_names(rule, arrays, required=required, owner=owner)
        if "step" in saved:
            checked_step(f"step of {owner}", saved["step"])
        elif arrays and rule.depends_on_step:
            raise ValueError(f"the state of {owner} must have step, got {sorted(saved)}")
    shapes = [tuple(parameter.shape)]
    if parameter.dim() == 2 and rule.state_width(2) == 1:
        shapes.append((shapes[0][0], 1))
    for name, value in arrays.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not is_dense or value.is_meta or value.is_nested:
            kind = type(value).__name__
            raise ValueError(f"{name} of {owner} must be a dense tensor, got {kind}")
        if tuple(value.shape) not in shapes or not _is_number(value, parameter):
            raise ValueError(
                f"{name} of {owner} must be real of shape {shapes[-1]}, "
                f"got {dtype_name(value.dtype)} of shape {tuple(value.shape)}"
            )
    return arrays


def _is_number(value: Tensor, parameter: Tensor | None) -> bool:
    """Return whether a tensor is real, or complex as its parameter is."""
    is_complex = parameter is not None and parameter.is_complex() and value.is_complex()
    return value.is_floating_point() or is_complex


def check_tensors(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> None:
    """Raise ValueError for arrays that torch could not copy, or would cast to real.

    Args:
        state_dict: Saved state of an optimizer.
        parameters: Parameters of the optimizer, in order.
    """
    by_number = dict(zip(parameter_numbers(state_dict), parameters, strict=False))
    for number, saved in state_dict["state"].items():
        if not isinstance(saved, dict):
            kind = type(saved).__name__
            raise ValueError(f"the state of parameter {number} must be a dict, got {kind}")
        for name, value in saved.items():
            if isinstance(value, Tensor) and name != "step":
                is_number = _is_number(value, by_number.get(number))
                if value.is_meta or value.is_nested or not is_number:
                    raise ValueError(
                        f"{name} of parameter {number} must be real and have values, "
                        f"got {dtype_name(value.dtype)} on {value.device}"
                    )


def check_stored_steps(
    state_dict: dict[str, Any],
    parameters: Sequence[Tensor],
    states: Mapping[Tensor, Any],
) -> None:
    """Raise ValueError if a table on disk is at another step than a saved state.

    Args:
        state_dict: Saved state of an optimizer.
        parameters: Parameters of the optimizer, in order.
        states: States of those that are tables.
    """
    for number, parameter in zip(parameter_numbers(state_dict), parameters, strict=False):
        saved, state = state_dict["state"].get(number), states.get(parameter)
        if saved and saved.keys() == {"step"} and state is not None:
            if state.stored is not None:
                check_stored_step(state, saved["step"], name="step")


def restore_float32(
    state_dict: dict[str, Any],
    parameters: Sequence[Tensor],
    states: dict[Tensor, dict[str, Any]],
) -> None:
    """Restore float32 states of half-precision parameters, which torch downcasts.

    Args:
        state_dict: Saved state that torch has loaded.
        parameters: Parameters of the optimizer, in order.
        states: Their states, which are changed.
    """
    for number, parameter in zip(parameter_numbers(state_dict), parameters, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if parameter.dtype in HALF and isinstance(value, Tensor):
                device = "cpu" if name == "step" else parameter.device
                states[parameter][name] = value.to(device, copy=True)


def parameter_numbers(state_dict: dict[str, Any]) -> list[int]:
    """Return the numbers of the parameters of a saved state, in order."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]
