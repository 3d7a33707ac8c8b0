"""The core that a thread runs on; on systems other than Linux, threads are not moved."""

import sys

import numpy as np
from numba import types

from .atomics import atomic_load, atomic_store
from .compile import internal
from .system import external, noop

# Size of Linux's ``cpu_set_t``, in bytes and in 64-bit words.
CPU_SET_BYTES, CPU_SET_WORDS = 128, 16

current_core, _get_affinity, _set_affinity = [noop] * 3
if sys.platform == "linux":
    current_core = external("sched_getcpu")
    _get_affinity = external("sched_getaffinity", types.int32, types.int64, types.uint64)
    _set_affinity = external("sched_setaffinity", types.int32, types.int64, types.uint64)


@internal
def exclude_core(thread, core, cores):
    """Exclude a core from those that a thread may run on, and return whether it was done.

    Return False, and change nothing, if the thread may run on no other core.

    Args:
        thread: Number that the system gave the thread; 0 is the calling one.
        core: The core.
        cores: Address of ``CPU_SET_BYTES`` bytes, which get the cores from before; see
            :func:`restore_cores`.
    """
    if core < 0 or core >= 64 * CPU_SET_WORDS:
        return False
    if _get_affinity(np.int32(thread), CPU_SET_BYTES, cores) < 0:
        return False
    word, others = cores + core // 64 * 8, np.int64(0)
    before = atomic_load(word)
    atomic_store(word, before & ~(1 << (core % 64)))
    for i in range(CPU_SET_WORDS):
        others |= atomic_load(cores + 8 * i)
    if others == 0:
        return False
    is_done = _set_affinity(np.int32(thread), CPU_SET_BYTES, cores) == 0
    atomic_store(word, before)
    return is_done


@internal
def restore_cores(thread, cores):
    """Let a thread run on the cores from before :func:`exclude_core`."""
    _set_affinity(np.int32(thread), CPU_SET_BYTES, cores)
