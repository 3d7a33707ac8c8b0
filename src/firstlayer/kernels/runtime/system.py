"""C library calls for compiled code: locking, sleeping, and pages.

A call that the system does not have is a no-op that returns -1. Without POSIX threads the
pool starts no helpers.
"""

import os
from typing import Any

import numba
from numba import types

#: Whether compiled code can put threads to sleep and wake them.
HAS_POSIX_THREADS = os.name == "posix"
# Advice of ``madvise``, the same number on Linux, macOS and the BSDs.
WILL_NEED = 3


def external(name: str, *argument_types: Any) -> Any:
    """Return a C function that returns an int, callable from compiled code."""
    return types.ExternalFunction(name, types.int32(*argument_types))


@numba.njit
def noop(*arguments):
    """Return -1."""
    return -1


mutex_lock, mutex_unlock, condition_wait, condition_broadcast, sleep_us = [noop] * 5
if HAS_POSIX_THREADS:
    mutex_lock = external("pthread_mutex_lock", types.int64)
    mutex_unlock = external("pthread_mutex_unlock", types.int64)
    condition_wait = external("pthread_cond_wait", types.int64, types.int64)
    condition_broadcast = external("pthread_cond_broadcast", types.int64)
    sleep_us = external("usleep", types.uint32)

_madvise, page_states = [noop] * 2
if HAS_POSIX_THREADS:
    _madvise = external("madvise", types.int64, types.int64, types.int32)
    #: Write one byte for each page of a range, whose lowest bit says that it is in memory.
    page_states = external("mincore", types.int64, types.int64, types.int64)
_memcpy = external("memcpy", types.int64, types.int64, types.int64)


@numba.njit(inline="always")
def copy_bytes(to, source, size):
    """Copy bytes between two addresses."""
    _memcpy(to, source, size)


@numba.njit
def request_pages(start, size):
    """Start reading pages of a mapped file; a hint, which the system may refuse."""
    return _madvise(start, size, WILL_NEED)
