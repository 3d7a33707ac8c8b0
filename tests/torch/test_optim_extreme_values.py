"""Row optimizers on huge, tiny and infinite numbers, against dense optimizers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import firstlayer.torch.optim
from firstlayer.torch import Embedding
from firstlayer.torch.optim import AveragedRows, row_optimizer
from tests.support.optim_cases import OPTIONS, dense

INF = float("inf")
EVERY_CASE = [(name, each) for name, options in OPTIONS.items() for each in options]
#: Gradient of the first step. In float32, the square of the first overflows, that of the
#: second only unless it is scaled first, and that of the last two underflows.
HUGE_AND_TINY = [3e38, 1e20, -3e38, 1e-30, -1e-40]
#: Rows that have a gradient in each step. Row 2 has none.
ROWS_OF_STEPS = [0, 1, 1, 0, 1, 1]


class Pair:
    """A table under a row optimizer and its twin under the dense one, with averages."""

    def __init__(self, name, options, weight):
        self.layer = Embedding.from_pretrained(
            torch.tensor(weight).repeat(3, 1), freeze=False, sparse=True
        )
        self.twin = nn.ParameterList([self.layer.weight.detach().clone()])
        make = getattr(firstlayer.torch.optim, f"Row{name}")
        self.ours = make(self.layer, **options)
        self.theirs = dense(name, self.twin, **options)
        self.average = AveragedRows(self.ours, decay=0.8)
        self.dense_average = AveragedModel(
            self.twin, multi_avg_fn=get_ema_multi_avg_fn(0.8)
        )

    def train(self, first_gradient, *, averages):
        gradient = torch.tensor([first_gradient])
        (twin,) = self.twin
        for row in ROWS_OF_STEPS:
            self.ours.zero_grad()
            self.layer(torch.tensor([row])).backward(gradient)
            twin.grad = torch.zeros_like(twin)
            twin.grad[row] = gradient[0]
            self.ours.step()
            self.theirs.step()
            if averages:
                self.average.update_parameters()
                self.dense_average.update_parameters(self.twin)
            gradient = torch.full_like(gradient, 0.5)

    def weights(self):
        return self.layer.weight.detach().numpy(), self.twin[0].detach().numpy()

    def averages(self):
        (want,) = self.dense_average.module.parameters()
        return self.average.average(self.layer.weight).numpy(), want.detach().numpy()


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("name, options", EVERY_CASE)
def test_huge_and_tiny_gradients_equal_the_dense_optimizer(
    name, options, averages, by_kernels, monkeypatch
):
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: by_kernels)
    pair = Pair(name, options, [1.0, 0.5, -1.0, 1e-40, 2.0])
    pair.train(HUGE_AND_TINY, averages=averages)
    got, want = pair.weights()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    if averages:
        got, want = pair.averages()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("name, options", EVERY_CASE)
def test_infinite_weights_and_gradients_equal_the_dense_optimizer(
    name, options, by_kernels, monkeypatch
):
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: by_kernels)
    pair = Pair(name, options, [INF, -INF, 1.0, -1.0])
    pair.train([1.0, -2.0, INF, -INF], averages=False)
    got, want = pair.weights()
    # Dense decay of SGD and Lion is ∞ − lr · decay · ∞, which is NaN; that of Lion even
    # without decay. A stale row stays infinite.
    if name == "Lion" or name == "SGD" and options.get("weight_decay"):
        want = np.where(np.isinf(got) & np.isnan(want), got, want)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
