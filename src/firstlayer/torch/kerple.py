"""KERPLE for torch: a learned attention bias that decreases with distance."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import one_of, positive
from ..files.layer_configs import config_of
from ..positions.kerple import (
    FORMS,
    MINIMUM,
    Form,
    kerple_bias,
    kerple_limited,
    zero_safe_power,
)
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias, parameter
from ._tensors.dtypes import dtype_name, upcast


class KerpleBias(Bias):
    """Subtracts a learned function of distance from attention scores (KERPLE).

    Args:
        num_heads: Number of heads. Positive.
        form: ``"log"``, ``-r1 * ln(1 + r2 * d)``, or ``"power"``, ``-r1 * d ** r2``.
        r1: Factor of each head, not copied if possible; None draws it as published.
        r2: Rate of the logarithm, or power, of each head; None draws it as published.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        - r1, r2: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or floats
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, or ``(batch, num_heads, q_length,
          k_length)`` if either side has a batch

    Parameters below 0.01 and powers above 2 are clamped when they are used, and then get no
    gradient. Call :meth:`project` after an optimizer step. The bias is computed in float32,
    even under autocast.

    Example:
        >>> layer = KerpleBias(1, form="power", r1=[3.0], r2=[2.0])
        >>> layer.bias([2], [0, 1]).tolist()
        [[[-12.0, -3.0]]]
    """

    r1: nn.Parameter
    r2: nn.Parameter

    def __init__(
        self,
        num_heads: int,
        *,
        form: Form = "log",
        r1: Any = None,
        r2: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        one_of("form", form, FORMS)
        self.form: Form = form
        self.num_heads = positive("num_heads", num_heads)
        for name, value in (("r1", r1), ("r2", r2)):
            values = parameter(value, (num_heads,), device=device, dtype=dtype, name=name)
            setattr(self, name, values)
            if value is None:
                self._draw(name)
        if self.r1.dtype != self.r2.dtype:
            raise ValueError(
                "r1 and r2 must have one dtype, "
                f"got {dtype_name(self.r1.dtype)} and {dtype_name(self.r2.dtype)}"
            )

    def reset_parameters(self) -> None:
        """Draw ``r1`` and ``r2`` from their initial distributions."""
        self._draw("r1")
        self._draw("r2")

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        out = kerple_bias(
            *self._checked_pair(q_positions, k_positions),
            r1=upcast(self.r1),
            r2=upcast(self.r2),
            form=self.form,
        )
        return out.to(dtype or self.r1.dtype)

    @torch.no_grad()
    def project(self) -> None:
        """Clamp the stored parameters to their limits. Call it after an optimizer step.

        Example:
            >>> layer = KerpleBias(1, form="power", r1=[-3.0], r2=[2.0])
            >>> layer.project()
            >>> round(float(layer.r1.detach()), 4)  # must be positive
            0.01
        """
        r1, r2 = kerple_limited(self.r1, self.r2, form=self.form)
        self.r1.copy_(r1)
        self.r2.copy_(r2)

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=dtype_name(self.r1.dtype))

    def _draw(self, name: str) -> None:
        # As published: r1 of "log" and r2 of "power" are drawn up to 2, the others up to 1.
        doubled = (name == "r1") == (self.form == "log")
        nn.init.uniform_(self.get_parameter(name), MINIMUM, 2.0 if doubled else 1.0)

    def _pair_bias(self) -> PairBias:
        form, all_r1, all_r2 = self.form, self.r1, self.r2

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            r1, r2 = upcast(all_r1[h]), upcast(all_r2[h])
            r1, r2 = kerple_limited(r1, r2, form=form)
            distance = (k - q).abs().to(r1.dtype)
            if form == "log":
                return -r1 * torch.log1p(r2 * distance)
            return -r1 * zero_safe_power(distance, r2)

        return pair_bias
