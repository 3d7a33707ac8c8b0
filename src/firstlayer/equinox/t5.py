"""T5's relative bias for Equinox: a learned bias for each bucket of distances."""

from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._check import boolean, positive
from ..positions.t5 import t5_bias, t5_buckets
from ._bias import Bias, Pair, checked_pair, upcast_pair
from ._constant import Constant
from ._module import compiled, upcast
from ._parameters import (
    Init,
    Key,
    check_parameters,
    draw_parameter,
    given_parameter,
    table_dtype,
)
from ._positions import Positions


class T5Bias(Bias):
    """Adds a learned bias per bucket of distances to the attention scores.

    Args:
        num_heads: Number of heads. Positive.
        num_buckets: Number of buckets: even and at least 4, or at least 2 if not
            ``bidirectional``.
        max_distance: Distance from which on all distances share a bucket. Greater than the
            number of distances with their own bucket: ``num_buckets / 4``, or ``num_buckets
            / 2`` if not ``bidirectional``.
        bidirectional: Whether keys after the query have their own buckets: True in T5's
            encoder, False in its decoder.
        weight: The table to use.
        init: Distribution of a new table, as for :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for a new table.

    Shape:
        - weight: ``(num_buckets, num_heads)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    T5 does not divide its scores by √head_dim, and shares one table among all layers. If
    ``bidirectional``, the first row of the second half is never used, as in T5. The table's
    gradient is summed in float32 for every dtype but float64.

    Example:
        >>> import jax
        >>> layer = T5Bias(8, key=jax.random.key(0))
        >>> prefill = layer.bias(range(200), range(200))
        >>> step = layer.bias([199], range(200))
        >>> step.shape, bool((step[:, 0] == prefill[:, -1]).all())
        ((8, 1, 200), True)
    """

    weight: Float[Array, "num_buckets num_heads"]
    #: Bucket of each distance, starting with the farthest before the query.
    buckets: Constant = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_buckets: int = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        weight: Any = None,
        init: Init = "truncated_normal",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        buckets = t5_buckets(
            num_buckets, max_distance=max_distance, bidirectional=bidirectional
        )
        self.buckets = Constant(buckets)
        self.num_heads = positive("num_heads", num_heads)
        self.num_buckets, self.max_distance = int(num_buckets), int(max_distance)
        self.bidirectional = boolean("bidirectional", bidirectional)
        shape = (self.num_buckets, self.num_heads)
        if weight is None:
            self.weight = draw_parameter(shape, init=init, key=key, dtype=dtype)
        else:
            self.weight = given_parameter(weight, shape, dtype=dtype)

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        dtype = self.weight.dtype if dtype is None else table_dtype(dtype)
        return _bias(self, checked_pair(q_positions, k_positions), dtype)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {"weight": self.weight}


@partial(compiled, static_argnums=2)
def _bias(layer: T5Bias, pair: Pair, dtype: np.dtype) -> Array:
    check_parameters(layer, weight=(layer.num_buckets, layer.num_heads))
    bias = t5_bias(
        *upcast_pair(pair),
        weight=upcast(layer.weight),
        buckets=jnp.asarray(layer.buckets.array),
        bidirectional=layer.bidirectional,
    )
    return bias.astype(dtype)
