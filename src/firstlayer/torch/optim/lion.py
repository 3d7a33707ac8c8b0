"""Lion for parameters that are no tables (Chen et al. 2023, arXiv 2302.06675)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Moves weights by the sign of an average of gradients.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: What of the average moves a weight, and what of it is kept.
        weight_decay: What part of a weight, times ``lr``, a step takes away.
        maximize: Climb instead.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        decay = {"weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, "betas": betas, **decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2), state = group["lr"], group["betas"], self.state[parameter]
        grad: Any = parameter.grad
        grad = -grad if group["maximize"] else grad
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(torch.lerp(grad, mean, beta1).sign_().mul_(lr))
        mean.lerp_(grad, 1 - beta2)
