"""Processes that use a shared store, kill each other and end in the middle."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

from firstlayer.stores import SharedStore

ROWS, WIDTH = 2000, 64


def table(version: int) -> np.ndarray:
    """Return a table in which every number says ``version``."""
    return np.full((ROWS, WIDTH), version, np.float32)


def leftovers(name: str) -> list[str]:
    """Return the files of a shared store that are still there."""
    return sorted(
        file
        for file in os.listdir("/dev/shm")
        if "firstlayer-" in file and f"-{name}" in file
    )


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python process that can import this module."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_processes(name: str, count: int) -> dict[str, int]:
    """Kill ``count`` forked processes that create, use and close a table.

    After each kill, the table is opened and must be complete. At the end nothing is left.
    """
    draw, left = random.Random(0), 0
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for version in range(5):
                        with SharedStore(name, lambda v=version: table(v)) as store:
                            store.read(np.arange(0, ROWS, 100))
            finally:
                os._exit(1)
        # Half of the time, this process has the table open when the other one is killed.
        time.sleep(draw.uniform(0, 0.006))
        holder = SharedStore(name, table(9)) if number % 2 else None
        time.sleep(draw.uniform(0, 0.002))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += bool(leftovers(name))
        with SharedStore(name, table(9)) as store:
            rows = store.read(np.arange(ROWS))
            assert (rows == rows[0, 0]).all(), "a table that was not complete"
        if holder is not None:
            assert (holder.read(np.arange(ROWS)) == rows).all()
            holder.close()
        assert not leftovers(name), leftovers(name)
    return {"kills": count, "killed while in use": left}
