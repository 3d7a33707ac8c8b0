"""Number of threads the kernels use: one setting for the process, one for a code block."""

import ctypes
import os
import threading
import warnings

from ..._check import positive
from .cpus import available_cpus

# Environment variables with the default number of threads; the first that is set counts.
VARIABLES = ("FIRSTLAYER_NUM_THREADS", "OMP_NUM_THREADS")


class _Setting:
    """The process-wide number of threads; 0 until it is set or first read."""

    def __init__(self) -> None:
        self.size = 0
        # The same number for compiled code that no Python code calls.
        self.native = ctypes.c_int64(0)

    def change(self, size: int) -> None:
        self.size = self.native.value = size


_setting = _Setting()
_here = threading.local()


def set_num_threads(n: int) -> None:
    """Set the number of threads the kernels use, the calling one included.

    Results do not depend on it: sums are taken in the same order.

    Args:
        n: Number of threads. Positive.

    Example:
        >>> before = get_num_threads()
        >>> set_num_threads(1); get_num_threads()
        1
        >>> set_num_threads(before)
    """
    _setting.change(positive("n", n))


def get_num_threads() -> int:
    """Return the number of threads the kernels use.

    The default is the environment variable ``FIRSTLAYER_NUM_THREADS``, otherwise
    ``OMP_NUM_THREADS``, otherwise one thread for each CPU that this process may use, within
    the CPU quota of its container.

    Example:
        >>> get_num_threads() >= 1
        True
    """
    if not _setting.size:
        _setting.change(default_num_threads())
    return _setting.size


def default_num_threads() -> int:
    """Return the default number of threads, from the environment or the system."""
    for name in VARIABLES:
        text = os.environ.get(name, "").strip()
        # OpenMP's variable may list a number for each level of nesting.
        first = text.partition(",")[0].strip() if name == "OMP_NUM_THREADS" else text
        if first.isascii() and first.isdigit() and int(first):
            return int(first)
        if text:
            warnings.warn(
                f"{name} must be a positive integer, got {text!r}; it is ignored",
                RuntimeWarning,
                stacklevel=3,
            )
    return available_cpus()


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


def address_of_num_threads() -> int:
    """Return the address of an int64 that has the value of :func:`get_num_threads`."""
    get_num_threads()
    return ctypes.addressof(_setting.native)


def current_num_threads() -> int:
    """Return the number of threads for kernels that this thread calls now."""
    return getattr(_here, "size", None) or _setting.size or get_num_threads()
