"""FIRE for torch: a small network from normalized distance to attention bias."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import number, positive, positive_number
from ..files.layer_configs import config_of
from ..positions.fire import fire_bias, normalized_distances
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias, parameter
from ._tensors.dtypes import compute_dtype, dtype_name, in_full_precision, upcast

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
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        - c, multiplier: ``()``
        - hidden_weight, hidden_bias: ``(width,)``
        - head_weight: ``(num_heads, width)``; head_bias: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or floats
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, or ``(batch, num_heads, q_length,
          k_length)`` if either side has a batch

    Count positions from the start of the text, because the bias depends on absolute query
    positions beyond ``threshold``. The network runs in float32; autocast is disabled
    inside.

    Example:
        >>> layer = FireBias(8)
        >>> full = layer.bias(range(20), range(20))
        >>> torch.allclose(layer.bias([19], range(20))[:, 0], full[:, -1])
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
        options = {"device": device, "dtype": dtype}
        self.c = parameter(None, (), **options)
        self.multiplier = parameter(None, (), **options)
        self.hidden_weight = parameter(None, (self.width,), **options)
        self.hidden_bias = parameter(None, (self.width,), **options)
        self.head_weight = parameter(None, (self.num_heads, self.width), **options)
        self.head_bias = parameter(None, (self.num_heads,), **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the network like ``nn.Linear`` and reset ``c`` and ``multiplier``."""
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
        positions = self._checked_pair(q_positions, k_positions)
        with in_full_precision(self.c.device):
            c, threshold = upcast(self.c), upcast(self.multiplier) * self.threshold
            share = normalized_distances(*positions, c=c, threshold=threshold, eps=self.eps)
            out = fire_bias(share, **self._network())
        return out.to(dtype or self.c.dtype)

    def config(self) -> dict[str, Any]:
        return config_of(self, c=self.initial_c, dtype=dtype_name(self.c.dtype))

    def _network(self) -> dict[str, Tensor]:
        return {name: upcast(getattr(self, name)) for name in NETWORK}

    def _pair_bias(self) -> PairBias:
        c, multiplier, width = self.c, self.multiplier, self.width
        # Tensors, not floats, for the reason given in T5Bias._pair_bias.
        options: dict[str, Any] = {"dtype": compute_dtype(c.dtype), "device": c.device}
        threshold = torch.tensor(self.threshold, **options)
        eps = torch.tensor(self.eps, **options)
        hidden_weight, hidden_bias, head_weight, head_bias = (
            getattr(self, name) for name in NETWORK
        )

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            rate, minimum = upcast(c).abs(), (upcast(multiplier) * threshold).abs()
            distance, q = (k - q).abs().to(rate.dtype), q.to(rate.dtype)
            scale = torch.log1p(rate * torch.where(q < minimum, minimum, q)) + eps
            share = torch.log1p(rate * distance) / scale
            out = upcast(head_bias[h])
            # A loop over hidden units: a score_mod cannot reduce over an axis.
            for unit in range(width):
                hidden = share * hidden_weight[unit] + hidden_bias[unit]
                out = out + torch.where(hidden <= 0, 0.0, hidden) * head_weight[h, unit]
            return out

        return pair_bias
