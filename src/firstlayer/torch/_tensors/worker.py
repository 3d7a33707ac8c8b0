"""The worker thread that gathers and updates rows while the model computes.

It is one thread, started by the first job of a process. It runs jobs in order, and kernels
on one core, without the GIL. A fork waits until it has no job left; the child starts its
own. At exit Python waits until its jobs are done.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...kernels.runtime.threads import on_threads

#: Beginning of the thread's name.
NAME = "firstlayer-worker"
# Module state: the worker thread of this process, started by the first job.
_worker: ThreadPoolExecutor | None = None


def on_one_core(job: Callable[[], Any]) -> Any:
    """Run a job whose kernels use one thread: the other cores belong to the model."""
    with on_threads(1):
        return job()


def submit(job: Callable[[], Any]) -> "Future[Any]":
    """Run a job on the worker, after those submitted before it.

    The job is cancelled if there can be no worker: while the interpreter exits, or if the
    system starts no further thread.
    """
    global _worker
    try:
        if _worker is None:
            worker = ThreadPoolExecutor(1, thread_name_prefix=NAME)
            # Starts the thread: an executor whose thread did not start is not kept.
            worker.submit(int)
            _worker = worker
        return _worker.submit(on_one_core, job)
    except RuntimeError:
        cancelled: Future[Any] = Future()
        cancelled.cancel()
        return cancelled


def is_worker() -> bool:
    """Return whether the worker runs the caller."""
    return threading.current_thread().name.startswith(NAME)


def _wait_for_worker() -> None:
    """Wait until the worker has no job left, so that a forked child sees whole results."""
    if _worker is not None:
        submit(int).exception()


def _forget_worker() -> None:
    """Drop the worker, whose thread does not exist in a forked child."""
    global _worker
    _worker = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_worker, after_in_child=_forget_worker)
