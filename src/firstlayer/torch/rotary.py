"""Rotary positions for torch."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.compiler import is_compiling

from .._check import boolean, one_of, positive
from ..files.hf import rotary_from_hf
from ..files.layer_configs import config_of
from ..positions.axial import dinov3_axial_frequencies, pixtral_axial_frequencies
from ..positions.frequencies import layer_frequencies
from ..positions.ids import check_axes
from ..positions.phases import axial_phases, phase_tables, phases
from ..positions.rotary import (
    LAYOUTS,
    Layout,
    check_heads,
    check_heads_axis,
    over_heads,
    over_rows,
    rotate,
)
from ..positions.scaling import Scaling, scaling_from
from ..positions.turns import (
    float64_digit_tables,
    float64_phase_tables,
    float64_phases,
    turn_constants,
)
from ._positions.arguments import (
    Offset,
    Positions,
    check_vectors,
    in_reach,
    positions_for,
    positions_tensor,
)
from ._positions.plan import rotation_plan
from ._positions.rotate import integer_phases, integer_positions, rotate_fused
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import upcast
from ._tensors.memory import is_plain_cpu, is_recorded, kernel_eligible


class RotaryPositions(PrecomputedBuffers):
    """Rotates queries or keys by their positions (RoPE). Has no parameters.

    Args:
        head_dim: Size of the last axis of the input. Positive, and even unless
            ``rotary_dim`` is given.
        base: Ratio of the slowest wavelength to the fastest (``rope_theta``).
        layout: Which features form a pair: ``"half"``, ``"interleaved"`` or
            ``"interleaved_to_half"``. A checkpoint works with one layout only; see
            :func:`firstlayer.positions.rotary.rotate`.
        scaling: Rule for long contexts, such as ``YaRN(factor=4.0, original_length=4096)``;
            see :mod:`firstlayer.positions.scaling`.
        rotary_dim: Number of leading features to rotate; None is all.
        sections: Number of pairs rotated by each coordinate of a position (M-RoPE); None is
            one coordinate.
        interleaved_sections: Assign pairs to coordinates round-robin (Qwen3-VL) instead of
            in contiguous runs (Qwen2-VL).
        frequencies: Explicit frequencies, ``(pairs,)`` or ``(axes, pairs)``, instead of
            ``base``, ``scaling``, ``rotary_dim`` and ``sections``; for images, those of
            :func:`firstlayer.positions.axial.qwen_axial_frequencies`.
        heads_axis: -3 for ``(..., heads, length, head_dim)``, -2 for ``(..., length, heads,
            head_dim)``. None is -3, but an input of three axes, which may be either, is
            a ValueError unless it has a position for every vector or an offset for every
            sequence.

    Shape:
        - x: ``(..., heads, length, head_dim)`` or ``(..., length, head_dim)``
        - positions: ``(length,)`` or ``(batch, length)``, integers or floats; None is
          ``offset, offset + 1, …``. Several coordinates are on the first axis, ``(axes,
          length)`` or ``(axes, batch, length)``.
        - output: the shape and dtype of ``x``

    There is no maximum length. Positions of absolute value 2^24 or more raise a ValueError
    on the CPU and give NaN on other devices and in compiled code. Rules that depend on the
    sequence length start unscaled (DynamicNTK) or with the short factors (LongRoPE); call
    :meth:`at_length`, outside of compiled code, for a copy with another length.

    Half precision is upcast to float32 and rounded once, even under autocast.

    Example:
        >>> layer = RotaryPositions(2)
        >>> layer(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
        tensor([[0.5403, 0.8415]])
        >>> layer(torch.ones(2, 8, 5, 2), offset=torch.tensor([7, 1_000_000])).shape
        torch.Size([2, 8, 5, 2])
    """

    bits: Tensor
    rate_bits: Tensor
    turns: Tensor

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
        heads_axis: int | None = None,
    ) -> None:
        super().__init__()
        self.heads_axis = check_heads_axis(heads_axis)
        one_of("layout", layout, LAYOUTS)
        self.scaling = scaling_from(scaling)
        #: Radians per position of each pair, in float64, and the factor of cos and sin.
        self.frequencies, self.attention_factor = layer_frequencies(
            head_dim,
            base=base,
            scaling=self.scaling,
            rotary_dim=rotary_dim,
            sections=sections,
            interleaved_sections=interleaved_sections,
            frequencies=frequencies,
        )
        #: Number of coordinates per position; None if a position is a single number.
        self.axes = None if self.frequencies.ndim == 1 else len(self.frequencies)
        self.head_dim, self.base, self.rotary_dim = int(head_dim), float(base), rotary_dim
        self.sections = None if sections is None else [int(n) for n in sections]
        self.interleaved_sections = boolean("interleaved_sections", interleaved_sections)
        self._frequencies_given = frequencies is not None
        self.layout: Layout = layout
        self._build()

    @classmethod
    def from_hf(
        cls, config: Any, layer_type: str | None = None, *, heads_axis: int | None = None
    ) -> Self:
        """Return the layer of a transformers model.

        See :func:`firstlayer.files.hf.rotary_from_hf` for supported configs and
        :func:`firstlayer.torch.hf.replace_rotary` to use it inside the model.

        Args:
            config: Model config, a dict or an object with ``to_dict``.
            layer_type: Layer type, if the config has rope parameters per layer type.
            heads_axis: As in the constructor.

        Example:
            >>> gptj = {"model_type": "gptj", "n_embd": 64, "n_head": 2, "rotary_dim": 8}
            >>> RotaryPositions.from_hf(gptj)
            RotaryPositions(32, layout='interleaved', rotary_dim=8)
        """
        return cls(**rotary_from_hf(config, layer_type), heads_axis=heads_axis)

    @classmethod
    def dinov3(
        cls, head_dim: int, *, base: float = 100.0, heads_axis: int | None = None
    ) -> Self:
        """Return the layer of DINOv3's image tower.

        Positions are the centers of the patches, from
        :func:`firstlayer.positions.from_patches`.

        Args:
            head_dim: Number of features of a head, a multiple of 4.
            base: Ratio of the slowest wavelength to the fastest (``rope_theta``).
            heads_axis: As in the constructor.

        Example:
            >>> from firstlayer.positions import from_patches
            >>> layer, x = RotaryPositions.dinov3(8), torch.ones(1, 3, 5, 8)
            >>> y = layer(x, from_patches((2, 2), prefix=1))
            >>> same = (y == x).all(-1).all(1)[0]
            >>> same.tolist()
            [True, False, False, False, False]
        """
        frequencies = dinov3_axial_frequencies(head_dim, base=base)
        return cls(head_dim, frequencies=frequencies, heads_axis=heads_axis)

    @classmethod
    def pixtral(
        cls, head_dim: int, *, base: float = 10_000.0, heads_axis: int | None = None
    ) -> Self:
        """Return the layer of Pixtral's image tower.

        Positions are the rows and columns of the patches, from
        :func:`firstlayer.positions.from_grid`.

        Args:
            head_dim: Number of features of a head, a multiple of 4.
            base: Ratio of the slowest wavelength to the fastest (``rope_theta``).
            heads_axis: As in the constructor.

        Example:
            >>> from firstlayer.positions import from_grid
            >>> RotaryPositions.pixtral(8)(torch.ones(1, 3, 6, 8), from_grid((2, 3))).shape
            torch.Size([1, 3, 6, 8])
        """
        frequencies = pixtral_axial_frequencies(head_dim, base=base)
        return cls(head_dim, frequencies=frequencies, heads_axis=heads_axis)

    def forward(
        self,
        x: Float[Tensor, "*lead head_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
    ) -> Float[Tensor, "*lead head_dim"]:
        """Return ``x`` rotated by its positions.

        Args:
            x: Queries or keys.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
        """
        plan = None if is_compiling() else self.__dict__.get("_plan")
        if plan is not None and positions is None:
            y = plan.run(self, x, offset)
            if y is not None:
                return y
        self._check(x)
        can_fuse = kernel_eligible(x)
        if positions is not None and not isinstance(positions, Tensor):
            positions = positions_tensor(positions, device=x.device)
        if self.heads_axis is None:
            axial = self.axes is not None
            check_heads(x.shape, positions, offset=offset, axial=axial)
        if can_fuse and self.axes is None:
            at = integer_positions(
                x, positions=positions, offset=offset, heads_axis=self.heads_axis
            )
            if at is not None:
                if plan is None or plan.current_tables(self) is None:
                    self.__dict__["_plan"] = rotation_plan(self, x, at)
                return self._fused(x, integer_phases(at, self._host_tables(x)), at.shape)
        cos, sin = self._phases(self._positions(x, positions, offset), x.dtype)
        if can_fuse and is_plain_cpu(cos) and not cos.requires_grad:
            both = torch.cat([cos, sin], dim=-1).flatten(0, -2).numpy()
            return self._fused(x, both, tuple(cos.shape[:-1]))
        return rotate(upcast(x), cos, sin, layout=self.layout).to(x.dtype)

    def phases(
        self, positions: Positions, *, dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "*seq pairs"], Float[Tensor, "*seq pairs"]]:
        """Return the cosine and the sine of each pair, attention factor included.

        Args:
            positions: Integers or floats of any shape; several coordinates are on the
                first axis.
            dtype: float32, the default, or float64.

        Example:
            >>> cos, sin = RotaryPositions(4).phases([0, 100], dtype=torch.float64)
            >>> sin
            tensor([[ 0.0000,  0.0000],
                    [-0.5064,  0.8415]], dtype=torch.float64)
        """
        positions = positions_tensor(positions, device=self.bits.device)
        if self.axes is not None:
            check_axes(positions, self.axes)
        return self._phases(in_reach(positions), dtype or torch.float32)

    def at_length(self, n: int) -> Self:
        """Return a copy for sequences of ``n`` positions.

        It equals this layer unless the rule is DynamicNTK or LongRoPE.

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
        """Return rotated keys shifted by ``delta`` positions, as after trimming a KV cache.

        The attention factor is not applied again.

        Args:
            keys: Output of this layer.
            delta: A number, or one for each sequence (the first axis of ``keys``). May be
                negative. All coordinates of a position are shifted equally.

        Example:
            >>> layer, k = RotaryPositions(4), torch.ones(3, 4)
            >>> moved = layer.rerotate(layer(k, offset=5), -5)
            >>> torch.allclose(moved, layer(k), atol=1e-6)
            True
        """
        self._check(keys, "keys")
        shift = positions_tensor(delta, device=keys.device, name="delta")
        shift = in_reach(over_rows(shift, keys, axes=self.axes), name="delta")
        phases = self._phases(shift, keys.dtype)
        cos, sin = (phase / self.attention_factor for phase in phases)
        layout = "interleaved" if self.layout == "interleaved" else "half"
        return rotate(upcast(keys), cos, sin, layout=layout).to(keys.dtype)

    def config(self) -> dict[str, Any]:
        given = self.frequencies if self._frequencies_given else None
        return config_of(self, frequencies=given)

    def _tables(self) -> dict[str, np.ndarray]:
        tables, rates = phase_tables(self.frequencies, scale=self.attention_factor)
        turns = turn_constants(self.frequencies)
        return {"bits": tables, "rate_bits": rates, "turns": turns}

    def _phases(
        self, positions: Shaped[Tensor, "*seq"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if dtype is torch.float64 and not is_recorded():
            turns = self._turns(positions.device)
            return float64_phases(positions, turns, scale=self.attention_factor)
        if dtype is torch.float64:
            tables, rates = self._recorded_float64(positions.device)
        else:
            tables = self._floats("bits", positions.device)
            rates = self._floats("rate_bits", positions.device)
        return (phases if self.axes is None else axial_phases)(positions, tables, rates)

    def _fused(self, x: Tensor, both: np.ndarray, seq: tuple[int, ...]) -> Tensor:
        read, write = self.layout == "half", self.layout != "interleaved"
        return rotate_fused(x, both, seq, read_half=read, write_half=write)

    def _host_tables(self, x: Tensor) -> np.ndarray:
        if x.dtype is torch.float64:
            return self._float64_tables
        return self._integers("bits", x.device)[0].numpy().view(np.float32)

    def _float64_constants(self) -> tuple[np.ndarray, np.ndarray]:
        return float64_phase_tables(self.frequencies, scale=self.attention_factor)

    @cached_property
    def _float64_tables(self) -> np.ndarray:
        turns = turn_constants(self.frequencies)
        return float64_digit_tables(turns, scale=self.attention_factor)[0]

    def _positions(self, x: Tensor, positions: Any, offset: Any) -> Tensor:
        """Return the positions of ``x``, checked and broadcastable against it."""
        if positions is None and self.axes is not None and self._frequencies_given:
            raise ValueError(f"positions must be given for {self.axes} axes, got None")
        length = x.shape[-2 if self.heads_axis != -2 else -3]
        at = positions_for(x, length=length, positions=positions, offset=offset)
        if self.axes is not None:
            if positions is None:
                # Text tokens have the same position on every axis.
                at = at.expand(self.axes, *at.shape)
            check_axes(at, self.axes)
        axial = self.axes is not None
        return over_heads(in_reach(at), x, heads_axis=self.heads_axis, axial=axial)

    def _check(self, x: Tensor, name: str = "x") -> None:
        axes = ("length",) if self.heads_axis != -2 else ("length", "heads")
        check_vectors(x, self.head_dim, axes=axes, name=name)
