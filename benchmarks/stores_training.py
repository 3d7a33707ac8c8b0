"""Training step on disk against the same step in memory, journal included.

A call is a forward, a backward and a step of RowAdamW on 32 × 128 ids. The table, its state
and its journal are files in a temporary folder, whose pages are resident. A row is
journalled when it first changes after a commit, so the cost depends on the steps between
commits and on how often ids repeat: every step has a batch of its own, until a pool of 96
batches is used up. The bar is for a commit every 96 steps; a commit every 8 steps, after
which nearly every row is new, is timed without one. The time of commits is included.
Outputs are required to be equal bit for bit to those in memory.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from firstlayer.stores import create_store
from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

from .ids import DISTRIBUTIONS, batches
from .timing import BATCHES, Case

IDS = (32, 128)
ROWS, WIDTH = 250_000, 256
#: Different batches; each call takes the next one.
POOL = 96
MEMORY = "in memory"
#: Steps before the first result: pages of the files are then mapped, and segments of the
#: journal overwrite older ones.
WARM_UP = 3 * POOL
#: Steps between commits, and the required time in memory over that on disk.
INTERVALS = {POOL: {MEMORY: 1 / 1.5}, 8: {}}


class Training:
    """A table with its optimizer; a call takes a training step on the next batch.

    Args:
        distribution: Distribution of the ids.
        interval: Number of steps between commits, or None to train in memory.
    """

    def __init__(self, distribution: str, *, interval: int | None) -> None:
        self.distribution, self.interval = distribution, interval
        self.layer: Embedding | None = None
        self.steps = 0

    def __call__(self, batch: int) -> torch.Tensor:
        """Take a step and return the output of its forward."""
        if self.layer is None:
            self._build()
            for _ in range(WARM_UP):
                self._step()
        return self._step()

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        y = self.layer(self.ids[self.steps % POOL])  # pyright: ignore
        y.backward(self.dy)
        self.optimizer.step()
        self.steps += 1
        if self.interval is not None and self.steps % self.interval == 0:
            self.store.commit()
        return y

    def _build(self) -> None:
        weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        if self.interval is None:
            self.layer = Embedding(ROWS, WIDTH, sparse=True, _weight=weight)
        else:
            self.folder = tempfile.TemporaryDirectory()
            self.store = create_store(
                Path(self.folder.name) / "table", (ROWS, WIDTH), rows=weight.numpy()
            )
            self.layer = Embedding.from_store(self.store)
        parts = batches(self.distribution, ROWS, (POOL // BATCHES, *IDS))
        self.ids = [torch.from_numpy(ids) for part in parts for ids in part]
        self.dy = torch.randn(*IDS, WIDTH, generator=torch.Generator().manual_seed(1))
        self.optimizer = RowAdamW(self.layer.parameters(), lr=1e-3)


def cases() -> Iterator[Case]:
    """Yield the benchmark of each distribution and interval between commits."""
    for distribution in DISTRIBUTIONS:
        for interval, bars in INTERVALS.items():
            yield Case(
                f"training step on disk {ROWS:,} × {WIDTH}, {distribution} ids, "
                f"commit every {interval} steps",
                Training(distribution, interval=interval),
                {MEMORY: Training(distribution, interval=None)},
                bars,
                flatten=lambda y: y.detach().numpy(),
            )
