"""Shaw's relative keys for Equinox: a learned key vector for each distance."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from .._check import not_negative, positive
from ..positions.shaw import shaw_scores
from ._bias import Pair, checked_pair, upcast_pair
from ._module import Module, compiled, upcast_together
from ._parameters import Init, Key, check_parameters, draw_parameter, given_parameter
from ._positions import Positions, checked_vectors


class ShawScores(Module):
    """Computes scores with a learned key vector per relative position (Shaw et al. 2018).

    Args:
        head_dim: Size of the last axis of queries and keys. Positive.
        max_left: Largest distance before the query with its own vector.
        max_right: Largest distance after the query with its own vector.
        weight: The table to use.
        init: Distribution of a new table, as for :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for a new table.

    Shape:
        - weight: ``(max_left + max_right + 1, head_dim)``, farthest before first
        - q: ``(..., heads, q_length, head_dim)`` or ``(..., q_length, head_dim)``
        - k: as ``q``, of ``k_length``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(..., q_length, k_length)``, divided by √head_dim, in the dtype of ``q``

    Products use full float32 precision on every device (float64 if any input is), and the
    result is rounded once.

    Example:
        >>> layer = ShawScores(4, max_left=64, max_right=8, key=jax.random.key(0))
        >>> q, k = jax.numpy.ones((2, 3, 4)), jax.numpy.ones((2, 5, 4))
        >>> layer.scores(q, k, range(3), range(5)).shape
        (2, 3, 5)
    """

    weight: Float[Array, "distances head_dim"]
    head_dim: int = eqx.field(static=True)
    max_left: int = eqx.field(static=True)
    max_right: int = eqx.field(static=True)

    def __init__(
        self,
        head_dim: int,
        *,
        max_left: int,
        max_right: int,
        weight: Any = None,
        init: Init = "truncated_normal",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.head_dim = positive("head_dim", head_dim)
        self.max_left = not_negative("max_left", max_left)
        self.max_right = not_negative("max_right", max_right)
        shape = (self.max_left + self.max_right + 1, self.head_dim)
        if weight is None:
            self.weight = draw_parameter(shape, init=init, key=key, dtype=dtype)
        else:
            self.weight = given_parameter(weight, shape, dtype=dtype)

    def scores(
        self,
        q: Float[Array | np.ndarray, "*lead q_length head_dim"],
        k: Float[Array | np.ndarray, "*lead k_length head_dim"],
        q_positions: Positions,
        k_positions: Positions,
    ) -> Float[Array, "*lead q_length k_length"]:
        """Return the scores of every query and key.

        Args:
            q: The queries, without positions.
            k: The keys, without positions.
            q_positions: Positions of the queries.
            k_positions: Positions of the keys.
        """
        pair = checked_pair(q_positions, k_positions)
        q = checked_vectors(q, self.head_dim, name="q")
        k = checked_vectors(k, self.head_dim, name="k")
        return _scores(self, q, k, pair)

    def __call__(
        self,
        q: Float[Array | np.ndarray, "*lead q_length head_dim"],
        k: Float[Array | np.ndarray, "*lead k_length head_dim"],
        q_positions: Positions,
        k_positions: Positions,
    ) -> Float[Array, "*lead q_length k_length"]:
        """Return the scores of every query and key; see :meth:`scores`."""
        return self.scores(q, k, q_positions, k_positions)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {"weight": self.weight}


@compiled
def _scores(layer: ShawScores, q: Array, k: Array, pair: Pair) -> Array:
    rows = layer.max_left + layer.max_right + 1
    check_parameters(layer, weight=(rows, layer.head_dim))
    q_positions, k_positions = upcast_pair(pair)
    q_upcast, k_upcast, weight = upcast_together(q, k, layer.weight)
    with jax.default_matmul_precision("highest"):
        out = shaw_scores(
            q_upcast,
            k_upcast,
            q_positions=q_positions,
            k_positions=k_positions,
            weight=weight,
            max_left=layer.max_left,
        )
    return out.astype(q.dtype)
