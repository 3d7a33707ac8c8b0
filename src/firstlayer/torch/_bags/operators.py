"""Bags pooled by plain operators: on any device, compiled, exported, or differentiated."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from ...embeddings.bag import Mode, divide_or_zero, pool
from ...embeddings.ragged import bag_indices
from .._table.lookup import as_index, divide_gradient, lookup
from .._tensors.memory import is_recorded
from .options import BagOptions


def pool_by_operators(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    offsets: Integer[Tensor, " bags"] | None,
    weights: Tensor | None,
    options: BagOptions,
) -> Float[Tensor, "bags embedding_dim"]:
    # With offsets, an id may be in no bag. Such ids do not count as occurrences.
    by_freq = options.scale_grad_by_freq
    rows = lookup(
        ids,
        weight,
        padding_idx=options.padding_idx,
        max_norm=options.max_norm,
        norm_type=options.norm_type,
        scale_grad_by_freq=by_freq and offsets is None,
        sparse=options.sparse,
        upcast_output=True,
    )
    factors = None if weights is None else weights.to(rows.dtype)
    if options.padding_idx is None:
        counted = torch.ones_like(ids, dtype=torch.bool)
    else:
        counted = ids != options.padding_idx
    if offsets is None:
        steps = torch.arange(ids.shape[1], device=ids.device)
        y = pool(rows, counted, steps=steps, weights=factors, mode=options.mode)
        return y.to(weight.dtype)
    bounds = as_index(offsets, name="offsets").to(torch.int64)
    if not options.include_last_offset:
        bounds = torch.cat([bounds, bounds.new_full((1,), ids.shape[0])])
    steps = torch.arange(ids.shape[0], device=ids.device)
    bags = _RaggedBags(_bag_numbers(bounds, steps), bounds.shape[0] - 1)
    counted = counted & (bags.numbers < bags.count)
    if by_freq:
        counts = rows.new_zeros(len(weight)).index_add(0, ids, counted.to(rows.dtype))
        rows = divide_gradient(rows, counts[ids].clamp(min=1))
    y = bags.pool(rows, counted, weights=factors, mode=options.mode)
    return y.to(weight.dtype)


def _bag_numbers(bounds: Tensor, steps: Tensor) -> Tensor:
    if not is_recorded():
        return bag_indices(bounds, steps)
    # ONNX has no searchsorted. The number of bounds up to each id is one more than its bag.
    zeros = bounds.new_zeros(steps.shape[0] + 1)
    starts = zeros.scatter_add(0, bounds, torch.ones_like(bounds))
    return starts.cumsum(0)[:-1] - 1


@dataclass(frozen=True, eq=False)
class _RaggedBags:
    """The bag number of each id. Ids in no bag have the number ``count``."""

    numbers: Tensor
    count: int

    def pool(
        self, rows: Tensor, counted: Tensor, *, weights: Tensor | None, mode: Mode
    ) -> Tensor:
        """Pool rows by bag, like :func:`firstlayer.embeddings.bag.pool` along an axis."""
        ones = counted.to(rows.dtype)
        factors = ones if weights is None else torch.where(counted, weights, 0.0)
        terms = torch.where(counted[:, None], rows * factors[:, None], 0.0)
        if mode == "max" and rows.shape[0]:
            return self._max(terms, counted)
        sums = self._sum(terms)
        return divide_or_zero(sums, self._sum(factors)[:, None]) if mode == "mean" else sums

    def _sum(self, terms: Tensor) -> Tensor:
        zeros = terms.new_zeros(self.count + 1, *terms.shape[1:])
        if is_recorded():
            # The exporter of traces to ONNX does not support repeated rows in index_add.
            index = self.numbers.reshape(-1, *(1,) * (terms.ndim - 1)).expand_as(terms)
            sums = zeros.scatter_add(0, index, terms)
        else:
            sums = zeros.index_add(0, self.numbers, terms)
        # Not a slice: Inductor writes its gradient in place, which a sparse one does not
        # support.
        return pad(sums, (*(0, 0) * (sums.ndim - 1), 0, -1))

    def _max(self, terms: Tensor, counted: Tensor) -> Tensor:
        """Return the largest term of each bag; the first of equals gets the gradient."""
        size, width = terms.shape
        index = self.numbers[:, None].expand(size, width)
        values = torch.where(counted[:, None], terms.detach(), -float("inf"))
        none = values.new_full((self.count + 1, width), -float("inf"))
        top = none.scatter_reduce(0, index, values, "amax").gather(0, index)
        hit = counted[:, None] & ((values == top) | (values.isnan() & top.isnan()))
        steps = torch.arange(size, device=terms.device)[:, None]
        none = self.numbers.new_full((self.count + 1, width), size)
        first = none.scatter_reduce(0, index, torch.where(hit, steps, size), "amin")
        first = first[: self.count]
        largest = terms.gather(0, first.clamp(max=size - 1))
        return torch.where(first == size, 0.0, largest)
