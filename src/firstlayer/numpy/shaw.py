"""Shaw's relative keys for NumPy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import dtype_text, host_array, is_float, not_negative, positive
from ..embeddings.init import Init, Seed, initial_table
from ..files.layer_configs import config_of
from ..positions.shaw import align_pairs, shaw_scores
from ..positions.t5 import clipped_index, relative_positions
from ._bias import (
    KPositions,
    QPositions,
    checked_pair,
    gradient_like,
    sum_by_row,
    sum_to,
    upcast_together,
)
from ._module import Module, as_parameter


class ShawScores(Module):
    """Computes scores with a learned key vector per relative position (Shaw et al. 2018).

    Args:
        head_dim: Size of the last axis of queries and keys. Positive.
        max_left: Largest distance before the query with its own vector.
        max_right: Largest distance after the query with its own vector.
        weight: Table to use, without a copy if its dtype and layout fit.
        init: Initializer of a new table; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - weight: ``(max_left + max_right + 1, head_dim)``, most negative position first
        - q: ``(..., heads, q_length, head_dim)`` or ``(..., q_length, head_dim)``
        - k: as ``q``, with ``k_length``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(..., q_length, k_length)``, divided by √head_dim, in the dtype of ``q``

    Example:
        >>> layer = ShawScores(4, max_left=64, max_right=8, rng=0)
        >>> layer.scores(np.ones((2, 3, 4)), np.ones((2, 5, 4)), range(3), range(5)).shape
        (2, 3, 5)
        >>> scores, pull = layer.vjp(np.ones((3, 4)), np.ones((5, 4)), range(3), range(5))
        >>> sorted(pull(np.ones_like(scores)))
        ['k', 'q', 'weight']
    """

    def __init__(
        self,
        head_dim: int,
        *,
        max_left: int,
        max_right: int,
        weight: Float[Any, "distances head_dim"] | None = None,
        init: Init = "truncated_normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.head_dim = positive("head_dim", head_dim)
        self.max_left = not_negative("max_left", max_left)
        self.max_right = not_negative("max_right", max_right)
        shape = (self.max_left + self.max_right + 1, self.head_dim)
        if weight is None:
            self.weight = initial_table(shape, init=init, rng=rng, dtype=dtype)
        else:
            self.weight = as_parameter(weight, shape, dtype=dtype)

    def scores(
        self,
        q: Float[Any, "*lead q_length head_dim"],
        k: Float[Any, "*lead k_length head_dim"],
        q_positions: QPositions,
        k_positions: KPositions,
    ) -> Float[np.ndarray, "*lead q_length k_length"]:
        """Return the scores of every query and key.

        Args:
            q: Queries, without positions.
            k: Keys, without positions.
            q_positions: Positions of the queries.
            k_positions: Positions of the keys.
        """
        q_positions, k_positions = checked_pair(q_positions, k_positions)
        q, k = self._checked("q", q), self._checked("k", k)
        q_upcast, k_upcast, weight = upcast_together(q, k, self.weight)
        out = shaw_scores(
            q_upcast,
            k_upcast,
            q_positions=q_positions,
            k_positions=k_positions,
            weight=weight,
            max_left=self.max_left,
        )
        return out.astype(q.dtype, copy=False)

    __call__ = scores

    def vjp(
        self,
        q: Float[Any, "*lead q_length head_dim"],
        k: Float[Any, "*lead k_length head_dim"],
        q_positions: QPositions,
        k_positions: KPositions,
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the scores and the pullback to the gradients of ``q``, ``k``, ``weight``.

        Gradients of ``q`` and ``k`` have their dtypes; that of the table is upcast.
        """
        scores = self.scores(q, k, q_positions, k_positions)
        q, k = host_array(q, name="q").copy(), host_array(k, name="k").copy()
        q_upcast, k_upcast, weight = upcast_together(q, k, self.weight.copy())
        relative = relative_positions(*checked_pair(q_positions, k_positions))
        index = clipped_index(relative, left=self.max_left, right=self.max_right)
        index = align_pairs(index, q, k)

        def pullback(dscores: Float[Any, "*lead q k"]) -> dict[str, np.ndarray]:
            d = gradient_like(dscores, scores, name="dscores").astype(q_upcast.dtype)
            d /= math.sqrt(self.head_dim)
            by_row = sum_by_row(d, index, len(weight))
            all_q = np.broadcast_to(q_upcast, (*d.shape[:-1], self.head_dim))
            dweight = by_row.reshape(-1, len(weight)).T @ all_q.reshape(-1, self.head_dim)
            dq, dk = d @ k_upcast + by_row @ weight, d.mT @ q_upcast
            return {
                "q": sum_to(dq, q.shape).astype(q.dtype, copy=False),
                "k": sum_to(dk, k.shape).astype(k.dtype, copy=False),
                "weight": dweight.astype(compute_dtype(self.weight.dtype), copy=False),
            }

        return scores, pullback

    def parameters(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.weight.dtype.name)

    def _checked(self, name: str, x: Any) -> np.ndarray:
        array = host_array(x, name=name)
        if not is_float(array.dtype):
            raise TypeError(f"{name} must be real, got {dtype_text(array.dtype)}")
        if array.ndim < 2 or array.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name} must have shape (..., length, {self.head_dim}), got {array.shape}"
            )
        return array
