"""Peaks of the memory that Python and NumPy allocate.

CPython crashes if tracemalloc is stopped while another thread allocates. Measurements that
follow each other therefore share one tracing, which ends when threads have had time to
finish their work.
"""

import time
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def tracing() -> Generator[None]:
    """Trace allocations in the block."""
    tracemalloc.start()
    try:
        yield
    finally:
        time.sleep(0.05)
        tracemalloc.stop()


def start_peak() -> int:
    """Start a measurement in a traced block, and return the bytes in use."""
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


def peak_since(start: int) -> int:
    """Return the largest number of bytes in use since :func:`start_peak` returned."""
    return tracemalloc.get_traced_memory()[1] - start
