"""Row optimizers on NumPy layers equal dense ones, at every step and on every row."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

import inlay
import inlay.optim
from inlay import Rows, kernels
from inlay._optim_adam import interpolation
from inlay.numpy import Embedding, EmbeddingBag, EmbeddingLayer, load, save
from inlay.optim import RowAdagrad, RowAdam, RowAdamW, RowLion, RowRMSprop, RowSGD

from .optim_cases import (
    OPTIONS,
    ROWS,
    SCHEDULES,
    WIDTH,
    close,
    dense,
    same_options,
    scheduler,
    touches,
)

CASES = [
    pytest.param(name, options, SCHEDULES[number % 4], id=f"{name} {number}")
    for name, choices in OPTIONS.items()
    for number, options in enumerate(choices)
]


class Race:
    """A layer under a row optimizer beside a table under a dense one."""

    def __init__(self, name, options, *, dtype="float64", schedule="constant", steps=1):
        rng = np.random.default_rng(0)
        self.goals = rng.standard_normal((ROWS, WIDTH))
        start = rng.standard_normal((ROWS, WIDTH)).astype(dtype)
        self.layer = Embedding(ROWS, WIDTH, weight=start.copy())
        self.ours = getattr(inlay.optim, f"Row{name}")(self.layer, **options)
        self.weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self.theirs = dense(name, [self.weight], **options)
        self.scheduler = scheduler(schedule, self.theirs, steps)
        self.rng, self.sign = rng, -1 if options.get("maximize") else 1

    def step(self, ids):
        """Take a step with both; return what was read of both before it."""
        y, pull = self.layer.vjp(ids)
        want = self.weight.detach().numpy()[ids].copy()
        goal = (self.goals[ids] + self.rng.standard_normal(y.shape)).astype(y.dtype)
        same_options(self.theirs, self.ours.options)
        self.ours.step(pull(self.sign * (y - goal)))
        self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad.index_add_(
            0, torch.from_numpy(ids), torch.from_numpy(self.sign * (want - goal))
        )
        self.theirs.step()
        self.scheduler.step()
        return y, want


@pytest.mark.parametrize("pattern", ["uniform", "zipf"])
@pytest.mark.parametrize("name, options, schedule", CASES)
def test_what_is_read_is_what_the_dense_optimizer_made_at_every_step(
    name, options, schedule, pattern
):
    steps = 1500 if pattern == "zipf" else 300
    race = Race(name, options, schedule=schedule, steps=steps)
    draw = touches(pattern, race.rng)
    # The drift of AdamW is a polynomial's; all else is exact.
    tolerance = 1e-6 if options.get("eps", 0) > 1e-5 and "Adam" in name else 1e-9
    for step in range(steps):
        got, want = race.step(draw())
        close(got, want, tolerance, f"step {step}")
    race.ours.flush()
    close(race.layer.weight, race.weight.detach(), tolerance, "after flush()")
