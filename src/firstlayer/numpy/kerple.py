"""KERPLE on NumPy: a learned penalty that grows with distance."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import float_dtype, positive
from ..embeddings.init import Seed
from ..positions.kerple import (
    Form,
    kerple_bias,
    kerple_initial,
    kerple_limited,
    zero_safe_power,
)
from ..positions.t5 import distances
from ._bias import Bias, KPositions, QPositions, checked_pair, gradient_like, sum_over_pairs
from ._module import as_parameter, upcast


class KerpleBias(Bias):
    """Takes a learned function of distance off the score of every query and key.

    Args:
        num_heads: Pairs of numbers, one for each head. Positive.
        form: ``"log"``, ``-r1 * ln(1 + r2 * d)``, or ``"power"``, ``-r1 * d ** r2``.
        r1: The numbers to use, not copied if they fit; drawn as published if None.
        r2: Likewise.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for what is drawn.

    Shape:
        - r1, r2: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    Numbers below 0.01, and powers above 2, are used as 0.01 and 2 and then get no gradient;
    call :meth:`project` after an optimizer step.

    Example:
        >>> layer = KerpleBias(1, form="power", r1=[3.0], r2=[2.0])
        >>> layer.bias([2], [0, 1]).tolist()
        [[[-12.0, -3.0]]]
    """

    def __init__(
        self,
        num_heads: int,
        *,
        form: Form = "log",
        r1: Float[Any, " num_heads"] | Sequence[float] | None = None,
        r2: Float[Any, " num_heads"] | Sequence[float] | None = None,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.form: Form = form
        self.num_heads = positive("num_heads", num_heads)
        drawn = kerple_initial(num_heads, form=form, rng=np.random.default_rng(rng))
        new = [number.astype(float_dtype(dtype)) for number in drawn]
        self.r1, self.r2 = (
            fresh
            if value is None
            else as_parameter(value, (num_heads,), dtype=dtype, name=name)
            for name, value, fresh in (("r1", r1, new[0]), ("r2", r2, new[1]))
        )
        if self.r1.dtype != self.r2.dtype:
            raise ValueError(
                f"r1 and r2 must have one dtype, got {self.r1.dtype} and {self.r2.dtype}"
            )

    def bias(
        self,
        q_positions: QPositions,
        k_positions: KPositions,
        *,
        dtype: Any = None,
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, the parameters' if None. Worked on in float32, or in
                float64 for float64 parameters, and rounded once.
        """
        found = self.r1.dtype if dtype is None else float_dtype(dtype)
        out = kerple_bias(
            *checked_pair(q_positions, k_positions),
            r1=upcast(self.r1),
            r2=upcast(self.r2),
            form=self.form,
        )
        return out.astype(found, copy=False)

    def vjp(
        self,
        q_positions: QPositions,
        k_positions: KPositions,
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the bias and the function from its gradient to those of ``r1`` and ``r2``.

        Example:
            >>> bias, pull = KerpleBias(1, r1=[2.0], r2=[1.0]).vjp([1], [0])
            >>> pull(np.ones_like(bias))["r2"].tolist()
            [-1.0]
        """
        bias = self.bias(q_positions, k_positions)
        stored = upcast(self.r1.copy()), upcast(self.r2.copy())
        used = kerple_limited(*stored, form=self.form)
        pair = checked_pair(q_positions, k_positions)
        distance = distances(*pair, dtype=compute_dtype(stored[0].dtype))[..., None, :, :]

        def pull(dbias: Float[Any, "*batch heads q k"]) -> dict[str, np.ndarray]:
            d = gradient_like(dbias, bias).astype(distance.dtype, copy=False)
            slopes = _derivatives(distance, *used, form=self.form)
            # Where a stored number is not the one used, the bias does not depend on it.
            return {
                name: np.where(is_used == is_stored, sum_over_pairs(d * slope), 0)
                for name, slope, is_used, is_stored in zip(
                    ("r1", "r2"), slopes, used, stored, strict=True
                )
            }

        return bias, pull

    def project(self) -> None:
        """Bring stored numbers back within their limits, after an optimizer step."""
        self.r1[...], self.r2[...] = kerple_limited(self.r1, self.r2, form=self.form)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the numbers under the names ``r1`` and ``r2``."""
        return {"r1": self.r1, "r2": self.r2}

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "form": self.form,
            "dtype": self.r1.dtype.name,
        }


def _derivatives(
    distance: np.ndarray, r1: np.ndarray, r2: np.ndarray, *, form: Form
) -> tuple[np.ndarray, np.ndarray]:
    """Return the derivatives of the bias by ``r1`` and by ``r2``."""
    r1, r2 = r1[:, None, None], r2[:, None, None]
    if form == "log":
        return -np.log1p(r2 * distance), -r1 * distance / (1 + r2 * distance)
    power = zero_safe_power(distance, r2)
    return -power, -r1 * power * np.log(np.where(distance > 0, distance, 1))
