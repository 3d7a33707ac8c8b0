"""CoPE: positions that count what the query attends to, such as words or sentences.

A gate between 0 and 1, the sigmoid of the score, says how much a key counts. The position
of a key is the sum of the gates from it up to the query. Positions are thus reals that
depend on the content. The query is multiplied with a learned vector for each whole
position, up to a largest one, and the products are interpolated between whole positions.
The result is added to the scores (Golovneva et al. 2024, https://arxiv.org/abs/2405.18719).

Scores of keys that a query must not see are ``-inf`` or very negative, which closes their
gates. ``cope_positions`` and ``cope_bias`` create no arrays and run unchanged on NumPy,
torch and JAX.
"""

from typing import Any

from jaxtyping import Float, Int

from .._array import cast, cast_like, move_axis, namespace_of, take_last
from .._check import positive


def check_cope_shapes(q: tuple[int, ...], scores: tuple[int, ...], head_dim: int) -> None:
    """Raise if queries and scores of these shapes do not fit each other.

    Example:
        >>> check_cope_shapes((2, 3, 8), (2, 4, 5), 8)
        Traceback (most recent call last):
        ...
        ValueError: scores must have shape (2, 3, k_length), got (2, 4, 5)
    """
    if len(q) < 2 or q[-1] != head_dim:
        raise ValueError(f"q must have shape (..., length, {head_dim}), got {q}")
    if scores[:-1] != q[:-1]:
        shape = ", ".join(map(str, (*q[:-1], "k_length")))
        raise ValueError(f"scores must have shape ({shape}), got {scores}")


def check_max_positions(max_positions: int) -> int:
    """Return ``max_positions`` as an int if there is something to interpolate between."""
    if positive("max_positions", max_positions) < 2:
        raise ValueError(f"max_positions must be at least 2, got {max_positions}")
    return int(max_positions)


def cope_gates(scores: Float[Any, "*lead k_length"]) -> Float[Any, "*lead k_length"]:
    """Return the sigmoid of each score, 0 with a gradient of 0 at ``-inf``.

    Example:
        >>> import numpy as np
        >>> cope_gates(np.array([-np.inf, 0.0, np.inf])).tolist()
        [0.0, 0.5, 1.0]
    """
    # Not 1 / (1 + exp(-x)), whose gradient at -inf is NaN.
    return 0.5 + 0.5 * namespace_of(scores).tanh(0.5 * scores)


def cope_positions(
    gates: Float[Any, "*lead k_length"], *, last: int
) -> Float[Any, "*lead k_length"]:
    """Return the position of each key: the sum of its gate and all later ones.

    Args:
        gates: From :func:`cope_gates`.
        last: Largest position. Larger sums are replaced by it and get no gradient.

    Example:
        >>> import numpy as np
        >>> cope_positions(np.array([1.0, 0.0, 0.5, 1.0]), last=2).tolist()
        [2.0, 1.5, 1.5, 1.0]
    """
    xp = namespace_of(gates)
    sums = xp.flip(xp.cumsum(xp.flip(gates, (-1,)), -1), (-1,))
    # Not a clip, whose gradient at the limit differs between the libraries.
    return xp.where(sums > last, float(last), sums)


def neighbors(
    positions: Float[Any, "*lead k_length"], *, last: int
) -> tuple[Int[Any, "*lead k_length"], Int[Any, "*lead k_length"]]:
    """Return the whole positions below and above each position; NaN counts as 0.

    Example:
        >>> import numpy as np
        >>> [side.tolist() for side in neighbors(np.array([0.5, 2.0, 3.0]), last=3)]
        [[0, 2, 3], [1, 3, 3]]
    """
    xp = namespace_of(positions)
    known = xp.where(positions == positions, positions, 0.0)
    below = cast(xp.floor(known), "int32")
    return below, xp.where(below < last, below + 1, below)


def cope_bias(
    q: Float[Any, "*lead head_dim"],
    scores: Float[Any, "*lead k_length"],
    *,
    weight: Float[Any, "max_positions head_dim"],
) -> Float[Any, "*lead k_length"]:
    """Return the bias of every query and key.

    Args:
        q: Queries, in float32 or float64.
        scores: Their scores, ``-inf`` for keys that they must not see, in the same dtype.
        weight: Vector of each whole position.

    Example:
        >>> import numpy as np
        >>> scores, weight = np.array([[0.0, 0.0, -np.inf]]), np.array([[0.0], [10.0]])
        >>> cope_bias(np.array([[2.0]]), scores, weight=weight).tolist()
        [[20.0, 10.0, 0.0]]
    """
    last = weight.shape[0] - 1
    positions = cope_positions(cope_gates(scores), last=last)
    below, above = neighbors(positions, last=last)
    products = q @ move_axis(weight, -1, -2)
    low, high = take_last(products, below), take_last(products, above)
    return low + (positions - cast_like(below, positions)) * (high - low)
