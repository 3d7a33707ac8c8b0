"""ALiBi for torch: a penalty on scores in proportion to distance."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..positions.alibi import alibi_bias, alibi_slopes
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias


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
    Autocast changes nothing: the bias is float32 unless ``dtype`` says otherwise.

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
        #: The slope of each head, in float64.
        self.slopes = alibi_slopes(num_heads, max_bias=max_bias, factor=factor)
        self.num_heads, self.symmetric = int(num_heads), bool(symmetric)
        self.max_bias, self.factor = float(max_bias), float(factor)
        self._build()

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, float32 if None. Half precision is rounded once, from
                float32.
        """
        q_positions, k_positions = self._pair(q_positions, k_positions)
        dtype = dtype or torch.float32
        slopes = self._slopes(dtype, q_positions.device)
        out = alibi_bias(q_positions, k_positions, slopes=slopes, symmetric=self.symmetric)
        return out.to(dtype)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "symmetric": self.symmetric,
            "max_bias": self.max_bias,
            "factor": self.factor,
        }

    def _tables(self) -> dict[str, np.ndarray]:
        # The nearest float32 and what is left: their sum is right in float32 and float64,
        # also where a device has no float64.
        near = self.slopes.astype(np.float32)
        left = (self.slopes - near).astype(np.float32)
        return {"slope_bits": np.stack([near, left])}

    def _slopes(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        near, left = self._floats("slope_bits", dtype, device)
        return near + left

    def _pair_bias(self) -> PairBias:
        slopes = self._slopes(torch.float32, self._device())
        symmetric = self.symmetric

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            relative = -(k - q).abs() if symmetric else k - q
            return slopes[h] * relative.to(slopes.dtype)

        return pair_bias
