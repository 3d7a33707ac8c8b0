"""ALiBi on NumPy: a penalty on scores in proportion to distance."""

from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import float_dtype
from ..positions.alibi import alibi_bias, alibi_slopes
from ._bias import Bias, KPositions, QPositions, checked_pair


class AlibiBias(Bias):
    """Takes ``slope * distance`` off the score of every query and key. Nothing is trained.

    Args:
        num_heads: Any positive number; see :func:`firstlayer.positions.alibi.alibi_slopes`.
        symmetric: ``-slope * |k - q|``, for encoders, instead of ``slope * (k - q)``, for
            causal decoders.
        max_bias: The exponent of the smallest slope (``alibi_bias_max`` in MPT).
        factor: How many times longer than in training sequences are; divides the slopes.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    BLOOM, Falcon and MPT add ``slope * k`` instead: under a causal mask the same attention.

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
        #: The slope of each head, in float64.
        self.slopes = alibi_slopes(num_heads, max_bias=max_bias, factor=factor)
        self.num_heads, self.symmetric = int(num_heads), bool(symmetric)
        self.max_bias, self.factor = float(max_bias), float(factor)

    def bias(
        self,
        q_positions: QPositions,
        k_positions: KPositions,
        *,
        dtype: Any = None,
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, float32 if None. Half precision is rounded once, from
                float32.
        """
        q_positions, k_positions = checked_pair(q_positions, k_positions)
        found = float_dtype(dtype)
        slopes = self.slopes.astype(compute_dtype(found))
        out = alibi_bias(q_positions, k_positions, slopes=slopes, symmetric=self.symmetric)
        return out.astype(found, copy=False)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "symmetric": self.symmetric,
            "max_bias": self.max_bias,
            "factor": self.factor,
        }
