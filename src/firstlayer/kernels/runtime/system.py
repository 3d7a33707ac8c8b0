"""C library calls for compiled code: locking, sleeping, choosing a core, and pages.

A call that the system does not have is a no-op that returns -1. Without POSIX threads the
pool starts no helpers; on systems other than Linux a thread stays on its core.
"""

import os
import sys
from typing import Any

import numba
import numpy as np
from numba import types

#: Whether compiled code can put threads to sleep and wake them.
HAS_POSIX_THREADS = os.name == "posix"
# Size of Linux's ``cpu_set_t``, in bytes and in 64-bit words.
CPU_SET_BYTES, CPU_SET_WORDS = 128, 16
# Advice of ``madvise``, the same number on Linux, macOS and the BSDs.
WILL_NEED = 3


def _external(name: str, *argument_types: Any) -> Any:
    """Return a C function that returns an int, callable from compiled code."""
    return types.ExternalFunction(name, types.int32(*argument_types))


@numba.njit
def _noop(*arguments):
    return -1


mutex_lock, mutex_unlock, condition_wait, condition_broadcast, sleep_us = [_noop] * 5
if HAS_POSIX_THREADS:
    mutex_lock = _external("pthread_mutex_lock", types.int64)
    mutex_unlock = _external("pthread_mutex_unlock", types.int64)
    condition_wait = _external("pthread_cond_wait", types.int64, types.int64)
    condition_broadcast = _external("pthread_cond_broadcast", types.int64)
    sleep_us = _external("usleep", types.uint32)

current_core, _get_affinity, _set_affinity = [_noop] * 3
if sys.platform == "linux":
    current_core = _external("sched_getcpu")
    _get_affinity = _external("sched_getaffinity", types.int32, types.int64, types.uint64)
    _set_affinity = _external("sched_setaffinity", types.int32, types.int64, types.uint64)

_madvise, page_states = [_noop] * 2
if HAS_POSIX_THREADS:
    _madvise = _external("madvise", types.int64, types.int64, types.int32)
    #: Write one byte for each page of a range, whose lowest bit says that it is in memory.
    page_states = _external("mincore", types.int64, types.int64, types.int64)
_memcpy = _external("memcpy", types.int64, types.int64, types.int64)


@numba.njit(inline="always")
def copy_bytes(to, source, size):
    """Copy bytes between two addresses."""
    _memcpy(to, source, size)


@numba.njit
def request_pages(start, size):
    """Start reading pages of a mapped file; a hint, which the system may refuse."""
    return _madvise(start, size, WILL_NEED)


@numba.njit
def move_off_core(core):
    """Move this thread to another core if it runs on ``core`` and may run elsewhere.

    A helper woken on its caller's core waits until the caller is done; the scheduler moves
    it only milliseconds later.
    """
    if core < 0 or current_core() != core or core >= 64 * CPU_SET_WORDS:
        return
    allowed = np.zeros(CPU_SET_WORDS, np.int64)
    if _get_affinity(0, CPU_SET_BYTES, allowed.ctypes.data) < 0:
        return
    others = allowed.copy()
    others[core // 64] &= ~(1 << (core % 64))
    if others.any() and _set_affinity(0, CPU_SET_BYTES, others.ctypes.data) == 0:
        _set_affinity(0, CPU_SET_BYTES, allowed.ctypes.data)
