"""Transformer-XL's relative scores for torch."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import number, positive, same_dtype
from ..files.layer_configs import config_of
from ..positions.phases import phases
from ..positions.sinusoidal import encode
from ..positions.transformer_xl import (
    distance_keys,
    distance_range,
    xl_scores,
    xl_tables,
    xl_turns,
)
from ..positions.turns import float64_phases
from ._positions.arguments import check_vectors, in_reach
from ._positions.bias import parameter
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import dtype_name, in_full_precision, upcast_together


class TransformerXLScores(PrecomputedBuffers):
    """Computes attention scores with learned products of queries and distances.

    Transformer-XL and XLNet: ``((q + u)·k + (q + v)·W R) / √head_dim``, where ``R`` are
    sinusoids of the distance from the key to the query, negative for keys after it.

    Args:
        num_heads: Number of heads. Positive.
        head_dim: Number of features of queries and keys. Positive.
        embedding_dim: Width of the sinusoids (``d_model``); None is that of all heads,
            ``num_heads * head_dim``.
        base: Ratio of the slowest wavelength of the sinusoids to the fastest.
        max_distance: Larger distances are replaced by this one (``clamp_len``); None is no
            limit.
        weight: Projection ``W`` of the sinusoids to all heads (``r_net`` in Transformer-XL;
            ``r`` in XLNet is its transpose). Not copied if possible.
        u: Added to queries before they are multiplied with keys (``r_w_bias``).
        v: Added to queries before they are multiplied with ``W R`` (``r_r_bias``).
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        - weight: ``(num_heads * head_dim, embedding_dim)``
        - u, v: ``(num_heads, head_dim)``
        - q: ``(..., num_heads, q_length, head_dim)``
        - k: ``(..., num_heads, k_length, head_dim)``
        - output: ``(..., num_heads, q_length, k_length)``, in the dtype of ``q``

    The queries are the last of the keys, unless ``offset`` is given: with cached keys of
    earlier segments, or in a step of decoding, pass all keys and only the new queries.
    Padding and packed documents need only a mask, because distances do not change.

    Parameters that are not given are drawn from a truncated normal distribution with
    standard deviation 0.02. Scores are computed in float32 (float64 if any input is) and
    rounded once; autocast is disabled inside.

    Example:
        >>> layer = TransformerXLScores(2, 4)
        >>> layer.scores(torch.ones(3, 2, 5, 4), torch.ones(3, 2, 9, 4)).shape
        torch.Size([3, 2, 5, 9])
    """

    bits: Tensor
    rate_bits: Tensor
    turns: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        embedding_dim: int | None = None,
        base: float = 10_000.0,
        max_distance: int | None = None,
        weight: Any = None,
        u: Any = None,
        v: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = positive("num_heads", num_heads)
        self.head_dim = positive("head_dim", head_dim)
        width = self.num_heads * self.head_dim
        self.embedding_dim = (
            width if embedding_dim is None else positive("embedding_dim", embedding_dim)
        )
        self.base = number("base", base)
        self.max_distance = (
            None if max_distance is None else positive("max_distance", max_distance)
        )
        shape = (width, self.embedding_dim)
        self.weight = parameter(weight, shape, device=device, dtype=dtype)
        shape, options = (self.num_heads, self.head_dim), {"device": device, "dtype": dtype}
        self.u = parameter(u, shape, **options, name="u")
        self.v = parameter(v, shape, **options, name="v")
        own = (self.weight, self.u, self.v)
        same_dtype("weight, u and v", *(dtype_name(value.dtype) for value in own))
        self._build(self.weight.device)
        for given, own in ((weight, self.weight), (u, self.u), (v, self.v)):
            if given is None:
                _draw(own)

    def reset_parameters(self) -> None:
        """Draw the parameters from their initial distribution."""
        for own in (self.weight, self.u, self.v):
            _draw(own)

    def scores(
        self,
        q: Float[Tensor, "*lead num_heads q_length head_dim"],
        k: Float[Tensor, "*lead num_heads k_length head_dim"],
        *,
        offset: int | None = None,
    ) -> Float[Tensor, "*lead num_heads q_length k_length"]:
        """Return the scores of every query and key.

        Args:
            q: Queries, without positions.
            k: Keys, without positions, those of earlier segments first.
            offset: Number of keys before the first query; None is ``k_length - q_length``.
        """
        for name, x in (("q", q), ("k", k)):
            self._check(x, name)
        with in_full_precision(q.device):
            own = upcast_together(q, k, self.weight, self.u, self.v)
            encodings = self._encodings(q, k, offset, own[0].dtype)
            keys = distance_keys(encodings, own[2], self.num_heads)
            out = xl_scores(own[0], own[1], keys, u=own[3], v=own[4])
        return out.to(q.dtype)

    def forward(
        self,
        q: Float[Tensor, "*lead num_heads q_length head_dim"],
        k: Float[Tensor, "*lead num_heads k_length head_dim"],
        *,
        offset: int | None = None,
    ) -> Float[Tensor, "*lead num_heads q_length k_length"]:
        """Return the scores of every query and key; see :meth:`scores`."""
        return self.scores(q, k, offset=offset)

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=dtype_name(self.weight.dtype))

    def _tables(self) -> dict[str, np.ndarray]:
        tables, rates = xl_tables(self.embedding_dim, base=self.base)
        turns = xl_turns(self.embedding_dim, base=self.base)
        return {"bits": tables, "rate_bits": rates, "turns": turns}

    def _encodings(
        self, q: Tensor, k: Tensor, offset: int | None, dtype: torch.dtype
    ) -> Tensor:
        largest, count = distance_range(q.shape[-2], k.shape[-2], offset)
        distances = largest - torch.arange(count, device=q.device)
        if self.max_distance is not None:
            distances = distances.clamp(-self.max_distance, self.max_distance)
        distances = in_reach(distances, name="distances")
        if dtype is torch.float64:
            both = float64_phases(distances, self._turns(q.device))
        else:
            tables = self._floats("bits", q.device)
            rates = self._floats("rate_bits", q.device)
            both = phases(distances, tables, rates)
        return encode(*both, embedding_dim=self.embedding_dim, layout="half")

    def _check(self, x: Tensor, name: str) -> None:
        check_vectors(x, self.head_dim, axes=(f"{self.num_heads}", "length"), name=name)
        if x.shape[-3] != self.num_heads:
            raise ValueError(
                f"{name} must have shape (..., {self.num_heads}, length, {self.head_dim}), "
                f"got {tuple(x.shape)}"
            )


def _draw(values: Tensor) -> None:
    nn.init.trunc_normal_(values, std=0.02, a=-0.04, b=0.04)
