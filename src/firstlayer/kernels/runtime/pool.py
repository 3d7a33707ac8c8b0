"""A few threads that share out a long range between the cores.

Numba's own threading layers abort a process that forks or that calls them from two threads
at once, so the threads are ours. A range is cut into pieces, and whoever is free takes the
next (``_share``): the caller begins at once, and a helper that is slow to wake leaves more
to the others instead of holding them up. Pieces write to places of their own, so that
results do not depend on who made them.

Helpers never return from compiled code: one that had to ask for the GIL would stop its
caller's Python to get it. They are made when they are first needed and forgotten in a
forked child, where they do not exist. There is one job at a time: whoever comes while the
helpers are busy works alone.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from .share import BLOCK, CONDITION, MUTEX, alone, help_forever
from .system import HAS_THREADS
from .threads import threads_here

# Pieces for each thread: enough to even out, few enough to cost little.
PIECES = 8
# How often a helper looks for its next job before it sleeps: for about 400 µs.
LINGER = 1_200_000


class _Pool:
    """The helpers: with their number, the only state this package keeps."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.lock = threading.Lock()
        self.block, self.helpers = 0, 0

    def hire(self, count: int) -> int:
        """Have that many helpers, and return the address of what they look at."""
        self.block = self.block or _block()
        while self.helpers < count:
            threading.Thread(
                target=help_forever,
                args=(self.block, LINGER),
                name="firstlayer",
                daemon=True,
            ).start()
            self.helpers += 1
        return self.block


def _block() -> int:
    """Return the address of memory that is never freed: helpers may outlive Python."""
    c = ctypes.CDLL(None)
    c.calloc.restype = ctypes.c_void_p
    # A line more, to begin where a line of cache does.
    start = c.calloc(1, BLOCK + 64) or 0
    block = -(-start // 64) * 64
    c.pthread_mutex_init(ctypes.c_void_p(block + MUTEX), None)
    c.pthread_cond_init(ctypes.c_void_p(block + CONDITION), None)
    return block


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


def run(loop: Callable[..., Any], size: int, *args: Any, grain: int) -> None:
    """Call ``loop(ticket, *args)`` in as many threads as are worth it.

    Args:
        loop: A compiled loop over ``pieces(ticket)`` that writes to disjoint places
            for disjoint pieces, and allocates before the first of them if at all.
        size: Length of the whole range.
        args: Passed on to every call.
        grain: The least length worth a thread: one that sleeps joins after about 50 µs.
    """
    threads = min(threads_here(), size // max(grain, 1)) if HAS_THREADS else 1
    if threads <= 1 or not _pool.lock.acquire(blocking=False):
        loop(alone(size), *args)
        return
    try:
        piece = -(-size // (threads * PIECES))
        loop((_pool.hire(threads - 1), size, piece, threads - 1, 1), *args)
    finally:
        _pool.lock.release()
