"""Steps that a worker takes while the model computes."""

import copy
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from firstlayer.optim.table_state import TableState
from firstlayer.torch import Embedding
from firstlayer.torch._tensors import worker
from firstlayer.torch.optim import AveragedRows, RowAdagrad, RowAdamW

ROWS, WIDTH = 40, 8


class Blocked:
    """Keeps the worker busy until it is released, or for a moment."""

    def __init__(self) -> None:
        self.go = threading.Event()
        worker.submit(lambda: self.go.wait(30))

    def release_soon(self) -> None:
        threading.Timer(0.05, self.go.set).start()


def trained(background: bool, steps: int = 6, **options: Any):
    """Return a layer and its optimizer after some steps, the last of them just taken."""
    torch.manual_seed(0)
    layer = Embedding(ROWS, WIDTH, sparse=True)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.2, background=background, **options)
    for step in range(steps):
        optimizer.zero_grad()
        layer(torch.tensor([step, step + 1, 7, 7])).square().sum().backward()
        optimizer.step()
    return layer, optimizer


def memory_of(layer: Embedding) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return layer.weight.detach().clone()


def test_a_step_returns_before_the_rows_are_updated():
    layer, optimizer = trained(True)
    optimizer.zero_grad()
    layer(torch.tensor([6, 7, 7, 7])).square().sum().backward()
    before, blocked = memory_of(layer), Blocked()
    optimizer.step()
    assert optimizer.state[layer.weight]["step"].item() == 7
    assert torch.equal(memory_of(layer), before)
    # Gradients may be overwritten while the step is still to be taken.
    gradient: Any = layer.weight.grad
    gradient._values().fill_(99.0)
    optimizer.param_groups[0]["lr"] = 5.0
    blocked.release_soon()
    start = time.perf_counter()
    got = layer(torch.tensor([6, 7]))
    assert time.perf_counter() - start > 0.02
    assert not torch.equal(got, before[6:8])
    ids = torch.tensor([[6, 7, 7, 7]])
    reference, other = trained(False)
    other.zero_grad()
    reference(ids).square().sum().backward()
    other.step()
    assert torch.equal(got, reference(torch.tensor([6, 7])))
    assert torch.equal(layer.weight.detach(), reference.weight.detach())


READERS = {
    "weight": lambda layer, optimizer: layer.weight.clone(),
    "evaluation": lambda layer, optimizer: layer.eval()(torch.arange(ROWS)),
    "functional": lambda layer, optimizer: torch.nn.functional.embedding(
        torch.arange(ROWS), layer.weight
    ),
    "state dict": lambda layer, optimizer: layer.state_dict()["weight"],
    "copy": lambda layer, optimizer: copy.deepcopy(layer).weight,
    "optimizer": lambda layer, optimizer: optimizer.state_dict()["state"][0]["exp_avg"],
    "flush": lambda layer, optimizer: (optimizer.flush(), layer.weight)[1],
    "copied optimizer": lambda layer, optimizer: copy.deepcopy(optimizer).state_dict()[
        "state"
    ][0]["exp_avg_sq"],
    "prefetch": lambda layer, optimizer: (
        layer.prefetch(torch.arange(ROWS)),
        layer(torch.arange(ROWS)),
    )[1],
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_the_step(reader):
    results = []
    for background in (True, False):
        layer, optimizer = trained(background)
        optimizer.zero_grad()
        layer(torch.tensor([2, 9])).square().sum().backward()
        blocked = Blocked()
        optimizer.step()
        blocked.release_soon()
        results.append(READERS[reader](layer, optimizer).detach().clone())
        blocked.go.set()
    np.testing.assert_array_equal(results[0].numpy(), results[1].numpy())


def test_averages_wait_for_the_step():
    results = []
    for background in (True, False):
        layer, optimizer = trained(background, steps=3)
        averaged = AveragedRows(optimizer, decay=0.7)
        for step in range(4):
            optimizer.zero_grad()
            layer(torch.tensor([step, 20])).square().sum().backward()
            blocked = Blocked()
            optimizer.step()
            blocked.release_soon()
            averaged.update_parameters()
        results.append(averaged.average(layer.weight))
    assert torch.equal(*results)


def test_an_error_of_the_worker_is_raised_by_the_next_read(monkeypatch):
    layer, optimizer = trained(True)
    layer(torch.tensor([3])).sum().backward()

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError("no memory for the step")

    with monkeypatch.context() as patch:
        patch.setattr(TableState, "step", fail)
        optimizer.step()
        with pytest.raises(MemoryError, match="no memory for the step"):
            layer(torch.tensor([3]))
    assert optimizer.state[layer.weight]["step"].item() == 6
    # The step can be taken again.
    optimizer.step()
    reference, other = trained(False)
    reference(torch.tensor([3])).sum().backward()
    other.step()
    assert torch.equal(layer.weight.detach(), reference.weight.detach())


def test_an_interrupt_of_a_waiting_read_does_not_forget_the_step():
    layer, optimizer = trained(True)
    optimizer.zero_grad()
    layer(torch.tensor([3])).square().sum().backward()
    blocked = Blocked()
    optimizer.step()
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        layer(torch.tensor([3]))
    blocked.release_soon()
    got = layer(torch.tensor([3]))
    reference, other = trained(False)
    other.zero_grad()
    reference(torch.tensor([3])).square().sum().backward()
    other.step()
    assert torch.equal(got, reference(torch.tensor([3])))


def test_a_learning_rate_in_a_tensor_is_that_of_the_step():
    results = []
    for background in (True, False):
        torch.manual_seed(0)
        layer = Embedding(ROWS, WIDTH, sparse=True)
        rate = torch.tensor(0.5)
        optimizer = RowAdagrad(layer, lr=rate, background=background)
        for step in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([1, step])).square().sum().backward()
            blocked = Blocked()
            optimizer.step()
            rate.fill_(0.5 / (step + 2))
            blocked.go.set()
        results.append(layer.weight.detach())
    assert torch.equal(*results)


def test_lazy_steps_are_not_taken_in_the_background():
    layer, optimizer = trained(True, mode="lazy")
    before = memory_of(layer)
    optimizer.zero_grad()
    layer(torch.tensor([3])).square().sum().backward()
    blocked = Blocked()
    optimizer.step()
    assert not torch.equal(memory_of(layer)[3], before[3])
    blocked.go.set()


def test_the_argument_is_in_the_signature_and_kept_by_copies():
    layer, optimizer = trained(True)
    assert "background=False" in str(RowAdamW.__signature__)
    assert copy.deepcopy(optimizer)._background
    assert not trained(False)[1]._background
