"""Rotation of one position by a layer that stays as it is, as in each step of generation.

Rotating the heads of one token takes less time than deciding how to and calling the
kernels. A :class:`RotationPlan` holds what depends on the layer alone, and compares it
before each use. It has the address of the tables and refers to no buffer.
"""

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...positions.phases import LIMIT
from .._tensors.memory import (
    NUMPY_DTYPES,
    TensorMemory,
    array_of_table,
    is_plain_cpu,
)
from .rotate import SINGLE_THREAD_FEATURES

if TYPE_CHECKING:
    from ..rotary import RotaryPositions

_settings_of = itemgetter("head_dim", "heads_axis", "layout", "axes")


class RotationPlan:
    """The kernels of a layer, with everything that decides whether they are valid.

    Args:
        layer: A layer whose positions are single numbers.
        dtype: Dtype of queries and keys, of at most 32 bits.
    """

    __slots__ = "_dtype", "_memory", "_rotate", "_settings"

    def __init__(self, layer: "RotaryPositions", dtype: torch.dtype) -> None:
        from ...kernels.bound import BoundRotation

        self._settings, self._dtype, bits = _settings_of(vars(layer)), dtype, layer.bits
        self._memory = TensorMemory(bits)
        self._rotate = BoundRotation(
            array_of_table(bits[0].view(torch.float32), keeps_alive=False),
            head_dim=layer.head_dim,
            dtype=NUMPY_DTYPES[dtype],
            read_half=layer.layout == "half",
            write_half=layer.layout != "interleaved",
        )

    def current_tables(self, layer: "RotaryPositions") -> Tensor | None:
        """Return the buffer of the tables if the layer is as it was, else None."""
        bits, is_known = layer._buffers["bits"], _settings_of(vars(layer)) == self._settings
        return bits if is_known and self._memory.is_that_of(bits) else None

    def run(self, layer: "RotaryPositions", x: Any, offset: Any) -> Tensor | None:
        """Return ``x`` rotated, or None if the plan does not cover the call."""
        if (
            type(x) is not Tensor
            or x.dtype is not self._dtype
            or type(offset) is not int
            or not is_plain_cpu(x)
            or x.layout is not torch.strided
            or x.is_nested
            or x.is_neg()
            or not x.is_contiguous()
            # A zero tensor, such as a tangent, has no memory.
            or not x.data_ptr()
            or not -LIMIT < offset < LIMIT
            or (x.requires_grad and torch.is_grad_enabled())
        ):
            return None
        # Held until the kernels have read it.
        bits = self.current_tables(layer)
        if bits is None:
            return None
        shape, features = x.shape, x.numel()
        head_dim, heads_axis, *_ = self._settings
        # Three axes are ambiguous without heads_axis; the layer raises the error.
        if not 0 < features <= SINGLE_THREAD_FEATURES or len(shape) < (
            4 if heads_axis is None else 3
        ):
            return None
        if shape[-1] != head_dim or shape[-3 if heads_axis == -2 else -2] != 1:
            return None
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        size = features // head_dim
        failed = self._rotate(x.data_ptr(), out.data_ptr(), size, offset)
        return None if failed else out


def rotation_plan(
    layer: "RotaryPositions", x: Tensor, positions: np.ndarray
) -> RotationPlan | None:
    """Return a plan for calls like this one, or None if there can be none.

    Args:
        layer: The layer.
        x: Queries or keys that the kernels can read.
        positions: Their positions, integers.
    """
    bits = layer._buffers["bits"]
    if (
        positions.size != 1
        or x.dtype is torch.float64
        or layer.axes is not None
        or bits is None
        or not is_plain_cpu(bits)
        or bits.dtype is not torch.int32
        or not bits.is_contiguous()
    ):
        return None
    return RotationPlan(layer, x.dtype) if kernels.can_bind() else None
