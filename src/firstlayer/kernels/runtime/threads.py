"""How many threads the kernels use: one setting for all, and one for a stretch of code."""

import os
import threading


class _Wanted:
    """What is set for the whole process, by default one thread for each core allowed."""

    def __init__(self) -> None:
        self.size = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )


_wanted = _Wanted()
_here = threading.local()


def set_num_threads(n: int) -> None:
    """Use ``n`` threads in the kernels from now on, the calling one included.

    Results do not depend on it: what is summed, and in which order, does not either.

    Example:
        >>> before = get_num_threads()
        >>> set_num_threads(1); get_num_threads()
        1
        >>> set_num_threads(before)
    """
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")
    _wanted.size = int(n)


def get_num_threads() -> int:
    """Return how many threads the kernels use, by default one for each core allowed."""
    return _wanted.size


class on_threads:
    """Use ``n`` threads in the kernels that this thread calls inside, whatever is set.

    Example:
        >>> with on_threads(1):
        ...     print(threads_here(), get_num_threads() >= 1)
        1 True
    """

    def __init__(self, n: int) -> None:
        self.size = n

    def __enter__(self) -> None:
        self.before, _here.size = getattr(_here, "size", None), self.size

    def __exit__(self, *error: object) -> None:
        _here.size = self.before


def threads_here() -> int:
    """Return how many threads the kernels that this thread calls now may use."""
    return getattr(_here, "size", None) or _wanted.size
