"""Timing ours beside its peers: equal results first, then medians over rotating batches.

A machine is noisy and shared, and one hot batch of ids flatters everybody's cache. So the
contestants take turns, in an order that rotates: after a rest and two calls that nobody
times, each goes once through all twelve batches, and each of those calls is a reading. What
is reported is the median of each and the ratio to ours. A copy of the output's size stands
beside them for scale: nothing that writes its output can be much faster.

Memory that was freed is kept by the process, for all of them: blocks up to 64 MB, as
outputs are, not those of a large table's size. By default the C library gives some back to
the system and takes it again, page by page, which in a benchmark's short loop costs more
than the layers do and falls on whoever comes next.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

BATCHES = 12
# OpenMP's threads go on spinning after their work and would sit on the next one's core.
REST = 0.01
# Calls after a rest that are not timed: threads wake, and the output's memory comes back.
WARM = 2
Run = Callable[[int], Any]
# The C library's names for "trim the heap above" and "map blocks from here on".
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Args:
        name: What is done, and on which sizes.
        ours: Does it on the batch of that number, with Firstlayer.
        peers: Does it with another library, by name.
        bars: How many times as fast as that peer ours has to be.
        missing: Peers that are not installed.
        tolerance: How far results may differ.
        repeat: How often a call is repeated for one reading; many for a tiny one.
        most_rounds: How many turns are enough; few for what takes long.
        flatten: Turns a result into something that NumPy can compare.
    """

    name: str
    ours: Run
    peers: dict[str, Run]
    bars: dict[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    tolerance: float = 0.0
    repeat: int = 1
    most_rounds: int = 1000
    flatten: Callable[[Any], Any] = np.asarray


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds, and how many times as long as ours each peer took."""

    name: str
    ours: float
    memcpy: float
    peers: dict[str, float]
    ratios: dict[str, float]
    bars: dict[str, float]
    missing: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Tell whether every bar was met."""
        return all(self.ratios[name] >= bar for name, bar in self.bars.items())

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "met": self.met}


def keep_freed_memory() -> None:
    """Let the process keep up to a gigabyte that it has freed, where it can be told to."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, 1 << 30)
        mallopt(MMAP_THRESHOLD, 1 << 26)


def measure(case: Case, *, rounds: int = 12) -> Result:
    """Check that all agree on every batch, then time them in turns."""
    _check_equal(case)
    sample = case.flatten(case.ours(0))
    runs = {"ours": case.ours, "memcpy": lambda batch: sample.copy(), **case.peers}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(min(rounds, case.most_rounds)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name] += _readings(runs[name], case.repeat)
    medians = {name: float(np.median(values)) * 1e3 for name, values in times.items()}
    peers = {name: medians[name] for name in case.peers}
    ratios = {name: value / medians["ours"] for name, value in peers.items()}
    return Result(
        case.name,
        medians["ours"],
        medians["memcpy"],
        peers,
        ratios,
        case.bars,
        case.missing,
    )


def _readings(run: Run, repeat: int) -> list[float]:
    """Return how long each of the batches took, one after the other."""
    time.sleep(REST)
    for batch in range(-WARM, 0):
        run(batch % BATCHES)
    return [_time(run, batch, repeat) for batch in range(BATCHES)]


def _time(run: Run, batch: int, repeat: int) -> float:
    start = time.perf_counter()
    for again in range(repeat):
        run((batch + again) % BATCHES)
    return (time.perf_counter() - start) / repeat


def _check_equal(case: Case) -> None:
    for batch in range(BATCHES):
        want = case.flatten(case.ours(batch))
        for name, peer in case.peers.items():
            got = case.flatten(peer(batch))
            np.testing.assert_allclose(
                got, want, rtol=0, atol=case.tolerance, err_msg=f"{case.name}: {name}"
            )
