"""Shaw's relative keys for torch: queries are also compared with a vector by distance."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import not_negative, positive
from ..positions.shaw import shaw_scores
from ._positions.arguments import Positions, check_vectors
from ._positions.bias import checked, parameter
from ._tensors.buffers import repr_of
from ._tensors.dtypes import dtype_name, in_full_precision


class ShawScores(nn.Module):
    """Scores queries and keys, with a learned vector for the distance between them.

    Args:
        head_dim: Size of the last axis of queries and keys. Positive.
        max_left: The farthest distance before the query with a vector of its own.
        max_right: The farthest distance after the query with a vector of its own.
        weight: The table to use, not copied if it fits; drawn with standard deviation 0.02
            if None.
        device: Where the table is.
        dtype: What the table is kept in.

    Shape:
        - weight: ``(max_left + max_right + 1, head_dim)``, farthest before first
        - q: ``(..., heads, q_length, head_dim)`` or ``(..., q_length, head_dim)``
        - k: as ``q``, of ``k_length``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(..., q_length, k_length)``, divided by √head_dim, in the dtype of ``q``

    Products are made in float32 (float64 if any side is), also under autocast, which is
    switched off inside, and rounded once.

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
        """Draw the table anew."""
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
            q: The queries, without positions.
            k: The keys, without positions.
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
        """
        for name, x in (("q", q), ("k", k)):
            check_vectors(x, self.head_dim, name=name)
        with in_full_precision(q.device):
            wide_q, wide_k, weight = _widened_together(q, k, self.weight)
            out = shaw_scores(
                wide_q,
                wide_k,
                q_positions=checked("q_positions", q_positions, q.device),
                k_positions=checked("k_positions", k_positions, q.device),
                weight=weight,
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
        """Return the arguments that build a layer like this one."""
        return {
            "head_dim": self.head_dim,
            "max_left": self.max_left,
            "max_right": self.max_right,
            "dtype": dtype_name(self.weight.dtype),
        }

    def extra_repr(self) -> str:
        return repr_of(self)


def _widened_together(*tensors: Tensor) -> list[Tensor]:
    double = any(x.dtype == torch.float64 for x in tensors)
    return [x.to(torch.float64 if double else torch.float32) for x in tensors]
