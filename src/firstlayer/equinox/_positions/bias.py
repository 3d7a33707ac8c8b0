"""What the schemes on attention scores share: checked positions of queries and keys."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ..._array import is_real
from ..._check import positions_in_reach
from .._module import Module, upcast
from .._table.lookup import on_host
from .arguments import Positions, arrived

#: Where JAX has 32 bits, the difference of two positions must fit into them.
LIMIT = 2**30


class Bias(Module):
    """Base of the layers whose output is added to attention scores.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it
    """

    prefix: ClassVar[str] = "bias."

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        """Return what is added to the score of every query and key."""
        raise NotImplementedError

    def __call__(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        return self.bias(q_positions, k_positions, dtype=dtype)


def checked_pair(
    q_positions: Positions, k_positions: Positions
) -> tuple[Shaped[Array, "*#batch q_length"], Shaped[Array, "*#batch k_length"]]:
    """Return both positions as integers or as reals of 32 bits or more."""
    return _checked("q_positions", q_positions), _checked("k_positions", k_positions)


def _checked(name: str, positions: Any) -> Shaped[Array, "*batch length"]:
    found = arrived(positions, name=name)
    seen = on_host(found)
    if seen is not None:
        _check(name, np.asarray(seen))
    if is_real(found):
        return upcast(jnp.asarray(found))
    return jnp.asarray(found.astype(np.dtype(jnp.result_type(int))))


def _check(name: str, positions: Shaped[np.ndarray, "*batch length"]) -> None:
    if not is_real(positions):
        if jnp.result_type(int) == jnp.int32:
            positions_in_reach(positions, LIMIT, name=name)
        return
    known = np.isfinite(positions)
    if not known.all():
        raise ValueError(f"{name} must be finite, got {positions[~known].flat[0]}")
