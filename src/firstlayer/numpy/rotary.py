"""Rotary positions for NumPy."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from jaxtyping import Float, Shaped

from .._array import compute_dtype
from .._check import (
    boolean,
    dtype_text,
    host_array,
    is_float,
    one_of,
    positions_array,
    positions_in_reach,
    positive,
)
from ..files.hf import rotary_from_hf
from ..files.layer_configs import config_of
from ..positions.axial import dinov3_axial_frequencies, pixtral_axial_frequencies
from ..positions.frequencies import layer_frequencies
from ..positions.ids import check_axes
from ..positions.phases import LIMIT, phase_tables
from ..positions.rotary import (
    LAYOUTS,
    Layout,
    check_heads,
    check_heads_axis,
    inverse_phases,
    over_heads,
    over_rows,
    phase_rows,
    rotate_rows,
)
from ..positions.scaling import Scaling, scaling_from
from ..positions.turns import float64_digit_tables, float64_phases, turn_constants
from ._module import Module, native_byte_order, resolve_positions
from ._positions import gradient_of


class RotaryPositions(Module):
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
        - positions: ``(length,)`` or ``(batch, length)`` integers or reals; None is ``0, 1,
          …`` shifted by ``offset``. Several coordinates are on the first axis, ``(axes,
          length)`` or ``(axes, batch, length)``.
        - output: as ``x``, in the dtype of ``x``

    There is no maximum length. A position of magnitude 2^24 or more is a ValueError. Until
    :meth:`at_length` is called, DynamicNTK is unscaled and LongRoPE uses its short factors.

    Example:
        >>> layer = RotaryPositions(2)
        >>> layer(np.array([[1.0, 0.0]]), [1]).round(4).tolist()
        [[0.5403, 0.8415]]
        >>> layer(np.ones((3, 8, 5, 2)), offset=[0, 7, 1_000_000]).shape
        (3, 8, 5, 2)
    """

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
        self.heads_axis = check_heads_axis(heads_axis)
        one_of("layout", layout, LAYOUTS)
        self.scaling = scaling_from(scaling)
        #: Angle per position of each pair, in float64, and the attention factor.
        self.frequencies, self.attention_factor = layer_frequencies(
            head_dim,
            base=base,
            scaling=self.scaling,
            rotary_dim=rotary_dim,
            sections=sections,
            interleaved_sections=interleaved_sections,
            frequencies=frequencies,
        )
        #: Phases of each digit of a position; see :mod:`firstlayer.positions.phases`.
        self.tables, self.rates = phase_tables(
            self.frequencies, scale=self.attention_factor
        )
        self.head_dim, self.base = int(head_dim), float(base)
        self.rotary_dim = None if rotary_dim is None else int(rotary_dim)
        self.sections = None if sections is None else [int(n) for n in sections]
        self.interleaved_sections = boolean("interleaved_sections", interleaved_sections)
        self._explicit = frequencies is not None
        self.layout: Layout = layout

    @classmethod
    def from_hf(
        cls, config: Any, layer_type: str | None = None, *, heads_axis: int | None = None
    ) -> Self:
        """Return the layer of a transformers model.

        Args:
            config: Config of the model, a dict or an object with ``to_dict``; see
                :func:`firstlayer.files.hf.rotary_from_hf`.
            layer_type: Type of layer, if the config has rope parameters for each type.
            heads_axis: As in the constructor.

        Example:
            >>> gptj = {"model_type": "gptj", "n_embd": 64, "n_head": 2, "rotary_dim": 8}
            >>> layer = RotaryPositions.from_hf(gptj)
            >>> layer.head_dim, layer.rotary_dim, layer.layout
            (32, 8, 'interleaved')
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
            >>> layer, x = RotaryPositions.dinov3(8), np.ones((1, 3, 5, 8))
            >>> y = layer(x, from_patches((2, 2), prefix=1))
            >>> same = (y == x).all((0, 1, 3))
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
            >>> RotaryPositions.pixtral(8)(np.ones((1, 3, 6, 8)), from_grid((2, 3))).shape
            (1, 3, 6, 8)
        """
        frequencies = pixtral_axial_frequencies(head_dim, base=base)
        return cls(head_dim, frequencies=frequencies, heads_axis=heads_axis)

    def __call__(
        self,
        x: Float[Any, "*lead head_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> Float[np.ndarray, "*lead head_dim"]:
        """Return ``x`` rotated by its positions.

        Args:
            x: Queries, or keys.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
        """
        return self.vjp(x, positions, offset=offset)[0]

    def vjp(
        self,
        x: Float[Any, "*lead head_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the output and the pullback from its gradient to that of ``x``.

        Example:
            >>> y, pullback = RotaryPositions(2).vjp(np.ones((3, 2)))
            >>> bool(np.allclose(pullback(y)["x"], 1.0))
            True
        """
        x = self._vectors(x)
        if self.heads_axis is None:
            axial = self.axes is not None
            check_heads(x.shape, positions, offset=offset, axial=axial)
        at = self._positions(x, positions, offset)
        rows, axial = self._phase_rows(at, x.dtype), self.axes is not None
        seq = over_heads(at, x, heads_axis=self.heads_axis, axial=axial).shape[axial:]
        read, write = self.layout == "half", self.layout != "interleaved"
        y = rotate_rows(x, rows, seq, read_half=read, write_half=write)

        def pullback(dy: Any) -> dict[str, np.ndarray]:
            dy = gradient_of(y, dy)
            if dy.dtype != x.dtype:
                dy = dy.astype(rows.dtype)
            inverse = inverse_phases(rows)
            dx = rotate_rows(dy, inverse, seq, read_half=write, write_half=read)
            return {"x": dx.astype(x.dtype, copy=False)}

        return y, pullback

    def phases(
        self, positions: Shaped[Any, "..."] | list[Any] | int | float, *, dtype: Any = None
    ) -> tuple[Float[np.ndarray, "*seq pairs"], Float[np.ndarray, "*seq pairs"]]:
        """Return the cosine and the sine of each pair, attention factor included.

        Args:
            positions: Integers or reals of any shape. Several coordinates are on the first
                axis.
            dtype: float32 (the default) or float64.

        Example:
            >>> cos, sin = RotaryPositions(4).phases([0, 100], dtype=np.float64)
            >>> sin.round(4).tolist()
            [[0.0, 0.0], [-0.5064, 0.8415]]
        """
        positions = positions_array(positions)
        seq = positions.shape if self.axes is None else positions.shape[1:]
        rows = self._phase_rows(positions, np.dtype(dtype or np.float32))
        cos, sin = np.split(rows.reshape(*seq, rows.shape[1]), 2, axis=-1)
        return cos, sin

    def at_length(self, n: int) -> Self:
        """Return a copy for sequences of ``n`` positions; most rules ignore the length.

        Example:
            >>> from firstlayer.positions.scaling import DynamicNTK
            >>> rule = DynamicNTK(factor=2.0, original_length=8)
            >>> layer = RotaryPositions(4, scaling=rule)
            >>> layer.at_length(8).frequencies[1], layer.at_length(20).frequencies[1]
            (np.float64(0.01), np.float64(0.0025))
        """
        positive("n", n)
        scaling = None if self.scaling is None else self.scaling.at_length(n)
        return type(self)(**{**self.config(), "scaling": scaling})

    def rerotate(
        self, keys: Float[Any, "*lead head_dim"] | list[Any], delta: Any
    ) -> Float[np.ndarray, "*lead head_dim"]:
        """Return rotated keys shifted by ``delta`` positions, as after trimming a KV cache.

        The attention factor, already part of the keys, is not applied again.

        Args:
            keys: Output of this layer.
            delta: A number, or one for each sequence (the first axis of ``keys``). May be
                negative. All coordinates of a position are shifted equally.

        Example:
            >>> layer, k = RotaryPositions(4), np.ones((3, 4))
            >>> moved = layer.rerotate(layer(k, [5, 6, 7]), -5)
            >>> bool(np.allclose(moved, layer(k, [0, 1, 2]), atol=1e-6))
            True
        """
        keys, delta = self._vectors(keys, "keys"), positions_array(delta, name="delta")
        delta = over_rows(delta, keys, axes=self.axes)
        seq = delta.shape if self.axes is None else delta.shape[1:]
        rows = self._phase_rows(delta, keys.dtype, name="delta")
        rows /= self.attention_factor
        half = self.layout != "interleaved"
        return rotate_rows(keys, rows, seq, read_half=half, write_half=half)

    @property
    def axes(self) -> int | None:
        """Number of coordinates of a position; None if it is a single number."""
        return None if self.frequencies.ndim == 1 else self.frequencies.shape[0]

    def config(self) -> dict[str, Any]:
        return config_of(self, frequencies=self.frequencies if self._explicit else None)

    def _vectors(self, x: Any, name: str = "x") -> np.ndarray:
        x = host_array(x, name=name)
        if not is_float(x.dtype):
            raise TypeError(f"{name} must be real, got {dtype_text(x.dtype)}")
        axes = ("length",) if self.heads_axis != -2 else ("length", "heads")
        if x.ndim <= len(axes) or x.shape[-1] != self.head_dim:
            shape = f"(..., {', '.join(axes)}, {self.head_dim})"
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
        return native_byte_order(x)

    def _positions(self, x: np.ndarray, positions: Any, offset: Any) -> np.ndarray:
        if positions is None and self.axes is not None and self._explicit:
            raise ValueError(f"positions must be given for {self.axes} axes, got None")
        length = x.shape[-2 if self.heads_axis != -2 else -3]
        at = resolve_positions(length, positions=positions, offset=offset)
        if positions is None and self.axes is not None:
            # In text, all coordinates of a token are equal.
            at = np.broadcast_to(at, (self.axes, *at.shape))
        return at

    def _phase_rows(
        self, positions: np.ndarray, dtype: Any, *, name: str = "positions"
    ) -> np.ndarray:
        if self.axes is not None:
            check_axes(positions, self.axes)
        positions_in_reach(positions, LIMIT, name=name)
        if compute_dtype(dtype) == "float32":
            return phase_rows(positions, self.tables, self.rates)
        if self.axes is None and positions.dtype.kind in "iu":
            return phase_rows(positions, self._float64_tables, self.frequencies[None])
        flat = positions.reshape(*positions.shape[: self.axes is not None], -1)
        cos, sin = float64_phases(flat, self.turns, scale=self.attention_factor)
        return np.concatenate([cos, sin], axis=-1)

    @cached_property
    def turns(self) -> np.ndarray:
        """Constants of float64 phases; see :mod:`firstlayer.positions.turns`."""
        return turn_constants(self.frequencies)

    @cached_property
    def _float64_tables(self) -> np.ndarray:
        return float64_digit_tables(self.turns, scale=self.attention_factor)
