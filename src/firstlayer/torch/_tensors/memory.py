"""Memory of tensors: when kernels may read it, NumPy views of it, large pages.

Kernels run eagerly on plain CPU tensors, inside autograd functions. ``torch.compile``,
``torch.export``, ``torch.func``, forward-mode AD, tracing, dispatch modes and tensor
subclasses work on operators instead of memory, so they get plain operators.

Three predicates decide, each stricter than the one before:

- :func:`is_eager`: operators run immediately, and nothing records or transforms them.
- :func:`is_plain_cpu`: the tensors are also ordinary CPU tensors with readable values.
- :func:`kernel_eligible`: the tensors also hold floating-point numbers.
"""

import ctypes
import mmap
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ... import kernels
from ..._check import float_dtype
from ...kernels.runtime.threads import on_threads
from .dtypes import FLOATS, HALF
from .row_parameter import PLAIN_CLASSES, RowTensor

_BFLOAT16 = float_dtype("bfloat16")
NUMPY_DTYPES = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: _BFLOAT16,
}
# The array interface has no bfloat16.
_TYPE_STRINGS = {
    dtype: np.dtype(np.uint16).str if dtype is torch.bfloat16 else numpy_dtype.str
    for dtype, numpy_dtype in NUMPY_DTYPES.items()
}
# Torch converts arrays of this many entries or more on several threads.
LARGE_COPY = 1 << 15
# NumPy requests large pages from the same size on.
LARGE_PAGES_FROM = 1 << 22
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = None if _HUGE is None else ctypes.CDLL(None).madvise
if _madvise is not None:
    _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def is_eager() -> bool:
    """Return whether operators run immediately, with nothing recording or transforming."""
    return not (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


def is_recorded() -> bool:
    """Return whether ``torch.export``, ``torch.jit.trace`` or an ONNX exporter records."""
    return is_exporting() if is_compiling() else _get_tracing_state() is not None


def is_plain_cpu(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are ordinary CPU tensors whose values can be read now.

    None is skipped.

    Example:
        >>> is_plain_cpu(torch.arange(3)), is_plain_cpu(torch.empty(3, device="meta"))
        (True, False)
    """
    if not is_eager():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN_CLASSES:
            return False
        # The vmap of autograd.grad(is_grads_batched=True) wraps tensors in plain ones.
        if not x.is_cpu or is_legacy_batchedtensor(x):
            return False
    return True


def kernel_eligible(*tensors: Tensor) -> bool:
    """Return whether all tensors are plain CPU tensors of floating-point numbers.

    Kernels also need contiguous memory. The caller decides whether to make a copy.

    Example:
        >>> kernel_eligible(torch.ones(2, dtype=torch.bfloat16))
        True
        >>> kernel_eligible(torch.arange(2))
        False
    """
    for x in tensors:
        if x.dtype not in FLOATS:
            return False
    return is_plain_cpu(*tensors)


def overrides_torch_functions(x: Any) -> bool:
    """Return whether the class of ``x`` has a ``__torch_function__`` of its own.

    That of :class:`RowTensor` only catches up.
    """
    handler = getattr(type(x), "__torch_function__", None)
    default = (
        None,
        torch._C._disabled_torch_function_impl,
        Tensor.__torch_function__.__func__,
        RowTensor.__torch_function__.__func__,
    )
    return getattr(handler, "__func__", handler) not in default


def threads_of_torch() -> AbstractContextManager[None]:
    """Let kernels called inside use as many threads as torch does."""
    return on_threads(torch.get_num_threads())


def array_of(x: Tensor) -> np.ndarray:
    """Return a plain CPU tensor as a NumPy array over the same memory; bfloat16 too."""
    if x.requires_grad:
        x = x.detach()
    if x.dtype is torch.bfloat16:
        return x.view(torch.uint16).numpy().view(_BFLOAT16)
    return x.numpy()


class _ArrayInterface:
    """An object that NumPy reads as the memory of ``tensor``."""

    __slots__ = ("__array_interface__", "tensor")


def array_of_table(weight: Tensor, *, keeps_alive: bool = True) -> np.ndarray:
    """Return a parameter as a NumPy array of the same memory, and keep it resizable.

    ``Tensor.numpy`` makes the storage non-resizable; FSDP frees tables by resizing.

    Args:
        weight: The parameter.
        keeps_alive: Whether the array keeps the parameter alive. Otherwise the caller
            reads it only while the parameter has the same memory.
    """
    memory, dtype, strides = _ArrayInterface(), weight.dtype, None
    address = weight.data_ptr()
    if not address and weight.numel():
        raise ValueError("the memory of a table must not be freed before it is read")
    memory.tensor = weight if keeps_alive else None
    if not weight.is_contiguous():
        strides = tuple(weight.element_size() * step for step in weight.stride())
    memory.__array_interface__ = {
        "data": (address, False),
        "shape": weight.shape,
        "strides": strides,
        "typestr": _TYPE_STRINGS[dtype],
        "version": 3,
    }
    array = np.asarray(memory)
    return array.view(_BFLOAT16) if dtype is torch.bfloat16 else array


class TensorMemory:
    """Address, shape and dtype of a tensor, compared later with those of another.

    No reference to the tensor is kept: with a weak one, torch could not swap its contents.

    Args:
        tensor: A contiguous tensor.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> memory = TensorMemory(weight)
        >>> memory.is_that_of(weight), memory.is_that_of(weight[:1])
        (True, False)
    """

    __slots__ = "_address", "_class", "_dtype", "_shape"

    def __init__(self, tensor: Tensor) -> None:
        self._class, self._address = type(tensor), tensor.data_ptr()
        self._shape, self._dtype = tensor.shape, tensor.dtype

    def is_that_of(self, x: Any) -> bool:
        """Return whether ``x`` has the same class, memory, shape and dtype.

        The class of a parameter under a row optimizer, which may have stale rows, differs
        from that of other parameters.
        """
        return (
            type(x) is self._class
            and x.data_ptr() == self._address
            and x.shape == self._shape
            and x.dtype is self._dtype
            and x.is_contiguous()
        )


def tensor_of(array: Any, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a NumPy array as a tensor over the same memory; bfloat16 too.

    Args:
        array: The array.
        dtype: Dtype of the tensor; None keeps the array's. Another dtype makes a copy,
            large ones by a kernel: after an operation of torch, OpenMP threads keep
            spinning on the cores that the kernels of row optimizers need.

    Example:
        >>> tensor_of(array_of(torch.ones(2, dtype=torch.bfloat16)))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    is_large = array.ndim == 2 and array.size >= LARGE_COPY
    if dtype in HALF and array.dtype == np.float32 and is_large:
        rounded = np.empty(array.shape, NUMPY_DTYPES[dtype])
        with threads_of_torch():
            kernels.store_rows(array, rounded, np.arange(len(array)), noise=None)
        array = rounded
    if array.dtype == _BFLOAT16:
        tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


def request_large_pages(x: Tensor) -> None:
    """Request large pages for a tensor that has not been written to yet.

    Lookups read rows in random order: with pages of 2 MB instead of 4 KB, far fewer reads
    miss the TLB. No-op for small tensors and on systems without ``MADV_HUGEPAGE``.
    """
    size = x.nbytes
    if size >= LARGE_PAGES_FROM and _madvise is not None and is_plain_cpu(x):
        start = x.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(first, start + size - first, _HUGE)
