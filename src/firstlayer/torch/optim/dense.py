"""Dense optimizer from the specification of a rule, for parameters that are not tables.

Torch's own optimizer of a rule is used instead where there is one.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...optim.missed_steps import host_values
from ...optim.rule import ArrayOps, RowOptions, update_rows
from .table_state import step_tensor


class DenseOptimizer(torch.optim.Optimizer):
    """Optimizer of dense gradients that executes an update rule with torch operators.

    Args:
        params: Parameters or parameter groups.
        options_class: Options of a rule with a state for each entry.
        options: Options of the rule, by name.
    """

    def __init__(
        self, params: Iterable[Any], *, options_class: type[RowOptions], **options: Any
    ) -> None:
        self.rule = options_class.rule_class()
        super().__init__(params, options_class(**options).hyperparameters())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, names = self.state[parameter], self.rule.initial_state(group)
        for name, initial in names.items():
            if name not in state:
                state[name] = torch.full_like(parameter, initial)
        step = int(state.get("step", 0)) + 1
        values = host_values(self.rule, group, step)
        arrays = [state[name] for name in names]
        weight, gradient = parameter, parameter.grad
        updated = update_rows(ArrayOps(torch), self.rule, values, weight, gradient, arrays)
        for old, new in zip((parameter, *arrays), updated, strict=True):
            old.copy_(new)
        if self.rule.depends_on_step:
            state["step"] = step_tensor(step)
