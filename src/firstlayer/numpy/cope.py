"""Contextual positions (CoPE) for NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype, take_last
from .._check import dtype_text, host_array, is_float, positive
from ..embeddings.init import Init, Seed, initial_table
from ..files.layer_configs import config_of
from ..positions.cope import (
    check_cope_shapes,
    check_max_positions,
    cope_bias,
    cope_gates,
    cope_positions,
    neighbors,
)
from ._bias import gradient_like, sum_by_row, upcast_together
from ._module import Module, as_parameter, native_byte_order


class CopeBias(Module):
    """Computes a bias from learned vectors of contextual positions (CoPE).

    The position of a key is the sum of ``sigmoid(score)`` over the keys from it up to the
    query. Add the bias to the same scores, before the softmax.

    Args:
        head_dim: Number of features of queries. Positive.
        max_positions: Number of whole positions with a vector of their own, 0, 1, …; sums
            beyond the last are replaced by it. At least 2.
        weight: Table to use, without a copy if its dtype and layout fit.
        init: Initializer of a new table, zeros as published; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - weight: ``(max_positions, head_dim)``, shared by all heads
        - q: ``(..., q_length, head_dim)``
        - scores: ``(..., q_length, k_length)``: the products of queries and keys, divided
          by √head_dim, and ``-inf`` for keys that a query must not see, such as later ones
        - output: as ``scores``, in the dtype of ``scores``

    A step of decoding needs the scores of its own queries with all keys, and no state.

    Example:
        >>> layer = CopeBias(2, max_positions=4, weight=[[0, 0], [1, 0], [2, 0], [3, 0]],
        ...                  dtype="float32")
        >>> layer.bias(np.ones((1, 2)), [[0.0, 0.0, -np.inf]]).tolist()
        [[1.0, 0.5, 0.0]]
        >>> bias, pull = layer.vjp(np.ones((1, 2)), np.zeros((1, 3)))
        >>> sorted(pull(np.ones_like(bias)))
        ['q', 'scores', 'weight']
    """

    def __init__(
        self,
        head_dim: int,
        *,
        max_positions: int,
        weight: Float[Any, "max_positions head_dim"] | list[Any] | None = None,
        init: Init = "zeros",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.head_dim = positive("head_dim", head_dim)
        self.max_positions = check_max_positions(max_positions)
        shape = (self.max_positions, self.head_dim)
        if weight is None:
            self.weight = initial_table(shape, init=init, rng=rng, dtype=dtype)
        else:
            self.weight = as_parameter(weight, shape, dtype=dtype)

    def bias(
        self,
        q: Float[Any, "*lead head_dim"],
        scores: Float[Any, "*lead k_length"] | list[Any],
    ) -> Float[np.ndarray, "*lead k_length"]:
        """Return the bias of every query and key, to be added to ``scores``.

        Args:
            q: Queries.
            scores: Scores of the queries, masked.
        """
        q, scores = self._checked(q, scores)
        q_upcast, upcast, weight = upcast_together(q, scores, self.weight)
        return cope_bias(q_upcast, upcast, weight=weight).astype(scores.dtype, copy=False)

    __call__ = bias

    def vjp(
        self,
        q: Float[Any, "*lead head_dim"],
        scores: Float[Any, "*lead k_length"] | list[Any],
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the bias and the pullback to the gradients of inputs and ``weight``.

        Gradients of ``q`` and ``scores`` have their dtypes; that of the table is upcast.
        """
        bias, last = self.bias(q, scores), self.max_positions - 1
        q, scores = self._checked(q, scores)
        q_upcast, upcast, weight = (
            x.copy() for x in upcast_together(q, scores, self.weight)
        )
        gates = cope_gates(upcast)
        positions = cope_positions(gates, last=last)
        below, above = neighbors(positions, last=last)

        def pullback(dbias: Any) -> dict[str, np.ndarray]:
            d = gradient_like(dbias, bias).astype(q_upcast.dtype)
            share, products = positions - below, q_upcast @ weight.T
            by_row = sum_by_row(d * (1 - share), below, len(weight))
            by_row += sum_by_row(d * share, above, len(weight))
            slopes = take_last(products, above) - take_last(products, below)
            # Positions at the limit are constant; their neighbors above are themselves.
            dgates = np.cumsum(d * slopes, axis=-1)
            rows = by_row.reshape(-1, len(weight)).T
            dweight = rows @ q_upcast.reshape(-1, self.head_dim)
            return {
                "q": (by_row @ weight).astype(q.dtype, copy=False),
                "scores": (dgates * gates * (1 - gates)).astype(scores.dtype, copy=False),
                "weight": dweight.astype(compute_dtype(self.weight.dtype), copy=False),
            }

        return bias, pullback

    def parameters(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.weight.dtype.name)

    def _checked(self, q: Any, scores: Any) -> tuple[np.ndarray, np.ndarray]:
        q, scores = host_array(q, name="q"), host_array(scores, name="scores")
        for name, x in (("q", q), ("scores", scores)):
            if not is_float(x.dtype):
                raise TypeError(f"{name} must be real, got {dtype_text(x.dtype)}")
        check_cope_shapes(q.shape, scores.shape, self.head_dim)
        return native_byte_order(q), native_byte_order(scores)
