"""FIRE for torch: a small network's bias for the share of the way back to a key."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import number, positive, positive_number
from ..positions.fire import fire_bias, fire_share
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias, parameter
from ._tensors.dtypes import compute_dtype, dtype_name, in_full_precision, upcast

NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")


class FireBias(Bias):
    """Adds a learned function of relative distance to the score of every query and key.

    Args:
        num_heads: Outputs of the network. Positive.
        width: Hidden units of the network. Positive.
        c: What the parameter ``c`` begins with: how strongly far distances are drawn
            together.
        threshold: Query positions below this, times the parameter ``multiplier``, count as
            this. Positive.
        eps: Keeps a denominator from zero. Positive.
        device: Where the parameters are.
        dtype: What they are kept in.

    Shape:
        - c, multiplier: ``()``
        - hidden_weight, hidden_bias: ``(width,)``
        - head_weight: ``(num_heads, width)``; head_bias: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    Positions are counted from the start of the text: they matter beyond ``threshold``. The
    network works in float32, also under autocast, which is switched off inside.

    Example:
        >>> layer = FireBias(8)
        >>> whole = layer.bias(range(20), range(20))
        >>> torch.allclose(layer.bias([19], range(20))[:, 0], whole[:, -1])
        True
    """

    def __init__(
        self,
        num_heads: int,
        *,
        width: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        eps: float = 1e-6,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = positive("num_heads", num_heads)
        self.width = positive("width", width)
        self.threshold = positive_number("threshold", threshold)
        self.eps, self.initial_c = positive_number("eps", eps), number("c", c)
        made = {"device": device, "dtype": dtype}
        self.c, self.multiplier = parameter(None, (), **made), parameter(None, (), **made)
        self.hidden_weight = parameter(None, (self.width,), **made)
        self.hidden_bias = parameter(None, (self.width,), **made)
        self.head_weight = parameter(None, (self.num_heads, self.width), **made)
        self.head_bias = parameter(None, (self.num_heads,), **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the network as torch draws its linear layers; the rest as it began."""
        nn.init.constant_(self.c, self.initial_c)
        nn.init.ones_(self.multiplier)
        for name, limit in zip(NETWORK, (1.0, 1.0, *[self.width**-0.5] * 2), strict=True):
            nn.init.uniform_(getattr(self, name), -limit, limit)

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
        pair = self._pair(q_positions, k_positions)
        with in_full_precision(self.c.device):
            c, threshold = upcast(self.c), upcast(self.multiplier) * self.threshold
            share = fire_share(*pair, c=c, threshold=threshold, eps=self.eps)
            out = fire_bias(share, **self._network())
        return out.to(dtype or self.c.dtype)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "width": self.width,
            "c": self.initial_c,
            "threshold": self.threshold,
            "eps": self.eps,
            "dtype": dtype_name(self.c.dtype),
        }

    def _network(self) -> dict[str, Tensor]:
        return {name: upcast(getattr(self, name)) for name in NETWORK}

    def _pair_bias(self) -> PairBias:
        c, multiplier, width = self.c, self.multiplier, self.width
        # As tensors: see T5Bias.
        kind = compute_dtype(c.dtype)
        threshold = torch.tensor(self.threshold, dtype=kind, device=c.device)
        eps = torch.tensor(self.eps, dtype=kind, device=c.device)
        hidden_weight, hidden_bias, head_weight, head_bias = (
            getattr(self, name) for name in NETWORK
        )

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            rate, least = upcast(c).abs(), (upcast(multiplier) * threshold).abs()
            distance, own = (k - q).abs().to(rate.dtype), q.to(rate.dtype)
            whole = torch.log1p(rate * torch.where(own < least, least, own)) + eps
            share = torch.log1p(rate * distance) / whole
            out = upcast(head_bias[h])
            # One unit after the other: there is no sum over an axis inside a score_mod.
            for unit in range(width):
                sums = share * hidden_weight[unit] + hidden_bias[unit]
                out = out + torch.where(sums <= 0, 0.0, sums) * head_weight[h, unit]
            return out

        return pair_bias
