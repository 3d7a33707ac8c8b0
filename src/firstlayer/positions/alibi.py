"""ALiBi: a penalty on attention scores proportional to distance.

Each head has a slope. The score of a key ``d`` positions before the query is reduced by
``slope * d``. Nothing is learned, and a model trained on short sequences generalizes to
longer ones (Press et al. 2021, https://arxiv.org/abs/2108.12409).

The distance is computed before anything is rounded. Several models add ``slope * key
position`` instead, which is equivalent under a causal softmax, but in bfloat16 it gives
4096 keys only 769 different biases. Here the keys near the query, which get most of the
attention, have exact biases in half precision. ``alibi_bias`` creates no arrays and runs
unchanged on NumPy, torch and JAX.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Shaped

from .._array import cast, compute_dtype, namespace_of
from .._check import positive, positive_number
from .t5 import relative_positions


def alibi_slopes(
    num_heads: int, *, max_bias: float = 8.0, factor: float = 1.0
) -> Float64[np.ndarray, " num_heads"]:
    """Return the slope of each head.

    For a power of two, slopes decrease geometrically to ``2 ** -max_bias``. Any other
    number of heads has the slopes of the power of two below it, followed by every second
    slope of the power of two above it.

    Args:
        num_heads: Number of heads. Positive.
        max_bias: Negated exponent of the smallest slope: 8 in the paper,
            ``alibi_bias_max`` in MPT. Positive.
        factor: Ratio of the sequence length to the training length. Slopes are divided by
            it, so that the largest bias does not change
            (https://arxiv.org/abs/2310.13017). Positive.

    Example:
        >>> alibi_slopes(4).tolist(), alibi_slopes(3)[2].tolist()
        ([0.25, 0.0625, 0.015625, 0.00390625], 0.25)
    """
    positive("num_heads", num_heads)
    max_bias = positive_number("max_bias", max_bias)
    factor = positive_number("factor", factor)
    below = 1 << (int(num_heads).bit_length() - 1)
    ranks = np.concatenate([
        np.arange(1, below + 1) / below,
        np.arange(1, 2 * below, 2)[: num_heads - below] / (2 * below),
    ])
    return 2.0 ** (-max_bias * ranks) / factor


def alibi_bias(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    slopes: Float[Any, " num_heads"],
    symmetric: bool = False,
) -> Float[Any, "*batch num_heads q_length k_length"]:
    """Return the bias of every query and key, in float32, or float64 if ``slopes`` are.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        slopes: From :func:`alibi_slopes`, as an array of the same library.
        symmetric: Use ``-slope * |k - q|``, for encoders, instead of ``slope * (k - q)``,
            which is positive for keys after the query; a causal mask removes those.

    Example:
        >>> alibi_bias(np.array([2]), np.arange(4), slopes=np.array([0.5])).tolist()
        [[[-1.0, -0.5, 0.0, 0.5]]]
    """
    relative = relative_positions(q_positions, k_positions)
    if symmetric:
        relative = -namespace_of(relative).abs(relative)
    distance = cast(relative, compute_dtype(slopes.dtype))
    return slopes[:, None, None] * distance[..., None, :, :]
