"""A few threads that share out a long range between the cores.

Numba's own threading layers abort a process that forks or that calls them from two threads
at once, so the loops are serial and the sharing happens here. A range is cut into pieces,
and whoever is free takes the next: the caller begins at once, and a helper that is slow to
wake leaves more to the others instead of holding them up. Pieces write to places of their
own, so that results do not depend on who made them.

Helpers are made when they are first needed and forgotten in a forked child, where they do
not exist.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

# Pieces for each thread: enough to even out, few enough to cost little.
PIECES = 4
# How long to look for the last helper before sleeping, which takes as long to wake from.
PATIENCE = 100e-6


class _Job:
    """A range that is being worked on by its caller and whoever joins."""

    def __init__(
        self, loop: Callable[..., Any], args: tuple[Any, ...], pieces: Any
    ) -> None:
        self.loop, self.args = loop, args
        # One iterator for all: under the GIL each piece is handed out once.
        self.pieces: Iterator[tuple[int, int]] = iter(pieces)
        self.lock, self.done = threading.Lock(), threading.Event()
        self.helpers, self.closed = 0, False
        self.error: BaseException | None = None

    def work(self) -> None:
        for lo, hi in self.pieces:
            self.loop(lo, hi, *self.args)

    def join(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.helpers += 1
        try:
            self.work()
        except BaseException as error:
            self.error = error
        with self.lock:
            self.helpers -= 1
            if self.closed and not self.helpers:
                self.done.set()

    def finish(self) -> None:
        """Let nobody join any more, and wait for those who did."""
        with self.lock:
            self.closed = True
            if not self.helpers:
                self.done.set()
        limit = time.perf_counter() + PATIENCE
        while not self.done.is_set() and time.perf_counter() < limit:
            time.sleep(0)
        self.done.wait()
        if self.error is not None:
            raise self.error


class _Pool:
    """The helpers and how many threads to use: the only state this package keeps."""

    def __init__(self) -> None:
        self.size = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        self.forget()

    def forget(self) -> None:
        self.lock = threading.Lock()
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.helpers = 0

    def call(self, job: _Job, count: int) -> None:
        """Ask ``count`` helpers to join a job."""
        with self.lock:
            while self.helpers < count:
                threading.Thread(
                    target=_help, args=(self.jobs,), name="inlay", daemon=True
                ).start()
                self.helpers += 1
        for _ in range(count):
            self.jobs.put(job)


def _help(jobs: "SimpleQueue[_Job]") -> None:
    while True:
        jobs.get().join()


_pool = _Pool()
_here = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


def set_num_threads(n: int) -> None:
    """Use ``n`` threads in the kernels from now on, the calling one included.

    Results do not depend on it: each id's sum is made by one thread, in order.

    Example:
        >>> before = get_num_threads()
        >>> set_num_threads(1); get_num_threads()
        1
        >>> set_num_threads(before)
    """
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")
    _pool.size = int(n)


def get_num_threads() -> int:
    """Return how many threads the kernels use, by default one for each core allowed."""
    return _pool.size


@contextmanager
def on_threads(n: int) -> Generator[None, None, None]:
    """Use ``n`` threads in the kernels that this thread calls inside, whatever is set.

    Example:
        >>> with on_threads(1):
        ...     run(print, 7, "one part", grain=2)
        0 7 one part
    """
    before, _here.size = getattr(_here, "size", None), n
    try:
        yield
    finally:
        _here.size = before


def run(loop: Callable[..., Any], size: int, *args: Any, grain: int) -> None:
    """Call ``loop(lo, hi, *args)`` over pieces that cover ``[0, size)``, and wait.

    Args:
        loop: A compiled loop that writes to disjoint places for disjoint ranges.
        size: Length of the whole range.
        args: Passed on to every call.
        grain: The least length worth a thread: a helper joins after about 50 µs.
    """
    threads = min(getattr(_here, "size", None) or _pool.size, size // max(grain, 1))
    if threads <= 1:
        loop(0, size, *args)
        return
    count = min(threads * PIECES, size)
    bounds = [size * piece // count for piece in range(count + 1)]
    job = _Job(loop, args, list(zip(bounds[:-1], bounds[1:], strict=True)))
    _pool.call(job, threads - 1)
    try:
        job.work()
    finally:
        job.finish()
