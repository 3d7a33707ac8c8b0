"""The core that a thread runs on; on systems other than Linux, threads are not moved."""

import sys

import numpy as np
from numba import types

from .compile import internal
from .scratch import free_row, is_allocated, scratch_row
from .system import external, noop

# Size of Linux's ``cpu_set_t``, in bytes and in 64-bit words.
CPU_SET_BYTES, CPU_SET_WORDS = 128, 16

current_core, _get_affinity, _set_affinity = [noop] * 3
if sys.platform == "linux":
    current_core = external("sched_getcpu")
    _get_affinity = external("sched_getaffinity", types.int32, types.int64, types.uint64)
    _set_affinity = external("sched_setaffinity", types.int32, types.int64, types.uint64)


@internal
def move_off_core(core):
    """Move this thread to another core if it runs on ``core`` and may run elsewhere.

    A helper woken on its caller's core waits until the caller is done; the scheduler moves
    it only milliseconds later.
    """
    if core < 0 or current_core() != core or core >= 64 * CPU_SET_WORDS:
        return
    allowed = scratch_row(CPU_SET_WORDS, np.int64(0))
    if not is_allocated(allowed):
        return
    address, word = allowed.ctypes.data, core // 64
    if _get_affinity(0, CPU_SET_BYTES, address) >= 0:
        cores, others = allowed[word], np.int64(0)
        allowed[word] = cores & ~(1 << (core % 64))
        for i in range(CPU_SET_WORDS):
            others |= allowed[i]
        if others and _set_affinity(0, CPU_SET_BYTES, address) == 0:
            allowed[word] = cores
            _set_affinity(0, CPU_SET_BYTES, address)
    free_row(allowed)
