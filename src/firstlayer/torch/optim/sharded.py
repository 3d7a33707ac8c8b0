"""State of sharded tables: DTensors in state dicts, and arrays before the first step.

``torch.distributed.checkpoint`` loads into tensors that exist. An optimizer without state
would get it from a step on gradients of zeros, which are as large as the tables.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim.rule import Rule
from .._tensors.shard import TableShard, shard_of
from .saved_state import parameter_numbers


def to_dtensors(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return a state dict of an optimizer in which arrays of shards are DTensors.

    Args:
        state_dict: State dict with this rank's arrays.
        parameters: Parameters of the optimizer, in order.
    """

    def convert(shard: TableShard, name: str, array: Tensor) -> Tensor:
        return shard.to_dtensor(array)

    return _convert(state_dict, parameters, convert)


def to_local(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return a state dict of an optimizer in which arrays of shards are this rank's.

    Args:
        state_dict: State dict with DTensors, or with the arrays of whole tables.
        parameters: Parameters of the optimizer, in order.
    """

    def convert(shard: TableShard, name: str, array: Tensor) -> Tensor:
        return shard.to_local(array, name=name)

    return _convert(state_dict, parameters, convert)


def check_whole_rows(parameter: Tensor, rule: Rule) -> None:
    """Raise if a rule has one number for each row, and a rank only some columns.

    Args:
        parameter: Parameter, which may be a shard or not.
        rule: Update rule.
    """
    shard = shard_of(parameter)
    is_part = shard is not None and not shard.has_whole_rows
    if is_part and rule.state_width(2) == 1:
        raise ValueError(
            "an optimizer with one number for each row needs whole rows, "
            "got a table whose columns are sharded"
        )


@torch.no_grad()
def create_dense_state(optimizer: Any, dense: torch.optim.Optimizer) -> None:
    """Create the state of parameters that are not tables, if another one is sharded.

    Args:
        optimizer: Row optimizer without state of such parameters.
        dense: Torch's optimizer, which updates them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(shard_of(p) is None or p.is_meta for p in parameters):
        return
    placeholders, groups = {}, []
    for group in optimizer.param_groups:
        # With dampening, a momentum of zeros is not what the first step starts from.
        others = [
            p
            for p in group["params"]
            if shard_of(p) is None and p.requires_grad and not group.get("dampening")
        ]
        for parameter in others:
            # Not the parameter itself, which a step without epsilon would change.
            placeholder = torch.zeros_like(parameter)
            placeholder.grad = torch.zeros_like(parameter)
            placeholders[parameter] = placeholder
        params = [placeholders[p] for p in others]
        groups.append({**group, "params": params, "lr": 0.0})
    if placeholders:
        dense.param_groups = groups
        dense.step()
    for parameter, placeholder in placeholders.items():
        state = dense.state.pop(placeholder, {})
        if "step" in state:
            state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))
        if state:
            optimizer.state[parameter] = state


def _convert(
    state_dict: dict[str, Any],
    parameters: Sequence[Tensor],
    convert: Callable[[TableShard, str, Tensor], Tensor],
) -> dict[str, Any]:
    """Return a copy of a state dict in which arrays of shards are converted."""
    numbers = parameter_numbers(state_dict)
    shards = dict(zip(numbers, map(shard_of, parameters), strict=False))
    if not any(shard is not None for shard in shards.values()):
        return state_dict
    states = {}
    for number, saved in state_dict["state"].items():
        shard = shards.get(number)
        if shard is not None and isinstance(saved, dict):
            saved = {
                name: convert(shard, name, value)
                if isinstance(value, Tensor) and value.dim() == 2
                else value
                for name, value in saved.items()
            }
        states[number] = saved
    return {**state_dict, "state": states}
