"""Fourier features for NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._check import (
    boolean,
    dtype_text,
    host_array,
    is_float,
    not_masked,
    one_of,
    positions_in_reach,
)
from ..positions.fourier import (
    float64_fourier_phases,
    fourier_phases,
    fourier_tables,
    gaussian_matrix,
    octave_matrix,
)
from ..positions.phases import LIMIT
from ..positions.sinusoidal import LAYOUTS, Layout, encode
from ._module import Module, upcast
from ._positions import gradient_of


class FourierFeatures(Module):
    """Maps coordinates to cosines and sines of fixed frequencies. Has no parameters.

    The frequencies are part of the config, not parameters. They are saved and restored
    exactly, and not trained.

    Args:
        matrix: Cycles per unit of each pair along each coordinate, ``(pairs, axes)``.
        layout: ``"half"`` is all cosines, then all sines; ``"interleaved"`` alternates.
        cos_first: Cosine before sine (Tancik et al.); NeRF has the sine first.

    Shape:
        - coordinates: ``(..., axes)``
        - output: ``(..., 2 * pairs)``, in the dtype of the coordinates

    Example:
        >>> FourierFeatures.gaussian(64, axes=2, std=10.0, rng=0)(np.zeros((5, 2))).shape
        (5, 128)
        >>> FourierFeatures.octaves(2, axes=1)([0.5]).round(6).tolist()
        [1.0, 0.0, 0.0, -1.0]
    """

    def __init__(
        self,
        matrix: Float[Any, "pairs axes"] | list[list[float]],
        *,
        layout: Layout = "half",
        cos_first: bool = True,
    ) -> None:
        self.matrix = np.array(not_masked(matrix, name="matrix"), np.float64)
        if self.matrix.ndim != 2 or not self.matrix.size:
            raise ValueError(
                f"matrix must have shape (pairs, axes), got {np.shape(matrix)}"
            )
        if not np.isfinite(self.matrix).all():
            raise ValueError("matrix must be finite, got NaN or infinity in it")
        self.layout: Layout = layout
        one_of("layout", layout, LAYOUTS)
        self.cos_first = boolean("cos_first", cos_first)
        self.tables, self.rates = fourier_tables(self.matrix)

    @classmethod
    def gaussian(
        cls, pairs: int, *, axes: int, std: float, rng: Any = None
    ) -> "FourierFeatures":
        """Return features with normally distributed frequencies, as in Tancik et al.

        Args:
            pairs: Number of frequencies, half the number of features.
            axes: Number of coordinates of a point.
            std: Standard deviation of the frequencies, in cycles per unit.
            rng: Seed or generator. None is random.
        """
        rng = np.random.default_rng(rng)
        return cls(gaussian_matrix(pairs, axes=axes, std=std, rng=rng))

    @classmethod
    def octaves(cls, octaves: int, *, axes: int) -> "FourierFeatures":
        """Return NeRF's features: ``sin 2^k πv, cos 2^k πv`` for each coordinate in turn.

        Args:
            octaves: Number of frequencies per coordinate.
            axes: Number of coordinates of a point.
        """
        matrix = octave_matrix(octaves, axes=axes)
        return cls(matrix, layout="interleaved", cos_first=False)

    def __call__(
        self, coordinates: Float[Any, "*batch axes"] | list[Any]
    ) -> Float[np.ndarray, "*batch features"]:
        """Return the features of ``coordinates``.

        Args:
            coordinates: Points, with one number for each axis of ``matrix``.
        """
        return self._features(self._checked(coordinates))

    def vjp(
        self, coordinates: Float[Any, "*batch axes"] | list[Any]
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the features and the pullback to the gradient of the coordinates, ``"x"``.

        Example:
            >>> y, pullback = FourierFeatures([[1.0]]).vjp([0.0])
            >>> pullback([0.0, 1.0])["x"].round(4).tolist()
            [6.2832]
        """
        x = self._checked(coordinates).copy()
        y = self._features(x)

        def pullback(dy: Any) -> dict[str, np.ndarray]:
            dangle = upcast(gradient_of(y, dy)) * self._derivatives(upcast(x))
            # Each feature has the frequencies of its pair.
            rates = (2 * np.pi * self.matrix.T).astype(dangle.dtype)
            return {"x": (dangle @ self._ordered(rates, rates).T).astype(x.dtype)}

        return y, pullback

    def __repr__(self) -> str:
        pairs, axes = self.matrix.shape
        return (
            f"FourierFeatures(<{pairs} pairs of {axes} axes>, "
            f"layout={self.layout!r}, cos_first={self.cos_first})"
        )

    def _checked(self, coordinates: Any) -> np.ndarray:
        array = host_array(coordinates, name="coordinates")
        if not is_float(array.dtype):
            raise TypeError(f"coordinates must be real, got {dtype_text(array.dtype)}")
        axes = self.matrix.shape[1]
        if array.shape[-1:] != (axes,):
            raise ValueError(
                f"coordinates must have shape (..., {axes}), got {array.shape}"
            )
        return positions_in_reach(array, LIMIT, name="coordinates")

    def _features(self, coordinates: np.ndarray) -> np.ndarray:
        cos, sin = self._phases(upcast(coordinates))
        return self._ordered(cos, sin).astype(coordinates.dtype, copy=False)

    def _derivatives(self, coordinates: np.ndarray) -> np.ndarray:
        """Return the derivative of each feature with respect to its angle."""
        cos, sin = self._phases(coordinates)
        return self._ordered(-sin, cos)

    def _phases(self, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if coordinates.dtype == np.float64:
            return float64_fourier_phases(coordinates, self.matrix)
        return fourier_phases(coordinates, self.tables, self.rates)

    def _ordered(self, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return encode(
            cos,
            sin,
            embedding_dim=2 * cos.shape[-1],
            layout=self.layout,
            cos_first=self.cos_first,
        )
