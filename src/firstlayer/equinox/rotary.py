"""Rotary positions for Equinox."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Shaped

from .._array import compute_dtype
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
from ..positions.turns import float64_phases, turn_constants
from ._constant import Constant
from ._module import Module, compiled, upcast
from ._parameters import Key, table_dtype
from ._positions import (
    Offset,
    Positions,
    PositionsArgument,
    check_reach,
    checked_positions,
    checked_vectors,
    positions_argument,
)


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
          …`` plus ``offset``. With several coordinates they are the first axis, ``(axes,
          length)`` or ``(axes, batch, length)``.
        - output: as ``x``, in the dtype of ``x``

    There is no maximum length. A position of magnitude 2^24 or more is a ValueError, or NaN
    if it is traced or on an accelerator. Reals are float32 unless ``jax_enable_x64`` is
    set. A rule that depends on the length is unscaled (DynamicNTK) or short (LongRoPE)
    until :meth:`at_length`.

    ``eqx.filter_jit`` compiles a function again for each value of a Python int; pass it
    offsets as arrays, ``jnp.asarray(offset)``. A Pallas kernel cannot capture the layer's
    tables: compute :meth:`phases` outside of it, and call
    :func:`firstlayer.positions.rotary.rotate` inside.

    Example:
        >>> layer = RotaryPositions(2)
        >>> layer(jnp.array([[1.0, 0.0]]), [1]).round(4).tolist()
        [[0.5403000116348267, 0.8414999842643738]]
        >>> layer(jnp.ones((3, 8, 5, 2)), offset=[0, 7, 1_000_000]).shape
        (3, 8, 5, 2)
    """

    #: Phases of each digit of a position; see
    #: :func:`firstlayer.positions.phases.phase_tables`.
    tables: Constant = eqx.field(static=True)
    rates: Constant = eqx.field(static=True)
    #: The same for float64; see :mod:`firstlayer.positions.turns`.
    turns: Constant = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    scaling: Scaling | None = eqx.field(static=True)
    rotary_dim: int | None = eqx.field(static=True)
    sections: tuple[int, ...] | None = eqx.field(static=True)
    interleaved_sections: bool = eqx.field(static=True)
    #: The frequencies, if they were given.
    given_frequencies: Constant | None = eqx.field(static=True)
    heads_axis: int | None = eqx.field(static=True)

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
        rates, factor = layer_frequencies(
            head_dim,
            base=base,
            scaling=self.scaling,
            rotary_dim=rotary_dim,
            sections=sections,
            interleaved_sections=interleaved_sections,
            frequencies=frequencies,
        )
        self.given_frequencies = None if frequencies is None else Constant(rates)
        self.turns = Constant(turn_constants(rates))
        tables, rates = phase_tables(rates, scale=factor)
        self.tables, self.rates = Constant(tables), Constant(rates)
        self.head_dim, self.base, self.layout = int(head_dim), float(base), layout
        self.rotary_dim = None if rotary_dim is None else int(rotary_dim)
        self.sections = None if sections is None else tuple(int(n) for n in sections)
        self.interleaved_sections = boolean("interleaved_sections", interleaved_sections)

    @classmethod
    def from_hf(
        cls, config: Any, layer_type: str | None = None, *, heads_axis: int | None = None
    ) -> Self:
        """Return the layer of a transformers model.

        See :func:`firstlayer.files.hf.rotary_from_hf`.

        Args:
            config: The model's config, as a dict or an object with ``to_dict``.
            layer_type: Layer type, if the config has rope parameters for each type.
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
            >>> layer, x = RotaryPositions.dinov3(8), jnp.ones((1, 3, 5, 8))
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
            >>> RotaryPositions.pixtral(8)(jnp.ones((1, 3, 6, 8)), from_grid((2, 3))).shape
            (1, 3, 6, 8)
        """
        frequencies = pixtral_axial_frequencies(head_dim, base=base)
        return cls(head_dim, frequencies=frequencies, heads_axis=heads_axis)

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*lead head_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        key: Key | None = None,
    ) -> Float[Array, "*lead head_dim"]:
        """Return ``x`` rotated by its positions.

        Args:
            x: Queries or keys.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        x = self._vectors(x)
        if self.heads_axis is None:
            axial = self.axes is not None
            check_heads(x.shape, positions, offset=offset, axial=axial)
        return _rotate(self, x, self._argument(x, positions, offset))

    def phases(
        self, positions: Positions, *, dtype: Any = None
    ) -> tuple[Float[Array, "*seq pairs"], Float[Array, "*seq pairs"]]:
        """Return the cosine and the sine of each pair, attention factor included.

        Args:
            positions: Integers or reals of any shape; with several coordinates, they are
                the first axis.
            dtype: float32, the default, or float64.

        Example:
            >>> cos, sin = RotaryPositions(4).phases([0, 100])
            >>> np.asarray(sin, np.float64).round(4).tolist()
            [[0.0, 0.0], [-0.5064, 0.8415]]
        """
        at = checked_positions(positions, check_reach)
        if self.axes is not None:
            check_axes(at, self.axes)
        return _phases(self, at, table_dtype(jnp.float32 if dtype is None else dtype))

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
        self, keys: Float[Array | np.ndarray, "*lead head_dim"], delta: Offset
    ) -> Float[Array, "*lead head_dim"]:
        """Return rotated keys shifted by ``delta`` positions, as after trimming a KV cache.

        Args:
            keys: Output of this layer.
            delta: A number, or one for each sequence (the first axis of ``keys``). May be
                negative. All coordinates of a position are shifted equally.

        The attention factor is not applied again.

        Example:
            >>> layer, k = RotaryPositions(4), jnp.ones((3, 4))
            >>> moved = layer.rerotate(layer(k, offset=5), -5)
            >>> bool(jnp.allclose(moved, layer(k), atol=1e-6))
            True
        """
        keys = self._vectors(keys, "keys")
        check = partial(check_reach, name="delta")
        return _rerotate(self, keys, checked_positions(delta, check, name="delta"))

    @property
    def frequencies(self) -> Float64[np.ndarray, "*axes pairs"]:
        """Angle per position of each pair, in float64."""
        if self.given_frequencies is not None:
            return self.given_frequencies.array
        return layer_frequencies(
            self.head_dim,
            base=self.base,
            scaling=self.scaling,
            rotary_dim=self.rotary_dim,
            sections=self.sections,
            interleaved_sections=self.interleaved_sections,
        )[0]

    @property
    def attention_factor(self) -> float:
        """Factor of every cosine and sine."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    @property
    def axes(self) -> int | None:
        """Number of coordinates of a position; None if it is a single number."""
        if self.sections is not None:
            return len(self.sections)
        if self.given_frequencies is not None and self.given_frequencies.array.ndim > 1:
            return len(self.given_frequencies.array)
        return None

    def config(self) -> dict[str, Any]:
        given = self.given_frequencies
        return config_of(self, frequencies=None if given is None else given.array)

    def _vectors(self, x: Any, name: str = "x") -> Float[Array, "*lead head_dim"]:
        axes = ("length",) if self.heads_axis != -2 else ("length", "heads")
        return checked_vectors(x, self.head_dim, axes=axes, name=name)

    def _argument(self, x: Array, positions: Any, offset: Any) -> PositionsArgument:
        if positions is None and self.axes is not None and self.sections is None:
            raise ValueError(f"positions must be given for {self.axes} axes, got None")
        length = x.shape[self._length_axis]
        return positions_argument(
            length, positions=positions, offset=offset, check=check_reach
        )

    @property
    def _length_axis(self) -> int:
        return -2 if self.heads_axis != -2 else -3

    def _phases(
        self, positions: Shaped[Array, "*seq"], dtype: Any
    ) -> tuple[Float[Array, "*seq pairs"], Float[Array, "*seq pairs"]]:
        if compute_dtype(dtype) == "float64":
            turns = jnp.asarray(self.turns.array)
            return float64_phases(positions, turns, scale=self.attention_factor)
        of = phases if self.axes is None else axial_phases
        tables, rates = (jnp.asarray(c.array) for c in (self.tables, self.rates))
        return of(positions, tables, rates)


