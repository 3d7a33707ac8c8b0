"""Number of threads the kernels use: one setting for the process, one for a code block."""

import os
import threading


class _Setting:
    """The process-wide number of threads, by default one for each core allowed."""

    def __init__(self) -> None:
        self.size = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )


_setting = _Setting()
_here = threading.local()


def set_num_threads(n: int) -> None:
    """Set the number of threads the kernels use, the calling one included.

    Results do not depend on it: sums are taken in the same order.

    Example:
        >>> before = get_num_threads()
        >>> set_num_threads(1); get_num_threads()
        1
        >>> set_num_threads(before)
    """
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")
    _setting.size = int(n)


def get_num_threads() -> int:
    """Return the number of threads the kernels use, by default one per allowed core."""
    return _setting.size


class on_threads:
    """Context manager: kernels called by this thread use ``n`` threads.

    Example:
        >>> with on_threads(1):
        ...     print(current_num_threads(), get_num_threads() >= 1)
        1 True
    """

    def __init__(self, n: int) -> None:
        self.size = n

    def __enter__(self) -> None:
        self.before, _here.size = getattr(_here, "size", None), self.size

    def __exit__(self, *error: object) -> None:
        _here.size = self.before


def current_num_threads() -> int:
    """Return the number of threads for kernels that this thread calls now."""
    return getattr(_here, "size", None) or _setting.size
