"""Rotary positions for torch."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from .._check import one_of, positive
from ..files.hf import rotary_from_hf
from ..positions.frequencies import layer_frequencies
from ..positions.ids import check_axes
from ..positions.phases import axial_phases, phase_tables, phases
from ..positions.rotary import (
    LAYOUTS,
    Layout,
    check_heads_axis,
    over_heads,
    over_rows,
    rotate,
)
from ..positions.scaling import Scaling, scaling_from
from ._positions.arguments import (
    Offset,
    Positions,
    check_vectors,
    in_reach,
    positions_for,
    positions_tensor,
)
from ._positions.rotate import integer_phases, turned, whole_positions
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import upcast
from ._tensors.memory import is_plain_cpu, kernel_eligible


class RotaryPositions(PrecomputedBuffers):
    """Rotates queries or keys by their positions. Has no parameters.

    Args:
        head_dim: Size of the last axis of the input. Positive, and even unless
            ``rotary_dim`` is given.
        base: Ratio of the slowest wavelength to the fastest.
        layout: ``"half"``, ``"interleaved"`` or ``"interleaved_to_half"``: which features
            form a pair, a checkpoint fits one; see :func:`firstlayer.positions.rotary.rotate`.
        scaling: A rule for long contexts, such as ``YaRN(factor=4.0,
            original_length=4096)``; see :mod:`firstlayer.positions.scaling`.
        rotary_dim: How many features are rotated, the first ones; None is all.
        sections: How many pairs turn by each coordinate of a position (M-RoPE); None is
            one coordinate.
        interleaved_sections: Deal the pairs out in turn (Qwen3-VL) instead of in runs
            (Qwen2-VL).
        frequencies: Ready ones, ``(pairs,)`` or ``(axes, pairs)``, in place of ``base``,
            ``scaling``, ``rotary_dim`` and ``sections``; for images, what
            :func:`firstlayer.positions.rotary.qwen_axial_frequencies` makes.
        heads_axis: -3 for ``(..., heads, length, head_dim)``, -2 for ``(..., length, heads,
            head_dim)``.

    Shape:
        - x: ``(..., heads, length, head_dim)`` or ``(..., length, head_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers or reals; None is ``0, 1,
          …`` moved on by ``offset``. With several coordinates they come first, ``(axes,
          length)`` or ``(axes, batch, length)``.
        - output: as ``x``, in the dtype of ``x``

    There is no maximum length. A position of 2^24 or more in size is a ValueError on the
    CPU, and NaN on other devices and in compiled code. A rule that depends on the length is
    unscaled (DynamicNTK) or short (LongRoPE) until :meth:`at_length`; make that copy
    outside of compiled code, which compiles at most once for each.

    Half precision is widened, turned in float32 and rounded once. Autocast changes nothing:
    angles are float32, the output has the dtype of ``x``.

    Example:
        >>> layer = RotaryPositions(2)
        >>> layer(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
        tensor([[0.5403, 0.8415]])
        >>> layer(torch.ones(2, 8, 5, 2), offset=torch.tensor([7, 1_000_000])).shape
        torch.Size([2, 8, 5, 2])
    """

    bits: Tensor
    rate_bits: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        layout: Layout = "half",
        scaling: Scaling | dict[str, Any] | None = None,
        rotary_dim: int | None = None,
        sections: Sequence[int] | None = None,
        interleaved_sections: bool = False,
        frequencies: Any = None,
        heads_axis: int = -3,
    ) -> None:
        super().__init__()
        self.heads_axis = check_heads_axis(heads_axis)
        one_of("layout", layout, LAYOUTS)
        self.scaling = scaling_from(scaling)
        #: Angle per position of each pair, in float64, and what its turns are enlarged by.
        self.frequencies, self.attention_factor = layer_frequencies(
            head_dim,
            base=base,
            scaling=self.scaling,
            rotary_dim=rotary_dim,
            sections=sections,
            interleaved_sections=interleaved_sections,
            frequencies=frequencies,
        )
        #: How many coordinates a position has; None if it is a single number.
        self.axes = None if self.frequencies.ndim == 1 else len(self.frequencies)
        self.head_dim, self.base, self.rotary_dim = int(head_dim), float(base), rotary_dim
        self.sections = None if sections is None else [int(n) for n in sections]
        self.interleaved_sections = bool(interleaved_sections)
        self.ready = frequencies is not None
        self.layout: Layout = layout
        self._build()

    @classmethod
    def from_hf(
        cls, config: Any, layer_type: str | None = None, *, heads_axis: int = -3
    ) -> Self:
        """Return the layer of a transformers model; see :func:`firstlayer.files.hf.rotary_from_hf`.

        :func:`firstlayer.torch.hf.replace_rotary` puts it into the model itself.

        Args:
            config: The model's config, as a dict or an object with ``to_dict``.
            layer_type: Which layers, where rope parameters are given for each type.
            heads_axis: As for the layer.

        Example:
            >>> gptj = {"model_type": "gptj", "n_embd": 64, "n_head": 2, "rotary_dim": 8}
            >>> RotaryPositions.from_hf(gptj)
            RotaryPositions(32, layout='interleaved', rotary_dim=8)
        """
        return cls(**rotary_from_hf(config, layer_type), heads_axis=heads_axis)

    def forward(
        self,
        x: Float[Tensor, "*lead head_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
    ) -> Float[Tensor, "*lead head_dim"]:
        """Return ``x`` turned by its positions.

        Args:
            x: Queries or keys.
            positions: Where each vector stands; None counts from ``offset``.
            offset: How many positions came before, a number or one per row.
        """
        self._check(x)
        on_kernels, axis = kernel_eligible(x), self.heads_axis
        if positions is not None and not isinstance(positions, Tensor):
            positions = positions_tensor(positions, device=x.device)
        if on_kernels and self.axes is None:
            at = whole_positions(x, positions=positions, offset=offset, heads_axis=axis)
            if at is not None:
                return self._turned(x, integer_phases(at, self._array(x)), at.shape)
        found, axial = self._positions(x, positions, offset), self.axes is not None
        lined = over_heads(found, x, heads_axis=axis, axial=axial)
        cos, sin = self._phases(lined, x.dtype)
        if on_kernels and is_plain_cpu(cos) and not cos.requires_grad:
            turn = torch.cat([cos, sin], dim=-1).flatten(0, -2).numpy()
            return self._turned(x, turn, tuple(cos.shape[:-1]))
        return rotate(upcast(x), cos, sin, layout=self.layout).to(x.dtype)

    def phases(
        self, positions: Positions, *, dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "*seq pairs"], Float[Tensor, "*seq pairs"]]:
        """Return the cosine and the sine of each pair, attention factor included.

        Args:
            positions: Integers or reals of any shape; with several coordinates, they come
                first.
            dtype: float32, which is the default, or float64.

        Example:
            >>> cos, sin = RotaryPositions(4).phases([0, 100], dtype=torch.float64)
            >>> sin
            tensor([[ 0.0000,  0.0000],
                    [-0.5064,  0.8415]], dtype=torch.float64)
        """
        found = positions_tensor(positions, device=self.bits.device)
        if self.axes is not None:
            check_axes(found, self.axes)
        return self._phases(in_reach(found), dtype or torch.float32)

    def at_length(self, n: int) -> Self:
        """Return a copy for sequences of ``n`` positions; most rules make the same one.

        Example:
            >>> from firstlayer.positions.scaling import DynamicNTK
            >>> rule = DynamicNTK(factor=2.0, original_length=8)
            >>> layer = RotaryPositions(4, scaling=rule)
            >>> layer.at_length(8).frequencies[1], layer.at_length(20).frequencies[1]
            (np.float64(0.01), np.float64(0.0025))
        """
        positive("n", n)
        scaling = None if self.scaling is None else self.scaling.at_length(n)
        return type(self)(**{**self.config(), "scaling": scaling}).to(self.bits.device)

    def rerotate(
        self, keys: Float[Tensor, "*lead head_dim"], delta: Offset
    ) -> Float[Tensor, "*lead head_dim"]:
        """Return rotated keys moved on by ``delta`` positions, as when a cache is cut.

        Args:
            keys: What this layer returned.
            delta: A number, or a tensor of one per row (the first axis of ``keys``);
                negative moves back. All coordinates of a position move alike.

        The attention factor, which the keys have already, is not applied again.

        Example:
            >>> layer, k = RotaryPositions(4), torch.ones(3, 4)
            >>> moved = layer.rerotate(layer(k, offset=5), -5)
            >>> torch.allclose(moved, layer(k), atol=1e-6)
            True
        """
        self._check(keys, "keys")
        delta = positions_tensor(delta, device=keys.device, name="delta")
        lined = over_rows(delta, keys, axes=self.axes)
        phases = self._phases(in_reach(lined, name="delta"), keys.dtype)
        cos, sin = (turn / self.attention_factor for turn in phases)
        layout = "interleaved" if self.layout == "interleaved" else "half"
        return rotate(upcast(keys), cos, sin, layout=layout).to(keys.dtype)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "head_dim": self.head_dim,
            "base": self.base,
            "layout": self.layout,
            "scaling": None if self.scaling is None else self.scaling.to_dict(),
            "rotary_dim": self.rotary_dim,
            "sections": self.sections,
            "interleaved_sections": self.interleaved_sections,
            "frequencies": self.frequencies.tolist() if self.ready else None,
            "heads_axis": self.heads_axis,
        }

    def _tables(self) -> dict[str, np.ndarray]:
        tables, rates = phase_tables(self.frequencies, scale=self.attention_factor)
        return {"bits": tables, "rate_bits": rates}

    def _phases(
        self, positions: Shaped[Tensor, "*seq"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        tables = self._floats("bits", dtype, positions.device)
        rates = self._floats("rate_bits", dtype, positions.device)
        return (phases if self.axes is None else axial_phases)(positions, tables, rates)

    def _turned(self, x: Tensor, turn: np.ndarray, seq: tuple[int, ...]) -> Tensor:
        read, write = self.layout == "half", self.layout != "interleaved"
        return turned(x, turn, seq, read_half=read, write_half=write)

    def _array(self, x: Tensor) -> np.ndarray:
        tables = self._integers("bits", x.device)[0].numpy().view(np.float32)
        return tables.astype(np.float64) if x.dtype == torch.float64 else tables

    def _positions(self, x: Tensor, positions: Any, offset: Any) -> Tensor:
        if positions is None and self.axes is not None and self.ready:
            raise ValueError(f"positions must be given for {self.axes} axes, got None")
        length = x.shape[-2 if self.heads_axis == -3 else -3]
        found = positions_for(x, length=length, positions=positions, offset=offset)
        if self.axes is not None:
            if positions is None:
                # Text, whose time, height and width are one.
                found = found.expand(self.axes, *found.shape)
            check_axes(found, self.axes)
        return in_reach(found)

    def _check(self, x: Tensor, name: str = "x") -> None:
        axes = ("length",) if self.heads_axis == -3 else ("length", "heads")
        check_vectors(x, self.head_dim, axes=axes, name=name)
