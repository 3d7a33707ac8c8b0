"""Ctrl-C at random moments of training: every call is done completely or not at all.

Another process sends SIGINT to this one at random times. After each KeyboardInterrupt, the
bytes of every table, optimizer state and counter must be those that an undisturbed run has
before the interrupted call, or those that it has after the call. The interrupted call is
then repeated, unless it was done.
"""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from firstlayer.numpy import EmbeddingLayer
from firstlayer.optim import RowAdamW, RowSGD
from firstlayer.optim.table_state import TableState
from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW as TorchRowAdamW

ROWS, WIDTH, LENGTH, STEPS = 60, 4, 12, 120

# Sends SIGINT to a process until it ends.
SENDER = """
import os, random, signal, sys, time
pid = int(sys.argv[1])
while True:
    try:
        os.kill(pid, signal.SIGINT)
    except ProcessLookupError:
        break
    time.sleep(random.expovariate(1 / 2e-4))
"""


class Interruptible:
    """Runs calls that may be interrupted; drops signals at all other times."""

    def __init__(self) -> None:
        self.is_armed, self.count = False, 0

    def handler(self, number: int, frame: Any) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt

    def is_interrupted(self, call: Callable[[int], None], step: int) -> bool:
        """Run ``call(step)``, and return whether it raised KeyboardInterrupt."""
        try:
            self.is_armed = True
            call(step)
            self.is_armed = False
        except KeyboardInterrupt:
            self.count += 1
            return True
        return False

    @contextmanager
    def signals(self) -> Generator[None, None, None]:
        """Receive signals from another process during the block."""
        before = signal.signal(signal.SIGINT, self.handler)
        sender = subprocess.Popen([sys.executable, "-c", SENDER, str(os.getpid())])
        try:
            yield
        finally:
            sender.kill()
            sender.wait()
            signal.signal(signal.SIGINT, before)


class NumpyTraining:
    """Training of a NumPy layer with two tables and two other parameters."""

    def __init__(self, optimizer_class: Any, **options: Any) -> None:
        self.layer = EmbeddingLayer(ROWS, WIDTH, max_positions=ROWS, layer_norm=True, rng=0)
        self.optimizer = optimizer_class(self.layer, **options)
        self.grads: dict[str, Any] = {}

    def forward_and_backward(self, step: int) -> None:
        ids, offset = _batch(step)
        output, pull = self.layer.vjp(ids, offset=offset)
        self.grads = pull(output - np.float32(step % 3))

    def step(self, step: int) -> None:
        self.optimizer.step(self.grads)

    def flush(self, step: int) -> None:
        self.optimizer.flush()

    def save(self, step: int) -> None:
        self.optimizer.state_dict()

    def digests(self) -> list[str]:
        states = self.optimizer.table_states
        return [_digest(_contents(states[name])) for name in sorted(states)]

    def step_counts(self) -> list[int]:
        """Return the counters that tell a caller whether a step is done."""
        return [state.step_count for state in self.optimizer.table_states.values()]


