"""FIRE for Equinox: a small network maps relative distance to a bias."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._check import number, positive, positive_number
from ..positions.fire import fire_bias, normalized_distances
from ._bias import Bias, Pair, checked_pair, upcast_pair
from ._module import compiled, upcast
from ._parameters import Key, check_parameters, draw_parameter, table_dtype
from ._positions import Positions

NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")


class FireBias(Bias):
    """Adds a learned function of normalized distance to attention scores (FIRE).

    Args:
        num_heads: Number of heads. Positive.
        width: Number of hidden units of the network. Positive.
        c: Initial value of the parameter ``c``, the strength of the log compression of
            distances.
        threshold: Lower bound of query positions in the normalization, times the parameter
            ``multiplier``. Positive.
        eps: Added to the denominator. Positive.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the network, initialized like torch's linear layers.

    Shape:
        - c, multiplier: ``()``
        - hidden_weight, hidden_bias: ``(width,)``
        - head_weight: ``(num_heads, width)``; head_bias: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    Count positions from the start of the text, because the bias depends on absolute query
    positions beyond ``threshold``. Matrix products use full float32 precision on every
    device.

    Example:
        >>> layer = FireBias(8, key=jax.random.key(0))
        >>> prefill = layer.bias(range(20), range(20))[:, -1]
        >>> bool(jnp.allclose(layer.bias([19], range(20))[:, 0], prefill, atol=1e-6))
        True
    """

    c: Float[Array, ""]
    multiplier: Float[Array, ""]
    hidden_weight: Float[Array, " width"]
    hidden_bias: Float[Array, " width"]
    head_weight: Float[Array, "num_heads width"]
    head_bias: Float[Array, " num_heads"]
    num_heads: int = eqx.field(static=True)
    width: int = eqx.field(static=True)
    threshold: float = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        *,
        width: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        eps: float = 1e-6,
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.num_heads = positive("num_heads", num_heads)
        self.width = positive("width", width)
        self.threshold = positive_number("threshold", threshold)
        self.eps, dtype = positive_number("eps", eps), table_dtype(dtype)
        self.c, self.multiplier = jnp.array(number("c", c), dtype), jnp.array(1.0, dtype)
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        self.hidden_weight, self.hidden_bias, self.head_weight, self.head_bias = (
            draw_parameter(
                shape,
                init=partial(jax.random.uniform, minval=-limit, maxval=limit),
                key=own,
                dtype=dtype,
            )
            for shape, limit, own in zip(
                ((width,), (width,), (num_heads, width), (num_heads,)),
                (1.0, 1.0, width**-0.5, width**-0.5),
                keys,
                strict=True,
            )
        )

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        dtype = self.c.dtype if dtype is None else table_dtype(dtype)
        return _bias(self, checked_pair(q_positions, k_positions), dtype)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {name: getattr(self, name) for name in ("c", "multiplier", *NETWORK)}


@partial(compiled, static_argnums=2)
def _bias(layer: FireBias, pair: Pair, dtype: np.dtype) -> Array:
    heads, width = layer.num_heads, layer.width
    check_parameters(
        layer,
        c=(),
        multiplier=(),
        hidden_weight=(width,),
        hidden_bias=(width,),
        head_weight=(heads, width),
        head_bias=(heads,),
    )
    values = {name: upcast(value) for name, value in layer.parameters().items()}
    threshold = values["multiplier"] * layer.threshold
    share = normalized_distances(
        *upcast_pair(pair), c=values["c"], threshold=threshold, eps=layer.eps
    )
    with jax.default_matmul_precision("highest"):
        out = fire_bias(share, **{name: values[name] for name in NETWORK})
    return out.astype(dtype)
