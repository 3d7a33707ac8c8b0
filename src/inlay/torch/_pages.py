"""Large pages of memory for large tensors, as NumPy asks the system for them.

Rows that are looked up lie anywhere in a table: with pages of 4 KB almost every one has to
be found first, with pages of 2 MB few do.
"""

import ctypes
import sys

from torch import Tensor

from ._fused import concrete

# From so many bytes on, as in NumPy.
LEAST = 1 << 22
PAGE = 1 << 12
# The system's name for the wish.
MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def with_large_pages(x: Tensor) -> Tensor:
    """Return ``x``, which nobody has written to yet, on large pages if there are any.

    A wish: where the system knows nothing of it, nothing happens.

    Example:
        >>> import torch
        >>> with_large_pages(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    size = x.numel() * x.element_size()
    if _libc is not None and size >= LEAST and concrete(x):
        first = -(-x.data_ptr() // PAGE) * PAGE
        end = x.data_ptr() + size
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)
    return x
