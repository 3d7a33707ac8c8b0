"""T5's relative bias for Equinox: a learned number for each bucket of distances."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._check import positive
from ..positions.t5 import t5_bias, t5_buckets
from ._constant import Constant
from ._module import upcast
from ._positions.arguments import Positions
from ._positions.bias import Bias, checked_pair
from ._table.parameters import Init, Key, drawn, given, table_dtype


class T5Bias(Bias):
    """Adds a learned number to the score of every query and key, by their distance.

    Args:
        num_heads: Numbers for each bucket. Positive.
        num_buckets: Rows of the table: even and at least 4, or at least 2 if not
            ``bidirectional``.
        max_distance: From here on all distances share a bucket. Greater than the number of
            distances with a bucket of their own: ``num_buckets`` by 4, or by 2 if not
            ``bidirectional``.
        bidirectional: Whether keys after the query are told apart: True in T5's encoder,
            False in its decoder.
        weight: The table to use.
        init: How a new table is drawn, as for :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: What a new table is drawn with.

    Shape:
        - weight: ``(num_buckets, num_heads)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    T5 does not divide its scores by the root of head_dim, and one table serves all layers.
    If ``bidirectional``, the first row of the second half is never used, as in T5. The
    table's gradient is summed in float32, whatever its dtype.

    Example:
        >>> import jax
        >>> layer = T5Bias(8, key=jax.random.key(0))
        >>> whole = layer.bias(range(200), range(200))
        >>> step = layer.bias([199], range(200))
        >>> step.shape, bool((step[:, 0] == whole[:, -1]).all())
        ((8, 1, 200), True)
    """

    weight: Float[Array, "num_buckets num_heads"]
    #: The bucket of each distance, from the farthest before the query onwards.
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
        self.bidirectional = bool(bidirectional)
        shape = (self.num_buckets, self.num_heads)
        if weight is None:
            self.weight = drawn(shape, init=init, key=key, dtype=dtype)
        else:
            self.weight = given(weight, shape, dtype=dtype)

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, the table's if None.
        """
        out = t5_bias(
            *checked_pair(q_positions, k_positions),
            weight=upcast(self.weight),
            buckets=jnp.asarray(self.buckets.array),
            bidirectional=self.bidirectional,
        )
        return out.astype(self.weight.dtype if dtype is None else table_dtype(dtype))

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        """Return the table under the name ``weight``."""
        return {"weight": self.weight}

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "dtype": self.weight.dtype.name,
        }
