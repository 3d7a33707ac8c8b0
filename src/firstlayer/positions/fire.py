"""FIRE: a learned function of distance, normalized by the position of the query.

A small network with one input computes each head's bias. Its input is the logarithm of the
distance divided by the logarithm of the query's position. For keys before the query it lies
between 0 and 1 at any length, so a network trained on short sequences sees no new inputs on
long ones. Query positions below a learned threshold are replaced by the threshold (Li et
al. 2023, https://arxiv.org/abs/2310.04418).

Up to the threshold the bias depends on relative position only; beyond it, on the query's
position too. ``normalized_distances`` and ``fire_bias`` create no arrays and run unchanged
on NumPy, torch and JAX.
"""

from typing import Any

from jaxtyping import Float, Shaped

from .._array import cast, compute_dtype, move_axis, namespace_of
from .t5 import distances


def normalized_distances(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    c: Float[Any, ""],
    threshold: Float[Any, ""],
    eps: float = 1e-6,
) -> Float[Any, "*batch q_length k_length"]:
    """Return the distance of every query and key, normalized by the query's position.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        c: Compression of large distances. Its sign is ignored.
        threshold: Replaces smaller query positions. Its sign is ignored.
        eps: Added to the denominator.

    Example:
        >>> import numpy as np
        >>> options = {"c": np.array(1.0), "threshold": np.array(3.0), "eps": 0.0}
        >>> normalized_distances(np.array([1, 15]), np.array([0]), **options).tolist()
        [[0.5], [1.0]]
    """
    xp, dtype = namespace_of(c), compute_dtype(c.dtype)
    rate, threshold = xp.abs(c), xp.abs(threshold)
    distance = distances(q_positions, k_positions, dtype=dtype)
    q = cast(q_positions, dtype)[..., :, None]
    denominator = xp.log1p(rate * xp.where(q < threshold, threshold, q)) + eps
    return xp.log1p(rate * distance) / denominator


def fire_bias(
    distances: Float[Any, "*batch q_length k_length"],
    *,
    hidden_weight: Float[Any, " width"],
    hidden_bias: Float[Any, " width"],
    head_weight: Float[Any, "num_heads width"],
    head_bias: Float[Any, " num_heads"],
) -> Float[Any, "*batch num_heads q_length k_length"]:
    """Return the output of the network, a hidden layer with ReLU, for every query and key.

    Args:
        distances: From :func:`normalized_distances`.
        hidden_weight: Weight of each hidden unit.
        hidden_bias: Bias of each hidden unit.
        head_weight: Weight of each hidden unit for each head.
        head_bias: Bias of each head.

    Example:
        >>> import numpy as np
        >>> one, distances = np.ones(1), np.array([[0.25, 1.0]])
        >>> hidden = {"hidden_weight": 2 * one, "hidden_bias": -one}
        >>> heads = {"head_weight": -one[None], "head_bias": one}
        >>> fire_bias(distances, **hidden, **heads).tolist()
        [[[1.0, 0.0]]]
    """
    xp = namespace_of(distances)
    sums = distances[..., None] * hidden_weight + hidden_bias
    # Not a clip, whose gradient at 0 differs between the libraries. NaN stays NaN.
    hidden = xp.where(sums <= 0, 0.0, sums)
    return move_axis(hidden @ head_weight.T + head_bias, -1, -3)