class TorchTraining:
    """Training of two sparse tables and a dense layer, in two parameter groups."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.token = Embedding(ROWS, WIDTH, sparse=True)
        self.position = Embedding(ROWS, WIDTH, sparse=True, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(WIDTH, 2)
        tables = {"params": [self.token.weight, self.head.weight]}
        others = {"params": [self.position.weight, self.head.bias], "lr": 0.03}
        self.optimizer = TorchRowAdamW([tables, others], lr=0.02, weight_decay=0.1)

    def forward_and_backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        ids, offset = _batch(step)
        rows = self.token(torch.from_numpy(ids))
        rows = rows + self.position(torch.arange(offset, offset + LENGTH)).float()
        (self.head(rows) - step % 3).square().sum().backward()

    def step(self, step: int) -> None:
        self.optimizer.step()

    def flush(self, step: int) -> None:
        self.optimizer.flush()

    def save(self, step: int) -> None:
        self.optimizer.state_dict()

    def digests(self) -> list[str]:
        digests = []
        for parameter in self._parameters():
            state = self.optimizer.state.get(parameter, {})
            table: Any = self.optimizer._table_states.get(parameter)
            parts = [] if table is None else list(_contents(table))
            parts += [f"{name} {value.tolist()}" for name, value in sorted(state.items())]
            digests.append(_digest([*parts, str(parameter.tolist())]))
        return digests

    def step_counts(self) -> list[int]:
        """Return the counters that tell a caller whether a step is done."""
        states = [self.optimizer.state.get(p, {}) for p in self._parameters()]
        return [int(state.get("step", 0)) for state in states]

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


Training = NumpyTraining | TorchTraining
TRAININGS: dict[str, Callable[[], Training]] = {
    "numpy-adamw": lambda: NumpyTraining(RowAdamW, lr=0.02, weight_decay=0.1),
    "numpy-sgd": lambda: NumpyTraining(RowSGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    "torch-adamw": TorchTraining,
}


def check_interrupts(name: str, *, count: int) -> dict[str, int]:
    """Interrupt a training ``count`` times, and raise unless each leaves a correct state.

    Args:
        name: One of :data:`TRAININGS`.
        count: Number of interrupts.

    Returns:
        Number of interrupts that left a call done, and not done.
    """
    calls = list(_calls())
    training = TRAININGS[name]()
    expected = [training.digests()]
    for call, step in calls:
        getattr(training, call)(step)
        expected.append(training.digests())
    interruptible, results = Interruptible(), {"done": 0, "not done": 0}
    with interruptible.signals():
        while interruptible.count < count:
            training, index = TRAININGS[name](), 0
            while index < len(calls) and interruptible.count < count:
                call, step = calls[index]
                before, after = expected[index], expected[index + 1]
                counts = training.step_counts()
                if interruptible.is_interrupted(getattr(training, call), step):
                    found = training.digests()
                    label = f"{call} at step {step} was interrupted"
                    for i, (x, y, z) in enumerate(zip(found, before, after, strict=True)):
                        assert x in (y, z), f"{label}: parameter {i} is half done"
                    if call == "step":
                        assert found in (before, after), f"{label}: some are done"
                        is_done = training.step_counts() != counts
                        assert is_done == (found == after), f"{label}: wrong counters"
                        assert not is_done or _all_increased(counts, training)
                    else:
                        # Weights that are not stale do not change. The call is repeated,
                        # because its result was lost.
                        is_done = False
                    results["done" if is_done else "not done"] += 1
                    index += is_done
                    continue
                assert training.digests() == after, f"{call} at step {step} differs"
                index += 1
    return results


def _all_increased(counts: Sequence[int], training: Training) -> bool:
    pairs = zip(counts, training.step_counts(), strict=True)
    return all(now == before + 1 for before, now in pairs)


def _calls() -> Iterator[tuple[str, int]]:
    for step in range(STEPS):
        yield "forward_and_backward", step
        yield "step", step
        if step % 9 == 8:
            yield "flush", step
        if step % 13 == 12:
            yield "save", step


def _batch(step: int) -> tuple[np.ndarray, int]:
    """Return the ids of a step, some of them repeated, and its first position."""
    rng = np.random.default_rng(step)
    return rng.integers(0, ROWS, LENGTH), int(rng.integers(0, ROWS - LENGTH))


def _contents(state: TableState) -> Iterator[Any]:
    """Yield everything that a step or a catch-up changes."""
    yield np.ascontiguousarray(state.table()).view(np.uint8)
    for name in sorted(state.state):
        yield state.state[name]
    missed = state.missed
    yield from (state.row_steps, state.has_state, np.ascontiguousarray(missed.coefficients))
    yield np.ascontiguousarray(missed.all_steps[:, 1 : missed.count + 1])
    yield str((state.step_count, state.base_step, missed.count, missed.frozen_options))
    yield str(state._missed_moves)


def _digest(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()
