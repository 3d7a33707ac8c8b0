"""Shaw's relative keys: the query is also multiplied with a vector for the distance.

A table holds one vector for each distance from ``max_left`` before the query to
``max_right`` after it; larger distances use the vector at the end. The score of a query
``q`` at ``m`` and a key ``k`` at ``n`` is ``(q·k + q·a[n - m]) / √head_dim`` (Shaw et al.
2018, https://arxiv.org/abs/1803.02155), as in wav2vec2-BERT (64 before, 8 after).

Gathering a vector for every pair would take head_dim times the memory of the scores.
Instead, each query is multiplied with the whole table once, and the products are gathered
by distance. ``shaw_scores`` creates no arrays and runs unchanged on NumPy, torch and JAX.
"""

import math
from typing import Any

from jaxtyping import Float, Shaped

from .._array import is_real, move_axis, namespace_of, take_last
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
        k: Keys, ``(..., heads, length, head_dim)``, in the dtype of ``q``.
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        weight: Vectors, starting with that of ``max_left`` before the query.
        max_left: Largest distance before the query with its own vector.

    Example:
        >>> import numpy as np
        >>> q, weight = np.ones((1, 1)), np.array([[-1.0], [0.0], [7.0]])
        >>> at = {"q_positions": np.array([4]), "k_positions": np.array([2, 4, 5])}
        >>> shaw_scores(q, np.ones((3, 1)), weight=weight, max_left=1, **at).tolist()
        [[0.0, 1.0, 8.0]]
    """
    relative = relative_positions(q_positions, k_positions)
    index = clipped_index(relative, left=max_left, right=weight.shape[0] - 1 - max_left)
    index = align_pairs(index, q, k)
    scores = (q @ move_axis(k, -1, -2) + take_last(q @ weight.T, index)) / math.sqrt(
        weight.shape[1]
    )
    if is_real(relative):
        not_nan = align_pairs(relative == relative, q, k)
        scores = namespace_of(q).where(not_nan, scores, float("nan"))
    return scores


def align_pairs(
    values: Shaped[Any, "*batch q_length k_length"],
    q: Float[Any, "*lead q_length head_dim"],
    k: Float[Any, "*lead k_length head_dim"],
) -> Shaped[Any, "*#lead q_length k_length"]:
    """Align values per query and key with the axes of the scores.

    Values without a batch apply to every sequence and head. Values with a batch belong to
    ``q`` of shape ``(batch, heads, q_length, head_dim)`` or ``(batch, q_length,
    head_dim)``; the number of axes decides which, never their sizes.
    """
    for axis, name, x in ((-2, "q", q), (-1, "k", k)):
        if values.shape[axis] != x.shape[-2]:
            raise ValueError(
                f"{name}_positions must have one entry for each of the {x.shape[-2]} rows "
                f"of {name}, got {values.shape[axis]}"
            )
    if values.ndim == 3 and q.ndim not in (3, 4):
        raise ValueError(
            "positions of shape (batch, length) need q with 3 or 4 axes, "
            f"got shape {tuple(q.shape)}"
        )
    if values.ndim == 3 and values.shape[0] not in (1, q.shape[0]):
        raise ValueError(
            f"positions of shape (batch, length) must have the batch of q, {q.shape[0]}, "
            f"got {values.shape[0]}"
        )
    if values.ndim == 3 and q.ndim == 4:
        return values[:, None]
    return values[(None,) * (q.ndim - values.ndim)]
