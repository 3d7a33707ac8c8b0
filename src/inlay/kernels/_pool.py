"""A few threads that share out a long range between the cores.

Numba's own threading layers abort a process that forks or that calls them from two threads
at once, so the threads are ours. A range is cut into pieces, and whoever is free takes the
next (``_share``): the caller begins at once, and a helper that is slow to wake leaves more
to the others instead of holding them up. Pieces write to places of their own, so that
results do not depend on who made them.

Helpers are made when they are first needed and forgotten in a forked child, where they do
not exist.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from ._share import Shared, address, alone
from ._threads import threads_here

# Pieces for each thread: enough to even out, few enough to cost little.
PIECES = 8
# Between two looks at a helper that the system has taken off its core.
NAP = 20e-6


# The core that the calling thread is on, where the system tells. It keeps the GIL.
_core: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


def _leave(core: int) -> None:
    """Move this thread off a core: woken where its caller works, it would wait for it.

    The system would notice too, but milliseconds later.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        os.sched_setaffinity(0, allowed - {core})
        os.sched_setaffinity(0, allowed)


class _Job:
    """A range that is being worked on by its caller and whoever joins."""

    def __init__(
        self, loop: Callable[..., Any], args: tuple[Any, ...], shared: Shared
    ) -> None:
        self.loop, self.args, self.shared = loop, args, shared
        self.error: BaseException | None = None
        self.core = _core() if _core else None

    def work(self, *, is_caller: bool) -> None:
        self.loop(self.shared.ticket(is_caller=is_caller), *self.args)

    def help(self) -> None:
        try:
            core = _core() if _core else None
            if core is not None and core == self.core:
                _leave(core)
            self.work(is_caller=False)
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        while not self.shared.finished:
            if self.error is not None:
                raise self.error
            time.sleep(NAP)


class _Pool:
    """The helpers: with their number, the only state this package keeps."""

    def __init__(self) -> None:
        self._calls = np.zeros(1, np.int64)
        self.bell = address(self._calls)
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
        jobs.get().help()


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


def run(loop: Callable[..., Any], size: int, *args: Any, grain: int) -> None:
    """Call ``loop(ticket, *args)`` in as many threads as are worth it, and wait.

    Args:
        loop: A compiled loop over ``pieces(ticket)`` that writes to disjoint places for
            disjoint pieces.
        size: Length of the whole range.
        args: Passed on to every call.
        grain: The least length worth a thread: one that sleeps joins after about 50 µs.
    """
    threads = min(threads_here(), size // max(grain, 1))
    if threads <= 1:
        loop(alone(size), *args)
        return
    piece = -(-size // (threads * PIECES))
    job = _Job(loop, args, Shared(size, piece, _pool.bell))
    _pool.call(job, threads - 1)
    job.work(is_caller=True)
    job.wait()
