"""Which core a thread is on, and leaving it: for compiled code, where the system tells.

A helper that is woken on its caller's core waits until the caller is done. The system would
notice and move it, but milliseconds later.
"""

import sys
from typing import Any

import numba
import numpy as np
from numba import types

# Bytes and words of the system's set of cores, a bit for each.
SIZE, WORDS = 128, 16

if sys.platform == "linux":
    core_here: Any = types.ExternalFunction("sched_getcpu", types.int32())
    _get: Any = types.ExternalFunction(
        "sched_getaffinity", types.int32(types.int32, types.int64, types.uint64)
    )
    _set: Any = types.ExternalFunction(
        "sched_setaffinity", types.int32(types.int32, types.int64, types.uint64)
    )

    @numba.njit
    def leave(core):
        """Move this thread to another core, if it is on this one and there is another."""
        if core_here() != core or core >= 64 * WORDS:
            return
        allowed = np.zeros(WORDS, np.int64)
        if _get(0, SIZE, allowed.ctypes.data) < 0:
            return
        others = allowed.copy()
        others[core // 64] &= ~(1 << (core % 64))
        if others.any() and _set(0, SIZE, others.ctypes.data) == 0:
            _set(0, SIZE, allowed.ctypes.data)

else:

    @numba.njit
    def core_here():
        """Return -1: the system does not tell."""
        return -1

    @numba.njit
    def leave(core):
        """Do nothing."""
