"""T5's relative position bias for torch: one learned scalar per bucket and head."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import boolean, positive
from ..files.layer_configs import config_of
from ..positions.t5 import reach, t5_bias, t5_buckets
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias, parameter
from ._tensors.dtypes import dtype_name, upcast


class T5Bias(Bias):
    """Adds a learned bias per bucket of distances to the attention scores.

    Args:
        num_heads: Number of heads. Positive.
        num_buckets: Number of buckets: even and at least 4, or at least 2 if not
            ``bidirectional``.
        max_distance: Distance from which on all distances share a bucket. Greater than the
            number of distances with their own bucket: ``num_buckets / 4``, or ``num_buckets
            / 2`` if not ``bidirectional``.
        bidirectional: Whether keys after the query have their own buckets: True in T5's
            encoder, False in its decoder.
        weight: Initial table, not copied if possible. None draws it from a truncated
            normal distribution with standard deviation 0.02.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - weight: ``(num_buckets, num_heads)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or floats
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, or ``(batch, num_heads, q_length,
          k_length)`` if either side has a batch

    T5 does not scale its scores by ``head_dim ** -0.5`` and shares one table among all
    layers. If ``bidirectional``, the first row of the second half is unused, as in T5. The
    gradient of a half-precision table is summed in float32, even under autocast.

    Example:
        >>> layer = T5Bias(8)
        >>> full = layer.bias(range(200), range(200))
        >>> step = layer.bias([199], range(200))
        >>> step.shape, bool((step[:, 0] == full[:, -1]).all())
        (torch.Size([8, 1, 200]), True)
    """

    #: Bucket of each relative position, from the farthest before the query onwards.
    buckets: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        weight: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = positive("num_heads", num_heads)
        self.num_buckets = positive("num_buckets", num_buckets)
        self.max_distance, self.bidirectional = (
            max_distance,
            boolean("bidirectional", bidirectional),
        )
        shape = (self.num_buckets, self.num_heads)
        self.weight = parameter(weight, shape, device=device, dtype=dtype)
        self._build(self.weight.device)
        if weight is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from its initial distribution."""
        nn.init.trunc_normal_(self.weight, std=0.02, a=-0.04, b=0.04)

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        q_positions, k_positions = self._checked_pair(q_positions, k_positions)
        out = t5_bias(
            q_positions,
            k_positions,
            weight=upcast(self.weight),
            buckets=self._integers("buckets", self.weight.device),
            bidirectional=self.bidirectional,
        )
        return out.to(dtype or self.weight.dtype)

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=dtype_name(self.weight.dtype))

    def _tables(self) -> dict[str, np.ndarray]:
        buckets = t5_buckets(
            self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return {"buckets": buckets}

    def _pair_bias(self) -> PairBias:
        buckets = self._integers("buckets", self.weight.device)
        left, right = reach(buckets, bidirectional=self.bidirectional)
        # Tensors, not ints: an int that differs between two layers becomes a symbolic size
        # under torch.compile, which flex_attention does not support on the CPU.
        first, last = buckets.new_tensor(-left), buckets.new_tensor(right)
        weight = self.weight

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            relative = torch.clamp(k - q, first, last)
            if relative.is_floating_point():
                relative = torch.trunc(relative)
            return weight[buckets[(relative - first).to(torch.int64)], h]

        return pair_bias
