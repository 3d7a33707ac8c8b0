"""KERPLE for torch: a learned penalty that grows with distance."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import one_of, positive
from ..positions.kerple import (
    FORMS,
    LEAST,
    Form,
    kerple_bias,
    kerple_limited,
    zero_safe_power,
)
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias, parameter
from ._tensors.dtypes import dtype_name, upcast


class KerpleBias(Bias):
    """Takes a learned function of distance off the score of every query and key.

    Args:
        num_heads: Pairs of numbers, one for each head. Positive.
        form: ``"log"``, ``-r1 * ln(1 + r2 * d)``, or ``"power"``, ``-r1 * d ** r2``.
        r1: The numbers to use, not copied if they fit; drawn as published if None.
        r2: Likewise.
        device: Where the numbers are.
        dtype: What they are kept in.

    Shape:
        - r1, r2: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    Numbers below 0.01, and powers above 2, are used as 0.01 and 2 and then get no gradient;
    call :meth:`project` after an optimizer step. Autocast changes nothing: distances and
    logarithms are float32.

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
            found = parameter(value, (num_heads,), device=device, dtype=dtype, name=name)
            setattr(self, name, found)
            if value is None:
                self._draw(name)
        if self.r1.dtype != self.r2.dtype:
            raise ValueError(
                "r1 and r2 must have one dtype, "
                f"got {dtype_name(self.r1.dtype)} and {dtype_name(self.r2.dtype)}"
            )

    def reset_parameters(self) -> None:
        """Draw both numbers of every head anew."""
        self._draw("r1")
        self._draw("r2")

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, the parameters' if None. Worked on in float32, or in
                float64 for float64 parameters, and rounded once.
        """
        out = kerple_bias(
            *self._pair(q_positions, k_positions),
            r1=upcast(self.r1),
            r2=upcast(self.r2),
            form=self.form,
        )
        return out.to(dtype or self.r1.dtype)

    @torch.no_grad()
    def project(self) -> None:
        """Bring stored numbers back within their limits, after an optimizer step."""
        r1, r2 = kerple_limited(self.r1, self.r2, form=self.form)
        self.r1.copy_(r1)
        self.r2.copy_(r2)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "form": self.form,
            "dtype": dtype_name(self.r1.dtype),
        }

    def _draw(self, name: str) -> None:
        # The factor of the logarithm and the power reach 2, as published.
        doubled = (name == "r1") == (self.form == "log")
        nn.init.uniform_(self.get_parameter(name), LEAST, 2.0 if doubled else 1.0)

    def _pair_bias(self) -> PairBias:
        form, each_r1, each_r2 = self.form, self.r1, self.r2

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            r1, r2 = upcast(each_r1[h]), upcast(each_r2[h])
            r1, r2 = kerple_limited(r1, r2, form=form)
            distance = (k - q).abs().to(r1.dtype)
            if form == "log":
                return -r1 * torch.log1p(r2 * distance)
            return -r1 * zero_safe_power(distance, r2)

        return pair_bias
