"""Contextual positions (CoPE) for Equinox."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from .._check import FLOATS, dtype_text, host_array, positive
from ..positions.cope import check_cope_shapes, check_max_positions, cope_bias
from ._module import Module, compiled, native, upcast_together
from ._parameters import Init, Key, check_parameters, draw_parameter, given_parameter


class CopeBias(Module):
    """Computes a bias from learned vectors of contextual positions (CoPE).

    The position of a key is the sum of ``sigmoid(score)`` over the keys from it up to the
    query. Add the bias to the same scores, before the softmax.

    Args:
        head_dim: Number of features of queries. Positive.
        max_positions: Number of whole positions with a vector of their own, 0, 1, …; sums
            beyond the last are replaced by it. At least 2.
        weight: Table to use.
        init: Distribution of a new table, zeros as published; as for
            :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for ``init``.

    Shape:
        - weight: ``(max_positions, head_dim)``, shared by all heads
        - q: ``(..., q_length, head_dim)``
        - scores: ``(..., q_length, k_length)``: the products of queries and keys, divided
          by √head_dim, and ``-inf`` for keys that a query must not see, such as later ones
        - output: as ``scores``, in the dtype of ``scores``

    A step of decoding needs the scores of its own queries with all keys, and no state.

    Products use full float32 precision on every device (float64 if any input is), and the
    result is rounded once.

    Example:
        >>> table = np.array([[0.0, 0], [1, 0], [2, 0], [3, 0]], np.float32)
        >>> layer = CopeBias(2, max_positions=4, weight=table)
        >>> scores = jax.numpy.array([[0.0, 0.0, -np.inf]])
        >>> layer.bias(jax.numpy.ones((1, 2)), scores).tolist()
        [[1.0, 0.5, 0.0]]
    """

    weight: Float[Array, "max_positions head_dim"]
    head_dim: int = eqx.field(static=True)
    max_positions: int = eqx.field(static=True)

    def __init__(
        self,
        head_dim: int,
        *,
        max_positions: int,
        weight: Any = None,
        init: Init = "zeros",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.head_dim = positive("head_dim", head_dim)
        self.max_positions = check_max_positions(max_positions)
        shape = (self.max_positions, self.head_dim)
        if weight is None:
            self.weight = draw_parameter(shape, init=init, key=key, dtype=dtype)
        else:
            self.weight = given_parameter(weight, shape, dtype=dtype)

    def bias(
        self,
        q: Float[Array | np.ndarray, "*lead head_dim"],
        scores: Float[Array | np.ndarray, "*lead k_length"],
    ) -> Float[Array, "*lead k_length"]:
        """Return the bias of every query and key, to be added to ``scores``.

        Args:
            q: Queries.
            scores: Scores of the queries, masked.
        """
        q, scores = _real("q", q), _real("scores", scores)
        check_cope_shapes(q.shape, scores.shape, self.head_dim)
        return _bias(self, q, scores)

    def __call__(
        self,
        q: Float[Array | np.ndarray, "*lead head_dim"],
        scores: Float[Array | np.ndarray, "*lead k_length"],
    ) -> Float[Array, "*lead k_length"]:
        """Return the bias of every query and key; see :meth:`bias`."""
        return self.bias(q, scores)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {"weight": self.weight}


@compiled
def _bias(layer: CopeBias, q: Array, scores: Array) -> Float[Array, "*lead k_length"]:
    check_parameters(layer, weight=(layer.max_positions, layer.head_dim))
    q_upcast, upcast, weight = upcast_together(q, scores, layer.weight)
    with jax.default_matmul_precision("highest"):
        return cope_bias(q_upcast, upcast, weight=weight).astype(scores.dtype)


def _real(name: str, x: Any) -> Float[Any, "..."]:
    x = x if isinstance(x, jax.Array) else native(host_array(x, name=name))
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be real, got {dtype_text(x.dtype)}")
    return x
