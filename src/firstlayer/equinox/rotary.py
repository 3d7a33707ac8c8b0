"""Rotary positions for Equinox."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Shaped

from .._array import compute_dtype
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
from ._constant import Constant
from ._module import Module, upcast
from ._positions.arguments import (
    Offset,
    Positions,
    arrived,
    checked,
    in_reach,
    positions_for,
    vectors,
)
from ._table.parameters import Key, table_dtype


class RotaryPositions(Module):
    """Rotates queries or keys by their positions. Has no parameters.

    Args:
        head_dim: Size of the last axis of the input. Positive, and even unless
            ``rotary_dim`` is given.
        base: Ratio of the slowest wavelength to the fastest.
        layout: ``"half"`` (what ``eqx.nn.RotaryPositionalEmbedding`` has),
            ``"interleaved"`` or ``"interleaved_to_half"``: which features form a pair, a
            checkpoint fits one; see :func:`firstlayer.positions.rotary.rotate`.
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
            head_dim)``, which the heads of ``eqx.nn.MultiheadAttention`` have.

    Shape:
        - x: ``(..., heads, length, head_dim)`` or ``(..., length, head_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers or reals; None is ``0, 1,
          …`` moved on by ``offset``. With several coordinates they come first, ``(axes,
          length)`` or ``(axes, batch, length)``.
        - output: as ``x``, in the dtype of ``x``

    There is no maximum length. A position of 2^24 or more in size is a ValueError, and NaN
    where it is traced. Reals are float32 unless JAX has 64 bits. A rule that depends on the
    length is unscaled (DynamicNTK) or short (LongRoPE) until :meth:`at_length`.

    Example:
        >>> layer = RotaryPositions(2)
        >>> layer(jnp.array([[1.0, 0.0]]), [1]).round(4).tolist()
        [[0.5403000116348267, 0.8414999842643738]]
        >>> layer(jnp.ones((3, 8, 5, 2)), offset=[0, 7, 1_000_000]).shape
        (3, 8, 5, 2)
    """

    #: The turns of each digit of a position; see :func:`firstlayer.positions.phases.phase_tables`.
    tables: Constant = eqx.field(static=True)
    rates: Constant = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    scaling: Scaling | None = eqx.field(static=True)
    rotary_dim: int | None = eqx.field(static=True)
    sections: tuple[int, ...] | None = eqx.field(static=True)
    interleaved_sections: bool = eqx.field(static=True)
    #: The frequencies, if they were given.
    ready: Constant | None = eqx.field(static=True)
    heads_axis: int = eqx.field(static=True)

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
        self.heads_axis = check_heads_axis(heads_axis)
        one_of("layout", layout, LAYOUTS)
        self.scaling = scaling_from(scaling)
        found, factor = layer_frequencies(
            head_dim,
            base=base,
            scaling=self.scaling,
            rotary_dim=rotary_dim,
            sections=sections,
            interleaved_sections=interleaved_sections,
            frequencies=frequencies,
        )
        tables, rates = phase_tables(found, scale=factor)
        self.tables, self.rates = Constant(tables), Constant(rates)
        self.head_dim, self.base, self.layout = int(head_dim), float(base), layout
        self.rotary_dim = None if rotary_dim is None else int(rotary_dim)
        self.sections = None if sections is None else tuple(int(n) for n in sections)
        self.interleaved_sections = bool(interleaved_sections)
        self.ready = None if frequencies is None else Constant(found)

    @classmethod
    def from_hf(
        cls, config: Any, layer_type: str | None = None, *, heads_axis: int = -3
    ) -> Self:
        """Return the layer of a transformers model; see :func:`firstlayer.files.hf.rotary_from_hf`.

        Args:
            config: The model's config, as a dict or an object with ``to_dict``.
            layer_type: Which layers, where rope parameters are given for each type.
            heads_axis: As for the layer.

        Example:
            >>> gptj = {"model_type": "gptj", "n_embd": 64, "n_head": 2, "rotary_dim": 8}
            >>> layer = RotaryPositions.from_hf(gptj)
            >>> layer.head_dim, layer.rotary_dim, layer.layout
            (32, 8, 'interleaved')
        """
        return cls(**rotary_from_hf(config, layer_type), heads_axis=heads_axis)

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*lead head_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        key: Key | None = None,
    ) -> Float[Array, "*lead head_dim"]:
        """Return ``x`` turned to its positions.

        Args:
            x: Queries or keys.
            positions: Where they stand.
            offset: How many positions came before, a number or one per row.
            key: Ignored; for :class:`equinox.nn.Sequential`.
        """
        x = self._vectors(x)
        found, axial = self._positions(x, positions, offset), self.axes is not None
        lined = over_heads(found, x, heads_axis=self.heads_axis, axial=axial)
        cos, sin = self._phases(lined, x.dtype)
        return rotate(upcast(x), cos, sin, layout=self.layout).astype(x.dtype)

    def phases(
        self, positions: Positions, *, dtype: Any = None
    ) -> tuple[Float[Array, "*seq pairs"], Float[Array, "*seq pairs"]]:
        """Return the cosine and the sine of each pair, attention factor included.

        Args:
            positions: Integers or reals of any shape; with several coordinates, they come
                first.
            dtype: float32, which is the default, or float64.

        Example:
            >>> cos, sin = RotaryPositions(4).phases([0, 100])
            >>> np.asarray(sin, np.float64).round(4).tolist()
            [[0.0, 0.0], [-0.5064, 0.8415]]
        """
        found = checked(arrived(positions), in_reach)
        if self.axes is not None:
            check_axes(found, self.axes)
        return self._phases(found, table_dtype(jnp.float32 if dtype is None else dtype))

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
        return type(self)(**{**self.config(), "scaling": scaling})

    def rerotate(
        self, keys: Float[Array | np.ndarray, "*lead head_dim"], delta: Offset
    ) -> Float[Array, "*lead head_dim"]:
        """Return rotated keys moved on by ``delta`` positions, as when a cache is cut.

        Args:
            keys: What this layer returned.
            delta: A number, or an array of one per row (the first axis of ``keys``);
                negative moves back. All coordinates of a position move alike.

        The attention factor, which the keys have already, is not applied again.

        Example:
            >>> layer, k = RotaryPositions(4), jnp.ones((3, 4))
            >>> moved = layer.rerotate(layer(k, offset=5), -5)
            >>> bool(jnp.allclose(moved, layer(k), atol=1e-6))
            True
        """
        keys = self._vectors(keys, "keys")
        found = checked(arrived(delta, name="delta"), partial(in_reach, name="delta"))
        lined = over_rows(found, keys, axes=self.axes)
        factor = self.attention_factor
        cos, sin = (turn / factor for turn in self._phases(lined, keys.dtype))
        layout = "interleaved" if self.layout == "interleaved" else "half"
        return rotate(upcast(keys), cos, sin, layout=layout).astype(keys.dtype)

    @property
    def frequencies(self) -> Float64[np.ndarray, "*axes pairs"]:
        """Angle per position of each pair, in float64."""
        if self.ready is not None:
            return self.ready.array
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
        """What every turn is enlarged by."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    @property
    def axes(self) -> int | None:
        """How many coordinates a position has; None if it is a single number."""
        if self.sections is not None:
            return len(self.sections)
        if self.ready is not None and self.ready.array.ndim > 1:
            return len(self.ready.array)
        return None

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "head_dim": self.head_dim,
            "base": self.base,
            "layout": self.layout,
            "scaling": None if self.scaling is None else self.scaling.to_dict(),
            "rotary_dim": self.rotary_dim,
            "sections": None if self.sections is None else list(self.sections),
            "interleaved_sections": self.interleaved_sections,
            "frequencies": None if self.ready is None else self.frequencies.tolist(),
            "heads_axis": self.heads_axis,
        }

    def _vectors(self, x: Any, name: str = "x") -> Float[Array, "*lead head_dim"]:
        axes = ("length",) if self.heads_axis == -3 else ("length", "heads")
        return vectors(x, self.head_dim, axes=axes, name=name)

    def _positions(self, x: Array, positions: Any, offset: Any) -> Shaped[Array, "*seq"]:
        if positions is None and self.axes is not None and self.ready is not None:
            raise ValueError(f"positions must be given for {self.axes} axes, got None")
        length = x.shape[-2 if self.heads_axis == -3 else -3]
        found = positions_for(length, positions=positions, offset=offset, check=in_reach)
        if self.axes is not None:
            if positions is None:
                # Text, whose time, height and width are one.
                found = jnp.broadcast_to(found, (self.axes, *found.shape))
            check_axes(found, self.axes)
        return found

    def _phases(
        self, positions: Shaped[Array, "*seq"], dtype: Any
    ) -> tuple[Float[Array, "*seq pairs"], Float[Array, "*seq pairs"]]:
        work, run = compute_dtype(dtype), phases if self.axes is None else axial_phases
        return run(
            positions, *(jnp.asarray(c.array, work) for c in (self.tables, self.rates))
        )
