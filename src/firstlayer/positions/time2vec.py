"""Time2Vec: one linear feature of a time, and sines with learned frequencies and phases.

The features of a time ``t`` are ``w[0] t + b[0]`` and ``sin(w[i] t + b[i])``. The linear
one represents progress, the others periods that are learned (Kazemi et al. 2019,
https://arxiv.org/abs/1907.05321).

Learned frequencies have no precomputed tables, so the angle ``w t`` is rounded: in float32
it is off by up to ``|w t| / 16,777,216`` radians. Pass times in units near their periods,
relative to a near origin, or float64. ``time2vec`` creates no arrays and runs unchanged on
NumPy, torch and JAX.
"""

from typing import Any

from jaxtyping import Float, Shaped

from .._array import cast_like, namespace_of
from .._check import positive


def check_width(embedding_dim: int) -> int:
    """Return ``embedding_dim`` as an int if there is a linear feature and a sine."""
    if positive("embedding_dim", embedding_dim) < 2:
        raise ValueError(f"embedding_dim must be at least 2, got {embedding_dim}")
    return int(embedding_dim)


def time2vec(
    times: Shaped[Any, "*shape"],
    *,
    weight: Float[Any, " embedding_dim"],
    bias: Float[Any, " embedding_dim"],
) -> Float[Any, "*shape embedding_dim"]:
    """Return the features of each time, in the dtype of ``weight``.

    Args:
        times: Integers or reals of any shape.
        weight: Slope of the linear feature, then the frequencies in radians per unit.
        bias: Offset of the linear feature, then the phases in radians.

    Example:
        >>> import numpy as np
        >>> weight, bias = np.array([2.0, np.pi]), np.array([1.0, 0.0])
        >>> time2vec(np.array([0.5]), weight=weight, bias=bias).tolist()
        [[2.0, 1.0]]
    """
    xp = namespace_of(weight)
    angles = cast_like(times, weight)[..., None] * weight + bias
    return xp.concat([angles[..., :1], xp.sin(angles[..., 1:])], axis=-1)
