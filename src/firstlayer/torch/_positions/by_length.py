"""Rotary phases that depend on the length of the sequence, as transformers computes them.

The length is the largest position plus one. It is used as a tensor: nothing waits for the
device, and ``torch.compile`` makes one graph for all lengths.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ...positions.ids import check_axes
from ...positions.scaling import DynamicNTK, LongRoPE
from .._tensors.buffers import PrecomputedBuffers
from .arguments import in_reach

Phases = tuple[Float[Tensor, "*seq pairs"], Float[Tensor, "*seq pairs"]]


class LongRoPEPhases(nn.Module):
    """Phases with the short or the long factors, by the length of each call.

    Args:
        layer: Rotary layer with the rule :class:`firstlayer.LongRoPE`.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        rule: LongRoPE = layer.scaling
        self.original_length = rule.original_length
        self.axes = layer.axes
        self.short = layer.at_length(rule.original_length)
        self.long = layer.at_length(rule.original_length + 1)

    def phases(self, positions: Shaped[Tensor, "*seq"], *, dtype: torch.dtype) -> Phases:
        """Return the cosine and the sine of each pair, times the attention factor."""
        is_long = positions.max() + 1 > self.original_length
        short = self.short.phases(positions, dtype=dtype)
        long = self.long.phases(positions, dtype=dtype)
        cos, sin = (torch.where(is_long, b, a) for a, b in zip(short, long, strict=True))
        return cos, sin


class DynamicNTKPhases(PrecomputedBuffers):
    """Phases whose base grows with the length of the calls so far.

    The base follows the longest call. A call shorter than the original length resets it.

    Args:
        layer: Rotary layer with the rule :class:`firstlayer.DynamicNTK`.
    """

    length: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        rule: DynamicNTK = layer.scaling
        self.rule, self.axes = rule, layer.axes
        plain = layer.at_length(rule.original_length).frequencies
        self._constants = np.stack([
            plain,
            np.broadcast_to(rule.exponents(plain), plain.shape),
        ])
        self._build()
        length = torch.tensor(rule.original_length, device=self.get_buffer("bits").device)
        self.register_buffer("length", length, persistent=False)

    def phases(self, positions: Shaped[Tensor, "*seq"], *, dtype: torch.dtype) -> Phases:
        """Return the cosine and the sine of each pair."""
        if self.axes is not None:
            check_axes(positions, self.axes)
        positions = in_reach(positions)
        now, original = positions.max() + 1, self.rule.original_length
        if self.length.dtype != torch.int64:
            self.length = self.length.to(torch.int64)  # A loop over buffers cast it.
        before = self.length.to(positions.device)
        kept = torch.where((now < original) & (before > original), original, before)
        self.length.copy_(torch.where(now > before, now, kept))
        # MPS has no float64.
        wide = torch.float32 if positions.device.type == "mps" else torch.float64
        plain, exponents = self._floats("bits", positions.device, torch.float64).to(wide)
        growth = self.rule.growth(self.length.to(positions.device, wide))
        angles = positions[..., None] * self._aligned(plain * growth**exponents, positions)
        if self.axes is not None:
            angles = angles.sum(0)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _aligned(self, frequencies: Tensor, positions: Tensor) -> Tensor:
        if self.axes is None:
            return frequencies
        return frequencies.reshape(self.axes, *(1,) * (positions.ndim - 1), -1)

    def _tables(self) -> dict[str, np.ndarray]:
        return {"bits": self._constants}

    def extra_repr(self) -> str:
        return repr(self.rule)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.length
        super()._apply(fn, recurse)
        # to_empty leaves the length uninitialized.
        if before.is_meta:
            self.length.fill_(self.rule.original_length)
        elif not self.length.is_meta:
            self.length.copy_(before)
        return self


def phases_of(layer: Any) -> Any:
    """Return a module with the ``phases`` of a rotary layer at the length of each call.

    Args:
        layer: A ``RotaryPositions`` layer. Returned as it is unless its rule depends on
            the length.
    """
    if isinstance(layer.scaling, LongRoPE):
        return LongRoPEPhases(layer)
    return DynamicNTKPhases(layer) if isinstance(layer.scaling, DynamicNTK) else layer
