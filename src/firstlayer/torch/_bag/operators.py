"""Bags in plain operators, for whatever watches operators instead of memory.

Each has gradients of every order by itself, compiles, exports and vmaps. With offsets, the
number of the bag is looked up for each id, and rows are added up by that number.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from ...embeddings.bag import Mode, divide_or_zero, pool
from ...embeddings.ragged import bag_indices
from .._table.lookup import Table, as_index, lookup, with_gradient_divided


@dataclass(frozen=True)
class How:
    """What is asked of the bags, whichever way it is done."""

    mode: Mode
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    include_last_offset: bool
    padding_idx: int | None

    def table(self, weight: Tensor) -> Table:
        """Return what the gradient of that table depends on."""
        return Table(
            len(weight),
            weight.dtype,
            self.padding_idx,
            self.scale_grad_by_freq,
            self.sparse,
        )


def in_operators(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    offsets: Integer[Tensor, " bags"] | None,
    weights: Tensor | None,
    how: How,
) -> Float[Tensor, "bags embedding_dim"]:
    """Return a row for each bag; ids are such as torch looks up by."""
    # With offsets an id may be in no bag, and is then not counted.
    freq = how.scale_grad_by_freq and offsets is None
    rows = lookup(
        ids,
        weight,
        padding_idx=how.padding_idx,
        max_norm=how.max_norm,
        norm_type=how.norm_type,
        scale_grad_by_freq=freq,
        sparse=how.sparse,
        wide=True,
    )
    factors = None if weights is None else weights.to(rows.dtype)
    if how.padding_idx is None:
        counted = torch.ones_like(ids, dtype=torch.bool)
    else:
        counted = ids != how.padding_idx
    if offsets is None:
        steps = torch.arange(ids.shape[1], device=ids.device)
        y = pool(rows, counted, steps=steps, weights=factors, mode=how.mode)
    else:
        bounds = _bounds(offsets, ids.shape[0], end_given=how.include_last_offset)
        steps = torch.arange(ids.shape[0], device=ids.device)
        bags = Ragged(bag_indices(bounds, steps), bounds.shape[0] - 1)
        counted = counted & (bags.numbers < bags.count)
        if how.scale_grad_by_freq:
            often = rows.new_zeros(len(weight)).index_add(0, ids, counted.to(rows.dtype))
            rows = with_gradient_divided(rows, often[ids].clamp(min=1))
        y = bags.pooled(rows, counted, weights=factors, mode=how.mode)
    return y.to(weight.dtype)


def _bounds(offsets: Tensor, size: int, *, end_given: bool) -> Tensor:
    bounds = as_index(offsets, name="offsets").to(torch.int64)
    return bounds if end_given else torch.cat([bounds, bounds.new_full((1,), size)])


@dataclass(frozen=True, eq=False)
class Ragged:
    """The number of each id's bag, and how many there are, which is that of no bag."""

    numbers: Tensor
    count: int

    def pooled(
        self, rows: Tensor, counted: Tensor, *, weights: Tensor | None, mode: Mode
    ) -> Tensor:
        """Pool rows by bag, as :func:`firstlayer.embeddings.bag.pool` does along an axis."""
        ones = counted.to(rows.dtype)
        factors = ones if weights is None else torch.where(counted, weights, 0.0)
        terms = torch.where(counted[:, None], rows * factors[:, None], 0.0)
        if mode == "max" and rows.shape[0]:
            return self.largest(terms, counted)
        sums = self.summed(terms)
        return (
            divide_or_zero(sums, self.summed(factors)[:, None]) if mode == "mean" else sums
        )

    def summed(self, terms: Tensor) -> Tensor:
        """Return the sum of each bag's terms."""
        zeros = terms.new_zeros(self.count + 1, *terms.shape[1:])
        sums = zeros.index_add(0, self.numbers, terms)
        # Not a slice: Inductor writes its gradient in place, where none may be sparse.
        return pad(sums, (*(0, 0) * (sums.ndim - 1), 0, -1))

    def largest(self, terms: Tensor, counted: Tensor) -> Tensor:
        """Return the largest of each bag's terms; the first of equals gets the gradient."""
        size, width = terms.shape
        index = self.numbers[:, None].expand(size, width)
        seen = torch.where(counted[:, None], terms.detach(), -float("inf"))
        none = seen.new_full((self.count + 1, width), -float("inf"))
        top = none.scatter_reduce(0, index, seen, "amax").gather(0, index)
        hit = counted[:, None] & ((seen == top) | (seen.isnan() & top.isnan()))
        steps = torch.arange(size, device=terms.device)[:, None]
        none = self.numbers.new_full((self.count + 1, width), size)
        first = none.scatter_reduce(0, index, torch.where(hit, steps, size), "amin")
        first = first[: self.count]
        largest = terms.gather(0, first.clamp(max=size - 1))
        return torch.where(first == size, 0.0, largest)
