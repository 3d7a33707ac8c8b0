"""Base class of the layers that add to attention scores, and their position arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import is_real
from .._check import positions_in_reach
from ._ids import host_values
from ._module import Module, upcast
from ._positions import Positions, as_positions

#: With 32-bit integers, the difference of two positions must fit into 32 bits.
LIMIT = 2**30


class Bias(Module):
    """Base class of the layers whose output is added to attention scores.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one
    """

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        """Return the bias of every query-key pair.

        Args:
            q_positions: Positions of the queries.
            k_positions: Positions of the keys.
            dtype: Dtype of the result. None is the dtype of the parameters, or float32
                without parameters. Computed in the compute dtype and rounded once.
        """
        raise NotImplementedError

    def __call__(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        """Return the bias of every query-key pair; see :meth:`bias`."""
        return self.bias(q_positions, k_positions, dtype=dtype)


#: Positions of queries and of keys.
Pair = tuple[Shaped[Array, "*#batch q_length"], Shaped[Array, "*#batch k_length"]]


def checked_pair(q_positions: Positions, k_positions: Positions) -> Pair:
    """Return both positions as arrays, checked if the host can read them."""
    return _checked("q_positions", q_positions), _checked("k_positions", k_positions)


def upcast_pair(pair: Pair) -> Pair:
    """Return integers of JAX's default size and reals of at least 32 bits.

    Called within a compiled function.
    """
    whole = np.dtype(jnp.result_type(int))
    q, k = (upcast(p) if is_real(p) else p.astype(whole) for p in pair)
    return q, k


def _checked(name: str, value: Any) -> Shaped[Any, "*batch length"]:
    positions = as_positions(value, name=name)
    values = host_values(positions)
    if values is not None:
        _check_values(name, np.asarray(values))
    if isinstance(positions, jax.Array) or is_real(positions):
        return positions
    return positions.astype(np.dtype(jnp.result_type(int)))


def _check_values(name: str, positions: Shaped[np.ndarray, "*batch length"]) -> None:
    if not is_real(positions):
        if jnp.result_type(int) == jnp.int32:
            positions_in_reach(positions, LIMIT, name=name)
        return
    finite = np.isfinite(positions)
    if not finite.all():
        raise ValueError(f"{name} must be finite, got {positions[~finite].flat[0]}")
