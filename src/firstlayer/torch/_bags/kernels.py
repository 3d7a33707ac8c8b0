"""Bags pooled by the kernels, with gradients of every order."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...embeddings.bag import (
    Mode,
    divide_or_zero,
    pool_ragged,
    table_gradient,
    weights_gradient,
)
from ...embeddings.ragged import Bags, bag_indices
from ...embeddings.row_gradient import GradientMemory
from .._table.lookup import LookupOptions
from .._tensors.dtypes import compute_dtype, upcast
from .._tensors.memory import (
    array_of,
    array_of_table,
    kernel_eligible,
    tensor_of,
    threads_of_torch,
)
from .._tensors.row_parameter import without_catch_up
from .options import BagOptions


@dataclass(frozen=True, eq=False)
class PooledRows:
    """Rows that bags pool: ``bags.ids`` are rows of ``array``.

    The array is a table, or has the row of each flat id of a call.
    """

    array: np.ndarray
    bags: Bags

    @staticmethod
    def of(weight: Tensor, bags: Bags, gathered: Tensor | None) -> "PooledRows":
        if gathered is None:
            return PooledRows(array_of_table(weight), bags)
        places = np.arange(len(gathered)) if bags.kept is None else bags.kept
        return PooledRows(array_of(gathered), replace(bags, ids=places))

    def pool(self, mode: Mode) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a row for each bag, and the winners of ``"max"``."""
        with threads_of_torch():
            return pool_ragged(self.array, self.bags, mode=mode)


def pool_by_kernels(
    weight: Tensor,
    weights: Tensor | None,
    *,
    ids: Tensor,
    bags: Bags,
    options: BagOptions,
    gathered: Tensor | None,
) -> Tensor:
    trained = weight.requires_grad or (weights is not None and weights.requires_grad)
    if trained and torch.is_grad_enabled():
        return _KernelBags.apply(  # pyright: ignore
            weight, weights, ids, bags, options, gathered
        )
    return tensor_of(PooledRows.of(weight, bags, gathered).pool(options.mode)[0])


class _KernelBags(torch.autograd.Function):
    """Bags pooled by the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        weights: Tensor | None,
        ids: Tensor,
        bags: Bags,
        options: BagOptions,
        gathered: Tensor | None,
    ) -> Tensor:
        # Saving the ids detects writes to them: `bags` may share their memory.
        table = None
        if ctx.needs_input_grad[1]:
            table = weight if gathered is None else gathered
        ctx.save_for_backward(weights, table, ids)
        rows = PooledRows.of(weight, bags, gathered)
        y, winners = rows.pool(options.mode)
        ctx.bags = PooledBags(
            bags,
            options.mode,
            winners,
            options.lookup_options(weight),
            rows.bags.ids,
            options.memory,
        )
        return tensor_of(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, table, _ = ctx.saved_tensors
        trained = ctx.needs_input_grad[0]
        # The rows read here were read, and up to date, in the forward.
        with without_catch_up():
            gradients = ctx.bags.gradients(grads[0], weights, table=table, trained=trained)
        return *gradients, None, None, None, None


@dataclass(frozen=True, eq=False)
class PooledBags:
    """Bags after the forward. ``winners`` are the indices in ``bags.ids`` of maxima.

    ``places`` are the rows that were pooled of what was read, the table or gathered rows.
    """

    bags: Bags
    mode: Mode
    winners: np.ndarray | None
    options: LookupOptions
    places: np.ndarray
    memory: GradientMemory | None = None

    def gradients(
        self, dy: Tensor, weights: Tensor | None, *, table: Tensor | None, trained: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the table and of the weights.

        Args:
            dy: Gradient of the result.
            weights: ``per_sample_weights`` or None.
            table: What was read if the weights need a gradient, else None.
            trained: Whether the table needs a gradient.
        """
        by_kernels = kernel_eligible(dy) and not torch.is_grad_enabled()
        run = self._by_kernels if by_kernels else self._by_operators
        return run(dy, weights, table=table, trained=trained)

    def _by_kernels(
        self, dy: Tensor, weights: Tensor | None, *, table: Tensor | None, trained: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        d, d_table, d_weights = array_of(upcast(dy).contiguous()), None, None
        with threads_of_torch():
            if trained:
                rows = table_gradient(
                    self.bags,
                    d,
                    mode=self.mode,
                    winners=self.winners,
                    scale_grad_by_freq=self.options.scale_grad_by_freq,
                    memory=self.memory,
                )
                d_table = self.options.to_tensor(rows)
            if table is not None and weights is not None:
                flat = weights_gradient(
                    array_of_table(table),
                    replace(self.bags, ids=self.places),
                    dy=d,
                    mode=self.mode,
                    winners=self.winners,
                )
                d_weights = self._like_weights(tensor_of(flat), weights)
        return d_table, d_weights

    def _by_operators(
        self, dy: Tensor, weights: Tensor | None, *, table: Tensor | None, trained: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        ids, d_table, d_weights = tensor_of(self.bags.ids), None, None
        steps = np.arange(self.bags.ids.size)
        numbers = tensor_of(bag_indices(self.bags.bounds, steps))
        factors, d = self._factors(weights), upcast(dy)
        divisors = self._divisors(factors, numbers, like=d)
        d = divide_or_zero(d, divisors[:, None])
        # The gradient of each term `factor · row` of the sums.
        terms = d[numbers] if self.winners is None else self._winner_terms(d)
        if trained:
            rows = terms if factors is None else terms * factors[:, None]
            d_table = self.options.gradient(ids, rows)
        if table is not None and weights is not None and factors is not None:
            dots = (upcast(table[tensor_of(self.places)]) * terms).sum(-1)
            if self.mode == "mean":
                # Each weight of Σ w x / Σ w is also in the divisor.
                shares = torch.zeros_like(divisors).index_add(0, numbers, factors * dots)
                shares = divide_or_zero(shares, divisors)
                if self.bags.is_mean is not None:
                    shares = shares.where(tensor_of(self.bags.is_mean), 0.0)
                dots = dots - shares[numbers]
            d_weights = self._like_weights(dots, weights)
        return d_table, d_weights

    def _factors(self, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        flat = weights.reshape(-1).to(compute_dtype(self.options.dtype))
        kept = self.bags.kept
        return flat if kept is None else flat[tensor_of(kept)]

    def _divisors(self, factors: Tensor | None, numbers: Tensor, *, like: Tensor) -> Tensor:
        size = len(self.bags.bounds) - 1
        if self.mode != "mean":
            return like.new_ones(size)
        counts = like.new_ones(len(numbers)) if factors is None else factors
        totals = like.new_zeros(size).index_add(0, numbers, counts)
        if self.bags.is_mean is None:
            return totals
        return totals.where(tensor_of(self.bags.is_mean), 1.0)

    def _winner_terms(self, d: Tensor) -> Tensor:
        full = np.diff(self.bags.bounds) > 0
        winners = tensor_of(np.asarray(self.winners)[full])
        zeros = d.new_zeros(self.bags.ids.size, d.shape[1])
        return zeros.scatter(0, winners, d[tensor_of(full)])

    def _like_weights(self, flat: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of the pooled ids' weights, in the shape of all weights."""
        flat, kept = flat.to(weights.dtype), self.bags.kept
        if kept is not None:
            zeros = flat.new_zeros(weights.numel())
            flat = zeros.index_copy(0, tensor_of(kept), flat)
        return flat.reshape(weights.shape)
