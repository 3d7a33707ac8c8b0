"""Shaw's relative position representations for torch: a learned key per distance."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import not_negative, positive
from ..files.layer_configs import config_of
from ..positions.shaw import shaw_scores
from ._positions.arguments import Positions, check_vectors
from ._positions.bias import checked_positions, parameter
from ._tensors.buffers import repr_of
from ._tensors.dtypes import dtype_name, in_full_precision, upcast_together


class ShawScores(nn.Module):
    """Computes scores with a learned key vector per relative position (Shaw et al. 2018).

    Args:
        head_dim: Size of the last axis of queries and keys. Positive.
        max_left: Largest distance before the query with its own vector.
        max_right: Largest distance after the query with its own vector.
        weight: Initial table, not copied if possible. None draws it from a truncated
            normal distribution with standard deviation 0.02.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - weight: ``(max_left + max_right + 1, head_dim)``, farthest before the query first
        - q: ``(..., heads, q_length, head_dim)`` or ``(..., q_length, head_dim)``
        - k: as ``q``, with ``k_length``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or floats
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(..., q_length, k_length)``, divided by √head_dim, in the dtype of ``q``

    Scores are computed in float32 (float64 if any input is) and rounded once; autocast is
    disabled inside.

    Example:
        >>> layer = ShawScores(4, max_left=64, max_right=8)
        >>> q, k = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
        >>> layer.scores(q, k, range(3), range(5)).shape
        torch.Size([2, 3, 5])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        max_left: int,
        max_right: int,
        weight: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = positive("head_dim", head_dim)
        self.max_left = not_negative("max_left", max_left)
        self.max_right = not_negative("max_right", max_right)
        shape = (self.max_left + self.max_right + 1, self.head_dim)
        self.weight = parameter(weight, shape, device=device, dtype=dtype)
        if weight is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from its initial distribution."""
        nn.init.trunc_normal_(self.weight, std=0.02, a=-0.04, b=0.04)

    def scores(
        self,
        q: Float[Tensor, "*lead q_length head_dim"],
        k: Float[Tensor, "*lead k_length head_dim"],
        q_positions: Positions,
        k_positions: Positions,
    ) -> Float[Tensor, "*lead q_length k_length"]:
        """Return the scores of every query and key.

        Args:
            q: Queries, without positions.
            k: Keys, without positions.
            q_positions: Positions of the queries.
            k_positions: Positions of the keys.
        """
        for name, x in (("q", q), ("k", k)):
            check_vectors(x, self.head_dim, name=name)
        with in_full_precision(q.device):
            inputs = upcast_together(q, k, self.weight)
            out = shaw_scores(
                inputs[0],
                inputs[1],
                q_positions=checked_positions("q_positions", q_positions, q.device),
                k_positions=checked_positions("k_positions", k_positions, q.device),
                weight=inputs[2],
                max_left=self.max_left,
            )
        return out.to(q.dtype)

    def forward(
        self,
        q: Float[Tensor, "*lead q_length head_dim"],
        k: Float[Tensor, "*lead k_length head_dim"],
        q_positions: Positions,
        k_positions: Positions,
    ) -> Float[Tensor, "*lead q_length k_length"]:
        """Return the scores of every query and key; see :meth:`scores`."""
        return self.scores(q, k, q_positions, k_positions)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> ShawScores(4, max_left=64, max_right=8).config()
            {'head_dim': 4, 'max_left': 64, 'max_right': 8, 'dtype': 'float32'}
        """
        return config_of(self, dtype=dtype_name(self.weight.dtype))

    def extra_repr(self) -> str:
        return repr_of(self)
