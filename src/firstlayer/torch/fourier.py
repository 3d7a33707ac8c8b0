"""Fourier features for torch."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .._check import boolean, not_masked, one_of
from ..positions.fourier import (
    float64_fourier_phases,
    float64_fourier_tables,
    fourier_phases,
    fourier_tables,
    gaussian_matrix,
    octave_matrix,
)
from ..positions.sinusoidal import LAYOUTS, Layout, encode
from ._positions.arguments import in_reach
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import dtype_name, upcast
from ._tensors.errors import check_tensor
from ._tensors.memory import is_recorded


class FourierFeatures(PrecomputedBuffers):
    """Maps coordinates to cosines and sines of fixed frequencies. Has no parameters.

    Randomly drawn frequencies cannot be recomputed, so a state_dict contains them, as the
    int64 bits of ``matrix`` in the layer's extra state.

    Args:
        matrix: Cycles per unit of each pair along each coordinate, ``(pairs, axes)``.
        layout: ``"half"`` is all cosines, then all sines; ``"interleaved"`` alternates.
        cos_first: Cosine before sine (Tancik et al.); NeRF has the sine first.

    Shape:
        - coordinates: ``(..., axes)``
        - output: ``(..., 2 * pairs)``, in the dtype of the coordinates

    Half precision is upcast to float32 and rounded once, even under autocast.

    Example:
        >>> FourierFeatures.gaussian(64, axes=2, std=10.0, rng=0)(torch.zeros(5, 2)).shape
        torch.Size([5, 128])
        >>> FourierFeatures.octaves(2, axes=1)(torch.tensor([0.25])).round(decimals=4)
        tensor([0.7071, 0.7071, 1.0000, 0.0000])
    """

    bits: Tensor
    rate_bits: Tensor
    matrix_bits: Tensor

    def __init__(
        self, matrix: Any, *, layout: Layout = "half", cos_first: bool = True
    ) -> None:
        super().__init__()
        #: Frequencies in cycles per unit, float64.
        self.matrix = _checked_matrix(matrix)
        #: Number of coordinates of a point.
        self.axes = self.matrix.shape[1]
        self.layout: Layout = layout
        one_of("layout", layout, LAYOUTS)
        self.cos_first = boolean("cos_first", cos_first)
        self._build()

    @classmethod
    def gaussian(
        cls, pairs: int, *, axes: int, std: float, rng: Any = None
    ) -> "FourierFeatures":
        """Return features with normally distributed frequencies, as in Tancik et al.

        Args:
            pairs: Number of frequencies; the output has twice as many features.
            axes: Number of coordinates of a point.
            std: Standard deviation of the frequencies, in cycles per unit.
            rng: Seed or NumPy generator; None takes a seed from torch's global generator.
        """
        if rng is None:
            rng = int(torch.randint(2**62, (), device="cpu"))
        generator = np.random.default_rng(rng)
        return cls(gaussian_matrix(pairs, axes=axes, std=std, rng=generator))

    @classmethod
    def octaves(cls, octaves: int, *, axes: int) -> "FourierFeatures":
        """Return NeRF's features: ``sin 2^k πv, cos 2^k πv`` for each coordinate in turn.

        Args:
            octaves: Number of frequencies per coordinate.
            axes: Number of coordinates of a point.
        """
        matrix = octave_matrix(octaves, axes=axes)
        return cls(matrix, layout="interleaved", cos_first=False)

    def forward(
        self, coordinates: Float[Tensor, "*batch axes"]
    ) -> Float[Tensor, "*batch features"]:
        """Return the features of ``coordinates``.

        Args:
            coordinates: Points, with one number for each axis of ``matrix``.
        """
        check_tensor(coordinates, name="coordinates")
        if not coordinates.is_floating_point():
            raise TypeError(
                f"coordinates must be real, got {dtype_name(coordinates.dtype)}"
            )
        if tuple(coordinates.shape[-1:]) != (self.axes,):
            raise ValueError(
                f"coordinates must have shape (..., {self.axes}), "
                f"got {tuple(coordinates.shape)}"
            )
        points = upcast(in_reach(coordinates, name="coordinates"))
        if points.dtype is torch.float64 and not is_recorded():
            matrix = self._floats("matrix_bits", points.device, torch.float64)
            cos, sin = float64_fourier_phases(points, matrix)
        elif points.dtype is torch.float64:
            cos, sin = fourier_phases(points, *self._recorded_float64(points.device))
        else:
            tables = self._floats("bits", points.device)
            rates = self._floats("rate_bits", points.device)
            cos, sin = fourier_phases(points, tables, rates)
        return encode(
            cos,
            sin,
            embedding_dim=2 * cos.shape[-1],
            layout=self.layout,
            cos_first=self.cos_first,
        ).to(coordinates.dtype)

    def get_extra_state(self) -> Tensor:
        """Return the bits of ``matrix`` for a state_dict."""
        return torch.from_numpy(self.matrix.view(np.int64).copy())

    def set_extra_state(self, state: Tensor) -> None:
        """Load ``matrix`` from a state_dict and rebuild the tables."""
        matrix = _checked_matrix(state.cpu().numpy().view(np.float64))
        if matrix.shape != self.matrix.shape:
            raise ValueError(
                f"matrix must have shape {self.matrix.shape}, got {matrix.shape}"
            )
        self.matrix = matrix
        self.reset_parameters()

    def extra_repr(self) -> str:
        pairs, axes = self.matrix.shape
        return (
            f"<{pairs} pairs of {axes} axes>, "
            f"layout={self.layout!r}, cos_first={self.cos_first}"
        )

    def _float64_constants(self) -> tuple[np.ndarray, np.ndarray]:
        return float64_fourier_tables(self.matrix)

    def _tables(self) -> dict[str, np.ndarray]:
        tables, rates = fourier_tables(self.matrix)
        return {"bits": tables, "rate_bits": rates, "matrix_bits": self.matrix.copy()}


def _checked_matrix(matrix: Any) -> np.ndarray:
    checked = np.array(not_masked(matrix, name="matrix"), np.float64)
    if checked.ndim != 2 or not checked.size:
        raise ValueError(f"matrix must have shape (pairs, axes), got {checked.shape}")
    if not np.isfinite(checked).all():
        raise ValueError("matrix must be finite, got NaN or infinity in it")
    return checked
