"""Sinusoidal positions for NumPy."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from .._array import compute_dtype, is_real
from .._check import (
    boolean,
    float_dtype,
    number,
    one_of,
    positions_array,
    positions_in_reach,
    positive,
)
from ..positions.ids import check_axes
from ..positions.phases import LIMIT
from ..positions.sinusoidal import (
    CONVENTIONS,
    LAYOUTS,
    Layout,
    Odd,
    encode,
    features_at,
    frequencies,
    join_axes,
    phase_tables,
)
from ..positions.turns import float64_digit_tables, float64_phases, turn_constants
from ._module import Module, upcast
from ._positions import gradient_of, positions_of, vectors


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
          …`` shifted by ``offset``. Several axes need ``(axes, length)`` or ``(axes, batch,
          length)``.
        - output: as ``x``, in the dtype of ``x``

    There is no maximum length. A position of magnitude 2^24 or more is a ValueError.

    Example:
        >>> layer = SinusoidalPositions(4)
        >>> layer.encode([0, 1]).round(4).tolist()[0]
        [0.0, 1.0, 0.0, 1.0]
        >>> layer(np.zeros((2, 3, 4)), offset=10_000_000).shape
        (2, 3, 4)
    """

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
        self.layout: Layout = layout
        self.base, self.shift = number("base", base), number("shift", shift)
        self.frequency_scale = number("frequency_scale", frequency_scale)
        self.scale, self.odd = number("scale", scale), odd
        self.cos_first = boolean("cos_first", cos_first)
        pairs = frequencies(
            embedding_dim // axes,
            base=base,
            shift=shift,
            odd=odd,
            frequency_scale=frequency_scale,
        )
        #: Phases of each digit of a position; see :mod:`firstlayer.positions.phases`.
        self._frequencies = pairs
        self.tables, self.rates = phase_tables(pairs, scale=scale)

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
        x: Float[Any, "*batch length embedding_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> Float[np.ndarray, "*batch length embedding_dim"]:
        """Return ``x`` plus the vectors of its positions.

        Args:
            x: Token vectors.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
        """
        x = vectors(x, self.embedding_dim)
        at = positions_of(x.shape, positions=positions, offset=offset, axes=self.axes)
        y = upcast(x)
        return (y + self.encode(at, dtype=y.dtype)).astype(x.dtype, copy=False)

    def encode(
        self, positions: Shaped[Any, "..."] | list[Any] | int | float, *, dtype: Any = None
    ) -> Float[np.ndarray, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape. Several coordinates are on the first
                axis.
            dtype: Dtype of the result, float32 by default.
        """
        positions = positions_in_reach(positions_array(positions), LIMIT)
        if self.axes > 1:
            check_axes(positions, self.axes)
        dtype = float_dtype(dtype)
        options: dict[str, Any] = {
            "embedding_dim": self.embedding_dim // self.axes,
            "layout": self.layout,
            "cos_first": self.cos_first,
        }
        if compute_dtype(dtype) == "float32":
            features = features_at(positions, self.tables, self.rates, **options)
        elif is_real(positions):
            phases = float64_phases(positions, self.turns, scale=self.scale)
            features = encode(*phases, **options)
        else:
            features = features_at(positions, self._float64_tables, self.rates, **options)
        if self.axes > 1:
            features = join_axes(features)
        return features.astype(dtype, copy=False)

    def vjp(
        self,
        x: Float[Any, "*batch length embedding_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the output and the pullback from its gradient to that of ``x``.

        Example:
            >>> y, pullback = SinusoidalPositions(2).vjp(np.zeros((1, 2)))
            >>> pullback([[3.0, 4.0]])["x"].tolist()
            [[3.0, 4.0]]
        """
        y = self(x, positions, offset=offset)
        return y, lambda dy: {"x": gradient_of(y, dy).astype(y.dtype)}

    @cached_property
    def turns(self) -> np.ndarray:
        """Constants of float64 phases; see :mod:`firstlayer.positions.turns`."""
        return turn_constants(self._frequencies)

    @cached_property
    def _float64_tables(self) -> np.ndarray:
        return float64_digit_tables(self.turns, scale=self.scale)
