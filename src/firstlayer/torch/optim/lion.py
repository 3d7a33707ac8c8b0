"""Lion for parameters that are not tables (Chen et al. 2023, arXiv 2302.06675)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Updates weights by the sign of an average of gradients.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the average: in the update, and in the stored state.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        maximize: bool,
    ) -> None:
        decay = {"weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, "betas": betas, **decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> None:
        lr, (beta1, beta2), state = group["lr"], group["betas"], self.state[parameter]
        grad = -grad if group["maximize"] else grad
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(torch.lerp(grad, mean, beta1).sign_().mul_(lr))
        mean.lerp_(grad, 1 - beta2)
