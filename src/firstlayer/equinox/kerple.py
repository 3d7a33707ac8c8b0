"""KERPLE for Equinox: a learned penalty that grows with distance."""

from functools import partial
from typing import Any, Self

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from .._check import one_of, positive
from ..positions.kerple import FORMS, MINIMUM, Form, kerple_bias, kerple_limited
from ._bias import Bias, Pair, checked_pair, upcast_pair
from ._module import compiled, replace_fields, upcast
from ._parameters import Key, check_parameters, draw_parameter, given_parameter, table_dtype
from ._positions import Positions


class KerpleBias(Bias):
    """Subtracts a learned function of distance from attention scores (KERPLE).

    Args:
        num_heads: Number of heads. Positive.
        form: ``"log"``, ``-r1 * ln(1 + r2 * d)``, or ``"power"``, ``-r1 * d ** r2``.
        r1: Factor of each head; None draws it as published.
        r2: Rate of the logarithm, or power, of each head; None draws it as published.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for new parameters.

    Shape:
        - r1, r2: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    Parameters below 0.01 and powers above 2 are clamped when they are used, and then get no
    gradient. Use :meth:`projected` after an optimizer step.

    Example:
        >>> layer = KerpleBias(1, form="power", r1=[3.0], r2=[2.0])
        >>> layer.bias([2], [0, 1]).tolist()
        [[[-12.0, -3.0]]]
    """

    r1: Float[Array, " num_heads"]
    r2: Float[Array, " num_heads"]
    num_heads: int = eqx.field(static=True)
    form: Form = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        *,
        form: Form = "log",
        r1: Any = None,
        r2: Any = None,
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        one_of("form", form, FORMS)
        self.form, self.num_heads = form, positive("num_heads", num_heads)
        keys = (None, None) if key is None else jax.random.split(key)
        # Upper limits of the paper.
        limits = (2.0, 1.0) if form == "log" else (1.0, 2.0)
        self.r1, self.r2 = (
            draw_parameter(
                (num_heads,),
                init=partial(jax.random.uniform, minval=MINIMUM, maxval=limit),
                key=own,
                dtype=dtype,
            )
            if value is None
            else given_parameter(value, (num_heads,), dtype=dtype, name=name)
            for name, value, limit, own in zip(
                ("r1", "r2"), (r1, r2), limits, keys, strict=True
            )
        )
        if self.r1.dtype != self.r2.dtype:
            raise ValueError(
                f"r1 and r2 must have one dtype, got {self.r1.dtype} and {self.r2.dtype}"
            )

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        dtype = self.r1.dtype if dtype is None else table_dtype(dtype)
        return _bias(self, checked_pair(q_positions, k_positions), dtype)

    def projected(self) -> Self:
        """Return a layer with clamped parameters. Call it after an optimizer step.

        Example:
            >>> KerpleBias(1, r1=[-1.0], r2=[0.5]).projected().r1.round(4).tolist()
            [0.009999999776482582]
        """
        r1, r2 = kerple_limited(self.r1, self.r2, form=self.form)
        return replace_fields(self, r1=r1, r2=r2)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {"r1": self.r1, "r2": self.r2}


@partial(compiled, static_argnums=2)
def _bias(layer: KerpleBias, pair: Pair, dtype: np.dtype) -> Array:
    check_parameters(layer, r1=(layer.num_heads,), r2=(layer.num_heads,))
    r1, r2 = upcast(layer.r1), upcast(layer.r2)
    return kerple_bias(*upcast_pair(pair), r1=r1, r2=r2, form=layer.form).astype(dtype)
