"""ALiBi for Equinox: a penalty on attention scores proportional to distance."""

from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from .._array import compute_dtype
from .._check import boolean
from ..positions.alibi import alibi_bias, alibi_slopes
from ._bias import Bias, Pair, checked_pair, upcast_pair
from ._module import compiled
from ._parameters import table_dtype
from ._positions import Positions


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

    num_heads: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True)
    max_bias: float = eqx.field(static=True)
    factor: float = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        *,
        symmetric: bool = False,
        max_bias: float = 8.0,
        factor: float = 1.0,
    ) -> None:
        alibi_slopes(num_heads, max_bias=max_bias, factor=factor)
        self.num_heads, self.symmetric = int(num_heads), boolean("symmetric", symmetric)
        self.max_bias, self.factor = float(max_bias), float(factor)

    @property
    def slopes(self) -> Float64[np.ndarray, " num_heads"]:
        """Slope of each head, in float64."""
        return alibi_slopes(self.num_heads, max_bias=self.max_bias, factor=self.factor)

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        dtype = table_dtype(jnp.float32 if dtype is None else dtype)
        return _bias(self, checked_pair(q_positions, k_positions), dtype)


@partial(compiled, static_argnums=2)
def _bias(layer: AlibiBias, pair: Pair, dtype: np.dtype) -> Array:
    slopes = jnp.asarray(layer.slopes.astype(compute_dtype(dtype)))
    bias = alibi_bias(*upcast_pair(pair), slopes=slopes, symmetric=layer.symmetric)
    return bias.astype(dtype)
