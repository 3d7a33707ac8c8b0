"""Helpers are kept off the core of their caller, for as long as it takes."""

import os
import sys
import threading
import time

import numpy as np
import pytest

from firstlayer.kernels.runtime.affinity import (
    CPU_SET_WORDS,
    exclude_core,
    restore_cores,
)
from firstlayer.kernels.runtime.compile import kernel
from firstlayer.kernels.runtime.pool import run
from firstlayer.kernels.runtime.threads import on_threads
from tests.kernels.runtime.test_pool import _add

HAS_AFFINITY = sys.platform == "linux"


@kernel()
def _exclude(thread, core, cores):
    return exclude_core(thread, core, cores)


@kernel()
def _restore(thread, cores):
    restore_cores(thread, cores)


def cores_of(thread=0):
    return os.sched_getaffinity(thread) if HAS_AFFINITY else {0}


def is_moved(core):
    """Return whether a thread can be kept off this core."""
    return HAS_AFFINITY and core in cores_of() and len(cores_of()) > 1


def test_a_core_is_excluded_until_it_is_restored():
    before, saved = cores_of(), np.zeros(CPU_SET_WORDS, np.int64)
    for core in before:
        expected = is_moved(core)
        is_done = _exclude(0, core, saved.ctypes.data)
        left = cores_of()
        _restore(0, saved.ctypes.data)
        assert is_done == expected
        assert left == (before - {core} if is_done else before)
        assert cores_of() == before


@pytest.mark.parametrize("core", [-1, 64 * CPU_SET_WORDS, 64 * CPU_SET_WORDS - 1])
def test_cores_that_a_thread_may_not_use_change_nothing(core):
    before, saved = cores_of(), np.zeros(CPU_SET_WORDS + 1, np.int64)
    _exclude(0, core, saved.ctypes.data)
    assert cores_of() == before and saved[-1] == 0


def test_helpers_keep_their_cores_when_they_are_woken():
    before, counts = cores_of(), np.zeros(20_000, np.int64)
    with on_threads(2):
        for _ in range(20):
            run(_add, counts.size, counts, 1, grain=7)
            # Helpers sleep after less than a millisecond.
            time.sleep(0.003)
    assert (counts == 20).all()
    helpers = [thread for thread in threading.enumerate() if thread.name == "firstlayer"]
    assert helpers
    for helper in helpers:
        assert cores_of(helper.native_id or 0) == before
