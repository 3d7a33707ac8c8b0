"""What compiled code asks of the operating system: to sleep, to wake, to change its core.

Where the system has no such call, it does nothing: without POSIX threads nobody sleeps,
because there are no helpers (:data:`HAS_THREADS`), and elsewhere than on Linux a thread
stays where it is.
"""

import os
import sys
from typing import Any

import numba
import numpy as np
from numba import types

#: Whether compiled code can put threads to sleep and wake them.
HAS_THREADS = os.name == "posix"
# Bytes and words of Linux's set of cores, a bit for each.
SIZE, WORDS = 128, 16


def _external(name: str, *arguments: Any) -> Any:
    """Return a function of the C library that returns an int, for compiled code."""
    return types.ExternalFunction(name, types.int32(*arguments))


@numba.njit
def _nothing(*arguments):
    return -1


lock, unlock, wait, wake, nap = [_nothing] * 5
if HAS_THREADS:
    lock = _external("pthread_mutex_lock", types.int64)
    unlock = _external("pthread_mutex_unlock", types.int64)
    wait = _external("pthread_cond_wait", types.int64, types.int64)
    wake = _external("pthread_cond_broadcast", types.int64)
    nap = _external("usleep", types.uint32)

core_here, _cores, _set_cores = [_nothing] * 3
if sys.platform == "linux":
    core_here = _external("sched_getcpu")
    _cores = _external("sched_getaffinity", types.int32, types.int64, types.uint64)
    _set_cores = _external("sched_setaffinity", types.int32, types.int64, types.uint64)


@numba.njit
def leave(core):
    """Move this thread to another core, if it is on this one and there is another.

    A helper that is woken on its caller's core would wait until the caller is done. The
    system would notice and move it, but milliseconds later.
    """
    if core < 0 or core_here() != core or core >= 64 * WORDS:
        return
    allowed = np.zeros(WORDS, np.int64)
    if _cores(0, SIZE, allowed.ctypes.data) < 0:
        return
    others = allowed.copy()
    others[core // 64] &= ~(1 << (core % 64))
    if others.any() and _set_cores(0, SIZE, others.ctypes.data) == 0:
        _set_cores(0, SIZE, allowed.ctypes.data)
