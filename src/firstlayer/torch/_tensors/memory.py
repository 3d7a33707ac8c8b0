"""Whether the compiled kernels may run on these tensors, and how they get at them.

Kernels read memory. They run on ordinary tensors on the CPU, eager, and behind autograd
functions; whatever watches operators instead of memory (``torch.compile``,
``torch.export``, ``torch.func``, forward-mode AD, tracing, dispatch modes, tensor
subclasses) gets plain operators.
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..._check import float_dtype
from ...kernels.runtime.threads import on_threads

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_BFLOAT16 = float_dtype("bfloat16")
# What NumPy calls numbers of a table, and its bytes.
_NAMES = {
    torch.float64: np.dtype(np.float64).str,
    torch.float32: np.dtype(np.float32).str,
    torch.float16: np.dtype(np.float16).str,
    torch.bfloat16: np.dtype(np.uint16).str,
    torch.uint8: np.dtype(np.uint8).str,
}


def eager() -> bool:
    """Tell whether operators run at once and on memory, with nothing watching them."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def concrete(*tensors: Tensor) -> bool:
    """Tell whether the values of all tensors can be looked at without waiting for them.

    Example:
        >>> concrete(torch.arange(3)), concrete(torch.empty(3, device="meta"))
        (True, False)
    """
    if not eager():
        return False
    # Neither a subclass of Tensor nor one that torch.func or autograd's own vmap wraps. A
    # plain loop, for every call comes by here.
    for x in tensors:
        kind = type(x)
        if kind is not Tensor and kind is not Parameter:
            return False
        if not x.is_cpu or is_legacy_batchedtensor(x):
            return False
    return True


def fusable(*tensors: Tensor) -> bool:
    """Tell whether kernels may run on these tensors: concrete ones, and real.

    Kernels take contiguous memory; whether a copy is worth that is the caller's to say.

    Example:
        >>> fusable(torch.ones(2, dtype=torch.bfloat16)), fusable(torch.arange(2))
        (True, False)
    """
    return all(x.dtype in FLOATS for x in tensors) and concrete(*tensors)


def overridden(x: Any) -> bool:
    """Tell whether the class of ``x`` takes torch's functions into its own hands."""
    handler = getattr(type(x), "__torch_function__", None)
    usual = (
        None,
        torch._C._disabled_torch_function_impl,
        Tensor.__torch_function__.__func__,
    )
    return getattr(handler, "__func__", handler) not in usual


def threads_of_torch() -> AbstractContextManager[None]:
    """Let the kernels called inside use as many threads as torch does."""
    return on_threads(torch.get_num_threads())


class _Memory:
    """What a tensor holds, as NumPy asks for it."""

    __slots__ = ("__array_interface__", "tensor")


def array_of(x: Tensor) -> np.ndarray:
    """Return the memory of a concrete tensor as a NumPy array, bfloat16 included."""
    if x.requires_grad:
        x = x.detach()
    if x.dtype is torch.bfloat16:
        return x.view(torch.uint16).numpy().view(_BFLOAT16)
    return x.numpy()


def array_of_table(weight: Tensor) -> np.ndarray:
    """Return the memory of a parameter as an array, and let it be resized later.

    ``Tensor.numpy`` forbids that for good, and FSDP frees tables between their uses.
    """
    memory, dtype, strides = _Memory(), weight.dtype, None
    memory.tensor = weight
    if not weight.is_contiguous():
        strides = tuple(weight.element_size() * step for step in weight.stride())
    memory.__array_interface__ = {
        "data": (weight.data_ptr(), False),
        "shape": tuple(weight.shape),
        "strides": strides,
        "typestr": _NAMES[dtype],
        "version": 3,
    }
    array = np.asarray(memory)
    return array.view(_BFLOAT16) if dtype is torch.bfloat16 else array


def tensor_of(array: Any, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a NumPy array as a tensor of the same memory, bfloat16 included.

    Args:
        array: The array.
        dtype: What the tensor shall be in; None is as it is. Another one is a copy.

    Example:
        >>> tensor_of(array_of(torch.ones(2, dtype=torch.bfloat16)))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    if array.dtype == _BFLOAT16:
        found = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(array)
    return found if dtype is None or found.dtype is dtype else found.to(dtype)
