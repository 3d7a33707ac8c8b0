"""Training step with RowAdamW against torch's AdamW and SparseAdam: time and memory.

A call is a forward, a backward and an optimizer step on one of twelve batches of 32 × 128
ids. Outputs of the exact RowAdamW are first compared with those of AdamW on dense
gradients. SparseAdam is a different algorithm, included for its speed: its outputs are only
required to lie within the distance that twelve steps can move weights. Each optimizer
trains its own table, created at its first call.

:func:`memory_of_a_step` measures the peak memory that a step adds to the process: the
touched rows for row gradients, the size of the table for dense gradients.
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
#: Rows, width, and required speed-up over fused AdamW on dense gradients.
SIZES = (
    (50_000, 256, 4.0),
    (250_000, 256, 9.0),
    (250_000, 1024, 18.0),
    (1_000_000, 256, 30.0),
)
DENSE, SPARSE = "torch AdamW(fused=True), dense", "torch SparseAdam"
RATE = 1e-3
# Largest distance between two weights after twelve steps, decay included.
MAX_DISTANCE = 2.5 * BATCHES * RATE


class Training:
    """A table with its optimizer; a call takes a training step on a batch.

    Args:
        rows: Number of rows.
        width: Width of each row.
        distribution: Distribution of the ids.
        implementation: ``"ours"`` or the name of a peer.
        dtype: Dtype of the table and of the gradient of its output.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        distribution: str,
        *,
        implementation: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rows, self.width, self.implementation = rows, width, implementation
        self.distribution, self.dtype = distribution, dtype
        self.layer: torch.nn.Embedding | None = None

    def __call__(self, batch: int) -> torch.Tensor:
        """Take a step and return the output of its forward."""
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
        ).to(self.dtype)
        sparse = self.implementation != DENSE
        layer_class = Embedding if self.implementation == "ours" else torch.nn.Embedding
        self.layer = layer_class(self.rows, self.width, sparse=sparse, _weight=weight)
        self.ids = [
            torch.from_numpy(ids) for ids in batches(self.distribution, self.rows, IDS)
        ]
        dy = torch.randn(*IDS, self.width, generator=torch.Generator().manual_seed(1))
        self.dy = dy.to(self.dtype)
        parameters = list(self.layer.parameters())
        self.optimizer: torch.optim.Optimizer = {
            "ours": lambda: RowAdamW(parameters, lr=RATE),
            DENSE: lambda: torch.optim.AdamW(parameters, lr=RATE, fused=True),
            SPARSE: lambda: torch.optim.SparseAdam(parameters, lr=RATE),
        }[self.implementation]()


def cases() -> Iterator[Case]:
    """Yield every size and distribution of ids, against AdamW and against SparseAdam."""
    for rows, width, bar in SIZES:
        for distribution in DISTRIBUTIONS:
            yield _case(rows, width, distribution, DENSE, bar=bar, tolerance=1e-4)
            yield _case(rows, width, distribution, SPARSE, bar=1.0, tolerance=MAX_DISTANCE)


def memory_of_a_step(
    implementation: str, *, rows: int = 1_000_000, width: int = 256
) -> float:
    """Return the peak memory in MB that steps add to the table and its state.

    Args:
        implementation: ``"ours"`` or the name of a peer.
        rows: Number of rows.
        width: Width of each row.
    """
    training = Training(rows, width, "uniform", implementation=implementation)
    for batch in range(BATCHES):
        training(batch)
    training.optimizer.zero_grad()
    gc.collect()
    # Return freed memory to the system, so that it does not count as used before.
    ctypes.CDLL(None).malloc_trim(0)
    # Linux: reset the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = _megabytes("VmRSS")
    for batch in range(BATCHES):
        training(batch)
    return _megabytes("VmHWM") - before


def _case(
    rows: int, width: int, distribution: str, peer: str, *, bar: float, tolerance: float
) -> Case:
    name = f"train {rows:,} × {width} by rows, 32 × 128 ids, {distribution}"
    return Case(
        name if peer == DENSE else f"{name}, exact against lazy",
        Training(rows, width, distribution, implementation="ours"),
        {peer: Training(rows, width, distribution, implementation=peer)},
        {peer: bar},
        tolerance=tolerance,
        most_rounds=12 if rows * width < 2e7 else 2,
        flatten=lambda y: y.detach().numpy(),
    )


def _megabytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
