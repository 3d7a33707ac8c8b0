"""xPos for torch."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .._check import number, one_of, positive_number
from ..positions.frequencies import check_rotary_dim
from ..positions.rotary import (
    LAYOUTS,
    Layout,
    check_heads,
    check_heads_axis,
    over_heads,
    rotate,
)
from ..positions.xpos import (
    check_center,
    check_xpos_reach,
    float64_xpos_constants,
    float64_xpos_phases,
    xpos_phases,
    xpos_reach,
    xpos_tables,
)
from ._positions.arguments import (
    Offset,
    Positions,
    check_vectors,
    in_reach,
    on_host,
    positions_for,
    positions_tensor,
)
from ._positions.rotate import rotate_fused
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import upcast
from ._tensors.memory import is_plain_cpu, kernel_eligible


class XPosRotary(PrecomputedBuffers):
    """Rotates queries and keys by their positions and scales them, so that scores decay.

    xPos rotates as :class:`RotaryPositions` and multiplies pair ``i`` of the score of a
    query and a key ``d`` positions before it by ``zeta_i ** (d / scale_base)``, where
    ``zeta_i = (2i + 0.4 rotary_dim) / (1.4 rotary_dim)``. Queries and keys are scaled
    inversely: call the layer with ``keys=True`` for keys. Attention must be causal. Has no
    parameters.

    Args:
        head_dim: Number of features of a head. Positive, and even unless ``rotary_dim`` is
            given.
        base: Ratio of the slowest wavelength to the fastest.
        scale_base: Number of positions over which pair ``i`` decays by ``zeta_i``.
            Positive.
        center: Position whose scale is 1. Scores do not depend on it. The middle of the
            longest sequence allows the most positions; see below.
        layout: ``"half"``, ``"interleaved"`` (torchscale, x-transformers) or
            ``"interleaved_to_half"``; see :func:`firstlayer.positions.rotary.rotate`.
        rotary_dim: Number of rotated features, the first ones; None is all.
        heads_axis: -3 for ``(..., heads, length, head_dim)``, -2 for ``(..., length, heads,
            head_dim)``. None is -3, but an input of three axes, which may be either, is
            a ValueError unless it has a position for every vector or an offset for every
            sequence.

    Shape:
        - x: ``(..., heads, length, head_dim)`` or ``(..., length, head_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers or reals; None is ``0, 1,
          …`` shifted by ``offset``
        - output: as ``x``, in the dtype of ``x``

    Positions must be within :attr:`reach` of ``center``, where no score overflows: 16997
    for a ``scale_base`` of 512, and a tenth of it in float16. Others raise a ValueError on
    the CPU and give NaN on other devices and in compiled code.

    Example:
        >>> layer = XPosRotary(4, scale_base=10.0)
        >>> q, k = torch.ones(2, 1, 4)
        >>> scores = [layer(q, [p + 9]) @ layer(k, [p], keys=True).T for p in (0, 50)]
        >>> torch.allclose(*scores), round(scores[0].item(), 4)
        (True, 0.7482)
    """

    bits: Tensor
    rate_bits: Tensor
    turns: Tensor
    exponent_bits: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        scale_base: float = 512.0,
        center: int = 0,
        layout: Layout = "half",
        rotary_dim: int | None = None,
        heads_axis: int | None = None,
    ) -> None:
        super().__init__()
        self.heads_axis = check_heads_axis(heads_axis)
        one_of("layout", layout, LAYOUTS)
        self.layout: Layout = layout
        self.center = check_center(center)
        check_rotary_dim(rotary_dim, head_dim)
        self.head_dim, self.base = int(head_dim), number("base", base)
        self.scale_base = positive_number("scale_base", scale_base)
        self.rotary_dim = None if rotary_dim is None else int(rotary_dim)
        self._build()

    def forward(
        self,
        x: Float[Tensor, "*lead head_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        keys: bool = False,
    ) -> Float[Tensor, "*lead head_dim"]:
        """Return ``x`` rotated by its positions and scaled.

        Args:
            x: Queries, or keys.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
            keys: Whether ``x`` are keys, which are scaled inversely to queries.
        """
        axes = ("length",) if self.heads_axis != -2 else ("length", "heads")
        check_vectors(x, self.head_dim, axes=axes)
        if positions is not None:
            positions = positions_tensor(positions, device=x.device)
        if self.heads_axis is None:
            check_heads(x.shape, positions, offset=offset, axial=False)
        length = x.shape[-2 if self.heads_axis != -2 else -3]
        at = in_reach(positions_for(x, length=length, positions=positions, offset=offset))
        reach = xpos_reach(self.scale_base, float16=x.dtype == torch.float16)
        if is_plain_cpu(at):
            check_xpos_reach(
                on_host(at), center=self.center, reach=reach, scale_base=self.scale_base
            )
        at = over_heads(at, x, heads_axis=self.heads_axis)
        options: dict[str, Any] = {"center": self.center, "reach": reach, "keys": keys}
        if x.dtype is torch.float64:
            exponents = self._floats("exponent_bits", at.device, torch.float64)
            turns = self._turns(at.device)
            cos, sin = float64_xpos_phases(at, turns, exponents, **options)
        else:
            tables = self._floats("bits", at.device)
            rates = self._floats("rate_bits", at.device)
            cos, sin = xpos_phases(at, tables, rates, **options)
        if kernel_eligible(x) and is_plain_cpu(cos) and not cos.requires_grad:
            both = torch.cat([cos, sin], dim=-1).flatten(0, -2).numpy()
            read, write = self.layout == "half", self.layout != "interleaved"
            seq = tuple(cos.shape[:-1])
            return rotate_fused(x, both, seq, read_half=read, write_half=write)
        return rotate(upcast(x), cos, sin, layout=self.layout).to(x.dtype)

    @property
    def reach(self) -> int:
        """Largest distance from ``center`` of a position, unless ``x`` is float16."""
        return xpos_reach(self.scale_base)

    def _tables(self) -> dict[str, np.ndarray]:
        options: dict[str, Any] = {
            "base": self.base,
            "scale_base": self.scale_base,
            "rotary_dim": self.rotary_dim,
        }
        tables, rates = xpos_tables(self.head_dim, **options)
        turns, exponents = float64_xpos_constants(self.head_dim, **options)
        return {
            "bits": tables,
            "rate_bits": rates,
            "turns": turns,
            "exponent_bits": exponents,
        }
