"""KERPLE for Equinox: a learned penalty that grows with distance."""

from functools import partial
from typing import Any, Self

import equinox as eqx
import jax
from jaxtyping import Array, Float

from .._check import one_of, positive
from ..positions.kerple import FORMS, MINIMUM, Form, kerple_bias, kerple_limited
from ._module import replaced, upcast
from ._positions.arguments import Positions
from ._positions.bias import Bias, checked_pair
from ._table.parameters import Key, drawn, given, table_dtype


class KerpleBias(Bias):
    """Takes a learned function of distance off the score of every query and key.

    Args:
        num_heads: Pairs of numbers, one for each head. Positive.
        form: ``"log"``, ``-r1 * ln(1 + r2 * d)``, or ``"power"``, ``-r1 * d ** r2``.
        r1: The numbers to use; drawn as published if None.
        r2: Likewise.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: What is drawn with.

    Shape:
        - r1, r2: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    Numbers below 0.01, and powers above 2, are used as 0.01 and 2 and then get no gradient;
    go on with :meth:`projected` after an optimizer step.

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
        # The factor of the logarithm and the power reach 2, as published.
        most = (2.0, 1.0) if form == "log" else (1.0, 2.0)
        self.r1, self.r2 = (
            drawn(
                (num_heads,),
                init=partial(jax.random.uniform, minval=MINIMUM, maxval=limit),
                key=own,
                dtype=dtype,
            )
            if value is None
            else given(value, (num_heads,), dtype=dtype, name=name)
            for name, value, limit, own in zip(
                ("r1", "r2"), (r1, r2), most, keys, strict=True
            )
        )
        if self.r1.dtype != self.r2.dtype:
            raise ValueError(
                f"r1 and r2 must have one dtype, got {self.r1.dtype} and {self.r2.dtype}"
            )

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, the parameters' if None. Worked on in float32, or in
                float64 for float64 parameters, and rounded once.
        """
        out = kerple_bias(
            *checked_pair(q_positions, k_positions),
            r1=upcast(self.r1),
            r2=upcast(self.r2),
            form=self.form,
        )
        return out.astype(self.r1.dtype if dtype is None else table_dtype(dtype))

    def projected(self) -> Self:
        """Return a layer whose numbers are within their limits, after an optimizer step.

        Example:
            >>> KerpleBias(1, r1=[-1.0], r2=[0.5]).projected().r1.round(4).tolist()
            [0.009999999776482582]
        """
        r1, r2 = kerple_limited(self.r1, self.r2, form=self.form)
        return replaced(self, r1=r1, r2=r2)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        """Return the numbers under the names ``r1`` and ``r2``."""
        return {"r1": self.r1, "r2": self.r2}

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "form": self.form,
            "dtype": self.r1.dtype.name,
        }
