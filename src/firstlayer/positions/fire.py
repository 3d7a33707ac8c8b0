"""FIRE: a learned function of distance, measured against how far the query has come.

A small network with one input gives each head's bias. Its input is the logarithm of the
distance divided by that of the query's own position, so that for keys before the query it
lies between 0 and 1 at any length, and a network trained on short sequences is never asked
about a number it has not seen. A learned threshold takes the place of positions below it,
where sequences are short anyway (Li et al. 2023, https://arxiv.org/abs/2310.04418).

Up to the threshold the bias depends on relative position only, beyond it on the query's
position too. ``fire_share`` and ``fire_bias`` create no arrays and run unchanged on NumPy,
torch and JAX.
"""

from typing import Any

from jaxtyping import Float, Shaped

from .._array import cast, compute_dtype, move_axis, namespace_of
from .t5 import distances


def fire_share(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    c: Float[Any, ""],
    threshold: Float[Any, ""],
    eps: float = 1e-6,
) -> Float[Any, "*batch q_length k_length"]:
    """Return the distance of every query and key as a share of the query's own position.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Likewise.
        c: How strongly far distances are drawn together. Its sign does not matter.
        threshold: What takes the place of smaller query positions, likewise.
        eps: Keeps the denominator from zero.

    Example:
        >>> import numpy as np
        >>> at = {"c": np.array(1.0), "threshold": np.array(3.0), "eps": 0.0}
        >>> fire_share(np.array([1, 15]), np.array([0]), **at).tolist()
        [[0.5], [1.0]]
    """
    xp, dtype = namespace_of(c), compute_dtype(c.dtype)
    rate, least = xp.abs(c), xp.abs(threshold)
    distance = distances(q_positions, k_positions, dtype=dtype)
    own = cast(q_positions, dtype)[..., :, None]
    whole = xp.log1p(rate * xp.where(own < least, least, own)) + eps
    return xp.log1p(rate * distance) / whole


def fire_bias(
    share: Float[Any, "*batch q_length k_length"],
    *,
    hidden_weight: Float[Any, " width"],
    hidden_bias: Float[Any, " width"],
    head_weight: Float[Any, "num_heads width"],
    head_bias: Float[Any, " num_heads"],
) -> Float[Any, "*batch num_heads q_length k_length"]:
    """Return the network's output for every query and key.

    Args:
        share: From :func:`fire_share`.
        hidden_weight: What each hidden unit multiplies the share by.
        hidden_bias: What it adds, before what is negative becomes zero.
        head_weight: What each head multiplies the hidden units by.
        head_bias: What it adds.

    Example:
        >>> import numpy as np
        >>> one, share = np.ones(1), np.array([[0.25, 1.0]])
        >>> layers = {"hidden_weight": 2 * one, "hidden_bias": -one}
        >>> heads = {"head_weight": -one[None], "head_bias": one}
        >>> fire_bias(share, **layers, **heads).tolist()
        [[[1.0, 0.0]]]
    """
    xp = namespace_of(share)
    sums = share[..., None] * hidden_weight + hidden_bias
    # Not a clip, whose gradient at zero differs between the libraries; NaN stays NaN.
    hidden = xp.where(sums <= 0, 0.0, sums)
    return move_axis(hidden @ head_weight.mT + head_bias, -1, -3)
