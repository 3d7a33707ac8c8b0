"""How fast rows are looked up, beside other libraries and beside the memory itself.

A lookup does nothing but move bytes: every id reads a row and writes it. Its speed is
therefore given twice, as tokens a second and as a fraction of what the memory can move,
which is measured by copying an array too large for any cache. A table that fits into the
cache can do better than that: a fraction above 1 says so.

One hot batch would flatter everybody, so the contestants take turns in an order that
rotates: after a rest and a call that nobody times, each goes once through all batches of
ids, and each of these calls is a reading. What is reported is their median. All have to
return the same bits before they are timed.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import get_num_threads
from .._check import positive

ROWS = (1_000, 10_000, 100_000)
BATCHES = (1, 16, 64, 256)
#: Different batches of ids that the readings go through.
BATCHES_OF_IDS = 8
# OpenMP's threads go on spinning after their work and would sit on the next one's core.
REST = 0.01
# A reading repeats a short call until it takes this long: a clock has its own cost.
LEAST = 5e-4
COPIED = 128 << 20

Lookup = Callable[[int], Any]
#: Told how many of how many readings are done.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Reading:
    """One library's median time for one lookup.

    Args:
        library: Whose lookup.
        rows: Of the table.
        width: Of the table, in float32.
        batch: Sequences of ids.
        length: Ids in a sequence.
        seconds: The median of all readings.
    """

    library: str
    rows: int
    width: int
    batch: int
    length: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """How many ids became rows in a second."""
        return self.batch * self.length / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """How much was moved: rows read and rows written, and the ids."""
        return self.tokens_per_second * (2 * self.width * 4 + 8)


@dataclass(frozen=True)
class Lookups:
    """What came of timing lookups.

    Args:
        threads: How many threads our lookups may use.
        bandwidth: Bytes a second, read and written, that a plain copy moves with as many.
        missing: Libraries that are not installed.
        readings: One for each library, table and batch.
    """

    threads: int
    bandwidth: float
    missing: tuple[str, ...]
    readings: tuple[Reading, ...]

    def fraction(self, reading: Reading) -> float:
        """Return how much of the memory's bandwidth a reading took."""
        return reading.bytes_per_second / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, with what follows from the times."""
        readings = [
            {
                **vars(reading),
                "tokens_per_second": reading.tokens_per_second,
                "bandwidth_fraction": self.fraction(reading),
            }
            for reading in self.readings
        ]
        return {**vars(self), "readings": readings}


def measure(
    rows: Iterable[int] = ROWS,
    *,
    batches: Iterable[int] = BATCHES,
    width: int = 256,
    length: int = 128,
    rounds: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Lookups:
    """Time lookups of uniformly drawn ids in float32 tables.

    Args:
        rows: Sizes of the tables.
        batches: Sequences of ids in a call.
        width: Of the tables.
        length: Ids in a sequence.
        rounds: How often each library's turn comes.
        seed: Of the ids.
        progress: Told of every table and batch that is done.

    Example:
        >>> found = measure([10], batches=[1], width=4, length=2, rounds=1)
        >>> sorted({reading.library for reading in found.readings})
        ['firstlayer', 'firstlayer.torch', 'numpy', 'torch']
    """
    cases = [
        (positive("rows", r), positive("batch", b))
        for r in dict.fromkeys(rows)
        for b in dict.fromkeys(batches)
    ]
    positive("width", width)
    positive("length", length)
    positive("rounds", rounds)
    rng, readings, missing = np.random.default_rng(seed), [], ()
    for done, (count, batch) in enumerate(cases):
        table = rng.standard_normal((count, width), dtype=np.float32)
        ids = [rng.integers(0, count, (batch, length)) for _ in range(BATCHES_OF_IDS)]
        lookups, missing = contestants(table, ids)
        for library, seconds in _medians(lookups, rounds=rounds).items():
            readings.append(Reading(library, count, width, batch, length, seconds))
        if progress is not None:
            progress(done + 1, len(cases))
    return Lookups(get_num_threads(), bandwidth(), missing, tuple(readings))


def contestants(
    table: np.ndarray, ids: list[np.ndarray]
) -> tuple[dict[str, Lookup], tuple[str, ...]]:
    """Return every installed library's lookup by the number of a batch, and the missing."""
    from ..numpy import Embedding

    rows, width = table.shape
    ours = Embedding(rows, width, weight=table)
    lookups: dict[str, Lookup] = {
        "firstlayer": lambda batch: ours(ids[batch]),
        "numpy": lambda batch: np.take(table, ids[batch], axis=0),
    }
    try:
        import torch

        from .. import torch as face
    except ImportError:
        return lookups, ("firstlayer.torch", "torch")
    weight, tensors = torch.from_numpy(table), [torch.from_numpy(batch) for batch in ids]
    for library, layer in (
        ("firstlayer.torch", face.Embedding),
        ("torch", torch.nn.Embedding),
    ):
        module = layer.from_pretrained(weight)
        lookups[library] = lambda batch, module=module: module(tensors[batch])
    return lookups, ()


def bandwidth(*, size: int = COPIED, readings: int = 7) -> float:
    """Return how many bytes a second a copy reads and writes, at its best.

    Args:
        size: Of the array that is copied, in bytes; many times a cache.
        readings: How often it is tried.
    """
    source = np.ones(size // 4, np.float32)
    target = np.empty_like(source)
    parts = np.linspace(0, len(source), get_num_threads() + 1, dtype=int)
    spans = [slice(*span) for span in zip(parts, parts[1:], strict=False)]

    def copy(span: slice) -> None:
        np.copyto(target[span], source[span])

    times = []
    with ThreadPoolExecutor(len(spans)) as pool:
        for _ in range(readings):
            start = time.perf_counter()
            list(pool.map(copy, spans))
            times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def _medians(lookups: dict[str, Lookup], *, rounds: int) -> dict[str, float]:
    _check_equal(lookups)
    names = list(lookups)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name] += _readings(lookups[name])
    return {name: float(np.median(values)) for name, values in times.items()}


def _readings(lookup: Lookup) -> list[float]:
    time.sleep(REST)
    repeat = max(1, round(LEAST / max(_time(lookup, 0), 1e-7)))
    return [_time(lookup, batch, repeat) for batch in range(BATCHES_OF_IDS)]


def _time(lookup: Lookup, batch: int, repeat: int = 1) -> float:
    start = time.perf_counter()
    for again in range(repeat):
        lookup((batch + again) % BATCHES_OF_IDS)
    return (time.perf_counter() - start) / repeat


def _check_equal(lookups: dict[str, Lookup]) -> None:
    for batch in range(BATCHES_OF_IDS):
        want = np.asarray(lookups["firstlayer"](batch))
        for name, lookup in lookups.items():
            if not np.array_equal(np.asarray(lookup(batch)), want):
                raise ValueError(f"{name} looked up other rows than firstlayer")
