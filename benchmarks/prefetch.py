"""How much of a lookup ``prefetch`` hides: ``python -m benchmarks.prefetch``.

A loop alternates a lookup with other work on one thread that takes at least as long. With
prefetching, the worker gathers the rows of the next batch during the work. The hidden share
is ``1 - (loop - work) / lookup``. All results are compared with those of an ordinary
lookup first; then runs are interleaved.

In the second row a table trained by RowAdamW takes a step before every lookup, so that all
rows are stale. The worker applies their missed steps twice: to the rows that it gathers,
and after the lookup in the table, as the lookup would. Here ``work`` includes the step, and
is done after the lookup too, as in training.

The last row is the share of a step of RowAdagrad that ``background=True`` hides behind work
between the step and the next read of the table.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from firstlayer.analysis.timing import interleaved_medians
from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdagrad, RowAdamW

from .ids import batches
from .timing import BATCHES, keep_freed_memory

ROWS, WIDTH, IDS = 250_000, 256, 16_384
#: Least share of a lookup that must be hidden.
GOAL = 0.8


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds, and the share of the lookup that is hidden."""

    name: str
    lookup: float
    work: float
    without: float
    loop: float

    @property
    def hidden(self) -> float:
        """Share of the lookup that the loop does not wait for."""
        return 1 - (self.loop - self.work) / self.lookup

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {**asdict(self), "hidden": self.hidden, "met": self.hidden >= GOAL}


class Loop:
    """Lookups of batches in turn, each before or after other work.

    Args:
        table: Table to look up.
        ids: Batches.
        advance: Called before each lookup; what it does to the table must not depend on how
            often it was called.
        works_after: Whether to do the work after each lookup as well as before it.
    """

    def __init__(
        self,
        table: Embedding,
        ids: list[Tensor],
        advance: Callable[[], Any],
        *,
        works_after: bool,
    ) -> None:
        self.table, self.ids, self.advance = table, ids, advance
        self.works_after = works_after
        #: Number of matrix products that the work consists of.
        self.repeats = 1
        self.matrix = torch.randn(256, 256)

    def lookup(self, batch: int) -> Tensor:
        """Look a batch up."""
        with torch.no_grad():
            return self.table(self.ids[batch])

    def work(self) -> None:
        """Multiply matrices."""
        for _ in range(self.repeats):
            torch.mm(self.matrix, self.matrix)

    def without(self, batch: int) -> Tensor:
        """Advance, work, and look a batch up."""
        self.advance()
        self.work()
        return self._lookup_and_work(batch)

    def with_prefetch(self, batch: int) -> Tensor:
        """Do the same, with the rows gathered during the work."""
        self.advance()
        self.table.prefetch(self.ids[batch])
        self.work()
        return self._lookup_and_work(batch)

    def only_work(self, batch: int) -> None:
        """Advance and work."""
        self.advance()
        self.work()
        if self.works_after:
            self.work()

    def _lookup_and_work(self, batch: int) -> Tensor:
        rows = self.lookup(batch)
        if self.works_after:
            self.work()
        return rows


