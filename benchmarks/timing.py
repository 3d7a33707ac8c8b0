"""Time Firstlayer against its peers: results are compared first, then runs are interleaved.

Each round runs every library: a short pause, two warm-up calls, then twelve timed calls on
twelve different batches (:mod:`firstlayer.analysis.timing`, shared with the ``bench``
command). The result is the median of all timed calls and its ratio to ours. A memcpy of the
output is timed as well, as a lower bound for anything that writes its output.

The process keeps freed memory blocks up to 64 MB. By default the C library returns some to
the system and faults them in again, which in a short loop costs more than the layers.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from firstlayer.analysis.timing import interleaved_medians

BATCHES = 12
Run = Callable[[int], Any]
# Smallest ratio that counts as equal: two processes that run the same code differ by this.
EQUAL = 0.97
# mallopt parameters of glibc.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Case:
    """One operation, timed for Firstlayer and its peers.

    Args:
        name: Operation and sizes.
        ours: Runs it on a batch, by batch number.
        peers: The same for other libraries, by name.
        bars: Required speed-up over each peer.
        missing: Peers that are not installed.
        tolerance: Largest allowed difference between results.
        repeat: Calls per timed reading, for very short operations.
        most_rounds: Upper limit of rounds, for long operations.
        flatten: Converts a result to a NumPy array.
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
    """Medians in milliseconds, and the ratio of each peer's time to ours."""

    name: str
    ours: float
    memcpy: float
    peers: dict[str, float]
    ratios: dict[str, float]
    bars: dict[str, float]
    missing: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Return whether every bar was met; a bar of 1 means as fast, within the noise."""
        return all(
            self.ratios[name] >= (EQUAL if bar == 1 else bar)
            for name, bar in self.bars.items()
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the result that :meth:`as_dict` made this dict of."""
        values = {name: value for name, value in values.items() if name != "met"}
        return cls(**{**values, "missing": tuple(values["missing"])})


def keep_freed_memory() -> None:
    """Make the process keep up to a gigabyte of freed memory, where glibc allows it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, 1 << 30)
        mallopt(MMAP_THRESHOLD, 1 << 26)


def measure(case: Case, *, rounds: int = 12) -> Result:
    """Check that all results agree on every batch, then time interleaved rounds."""
    _check_equal(case)
    sample = case.flatten(case.ours(0))
    runs = {"ours": case.ours, "memcpy": lambda batch: sample.copy(), **case.peers}
    rounds = min(rounds, case.most_rounds)
    seconds = interleaved_medians(runs, batches=BATCHES, rounds=rounds, repeat=case.repeat)
    medians = {name: value * 1e3 for name, value in seconds.items()}
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


def median_result(results: Sequence[Result]) -> Result:
    """Return the medians of one case over several processes.

    The ratios are medians of the ratios, because both times of a ratio were taken in the
    same minutes.
    """

    def median(values: Callable[[Result], dict[str, float]]) -> dict[str, float]:
        names = values(results[0])
        return {n: float(np.median([values(one)[n] for one in results])) for n in names}

    first = results[0]
    return Result(
        first.name,
        float(np.median([one.ours for one in results])),
        float(np.median([one.memcpy for one in results])),
        median(lambda one: one.peers),
        median(lambda one: one.ratios),
        first.bars,
        first.missing,
    )


def _check_equal(case: Case) -> None:
    for batch in range(BATCHES):
        want = _upcast(case.flatten(case.ours(batch)))
        for name, peer in case.peers.items():
            got = _upcast(case.flatten(peer(batch)))
            np.testing.assert_allclose(
                got, want, rtol=0, atol=case.tolerance, err_msg=f"{case.name}: {name}"
            )


def _upcast(x: np.ndarray) -> np.ndarray:
    """Return half precision as float32: NumPy cannot compare bfloat16 with a tolerance."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x
