"""Time several functions against each other on a shared, noisy machine.

Runs are interleaved: in each round every function is called on all batches before the next
one starts, and the order rotates from round to round. Different batches keep the inputs out
of the cache, a pause lets OpenMP threads of the previous function go to sleep, and warm-up
calls wake those of the next one.
"""

import statistics
import time
from collections.abc import Callable, Mapping

#: A function to time, called with the number of a batch.
Run = Callable[[int], object]


def interleaved_medians(
    runs: Mapping[str, Run],
    *,
    batches: int,
    rounds: int,
    warmup: int = 2,
    rest: float = 0.01,
    repeat: int = 1,
    min_seconds: float = 0.0,
) -> dict[str, float]:
    """Return the median seconds of a call of each function.

    Args:
        runs: Functions by name.
        batches: Number of batches. Each is timed once per round.
        rounds: Number of rounds.
        warmup: Untimed calls before each function's batches, on the last batches.
        rest: Seconds to sleep before the warm-up.
        repeat: Calls per measurement, each on the next batch.
        min_seconds: Length of a measurement: calls that are shorter are repeated more often
            than ``repeat``. Needs a warm-up, whose last call estimates the time of one.

    Example:
        >>> times = interleaved_medians(
        ...     {"len": lambda batch: len("abc"), "sleep": lambda batch: time.sleep(1e-3)},
        ...     batches=3,
        ...     rounds=2,
        ... )
        >>> times["len"] < 1e-3 < times["sleep"]
        True
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            run, calls = runs[name], repeat
            time.sleep(rest)
            for batch in range(batches - warmup, batches):
                seconds = _seconds(run, batch % batches, 1, batches)
                calls = max(repeat, round(min_seconds / max(seconds, 1e-7)))
            times[name] += [
                _seconds(run, batch, calls, batches) / calls for batch in range(batches)
            ]
    return {name: statistics.median(values) for name, values in times.items()}


def _seconds(run: Run, batch: int, calls: int, batches: int) -> float:
    start = time.perf_counter()
    for call in range(calls):
        run((batch + call) % batches)
    return time.perf_counter() - start
