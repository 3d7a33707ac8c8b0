"""Time row lookups with several libraries, and relate them to the memory bandwidth.

A lookup only moves bytes: it reads a row per id and writes it. Its speed is therefore given
in tokens per second and as a fraction of the memory bandwidth, which is measured by copying
an array larger than any cache. A table in the cache can exceed it: a fraction above 1.

All libraries must return the same bits before they are timed. Runs are interleaved; see
:mod:`firstlayer.analysis.timing`.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import get_num_threads
from .._check import positive
from .timing import Run, interleaved_medians

ROWS = (1_000, 10_000, 100_000, 400_000)
BATCHES = (1, 16, 64, 256)
WIDTHS = (64, 256, 1024)
#: Number of different batches of ids.
BATCHES_OF_IDS = 8
# Shorter calls are repeated until they take this long: reading the clock costs time too.
MIN_SECONDS = 5e-4
COPIED_BYTES = 128 << 20

#: Called with the number of finished cases and the number of all cases.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Reading:
    """Median time of one lookup with one library.

    Args:
        library: Name of the library.
        rows: Rows of the table.
        width: Width of the table, in float32.
        batch: Sequences of ids.
        length: Ids in a sequence.
        seconds: Median time.
    """

    library: str
    rows: int
    width: int
    batch: int
    length: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Ids looked up per second."""
        return self.batch * self.length / self.seconds

    @property
    def moved_bytes(self) -> int:
        """Bytes moved by a call: rows read, rows written, and ids."""
        return self.batch * self.length * (2 * self.width * 4 + 8)

    @property
    def bytes_per_second(self) -> float:
        """Bytes moved per second."""
        return self.moved_bytes / self.seconds


@dataclass(frozen=True)
class Lookups:
    """Results of timing lookups.

    Args:
        threads: Number of threads.
        bandwidth: Bytes per second, read and written, of a plain copy with as many threads.
        missing: Libraries that are not installed.
        readings: A reading per table, batch and library.
    """

    threads: int
    bandwidth: float
    missing: tuple[str, ...]
    readings: tuple[Reading, ...]

    def fraction(self, reading: Reading) -> float:
        """Return the fraction of the memory bandwidth that a reading used."""
        return reading.bytes_per_second / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, with derived speeds."""
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
    widths: Iterable[int] = WIDTHS,
    length: int = 128,
    rounds: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Lookups:
    """Time lookups of uniformly drawn ids in float32 tables.

    One size varies at a time, while the others have their middle values.

    Args:
        rows: Numbers of rows of the tables.
        batches: Numbers of sequences per call.
        widths: Widths of the tables.
        length: Ids in a sequence.
        rounds: Number of rounds over all libraries.
        seed: Seed of the tables and ids.
        progress: Called after every table and batch.

    Example:
        >>> found = measure([10], batches=[1], widths=[4], length=2, rounds=1)
        >>> sorted({reading.library for reading in found.readings})
        ['firstlayer', 'firstlayer.torch', 'numpy', 'torch']
    """
    cases = _cases(
        [positive("rows", count) for count in rows],
        [positive("width", width) for width in widths],
        [positive("batch", batch) for batch in batches],
    )
    positive("length", length)
    positive("rounds", rounds)
    rng, readings, missing = np.random.default_rng(seed), [], ()
    for done, (count, width, batch) in enumerate(cases):
        table = rng.standard_normal((count, width), dtype=np.float32)
        ids = [rng.integers(0, count, (batch, length)) for _ in range(BATCHES_OF_IDS)]
        lookups, missing = library_lookups(table, ids)
        _check_equal(lookups)
        medians = interleaved_medians(
            lookups, batches=BATCHES_OF_IDS, rounds=rounds, min_seconds=MIN_SECONDS
        )
        for library, seconds in medians.items():
            readings.append(Reading(library, count, width, batch, length, seconds))
        if progress is not None:
            progress(done + 1, len(cases))
    return Lookups(get_num_threads(), bandwidth(), missing, tuple(readings))


def _cases(*sizes: list[int]) -> list[tuple[int, ...]]:
    """Return the cases in which one size varies and the others have middle values.

    Example:
        >>> _cases([10, 30, 20], [4, 8])
        [(10, 8), (20, 4), (20, 8), (30, 8)]
    """
    middle = tuple(sorted({*values})[len({*values}) // 2] for values in sizes)
    return sorted({
        (*middle[:which], value, *middle[which + 1 :])
        for which, values in enumerate(sizes)
        for value in values
    })


def library_lookups(
    table: np.ndarray, ids: list[np.ndarray]
) -> tuple[dict[str, Run], tuple[str, ...]]:
    """Return the lookups of a batch by library, and the libraries that are missing."""
    from ..numpy import Embedding

    rows, width = table.shape
    ours = Embedding(rows, width, weight=table)
    lookups: dict[str, Run] = {
        "firstlayer": lambda batch: ours(ids[batch]),
        "numpy": lambda batch: np.take(table, ids[batch], axis=0),
    }
    try:
        import torch

        from ..torch import Embedding as TorchEmbedding
    except ImportError:
        return lookups, ("firstlayer.torch", "torch")
    weight, tensors = torch.from_numpy(table), [torch.from_numpy(batch) for batch in ids]
    for library, layer in (
        ("firstlayer.torch", TorchEmbedding),
        ("torch", torch.nn.Embedding),
    ):
        module = layer.from_pretrained(weight)
        lookups[library] = lambda batch, module=module: module(tensors[batch])
    return lookups, ()


def bandwidth(*, size: int = COPIED_BYTES, readings: int = 7) -> float:
    """Return the bytes per second that the fastest of several copies reads and writes.

    Args:
        size: Bytes of the copied array; many times the size of a cache.
        readings: Number of copies.
    """
    source = np.ones(size // 4, np.float32)
    target = np.empty_like(source)
    ends = np.linspace(0, len(source), get_num_threads() + 1, dtype=int)
    parts = [slice(*part) for part in zip(ends, ends[1:], strict=False)]

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    times = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(readings):
            start = time.perf_counter()
            list(pool.map(copy, parts))
            times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def _check_equal(lookups: dict[str, Run]) -> None:
    for batch in range(BATCHES_OF_IDS):
        want = np.asarray(lookups["firstlayer"](batch))
        for name, lookup in lookups.items():
            if not np.array_equal(np.asarray(lookup(batch)), want):
                raise ValueError(f"{name} returned other rows than firstlayer")
