"""Sinusoidal positions for torch."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .._check import boolean, number, one_of, positive
from ..positions.ids import check_axes
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
    phases,
)
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
    positions_of,
    positions_tensor,
)
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import upcast
from ._tensors.memory import (
    array_of,
    is_plain_cpu,
    is_recorded,
    tensor_of,
    threads_of_torch,
)


class SinusoidalPositions(PrecomputedBuffers):
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
        - positions: ``(length,)`` or ``(batch, length)``, integers or floats; None is
          ``offset, offset + 1, …``. Several coordinates are on the first axis, ``(axes,
          length)`` or ``(axes, batch, length)``, and must be given.
        - output: the shape and dtype of ``x``

    There is no maximum length. Positions of absolute value 2^24 or more raise a ValueError
    on the CPU and give NaN on other devices and in compiled code.

    The sum is computed in float32 (float64 for float64) and rounded once, even under
    autocast.

    Example:
        >>> layer = SinusoidalPositions(4)
        >>> layer.encode([0, 1])
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
        >>> layer(torch.zeros(2, 3, 4), offset=10_000_000).shape
        torch.Size([2, 3, 4])
    """

    bits: Tensor
    rate_bits: Tensor
    turns: Tensor

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
        super().__init__()
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
        self.scale, self.cos_first = number("scale", scale), boolean("cos_first", cos_first)
        self.odd: Odd = odd
        self._build()

    @classmethod
    def tensor2tensor(cls, embedding_dim: int, **options: Any) -> "SinusoidalPositions":
        """Return the layer of tensor2tensor, fairseq, M2M100 and Whisper's encoder.

        Args:
            embedding_dim: Width of each vector.
            options: Further arguments of the constructor.

        Example:
            >>> SinusoidalPositions.tensor2tensor(5).encode([0])
            tensor([[0., 0., 1., 1., 0.]])
        """
        return cls(embedding_dim, **{**CONVENTIONS["tensor2tensor"], **options})

    @classmethod
    def marian(cls, embedding_dim: int, **options: Any) -> "SinusoidalPositions":
        """Return the layer of Marian and Pegasus; with ``axes=2``, that of ViT-MAE.

        Args:
            embedding_dim: Width of each vector.
            options: Further arguments of the constructor.

        Example:
            >>> SinusoidalPositions.marian(5).encode([0])
            tensor([[0., 0., 0., 1., 1.]])
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
            >>> SinusoidalPositions.timestep(4).encode([0.0])
            tensor([[1., 1., 0., 0.]])
        """
        return cls(embedding_dim, **{**CONVENTIONS["timestep"], **options})

    def forward(
        self,
        x: Float[Tensor, "*batch length embedding_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return ``x`` plus the vectors of its positions.

        Args:
            x: Token vectors.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
        """
        check_vectors(x, self.embedding_dim)
        positions = positions_of(x, positions=positions, offset=offset, axes=self.axes)
        return (upcast(x) + self._features(positions, x.dtype)).to(x.dtype)

    def encode(
        self, positions: Positions, *, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or floats of any shape; several coordinates are on the
                first axis.
            dtype: Dtype of the output; float32 if None.
        """
        positions = positions_tensor(positions, device=self.bits.device)
        if self.axes > 1:
            check_axes(positions, self.axes)
        dtype = dtype or torch.float32
        return self._features(positions, dtype).to(dtype)

    def _frequencies(self) -> np.ndarray:
        return frequencies(
            self.embedding_dim // self.axes,
            base=self.base,
            shift=self.shift,
            odd=self.odd,
            frequency_scale=self.frequency_scale,
        )

    def _tables(self) -> dict[str, np.ndarray]:
        rates = self._frequencies()
        tables, table_rates = phase_tables(rates, scale=self.scale)
        return {"bits": tables, "rate_bits": table_rates, "turns": turn_constants(rates)}

    def _features(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        options: dict[str, Any] = {
            "embedding_dim": self.embedding_dim // self.axes,
            "layout": self.layout,
            "cos_first": self.cos_first,
        }
        positions = in_reach(positions)
        tables = self._floats("bits", positions.device)
        rates = self._floats("rate_bits", positions.device)
        if not positions.is_floating_point() and is_plain_cpu(positions, tables):
            arrays = [array_of(tables), array_of(rates)]
            if dtype is torch.float64:
                arrays[0] = self._float64_tables
            with threads_of_torch():
                features = features_at(array_of(positions), *arrays, **options)
                features = tensor_of(features)
        elif dtype is torch.float64 and not is_recorded():
            turns = self._turns(positions.device)
            phases_ = float64_phases(positions, turns, scale=self.scale)
            features = encode(*phases_, **options)
        else:
            if dtype is torch.float64:
                tables, rates = self._recorded_float64(positions.device)
            features = encode(*phases(positions, tables, rates), **options)
        return join_axes(features) if self.axes > 1 else features

    def _float64_constants(self) -> tuple[np.ndarray, np.ndarray]:
        return float64_phase_tables(self._frequencies(), scale=self.scale)

    @cached_property
    def _float64_tables(self) -> np.ndarray:
        turns = turn_constants(self._frequencies())
        return float64_digit_tables(turns, scale=self.scale)
