"""Large pages of memory for large tensors, as NumPy asks the system for them.

Rows that are looked up lie anywhere in a table: with pages of 4 KB almost every one has to
be found first, with pages of 2 MB few do.
"""

import ctypes
import mmap

from torch import Tensor

from ._fused import concrete

# From so many bytes on, as in NumPy.
LEAST = 1 << 22
# What the system calls the wish, if it knows of it.
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = None if _HUGE is None else ctypes.CDLL(None).madvise


def with_large_pages(x: Tensor) -> Tensor:
    """Return ``x``, which nobody has written to yet, on large pages if there are any.

    A wish: where the system knows nothing of it, nothing happens.

    Example:
        >>> import torch
        >>> with_large_pages(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    size = x.numel() * x.element_size()
    if _madvise is not None and size >= LEAST and concrete(x):
        first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = ctypes.c_size_t(x.data_ptr() + size - first)
        _madvise(ctypes.c_void_p(first), length, _HUGE)
    return x