@compiled
def _rotate(
    layer: RotaryPositions, x: Float[Array, "*lead head_dim"], argument: PositionsArgument
) -> Float[Array, "*lead head_dim"]:
    at, axes = argument.count(x.shape[layer._length_axis]), layer.axes
    if axes is not None:
        if argument.is_offset:
            # Text has the same position on every axis.
            at = jnp.broadcast_to(at, (axes, *at.shape))
        check_axes(at, axes)
    at = over_heads(at, x, heads_axis=layer.heads_axis, axial=axes is not None)
    cos, sin = layer._phases(at, x.dtype)
    return rotate(upcast(x), cos, sin, layout=layer.layout).astype(x.dtype)


@compiled
def _rerotate(
    layer: RotaryPositions, keys: Float[Array, "*lead head_dim"], delta: Shaped[Array, ""]
) -> Float[Array, "*lead head_dim"]:
    at, factor = over_rows(delta, keys, axes=layer.axes), layer.attention_factor
    cos, sin = (phase / factor for phase in layer._phases(at, keys.dtype))
    layout = "interleaved" if layer.layout == "interleaved" else "half"
    return rotate(upcast(keys), cos, sin, layout=layout).astype(keys.dtype)


@partial(compiled, static_argnums=2)
def _phases(
    layer: RotaryPositions, positions: Shaped[Array, "*seq"], dtype: np.dtype
) -> tuple[Float[Array, "*seq pairs"], Float[Array, "*seq pairs"]]:
    return layer._phases(positions, dtype)
