"""Options, dense reference optimizers and schedules for tests of row optimizers.

The loss of a row is half its squared distance to a random goal that changes in every step.
Gradients therefore depend on the weights, so reading a stale row shows, and do not vanish:
with vanishing gradients Adam's direction is noise, and rounding errors grow without bound.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

ROWS, WIDTH, BATCH = 40, 3, 4
#: Options of each optimizer, every one of them at a value that is not its default.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.05, "weight_decay": 0.02},
        {"lr": 0.05, "momentum": 0.9},
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
    ],
    "Adagrad": [{"lr": 0.3, "lr_decay": 0.01, "eps": 1e-3, "maximize": True}]
    + [{"lr": 0.3, "initial_accumulator_value": 0.1}],
    "Adam": [{"lr": 0.02}, {"lr": 0.02, "betas": (0.8, 0.99), "amsgrad": True}]
    + [{"lr": 0.01, "betas": (0.5, 0.0), "eps": 0.1}],
    "AdamW": [
        {"lr": 0.02, "weight_decay": 0.1},
        {"lr": 0.02, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-3},
        {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True, "eps": 1e-2},
        {"lr": 0.02, "weight_decay": 0.3, "betas": (0.95, 0.8), "eps": 1e-6},
        {"lr": 0.002, "maximize": True, "betas": (0.0, 0.9)},
    ],
    "RMSprop": [
        {"lr": 0.01, "alpha": 0.95, "eps": 1e-3},
        {"lr": 0.002, "alpha": 0.9, "momentum": 0.8},
        {"lr": 0.002, "centered": True, "momentum": 0.8, "maximize": True},
    ],
    "Lion": [
        {"lr": 0.01},
        {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "maximize": True},
    ],
    "WiseAdagrad": [
        {"lr": 0.3, "lr_decay": 0.01, "eps": 1e-2, "initial_accumulator_value": 0.1}
    ],
    "WiseRMSprop": [{"lr": 0.01, "alpha": 0.9, "eps": 1e-2, "maximize": True}],
}


class Lion(torch.optim.Optimizer):
    """Dense Lion, as in the paper's listing."""

    def __init__(
        self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False
    ):
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                g = -p.grad if group["maximize"] else p.grad
                update = (beta1 * m + (1 - beta1) * g).sign()
                p.sub_(lr * (update + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * g)


class WiseAdagrad(torch.optim.Optimizer):
    """Dense Adagrad with the sum of the mean squares of each row's gradients."""

    def __init__(self, params, lr, lr_decay=0.0, eps=1e-10, initial_accumulator_value=0.0):
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "steps": 0}
        super().__init__(params, {**defaults, "initial": initial_accumulator_value})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"] / (1 + group["steps"] * group["lr_decay"])
            group["steps"] += 1
            for p in group["params"]:
                initial = torch.full((len(p), 1), group["initial"], dtype=p.dtype)
                total = self.state[p].setdefault("sum", initial)
                total += (p.grad**2).mean(1, keepdim=True)
                p.sub_(lr * p.grad / (total.sqrt() + group["eps"]))


class WiseRMSprop(torch.optim.Optimizer):
    """Dense RMSprop with the average of the mean squares of each row's gradients."""

    def __init__(self, params, lr, alpha=0.99, eps=1e-8, maximize=False):
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                zeros = torch.zeros((len(p), 1), dtype=p.dtype)
                average = self.state[p].setdefault("square_avg", zeros)
                g = -p.grad if group["maximize"] else p.grad
                square = (g**2).mean(1, keepdim=True)
                average.mul_(group["alpha"]).add_((1 - group["alpha"]) * square)
                p.sub_(group["lr"] * g / (average.sqrt() + group["eps"]))


DENSE: dict[str, Any] = {
    "Lion": Lion,
    "WiseAdagrad": WiseAdagrad,
    "WiseRMSprop": WiseRMSprop,
}


def dense(name: str, params: Any, **options: Any) -> Any:
    """Return the dense optimizer of that name."""
    return (DENSE.get(name) or getattr(torch.optim, name))(params, **options)


def scheduler(schedule: str, optimizer: Any, steps: int) -> Any:
    """Return a torch scheduler of the learning rate; ``one-cycle`` also of momentum."""
    schedulers = torch.optim.lr_scheduler
    if schedule == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    if schedule == "step":
        return schedulers.StepLR(optimizer, max(1, steps // 5), gamma=0.6)
    if schedule == "one-cycle":
        lr = optimizer.param_groups[0]["lr"]
        cycles = "betas" in optimizer.defaults or optimizer.defaults.get("momentum", 0) > 0
        return schedulers.OneCycleLR(
            optimizer, lr, total_steps=steps + 1, cycle_momentum=cycles
        )
    return schedulers.ConstantLR(optimizer, 1.0)


SCHEDULES = ("constant", "cosine", "step", "one-cycle")


def draw_ids(pattern: str, rng: np.random.Generator) -> Callable[[], np.ndarray]:
    """Return a function that draws ids, uniform or Zipf-distributed, never id 0."""
    if pattern == "uniform":
        return lambda: rng.integers(1, ROWS, BATCH)
    probability = 1.0 / np.arange(1, ROWS)
    probability /= probability.sum()
    return lambda: 1 + rng.choice(ROWS - 1, BATCH, p=probability)


def copy_options(theirs: Any, ours: dict[str, Any]) -> None:
    """Copy the options that a scheduler changed in the torch optimizer."""
    group = theirs.param_groups[0]
    names = {"lr", "momentum", "betas"} & ours.keys() & group.keys()
    ours.update({name: group[name] for name in names})


def assert_close(got: Any, want: Any, tolerance: float, label: str = "") -> None:
    """Assert that no entry differs by more than an absolute tolerance."""
    error = float(np.max(np.abs(np.asarray(got) - np.asarray(want)), initial=0.0))
    assert error <= tolerance and not math.isnan(error), f"{label}: {error:.1e}"