def loops() -> Iterator[tuple[str, Loop]]:
    """Yield the loops by name."""
    ids = [torch.from_numpy(x) for x in batches("uniform", ROWS, (IDS,))]
    torch.manual_seed(0)
    yield "lookup", Loop(Embedding(ROWS, WIDTH), ids, lambda: None, works_after=False)
    table = Embedding(ROWS, WIDTH, sparse=True)
    optimizer = RowAdamW([table.weight], lr=1e-3, weight_decay=0.01)
    for batch in ids:
        table(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        table(ids[0][:64]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    yield "lookup of stale rows, RowAdamW", Loop(table, ids, step, works_after=True)


def measure(name: str, loop: Loop, *, rounds: int) -> Result:
    """Check that prefetched rows are those of a lookup, then time."""
    for batch in range(BATCHES):
        loop.advance()
        loop.table.prefetch(loop.ids[batch])
        got = loop.lookup(batch)
        if not torch.equal(got, loop.lookup(batch)):
            raise AssertionError(f"{name}: batch {batch} differs")

    def advance_and_lookup(batch: int) -> None:
        loop.advance()
        loop.lookup(batch)

    alone = {"advance": lambda batch: loop.advance(), "both": advance_and_lookup}
    seconds = interleaved_medians(alone, batches=BATCHES, rounds=rounds)
    lookup = seconds["both"] - seconds["advance"]
    runs = {"work": lambda batch: loop.work()}
    while interleaved_medians(runs, batches=BATCHES, rounds=1)["work"] < 1.2 * lookup:
        loop.repeats *= 2
    runs = {
        "advance": lambda batch: loop.advance(),
        "both": advance_and_lookup,
        "work": loop.only_work,
        "without": loop.without,
        "loop": loop.with_prefetch,
    }
    seconds = interleaved_medians(runs, batches=BATCHES, rounds=rounds)
    times = {key: value * 1e3 for key, value in seconds.items()}
    lookup = times["both"] - times["advance"]
    return Result(name, lookup, times["work"], times["without"], times["loop"])


def measure_update(*, rounds: int) -> Result:
    """Check that steps in the background have the same bits, then time them."""
    ids = [torch.from_numpy(x) for x in batches("uniform", ROWS, (IDS,))]
    tables, optimizers = [], []
    for background in (False, True):
        torch.manual_seed(0)
        tables.append(Embedding(ROWS, WIDTH, sparse=True))
        optimizers.append(RowAdagrad(tables[-1], lr=0.01, background=background))
    gradients = []
    for batch in ids:
        tables[0](batch).square().sum().backward()
        gradients.append(tables[0].weight.grad)
        tables[0].weight.grad = None
    loop = Loop(tables[0], ids, lambda: None, works_after=False)

    def step(number: int, batch: int, *, works: bool) -> None:
        tables[number].weight.grad = gradients[batch]
        optimizers[number].step()
        if works:
            loop.work()
        # Reading the table waits for the step.
        tables[number](ids[batch][:1])

    for batch in range(BATCHES):
        for number in (0, 1):
            step(number, batch, works=False)
    if not torch.equal(tables[0].weight, tables[1].weight):
        raise AssertionError("steps in the background differ")
    alone = {"step": lambda batch: step(0, batch, works=False)}
    seconds = interleaved_medians(alone, batches=BATCHES, rounds=rounds)["step"]
    work = {"work": lambda batch: loop.work()}
    while interleaved_medians(work, batches=BATCHES, rounds=1)["work"] < 1.2 * seconds:
        loop.repeats *= 2
    runs = {
        **alone,
        **work,
        "without": lambda batch: step(0, batch, works=True),
        "loop": lambda batch: step(1, batch, works=True),
    }
    found = interleaved_medians(runs, batches=BATCHES, rounds=rounds)
    times = {key: value * 1e3 for key, value in found.items()}
    name = "step of RowAdagrad"
    return Result(name, times["step"], times["work"], times["without"], times["loop"])


def main() -> None:
    """Print the times and the hidden shares."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefetch", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds")
    options = parser.parse_args()
    keep_freed_memory()
    # The work is on one thread, and the worker has the other core.
    torch.set_num_threads(1)
    results = [measure(name, loop, rounds=options.rounds) for name, loop in loops()]
    results.append(measure_update(rounds=options.rounds))
    if options.json:
        print(json.dumps([result.as_dict() for result in results], indent=2))
        return
    for result in results:
        print(
            f"{result.name} {ROWS:,} × {WIDTH}, {IDS:,} ids: "
            f"{result.lookup:.2f} ms, "
            f"work {result.work:.2f}, both {result.without:.2f}, with the worker "
            f"{result.loop:.2f}: {result.hidden:.0%} hidden (goal {GOAL:.0%})"
        )


if __name__ == "__main__":
    main()
