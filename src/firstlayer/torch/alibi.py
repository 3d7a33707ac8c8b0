"""ALiBi for torch: an attention bias proportional to distance."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .._check import boolean
from ..positions.alibi import alibi_bias, alibi_slopes
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias
from ._tensors.dtypes import compute_dtype


class AlibiBias(Bias):
    """Subtracts ``slope * distance`` from attention scores (ALiBi). Has no parameters.

    Args:
        num_heads: Number of heads, not necessarily a power of two; see
            :func:`firstlayer.positions.alibi.alibi_slopes`.
        symmetric: Use ``-slope * |k - q|``, for encoders, instead of ``slope * (k - q)``,
            for causal decoders.
        max_bias: Negated exponent of the smallest slope (``alibi_bias_max`` in MPT).
        factor: Ratio of the sequence length to the training length; divides the slopes.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or floats
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, or ``(batch, num_heads, q_length,
          k_length)`` if either side has a batch

    BLOOM, Falcon and MPT add ``slope * k``, which gives the same attention under a causal
    mask. The bias is float32 unless ``dtype`` is given, even under autocast.

    Example:
        >>> layer = AlibiBias(2, max_bias=2.0)
        >>> layer.slopes
        array([0.5 , 0.25])
        >>> layer.bias([2], [0, 1, 2])
        tensor([[[-1.0000, -0.5000,  0.0000]],
        <BLANKLINE>
                [[-0.5000, -0.2500,  0.0000]]])
    """

    slope_bits: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        symmetric: bool = False,
        max_bias: float = 8.0,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        #: Slope of each head, float64.
        self.slopes = alibi_slopes(num_heads, max_bias=max_bias, factor=factor)
        self.num_heads, self.symmetric = int(num_heads), boolean("symmetric", symmetric)
        self.max_bias, self.factor = float(max_bias), float(factor)
        self._build()

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        q_positions, k_positions = self._checked_pair(q_positions, k_positions)
        dtype = dtype or torch.float32
        slopes = self._slopes(dtype, q_positions.device)
        out = alibi_bias(q_positions, k_positions, slopes=slopes, symmetric=self.symmetric)
        return out.to(dtype)

    def _tables(self) -> dict[str, np.ndarray]:
        # Three float32 numbers whose sum is the slope: in float64 exactly, in float32 its
        # nearest. Some devices do not support a float64 buffer.
        parts, rest = [], self.slopes
        for _ in range(3):
            parts.append(rest.astype(np.float32))
            rest = rest - parts[-1]
        return {"slope_bits": np.stack(parts)}

    def _slopes(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        nearest, middle, last = self._floats("slope_bits", device).to(compute_dtype(dtype))
        return nearest + middle + last

    def _pair_bias(self) -> PairBias:
        slopes = self._slopes(torch.float32, self._device())
        symmetric = self.symmetric

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            relative = -(k - q).abs() if symmetric else k - q
            return slopes[h] * relative.to(slopes.dtype)

        return pair_bias
