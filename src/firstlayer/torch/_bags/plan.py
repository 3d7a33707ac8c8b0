"""Short calls of bags without a gradient, on a table that stays as it is.

Summing forty rows takes less time than deciding how to sum them and calling the kernel. A
:class:`BagPlan` holds what depends on the layer alone, and compares it before each use. It
has the address of the table and refers to no parameter.
"""

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ... import kernels
from .._tensors.dtypes import FLOATS
from .._tensors.memory import TensorMemory, array_of_table, is_plain_cpu

if TYPE_CHECKING:
    from ..bag import EmbeddingBag

# Largest number of bags, and of ids times width. A larger call takes longer than the checks
# that a plan saves.
MAX_BAGS, MAX_NUMBERS = 64, 1 << 17
_CPU = torch.device("cpu")
_settings_of = itemgetter("mode", "include_last_offset", "padding_idx", "max_norm")


class BagPlan:
    """The kernel of a layer's bags, with everything that decides whether it is valid.

    Args:
        layer: The layer, with a contiguous table and without ``padding_idx`` and
            ``max_norm``.
    """

    __slots__ = "_bags", "_dtype", "_memory", "_settings", "_width"

    def __init__(self, layer: "EmbeddingBag") -> None:
        from ...kernels.bound import BoundBags

        self._settings, weight = _settings_of(vars(layer)), layer.weight
        self._memory = TensorMemory(weight)
        self._dtype, self._width = weight.dtype, weight.shape[1]
        self._bags = BoundBags(array_of_table(weight, keeps_alive=False))

    def current_table(self, layer: "EmbeddingBag") -> Tensor | None:
        """Return the table if the layer is as it was, else None."""
        weight: Any = layer._parameters.get("weight")
        is_known = _settings_of(vars(layer)) == self._settings
        return weight if is_known and self._memory.is_that_of(weight) else None

    def run(self, layer: "EmbeddingBag", ids: Any, offsets: Any) -> Tensor | None:
        """Return a row for each bag, or None if the plan does not cover the call."""
        if not is_short(ids, offsets, self._width):
            return None
        weight = self.current_table(layer)
        if weight is None or (weight.requires_grad and torch.is_grad_enabled()):
            return None
        # A copy: another thread may change the offsets after the check.
        bounds, (mode, has_end, *_) = offsets.tolist(), self._settings
        if not has_end:
            bounds.append(ids.shape[0])
        if bounds[0] != 0 or bounds[-1] != ids.shape[0] or bounds != sorted(bounds):
            return None
        divisors = []
        if mode == "mean":
            pairs = zip(bounds, bounds[1:], strict=False)
            divisors = [end - start or float("inf") for start, end in pairs]
        shape = len(bounds) - 1, self._width
        out = torch.empty(shape, dtype=self._dtype, device=_CPU)
        flag = self._bags(ids.data_ptr(), out.data_ptr(), bounds, divisors=divisors)
        return None if flag else out


def is_short(ids: Any, offsets: Any, width: int) -> bool:
    """Return whether ids and offsets are those of a call that a plan can compute."""
    return (
        type(ids) is type(offsets) is Tensor
        and is_plain_cpu(ids, offsets)
        and ids.dtype is offsets.dtype is torch.int64
        and ids.layout is offsets.layout is torch.strided
        and not ids.is_nested
        and ids.ndim == offsets.ndim == 1
        and ids.is_contiguous()
        # A zero tensor, such as a tangent, has no memory.
        and ids.data_ptr() != 0
        and ids.shape[0] * width < MAX_NUMBERS
        and 0 < offsets.shape[0] <= MAX_BAGS
    )


def bag_plan(layer: "EmbeddingBag", ids: Any, offsets: Any) -> BagPlan | None:
    """Return a plan for calls like this one, or None if there can be none.

    Args:
        layer: The layer.
        ids: Ids of a call.
        offsets: Its offsets.
    """
    weight = layer._parameters.get("weight")
    mode, _, padding_idx, max_norm = _settings_of(vars(layer))
    if (
        type(weight) is not Parameter
        or (weight.requires_grad and torch.is_grad_enabled())
        or not is_plain_cpu(weight)
        or weight.dtype not in FLOATS
        or weight.ndim != 2
        or not weight.is_contiguous()
        or not weight.numel()
        or mode == "max"
        or padding_idx is not None
        or max_norm is not None
        or not is_short(ids, offsets, weight.shape[1])
    ):
        return None
    return BagPlan(layer) if kernels.can_bind() else None
