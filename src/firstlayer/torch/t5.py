"""T5's relative bias for torch: a learned number for each bucket of distances."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import positive
from ..positions.t5 import reach, t5_bias, t5_buckets
from ._positions.arguments import Positions
from ._positions.bias import Bias, PairBias, parameter
from ._tensors.dtypes import dtype_name, upcast


class T5Bias(Bias):
    """Adds a learned number to the score of every query and key, by their distance.

    Args:
        num_heads: Numbers for each bucket. Positive.
        num_buckets: Rows of the table: even and at least 4, or at least 2 if not
            ``bidirectional``.
        max_distance: From here on all distances share a bucket. Greater than the number of
            distances with a bucket of their own: ``num_buckets`` by 4, or by 2 if not
            ``bidirectional``.
        bidirectional: Whether keys after the query are told apart: True in T5's encoder,
            False in its decoder.
        weight: The table to use, not copied if it fits; drawn with standard deviation 0.02
            if None.
        device: Where the table is.
        dtype: What the table is kept in.

    Shape:
        - weight: ``(num_buckets, num_heads)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    T5 does not divide its scores by the root of head_dim, and one table serves all layers.
    If ``bidirectional``, the first row of the second half is never used, as in T5. Autocast
    changes nothing, and the table's gradient is summed in float32, whatever its dtype.

    Example:
        >>> layer = T5Bias(8)
        >>> whole = layer.bias(range(200), range(200))
        >>> step = layer.bias([199], range(200))
        >>> step.shape, bool((step[:, 0] == whole[:, -1]).all())
        (torch.Size([8, 1, 200]), True)
    """

    #: The bucket of each distance, from the farthest before the query onwards.
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
        self.max_distance, self.bidirectional = max_distance, bool(bidirectional)
        shape = (self.num_buckets, self.num_heads)
        self.weight = parameter(weight, shape, device=device, dtype=dtype)
        self._build(self.weight.device)
        if weight is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.trunc_normal_(self.weight, std=0.02, a=-0.04, b=0.04)

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
            dtype: Of the result, the table's if None.
        """
        q_positions, k_positions = self._pair(q_positions, k_positions)
        out = t5_bias(
            q_positions,
            k_positions,
            weight=upcast(self.weight),
            buckets=self._integers("buckets", self.weight.device),
            bidirectional=self.bidirectional,
        )
        return out.to(dtype or self.weight.dtype)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "dtype": dtype_name(self.weight.dtype),
        }

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
        # As tensors: a number that differs between two layers would become a symbol, which
        # flex_attention on the CPU does not take.
        first, last = buckets.new_tensor(-left), buckets.new_tensor(right)
        weight = self.weight

        def pair_bias(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            near = torch.clamp(k - q, first, last)
            if near.is_floating_point():
                near = torch.trunc(near)
            return weight[buckets[(near - first).to(torch.int64)], h]

        return pair_bias
