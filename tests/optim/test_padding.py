"""Row optimizers do to the padding row what a dense optimizer does without a gradient.

The padding row is an ordinary row whose lookups have no gradient: AdamW's weight decay
shrinks it, and momentum moves it after a gradient from elsewhere, such as a tied head.
"""

from typing import Any

import numpy as np
import pytest
import torch

import firstlayer.numpy
import firstlayer.torch
from firstlayer import RowGradient
from firstlayer.optim import RowAdamW
from firstlayer.torch.optim import RowAdamW as TorchRowAdamW

PADDING, STEPS = 2, 6
OPTIONS: Any = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.95)}
IDS = [[PADDING, 4, 1], [3, PADDING], [4, 4, 5], [PADDING], [1, 0, 3], [2, 5]]


def start():
    return np.random.default_rng(0).standard_normal((6, 3)) + 2


def dense_run(*, head_gradient=False):
    """Return the table before each step of torch's AdamW, and after the last."""
    layer = torch.nn.Embedding.from_pretrained(
        torch.from_numpy(start()), freeze=False, padding_idx=PADDING
    )
    optimizer = torch.optim.AdamW(layer.parameters(), **OPTIONS)
    tables = [start()]
    for step, ids in enumerate(IDS):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).square().sum().backward()
        if head_gradient and step == 0:
            layer.weight.grad += 1.0  # pyright: ignore
        optimizer.step()
        tables.append(layer.weight.detach().numpy().copy())
    return tables


def test_dense_adamw_moves_the_padding_row():
    tables = dense_run()
    np.testing.assert_allclose(tables[-1][PADDING], 0.95**STEPS * start()[PADDING])


def test_numpy_padding_row_decays_as_in_dense_adamw():
    layer = firstlayer.numpy.Embedding(6, 3, padding_idx=PADDING, weight=start())
    optimizer, want = RowAdamW(layer, **OPTIONS), dense_run()
    for ids, before in zip(IDS, want[:-1], strict=True):
        rows = np.array(sorted(set(ids) - {PADDING}), np.int64)
        counts = np.array([[ids.count(row)] for row in rows]).reshape(-1, 1)
        optimizer.table_states["weight"].catch_up(rows)
        optimizer.step({"weight": RowGradient(rows, 2.0 * counts * before[rows])})
    optimizer.flush()
    np.testing.assert_allclose(layer.weight, want[-1], rtol=1e-8)


@pytest.mark.parametrize("head_gradient", [False, True])
def test_numpy_padding_row_read_through_the_layer_equals_dense_adamw(head_gradient):
    layer = firstlayer.numpy.Embedding(6, 3, padding_idx=PADDING, weight=start())
    optimizer, want = RowAdamW(layer, **OPTIONS), dense_run(head_gradient=head_gradient)
    for step, ids in enumerate(IDS):
        np.testing.assert_allclose(layer(ids), want[step][ids], rtol=1e-8)
        y, pull = layer.vjp(ids)
        grads = pull(2 * y)
        if head_gradient and step == 0:
            grads = {"weight": grads["weight"].dense(6) + 1.0}
        optimizer.step(grads)
    np.testing.assert_allclose(layer(np.arange(6)), want[-1], rtol=1e-8)
    np.testing.assert_allclose(layer.state_dict()["weight"], want[-1], rtol=1e-8)


@pytest.mark.filterwarnings("ignore:the gradient of a table:UserWarning")
@pytest.mark.parametrize("head_gradient", [False, True])
def test_torch_padding_row_read_through_the_layer_equals_dense_adamw(head_gradient):
    layer = firstlayer.torch.Embedding(
        6, 3, padding_idx=PADDING, sparse=True, _weight=torch.from_numpy(start())
    )
    optimizer, want = (
        TorchRowAdamW(layer, **OPTIONS),
        dense_run(head_gradient=head_gradient),
    )
    for step, ids in enumerate(IDS):
        optimizer.zero_grad()
        y = layer(torch.tensor(ids))
        np.testing.assert_allclose(y.detach(), want[step][ids], rtol=1e-8)
        y.square().sum().backward()
        if head_gradient and step == 0:
            grad: Any = layer.weight.grad
            layer.weight.grad = grad.to_dense() + 1.0
        optimizer.step()
    got = layer(torch.arange(6)).detach()
    np.testing.assert_allclose(got, want[-1], rtol=1e-8)
    np.testing.assert_allclose(layer.state_dict()["weight"], want[-1], rtol=1e-8)
    optimizer.flush()
    np.testing.assert_allclose(layer.weight.detach(), want[-1], rtol=1e-8)
