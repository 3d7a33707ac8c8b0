"""Contextual positions (CoPE) for torch."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import positive
from ..files.layer_configs import config_of
from ..positions.cope import check_cope_shapes, check_max_positions, cope_bias
from ._positions.bias import parameter
from ._tensors.buffers import repr_of
from ._tensors.dtypes import dtype_name, in_full_precision, upcast_together
from ._tensors.errors import check_tensor


class CopeBias(nn.Module):
    """Computes a bias from learned vectors of contextual positions (CoPE).

    The position of a key is the sum of ``sigmoid(score)`` over the keys from it up to the
    query. Add the bias to the same scores, before the softmax.

    Args:
        head_dim: Number of features of queries. Positive.
        max_positions: Number of whole positions with a vector of their own, 0, 1, …; sums
            beyond the last are replaced by it. At least 2.
        weight: Table to use, not copied if possible. None is zeros, as published.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - weight: ``(max_positions, head_dim)``, shared by all heads
        - q: ``(..., q_length, head_dim)``
        - scores: ``(..., q_length, k_length)``: the products of queries and keys, divided
          by √head_dim, and ``-inf`` for keys that a query must not see, such as later ones
        - output: as ``scores``, in the dtype of ``scores``

    A step of decoding needs the scores of its own queries with all keys, and no state.

    Computed in float32 (float64 if any input is) and rounded once; autocast is disabled
    inside.

    Example:
        >>> table = torch.tensor([[0.0, 0], [1, 0], [2, 0], [3, 0]])
        >>> layer = CopeBias(2, max_positions=4, weight=table)
        >>> layer.bias(torch.ones(1, 2), torch.tensor([[0.0, 0.0, -torch.inf]])).tolist()
        [[1.0, 0.5, 0.0]]
    """

    def __init__(
        self,
        head_dim: int,
        *,
        max_positions: int,
        weight: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = positive("head_dim", head_dim)
        self.max_positions = check_max_positions(max_positions)
        shape = (self.max_positions, self.head_dim)
        self.weight = parameter(weight, shape, device=device, dtype=dtype)
        if weight is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the table to zeros."""
        nn.init.zeros_(self.weight)

    def bias(
        self, q: Float[Tensor, "*lead head_dim"], scores: Float[Tensor, "*lead k_length"]
    ) -> Float[Tensor, "*lead k_length"]:
        """Return the bias of every query and key, to be added to ``scores``.

        Args:
            q: Queries.
            scores: Scores of the queries, masked.
        """
        for name, x in (("q", q), ("scores", scores)):
            check_tensor(x, name=name)
            if not x.is_floating_point():
                raise TypeError(f"{name} must be real, got {dtype_name(x.dtype)}")
        check_cope_shapes(tuple(q.shape), tuple(scores.shape), self.head_dim)
        with in_full_precision(q.device):
            own = upcast_together(q, scores, self.weight)
            return cope_bias(own[0], own[1], weight=own[2]).to(scores.dtype)

    def forward(
        self, q: Float[Tensor, "*lead head_dim"], scores: Float[Tensor, "*lead k_length"]
    ) -> Float[Tensor, "*lead k_length"]:
        """Return the bias of every query and key; see :meth:`bias`."""
        return self.bias(q, scores)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> CopeBias(4, max_positions=8).config()
            {'head_dim': 4, 'max_positions': 8, 'dtype': 'float32'}
        """
        return config_of(self, dtype=dtype_name(self.weight.dtype))

    def extra_repr(self) -> str:
        return repr_of(self)
