"""Large pages of memory for large tensors, as NumPy asks the system for them.

Rows that are looked up lie anywhere in a table: with pages of 4 KB almost every one has to
be found first, with pages of 2 MB few do.
"""

import ctypes
import mmap

from torch import Tensor

from .memory import concrete

# From so many bytes on, as in NumPy.
LEAST = 1 << 22
# What the system calls the wish, if it knows of it.
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = None if _HUGE is None else ctypes.CDLL(None).madvise
if _madvise is not None:
    _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def with_large_pages(x: Tensor) -> Tensor:
    """Return ``x``, which nobody has written to yet, on large pages if there are any.

    A wish: where the system knows nothing of it, nothing happens.

    Example:
        >>> import torch
        >>> with_large_pages(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    if x.nbytes >= LEAST and concrete(x):
        wish_for_large_pages(x)
    return x


def wish_for_large_pages(x: Tensor) -> None:
    """Tell the system so, of a tensor that is ordinary memory."""
    start, size = x.data_ptr(), x.nbytes
    if _madvise is not None and size >= LEAST:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(first, start + size - first, _HUGE)
