"""Shaw's relative keys: the query is also compared with a vector for the distance.

A table holds one vector for each distance from ``max_left`` before the query to
``max_right`` after it; what is farther shares the vector at the end. The score of a query
``q`` at ``m`` and a key ``k`` at ``n`` is ``(q·k + q·a[n - m]) / √head_dim`` (Shaw et al.
2018, https://arxiv.org/abs/1803.02155), as in wav2vec2-BERT (64 before, 8 after).

The vectors are never gathered by pair, which would take head_dim times the memory of the
scores: each query is multiplied with the table once, and the products are picked by
distance. ``shaw_scores`` creates no arrays and runs unchanged on NumPy, torch and JAX.
"""

import math
from typing import Any

from jaxtyping import Float, Shaped

from .._array import is_real, namespace_of, take_last
from .t5 import clipped_index, relative_positions


def shaw_scores(
    q: Float[Any, "*lead q_length head_dim"],
    k: Float[Any, "*lead k_length head_dim"],
    *,
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    weight: Float[Any, "distances head_dim"],
    max_left: int,
) -> Float[Any, "*lead q_length k_length"]:
    """Return the scaled scores of every query and key, NaN where a position is NaN.

    Args:
        q: Queries, ``(..., heads, length, head_dim)``, in float32 or float64.
        k: Keys, likewise.
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Likewise.
        weight: The vectors, from that of ``max_left`` before the query onwards.
        max_left: The farthest distance before the query with a vector of its own.

    Example:
        >>> import numpy as np
        >>> q, weight = np.ones((1, 1)), np.array([[-1.0], [0.0], [7.0]])
        >>> at = {"q_positions": np.array([4]), "k_positions": np.array([2, 4, 5])}
        >>> shaw_scores(q, np.ones((3, 1)), weight=weight, max_left=1, **at).tolist()
        [[0.0, 1.0, 8.0]]
    """
    relative = relative_positions(q_positions, k_positions)
    index = clipped_index(relative, left=max_left, right=weight.shape[0] - 1 - max_left)
    index = lined_up(index, q, k)
    scores = (q @ k.mT + take_last(q @ weight.mT, index)) / math.sqrt(weight.shape[1])
    if is_real(relative):
        known = lined_up(relative == relative, q, k)
        scores = namespace_of(q).where(known, scores, float("nan"))
    return scores


def lined_up(
    index: Shaped[Any, "*batch q_length k_length"],
    q: Float[Any, "*lead q_length head_dim"],
    k: Float[Any, "*lead k_length head_dim"],
) -> Shaped[Any, "*#lead q_length k_length"]:
    """Line what is known by pair up with the axes of the scores.

    Without a batch it serves every sequence and head. With a batch it belongs to
    ``q`` of shape ``(batch, heads, q_length, head_dim)`` or ``(batch, q_length,
    head_dim)``: which of the two is read off the number of axes, never off their sizes.
    """
    for axis, name, x in ((-2, "q", q), (-1, "k", k)):
        if index.shape[axis] != x.shape[-2]:
            raise ValueError(
                f"{name}_positions must have one entry for each of the {x.shape[-2]} rows "
                f"of {name}, got {index.shape[axis]}"
            )
    if index.ndim == 3 and q.ndim not in (3, 4):
        raise ValueError(
            "positions of shape (batch, length) need q with 3 or 4 axes, "
            f"got shape {tuple(q.shape)}"
        )
    if index.ndim == 3 and q.ndim == 4:
        return index[:, None]
    return index[(None,) * (q.ndim - index.ndim)]
