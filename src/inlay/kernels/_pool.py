"""A small pool of threads that splits a long range between the cores.

Numba's own threading layers abort a process that forks or that calls them from two threads
at once, so the loops are serial and the splitting happens here. The pool is made when it is
first needed and forgotten in a forked child, where its threads do not exist.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class _Pool:
    """The threads and how many there are: the only state this package keeps."""

    def __init__(self) -> None:
        self.size = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        self.forget()

    def forget(self) -> None:
        self.lock = threading.Lock()
        self.executor: ThreadPoolExecutor | None = None
        self.capacity = 0

    def workers(self, count: int) -> ThreadPoolExecutor:
        with self.lock:
            if self.executor is None or self.capacity < count:
                self.drop()
                self.executor, self.capacity = ThreadPoolExecutor(count, "inlay"), count
            return self.executor

    def drop(self) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=False)
            self.executor = None

    def resize(self, size: int) -> None:
        with self.lock:
            if size != self.size:
                self.drop()
            self.size = size


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
    _pool.resize(int(n))


def get_num_threads() -> int:
    """Return how many threads the kernels use, by default one for each core allowed."""
    return _pool.size


@contextmanager
def on_threads(n: int) -> Iterator[None]:
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
    """Call ``loop(lo, hi, *args)`` over parts that cover ``[0, size)``, and wait.

    Args:
        loop: A compiled loop that writes to disjoint places for disjoint ranges.
        size: Length of the whole range.
        args: Passed on to every call.
        grain: The least length worth a thread: handing over costs about 40 µs.
    """
    threads = getattr(_here, "size", None) or _pool.size
    parts = min(threads, size // max(grain, 1))
    if parts <= 1:
        loop(0, size, *args)
        return
    bounds = [size * part // parts for part in range(parts + 1)]
    # Submitted under no lock of ours: a pool that is resized meanwhile says so, and then
    # the caller does the rest itself.
    others = []
    for lo, hi in zip(bounds[1:-1], bounds[2:], strict=True):
        try:
            others.append(_pool.workers(parts - 1).submit(loop, lo, hi, *args))
        except RuntimeError:
            loop(lo, hi, *args)
    loop(bounds[0], bounds[1], *args)
    for other in others:
        other.result()
