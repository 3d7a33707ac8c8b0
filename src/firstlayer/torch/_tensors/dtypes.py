"""Dtypes: the one that computations run in, and conversion from and to names."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..._check import float_dtype

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
HALF = frozenset({torch.float16, torch.bfloat16})


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computing with ``dtype``: float64 for itself, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in its compute dtype."""
    return x.to(compute_dtype(x.dtype))


def upcast_together(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in one compute dtype, float64 if any is float64."""
    any_double = any(x.dtype == torch.float64 for x in tensors)
    return [x.to(torch.float64 if any_double else torch.float32) for x in tensors]


def in_full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast, which would multiply matrices in half precision."""
    enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    # No context if autocast is off already: it would appear in exported programs.
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def as_torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that may be given by name, as in configs.

    Example:
        >>> as_torch_dtype("bfloat16"), as_torch_dtype(torch.float16)
        (torch.bfloat16, torch.float16)
    """
    if not isinstance(dtype, str):
        return dtype
    return getattr(torch, float_dtype(dtype).name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix ``torch.``."""
    return str(dtype).removeprefix("torch.")
