"""ALiBi for NumPy."""

from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import boolean, float_dtype
from ..positions.alibi import alibi_bias, alibi_slopes
from ._bias import Bias, KPositions, QPositions, checked_pair


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
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    BLOOM, Falcon and MPT add ``slope * k`` instead, which gives the same attention under a
    causal mask.

    Example:
        >>> layer = AlibiBias(2, max_bias=2.0)
        >>> layer.slopes.tolist()
        [0.5, 0.25]
        >>> layer.bias([2], [0, 1, 2]).tolist()
        [[[-1.0, -0.5, 0.0]], [[-0.5, -0.25, 0.0]]]
    """

    def __init__(
        self,
        num_heads: int,
        *,
        symmetric: bool = False,
        max_bias: float = 8.0,
        factor: float = 1.0,
    ) -> None:
        #: Slope of each head, in float64.
        self.slopes = alibi_slopes(num_heads, max_bias=max_bias, factor=factor)
        self.num_heads, self.symmetric = int(num_heads), boolean("symmetric", symmetric)
        self.max_bias, self.factor = float(max_bias), float(factor)

    def bias(
        self, q_positions: QPositions, k_positions: KPositions, *, dtype: Any = None
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        q_positions, k_positions = checked_pair(q_positions, k_positions)
        dtype = float_dtype(dtype)
        slopes = self.slopes.astype(compute_dtype(dtype))
        out = alibi_bias(q_positions, k_positions, slopes=slopes, symmetric=self.symmetric)
        return out.astype(dtype, copy=False)
