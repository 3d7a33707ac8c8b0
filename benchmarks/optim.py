"""Training a table by rows beside torch's optimizers, and the memory that it takes.

A call is a forward, a backward and a step of AdamW on one of twelve batches of 32 × 128
ids. Exact rows make what dense gradients make, and that is checked first. SparseAdam is
another algorithm and is here for its time: it can only be checked that neither has gone
further than twelve steps go. Each contestant trains a table of its own, made when it is
first called.

What a step adds to the process's memory at its peak is measured too: rows add what they
touch, a dense gradient the table's size.
"""

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

from .ids import DISTRIBUTIONS, batches
from .timing import BATCHES, Case

IDS = (32, 128)
#: Rows, width, and how many times as fast as fused AdamW on dense gradients ours has to be.
SIZES = (
    (50_000, 256, 2.5),
    (250_000, 256, 9.0),
    (250_000, 1024, 18.0),
    (1_000_000, 256, 30.0),
)
DENSE, SPARSE = "torch AdamW(fused=True), dense", "torch SparseAdam"
RATE = 1e-3
# How far twelve steps move two weights apart at most, decay included.
APART = 2.5 * BATCHES * RATE


class Training:
    """A table and its optimizer, and steps on batches.

    Args:
        rows: Rows of the table.
        width: Of a row.
        kind: How ids are spread.
        who: ``"ours"`` or the name of a peer.
    """

    def __init__(self, rows: int, width: int, kind: str, *, who: str) -> None:
        self.rows, self.width, self.kind, self.who = rows, width, kind, who
        self.layer: torch.nn.Embedding | None = None

    def __call__(self, batch: int) -> torch.Tensor:
        """Return what was looked up, before the step that follows."""
        if self.layer is None:
            self._build()
        self.optimizer.zero_grad()
        y = self.layer(self.ids[batch])  # pyright: ignore
        y.backward(self.dy)
        self.optimizer.step()
        return y

    def _build(self) -> None:
        weight = torch.randn(
            self.rows, self.width, generator=torch.Generator().manual_seed(0)
        )
        sparse = self.who != DENSE
        make = Embedding if self.who == "ours" else torch.nn.Embedding
        self.layer = make(self.rows, self.width, sparse=sparse, _weight=weight)
        self.ids = [torch.from_numpy(b) for b in batches(self.kind, self.rows, IDS)]
        self.dy = torch.randn(*IDS, self.width, generator=torch.Generator().manual_seed(1))
        parameters = list(self.layer.parameters())
        self.optimizer: torch.optim.Optimizer = {
            "ours": lambda: RowAdamW(parameters, lr=RATE),
            DENSE: lambda: torch.optim.AdamW(parameters, lr=RATE, fused=True),
            SPARSE: lambda: torch.optim.SparseAdam(parameters, lr=RATE),
        }[self.who]()


def cases() -> Iterator[Case]:
    """Yield every size and spread of ids, beside dense gradients and beside SparseAdam."""
    for rows, width, bar in SIZES:
        for kind in DISTRIBUTIONS:
            yield _case(rows, width, kind, DENSE, bar=bar, tolerance=1e-4)
            yield _case(rows, width, kind, SPARSE, bar=1.0, tolerance=APART)


def memory_of_a_step(who: str, *, rows: int = 1_000_000, width: int = 256) -> float:
    """Return the megabytes that steps add at their peak to the table and its state.

    Args:
        who: ``"ours"`` or the name of a peer.
        rows: Rows of the table.
        width: Of a row.
    """
    training = Training(rows, width, "uniform", who=who)
    for batch in range(BATCHES):
        training(batch)
    training.optimizer.zero_grad()
    gc.collect()
    # What the steps before have freed and the process has kept must not count as there.
    ctypes.CDLL(None).malloc_trim(0)
    # Linux: from here on, the peak is that of what follows.
    Path("/proc/self/clear_refs").write_text("5")
    before = _megabytes("VmRSS")
    for batch in range(BATCHES):
        training(batch)
    return _megabytes("VmHWM") - before


def _case(
    rows: int, width: int, kind: str, peer: str, *, bar: float, tolerance: float
) -> Case:
    name = f"train {rows:,} × {width} by rows, 32 × 128 ids, {kind}"
    return Case(
        name if peer == DENSE else f"{name}, exact beside lazy",
        Training(rows, width, kind, who="ours"),
        {peer: Training(rows, width, kind, who=peer)},
        {peer: bar},
        tolerance=tolerance,
        most_rounds=12 if rows * width < 2e7 else 2,
        flatten=lambda y: y.detach().numpy(),
    )


def _megabytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
