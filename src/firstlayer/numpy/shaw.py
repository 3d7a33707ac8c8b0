"""Shaw's relative keys on NumPy: queries are also compared with a vector by distance."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from .._array import compute_dtype
from .._check import is_float, not_negative, positive
from ..embeddings.init import Init, Seed, initial_table
from ..positions.shaw import lined_up, shaw_scores
from ..positions.t5 import clipped_index, relative_positions
from ._bias import KPositions, QPositions, checked_pair, gradient_like
from ._module import Module, as_parameter


class ShawScores(Module):
    """Scores queries and keys, with a learned vector for the distance between them.

    Args:
        head_dim: Size of the last axis of queries and keys. Positive.
        max_left: The farthest distance before the query with a vector of its own.
        max_right: The farthest distance after the query with a vector of its own.
        weight: The table to use, not copied if it fits.
        init: Initial values; see :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for ``init``.

    Shape:
        - weight: ``(max_left + max_right + 1, head_dim)``, farthest before first
        - q: ``(..., heads, q_length, head_dim)`` or ``(..., q_length, head_dim)``
        - k: as ``q``, of ``k_length``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(..., q_length, k_length)``, divided by √head_dim, in the dtype of ``q``

    Example:
        >>> layer = ShawScores(4, max_left=64, max_right=8, rng=0)
        >>> layer.scores(np.ones((2, 3, 4)), np.ones((2, 5, 4)), range(3), range(5)).shape
        (2, 3, 5)
    """

    prefix = "bias."

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
            q: The queries, without positions.
            k: The keys, without positions.
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
        """
        q_positions, k_positions = checked_pair(q_positions, k_positions)
        q, k = self._checked("q", q), self._checked("k", k)
        wide_q, wide_k, weight = _widened_together(q, k, self.weight)
        out = shaw_scores(
            wide_q,
            wide_k,
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
        """Return the scores and the function to the gradients of ``q, k`` and ``weight``.

        Gradients of ``q`` and ``k`` have their dtype; that of the table is wide.
        """
        scores = self.scores(q, k, q_positions, k_positions)
        q, k = np.array(q), np.array(k)
        wide_q, wide_k, weight = _widened_together(q, k, self.weight.copy())
        relative = relative_positions(*checked_pair(q_positions, k_positions))
        index = clipped_index(relative, left=self.max_left, right=self.max_right)
        index = lined_up(index, q, k)

        def pull(dscores: Float[Any, "*lead q k"]) -> dict[str, np.ndarray]:
            d = gradient_like(dscores, scores, name="dscores").astype(wide_q.dtype)
            d /= math.sqrt(self.head_dim)
            by_row = _summed_by_row(d, index, len(weight))
            every_q = np.broadcast_to(wide_q, (*d.shape[:-1], self.head_dim))
            flat = by_row.reshape(-1, len(weight)).T @ every_q.reshape(-1, self.head_dim)
            dq, dk = d @ wide_k + by_row @ weight, d.mT @ wide_q
            return {
                "q": _summed_to(dq, q.shape).astype(q.dtype, copy=False),
                "k": _summed_to(dk, k.shape).astype(k.dtype, copy=False),
                "weight": flat.astype(compute_dtype(self.weight.dtype), copy=False),
            }

        return scores, pull

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the table under the name ``weight``."""
        return {"weight": self.weight}

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "head_dim": self.head_dim,
            "max_left": self.max_left,
            "max_right": self.max_right,
            "dtype": self.weight.dtype.name,
        }

    def _checked(self, name: str, x: Any) -> np.ndarray:
        array = np.asarray(x)
        if not is_float(array.dtype):
            raise TypeError(f"{name} must be real, got {array.dtype.name}")
        if array.ndim < 2 or array.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name} must have shape (..., length, {self.head_dim}), got {array.shape}"
            )
        return array


def _widened_together(*arrays: np.ndarray) -> list[np.ndarray]:
    wide = "float64" if any(x.dtype == np.float64 for x in arrays) else "float32"
    return [x.astype(wide, copy=False) for x in arrays]


def _summed_to(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of what had that shape before it served several heads."""
    extra = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(extra)))
    axes = (at for at, size in enumerate(shape) if size == 1 != gradient.shape[at])
    return gradient.sum(axis=tuple(axes), keepdims=True)


def _summed_by_row(
    d: Float[np.ndarray, "*lead q_length k_length"],
    index: Int[np.ndarray, "*#lead q_length k_length"],
    rows: int,
) -> Float[np.ndarray, "*lead q_length rows"]:
    """Return, for each query, the sum of what arrived for each row of the table."""
    length = d.shape[-2]
    # One number for each query and row, so that a single pass adds all of them up.
    place = index + rows * np.arange(length)[:, None]
    place = np.broadcast_to(place, d.shape)
    out = np.empty((*d.shape[:-1], rows), d.dtype)
    for lead in np.ndindex(d.shape[:-2]):
        sums = np.bincount(place[lead].ravel(), d[lead].ravel(), minlength=rows * length)
        out[lead] = sums.reshape(length, rows)
    return out
