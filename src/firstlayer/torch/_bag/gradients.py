"""The gradients of pooled bags: by kernels, or in operators that have gradients again."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...embeddings.bag import Mode, divide_or_zero, table_gradient, weights_gradient
from ...embeddings.ragged import Bags, bag_indices
from .._table.lookup import Table
from .._tensors.buffers import compute_dtype, upcast
from .._tensors.memory import array_of, array_of_table, fusable, tensor_of, threads_of_torch


@dataclass(frozen=True, eq=False)
class Gradients:
    """What the gradients of pooled bags depend on, beside those of the result."""

    bags: Bags
    mode: Mode
    winners: np.ndarray | None
    table: Table

    def of(
        self, dy: Tensor, weights: Tensor | None, *, table: Tensor | None, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the table and of the weights.

        Args:
            dy: The gradient of the result.
            weights: ``per_sample_weights``, if there are any.
            table: Where the rows were, if the weights shall get a gradient.
            wanted: Whether the table shall get one.
        """
        by_kernels = fusable(dy) and not torch.is_grad_enabled()
        make = self._by_kernels if by_kernels else self._in_operators
        return make(dy, weights, table=table, wanted=wanted)

    def _by_kernels(
        self, dy: Tensor, weights: Tensor | None, *, table: Tensor | None, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        d, d_table, d_weights = array_of(upcast(dy).contiguous()), None, None
        how: Any = {"mode": self.mode, "winners": self.winners}
        freq = self.table.scale_grad_by_freq
        with threads_of_torch():
            if wanted:
                rows = table_gradient(self.bags, d, scale_grad_by_freq=freq, **how)
                d_table = self.table.filled(rows)
            if table is not None and weights is not None:
                flat = weights_gradient(array_of_table(table), self.bags, dy=d, **how)
                d_weights = self._put_back(tensor_of(flat), weights)
        return d_table, d_weights

    def _in_operators(
        self, dy: Tensor, weights: Tensor | None, *, table: Tensor | None, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        ids, d_table, d_weights = tensor_of(self.bags.ids), None, None
        steps = np.arange(self.bags.ids.size)
        numbers = tensor_of(bag_indices(self.bags.bounds, steps))
        factors, d = self._factors(weights), upcast(dy)
        by = self._divisors(factors, numbers, like=d)
        d = divide_or_zero(d, by[:, None])
        # The gradient of each term `factor · row` of the sums.
        terms = d[numbers] if self.winners is None else self._won(d)
        if wanted:
            rows = terms if factors is None else terms * factors[:, None]
            d_table = self.table.gradient(ids, rows)
        if table is not None and weights is not None and factors is not None:
            dots = (upcast(table[ids]) * terms).sum(-1)
            if self.mode == "mean":
                # Of Σ w x / Σ w: every weight also makes the divisor larger.
                shares = torch.zeros_like(by).index_add(0, numbers, factors * dots)
                dots = dots - divide_or_zero(shares, by)[numbers]
            d_weights = self._put_back(dots, weights)
        return d_table, d_weights

    def _factors(self, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        flat, places = (
            weights.reshape(-1).to(compute_dtype(self.table.dtype)),
            self.bags.kept,
        )
        return flat if places is None else flat[tensor_of(places)]

    def _divisors(self, factors: Tensor | None, numbers: Tensor, *, like: Tensor) -> Tensor:
        size = len(self.bags.bounds) - 1
        if self.mode != "mean":
            return like.new_ones(size)
        counts = like.new_ones(len(numbers)) if factors is None else factors
        return like.new_zeros(size).index_add(0, numbers, counts)

    def _won(self, d: Tensor) -> Tensor:
        full = np.diff(self.bags.bounds) > 0
        winners = tensor_of(np.asarray(self.winners)[full])
        zeros = d.new_zeros(self.bags.ids.size, d.shape[1])
        return zeros.scatter(0, winners, d[tensor_of(full)])

    def _put_back(self, flat: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of what counts as that of all weights."""
        flat, places = flat.to(weights.dtype), self.bags.kept
        if places is not None:
            zeros = flat.new_zeros(weights.numel())
            flat = zeros.index_copy(0, tensor_of(places), flat)
        return flat.reshape(weights.shape)
