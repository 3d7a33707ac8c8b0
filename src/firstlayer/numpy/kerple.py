"""KERPLE for NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import float_dtype, positive
from ..embeddings.init import Seed
from ..files.layer_configs import config_of
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
    """Subtracts a learned function of distance from attention scores (KERPLE).

    Args:
        num_heads: Number of heads. Positive.
        form: ``"log"``, ``-r1 * ln(1 + r2 * d)``, or ``"power"``, ``-r1 * d ** r2``.
        r1: Factor of each head, not copied if possible; None draws it as published.
        r2: Rate of the logarithm, or power, of each head; None draws it as published.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``r1`` and ``r2``.

    Shape:
        - r1, r2: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    Parameters below 0.01 and powers above 2 are clamped when they are used, and then get no
    gradient. Call :meth:`project` after an optimizer step.

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
        self.r1, self.r2 = (
            initial.astype(float_dtype(dtype))
            if value is None
            else as_parameter(value, (num_heads,), dtype=dtype, name=name)
            for name, value, initial in zip(("r1", "r2"), (r1, r2), drawn, strict=True)
        )
        if self.r1.dtype != self.r2.dtype:
            raise ValueError(
                f"r1 and r2 must have one dtype, got {self.r1.dtype} and {self.r2.dtype}"
            )

    def bias(
        self, q_positions: QPositions, k_positions: KPositions, *, dtype: Any = None
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        dtype = self.r1.dtype if dtype is None else float_dtype(dtype)
        out = kerple_bias(
            *checked_pair(q_positions, k_positions),
            r1=upcast(self.r1),
            r2=upcast(self.r2),
            form=self.form,
        )
        return out.astype(dtype, copy=False)

    def vjp(
        self, q_positions: QPositions, k_positions: KPositions
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the bias and the pullback from its gradient to those of ``r1`` and ``r2``.

        Example:
            >>> bias, pullback = KerpleBias(1, r1=[2.0], r2=[1.0]).vjp([1], [0])
            >>> pullback(np.ones_like(bias))["r2"].tolist()
            [-1.0]
        """
        bias = self.bias(q_positions, k_positions)
        stored = upcast(self.r1.copy()), upcast(self.r2.copy())
        used = kerple_limited(*stored, form=self.form)
        pair = checked_pair(q_positions, k_positions)
        distance = distances(*pair, dtype=compute_dtype(stored[0].dtype))[..., None, :, :]

        def pullback(dbias: Float[Any, "*batch heads q k"]) -> dict[str, np.ndarray]:
            d = gradient_like(dbias, bias).astype(distance.dtype, copy=False)
            slopes = _derivatives(distance, *used, form=self.form)
            # The bias does not depend on a stored parameter that was clamped.
            return {
                name: np.where(clamped == value, sum_over_pairs(d * slope), 0)
                for name, slope, clamped, value in zip(
                    ("r1", "r2"), slopes, used, stored, strict=True
                )
            }

        return bias, pullback

    def project(self) -> None:
        """Clamp the stored parameters to their limits. Call it after an optimizer step.

        Example:
            >>> layer = KerpleBias(2, rng=0)
            >>> for value in layer.parameters().values():
            ...     value[:] = -1.0  # a step of an optimizer that went too far
            >>> layer.project()
            >>> all((value > 0).all() for value in layer.parameters().values())
            True
        """
        self.r1[...], self.r2[...] = kerple_limited(self.r1, self.r2, form=self.form)

    def parameters(self) -> dict[str, np.ndarray]:
        return {"r1": self.r1, "r2": self.r2}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.r1.dtype.name)


def _derivatives(
    distance: np.ndarray, r1: np.ndarray, r2: np.ndarray, *, form: Form
) -> tuple[np.ndarray, np.ndarray]:
    """Return the derivatives of the bias with respect to ``r1`` and ``r2``."""
    r1, r2 = r1[:, None, None], r2[:, None, None]
    if form == "log":
        return -np.log1p(r2 * distance), -r1 * distance / (1 + r2 * distance)
    power = zero_safe_power(distance, r2)
    return -power, -r1 * power * np.log(np.where(distance > 0, distance, 1))
