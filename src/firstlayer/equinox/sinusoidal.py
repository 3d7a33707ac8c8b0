"""Sinusoidal positions for Equinox."""

from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import compute_dtype
from .._check import boolean, number, one_of, positive
from ..positions.ids import check_axes
from ..positions.sinusoidal import (
    CONVENTIONS,
    LAYOUTS,
    Layout,
    Odd,
    encode,
    frequencies,
    join_axes,
    phase_tables,
    phases,
)
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


class SinusoidalPositions(Module):
    """Adds the sines and cosines of its position to each vector. Has no parameters.

    Args:
        embedding_dim: Width of each vector. A multiple of ``axes``.
        base: Ratio of the slowest wavelength to the fastest.
        layout: ``"interleaved"`` or ``"half"``; see
            :func:`firstlayer.positions.sinusoidal.encode`.
        shift: Subtracted from the denominator of the exponents, 0 or 1; see
            :func:`firstlayer.positions.sinusoidal.frequencies`.
        cos_first: Put cosines before sines.
        scale: Factor of the added vectors; MLX has ``(2 / embedding_dim) ** 0.5``.
        odd: Last feature of an odd width: ``"sine"`` or ``"zero"``.
        axes: Number of coordinates of a position. Each gets an equal share of the features,
            in the order of the axes.
        frequency_scale: Factor of every frequency.

    Shape:
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers or reals; None is ``0, 1,
          …`` plus ``offset``. With several axes the coordinates are the first axis,
          ``(axes, length)`` or ``(axes, batch, length)``, and must be given.
        - output: as ``x``, in the dtype of ``x``

    There is no maximum length. A position of magnitude 2^24 or more is a ValueError, or NaN
    if it is traced or on an accelerator. Reals are float32 unless ``jax_enable_x64`` is
    set.

    Example:
        >>> layer = SinusoidalPositions(4)
        >>> layer.encode([0, 1]).round(4).tolist()[0]
        [0.0, 1.0, 0.0, 1.0]
        >>> layer(jnp.zeros((2, 3, 4)), offset=10_000_000).shape
        (2, 3, 4)
    """

    #: Phases of each digit of a position, and their rates; see
    #: :mod:`firstlayer.positions.phases`.
    tables: Constant = eqx.field(static=True)
    rates: Constant = eqx.field(static=True)
    #: The same for float64; see :mod:`firstlayer.positions.turns`.
    turns: Constant = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    shift: float = eqx.field(static=True)
    cos_first: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    odd: Odd = eqx.field(static=True)
    axes: int = eqx.field(static=True)
    frequency_scale: float = eqx.field(static=True)

    def __init__(
        self,
        embedding_dim: int,
        *,
        base: float = 10_000.0,
        layout: Layout = "interleaved",
        shift: float = 0.0,
        cos_first: bool = False,
        scale: float = 1.0,
        odd: Odd = "sine",
        axes: int = 1,
        frequency_scale: float = 1.0,
    ) -> None:
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.axes = positive("axes", axes)
        if embedding_dim % axes:
            raise ValueError(
                f"embedding_dim must be a multiple of axes {axes}, got {embedding_dim}"
            )
        one_of("layout", layout, LAYOUTS)
        self.layout, self.odd, self.cos_first = layout, odd, boolean("cos_first", cos_first)
        rates = frequencies(
            embedding_dim // axes,
            base=base,
            shift=shift,
            odd=odd,
            frequency_scale=frequency_scale,
        )
        self.base, self.shift = float(base), float(shift)
        self.scale = number("scale", scale)
        self.frequency_scale = float(frequency_scale)
        self.turns = Constant(turn_constants(rates))
        tables, rates = phase_tables(rates, scale=scale)
        self.tables, self.rates = Constant(tables), Constant(rates)

    @classmethod
    def tensor2tensor(cls, embedding_dim: int, **options: Any) -> "SinusoidalPositions":
        """Return the layer of tensor2tensor, fairseq, M2M100 and Whisper's encoder.

        Args:
            embedding_dim: Width of each vector.
            options: Further arguments of the constructor.

        Example:
            >>> SinusoidalPositions.tensor2tensor(5).encode([0]).tolist()
            [[0.0, 0.0, 1.0, 1.0, 0.0]]
        """
        return cls(embedding_dim, **{**CONVENTIONS["tensor2tensor"], **options})

    @classmethod
    def marian(cls, embedding_dim: int, **options: Any) -> "SinusoidalPositions":
        """Return the layer of Marian and Pegasus; with ``axes=2``, that of ViT-MAE.

        Args:
            embedding_dim: Width of each vector.
            options: Further arguments of the constructor.

        Example:
            >>> SinusoidalPositions.marian(5).encode([0]).tolist()
            [[0.0, 0.0, 0.0, 1.0, 1.0]]
        """
        return cls(embedding_dim, **{**CONVENTIONS["marian"], **options})

    @classmethod
    def timestep(cls, embedding_dim: int, **options: Any) -> "SinusoidalPositions":
        """Return the timestep encoding of diffusion models (DiT, Stable Diffusion).

        The original DDPM has ``shift=1, cos_first=False``.

        Args:
            embedding_dim: Width of each vector.
            options: Further arguments of the constructor.

        Example:
            >>> SinusoidalPositions.timestep(4).encode([0.0]).tolist()
            [[1.0, 1.0, 0.0, 0.0]]
        """
        return cls(embedding_dim, **{**CONVENTIONS["timestep"], **options})

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch length embedding_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        key: Key | None = None,
    ) -> Float[Array, "*batch length embedding_dim"]:
        """Return ``x`` plus the vectors of its positions.

        Args:
            x: Token vectors.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        x = checked_vectors(x, self.embedding_dim)
        return _add(self, x, self._argument(x.shape[:-1], positions, offset))

    def encode(
        self, positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape; with several axes, the coordinates
                are the first axis.
            dtype: Dtype of the result, float32 by default.
        """
        at = checked_positions(positions, check_reach)
        if self.axes > 1:
            check_axes(at, self.axes)
        dtype = table_dtype(jnp.float32 if dtype is None else dtype)
        return _encode(self, at, dtype)

    def _argument(
        self, lead: tuple[int, ...], positions: Any, offset: Any
    ) -> PositionsArgument:
        """Return the checked positions of vectors with these leading axes."""
        if self.axes > 1 and positions is None:
            raise ValueError(f"positions must be given when axes is {self.axes}, got None")
        return positions_argument(
            lead[-1], positions=positions, offset=offset, check=check_reach
        )

    def _add(
        self, x: Float[Array, "*batch length width"], argument: PositionsArgument
    ) -> Float[Array, "*batch length width"]:
        """Return ``x`` plus its vectors, within a compiled function."""
        at = argument.fit(x, axes=self.axes)
        return (upcast(x) + self._features(at, x.dtype)).astype(x.dtype)

    def _features(
        self, positions: Shaped[Array, "*seq"], dtype: Any
    ) -> Float[Array, "*seq width"]:
        if compute_dtype(dtype) == "float64":
            turns = jnp.asarray(self.turns.array)
            cos, sin = float64_phases(positions, turns, scale=self.scale)
        else:
            tables, rates = (jnp.asarray(c.array) for c in (self.tables, self.rates))
            cos, sin = phases(positions, tables, rates)
        features = encode(
            cos,
            sin,
            embedding_dim=self.embedding_dim // self.axes,
            layout=self.layout,
            cos_first=self.cos_first,
        )
        return join_axes(features) if self.axes > 1 else features


@compiled
def _add(
    layer: SinusoidalPositions, x: Array, argument: PositionsArgument
) -> Float[Array, "*batch length width"]:
    return layer._add(x, argument)


@partial(compiled, static_argnums=2)
def _encode(
    layer: SinusoidalPositions, positions: Shaped[Array, "*seq"], dtype: np.dtype
) -> Float[Array, "*seq width"]:
    return layer._features(positions, dtype).astype(dtype)
