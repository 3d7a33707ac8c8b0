"""Training step with RowAdamW by torch operators, as on an accelerator, but on the CPU.

As in :mod:`benchmarks.optim`, a call is a forward, a backward and an optimizer step on one
of twelve batches of 32 × 128 ids. ``row_step`` makes operators update the table. The
compiled form is one graph of the lookup and the step, with the gradient of the looked up
rows as an input.
"""

from collections.abc import Iterator

import torch

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

from .ids import DISTRIBUTIONS
from .optim import DENSE, MAX_DISTANCE, RATE, SPARSE, Training
from .timing import Case

ROWS, WIDTH = 250_000, 256
#: Required speed-up over SparseAdam, eager and compiled.
BARS = {"operators": 0.7, "compiled operators": 1.0}
# Required speed-up over fused AdamW on dense gradients.
BAR = 5.0


class OperatorTraining(Training):
    """A table with RowAdamW that operators update; see :class:`Training`."""

    def _build(self) -> None:
        kind, self.implementation = self.implementation, "ours"
        super()._build()
        layer = self.layer
        assert isinstance(layer, Embedding)
        optimizer = RowAdamW(layer.parameters(), lr=RATE)
        self.optimizer, row_step = optimizer, optimizer.row_step(layer.weight)
        self.compiled = None
        if kind == "compiled operators":

            def train(ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
                y = row_step.lookup(ids)
                row_step(ids, dy)
                return y

            self.compiled = torch.compile(train, fullgraph=True)

    def __call__(self, batch: int) -> torch.Tensor:
        """Take a step and return the output of its forward."""
        if self.layer is None:
            self._build()
        if self.compiled is not None:
            return self.compiled(self.ids[batch], self.dy)
        return super().__call__(batch)


def cases() -> Iterator[Case]:
    """Yield eager and compiled steps, against AdamW and against SparseAdam."""
    for kind, sparse_bar in BARS.items():
        for distribution in DISTRIBUTIONS:
            for peer, bar in ((DENSE, BAR), (SPARSE, sparse_bar)):
                yield _case(kind, distribution, peer, bar)


def _case(kind: str, distribution: str, peer: str, bar: float) -> Case:
    name = f"train {ROWS:,} × {WIDTH} by {kind}, {distribution}"
    return Case(
        name if peer == DENSE else f"{name}, exact against lazy",
        OperatorTraining(ROWS, WIDTH, distribution, implementation=kind),
        {peer: Training(ROWS, WIDTH, distribution, implementation=peer)},
        {peer: bar},
        tolerance=1e-4 if peer == DENSE else MAX_DISTANCE,
        most_rounds=2,
        flatten=lambda y: y.detach().numpy(),
    )
