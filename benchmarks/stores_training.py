"""Training step on disk against the same step in memory, journal included.

A call is a forward, a backward and a step of RowAdamW on one of twelve batches of 32 × 128
ids. The table, its state and its journal are files in a temporary folder, whose pages are
resident. Journalling costs most at the first touch of a row after a commit. One case
commits every 12 steps, so that nearly every row of every batch is journalled; another every
100 steps. The time of the commits is included. Outputs are required to be equal bit for
bit to those in memory.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from firstlayer.stores import create_training_store
from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

from .ids import DISTRIBUTIONS, batches
from .timing import Case

IDS = (32, 128)
ROWS, WIDTH = 250_000, 256
#: Steps between commits.
INTERVALS = (12, 100)
#: Time in memory over time on disk.
BAR = 1 / 1.5
MEMORY = "in memory"


class Training:
    """A table with its optimizer; a call takes a training step on a batch.

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
        self.optimizer.zero_grad()
        y = self.layer(self.ids[batch])  # pyright: ignore
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
            self.store = create_training_store(
                Path(self.folder.name) / "table", (ROWS, WIDTH), rows=weight.numpy()
            )
            self.layer = Embedding.from_store(self.store)
        self.ids = [torch.from_numpy(ids) for ids in batches(self.distribution, ROWS, IDS)]
        self.dy = torch.randn(*IDS, WIDTH, generator=torch.Generator().manual_seed(1))
        self.optimizer = RowAdamW(self.layer.parameters(), lr=1e-3)


def cases() -> Iterator[Case]:
    """Yield the benchmark of each distribution and interval between commits."""
    for distribution in DISTRIBUTIONS:
        for interval in INTERVALS:
            yield Case(
                f"training step on disk {ROWS:,} × {WIDTH}, {distribution} ids, "
                f"commit every {interval} steps",
                Training(distribution, interval=interval),
                {MEMORY: Training(distribution, interval=None)},
                {MEMORY: BAR},
                flatten=lambda y: y.detach().numpy(),
            )
