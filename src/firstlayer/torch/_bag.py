"""Bags of rows on torch: sums, means and maxima, with gradients of every order.

:mod:`firstlayer.embeddings.bag` defines the result. Eager calls on the CPU run on the
kernels, in the backward too, or on torch's operator if it gives the same result faster.
Everything else, and a backward that is itself differentiated, runs on plain operators.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from .._check import changed_ids
from ..embeddings.bag import (
    MODES,
    Mode,
    divide_or_zero,
    pool,
    pool_ragged,
    table_gradient,
    weights_gradient,
)
from ..embeddings.ragged import Bags, bag_bounds, bag_indices, flatten_bags
from ..embeddings.row_gradient import GradientMemory
from ._table.lookup import INDEX, LookupOptions, as_index, divide_gradient, lookup
from ._tensors.dtypes import HALF, compute_dtype, dtype_name, upcast
from ._tensors.errors import OutOfRange, torch_errors
from ._tensors.memory import (
    array_of,
    array_of_table,
    is_plain_cpu,
    is_recorded,
    kernel_eligible,
    tensor_of,
    threads_of_torch,
)
from ._tensors.row_parameter import is_row_tensor, without_catch_up

# Up to this size (ids times width), torch's handling of padding costs less than a kernel
# call.
SMALL_BAGS = 1 << 15


@dataclass(frozen=True)
class BagOptions:
    """Options of the bags.

    ``padding_idx`` counts from the front. ``memory`` is that of the table's gradient.
    """

    mode: Mode
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    include_last_offset: bool
    padding_idx: int | None
    memory: GradientMemory | None = None

    def lookup_options(self, weight: Tensor) -> LookupOptions:
        """Return the options that the gradient of a table depends on."""
        return LookupOptions(
            len(weight),
            weight.dtype,
            self.padding_idx,
            self.scale_grad_by_freq,
            self.sparse,
        )


def pool_bags(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    offsets: Integer[Tensor, " bags"] | None,
    weights: Tensor | None,
    options: BagOptions,
    gathered: Tensor | None = None,
) -> Float[Tensor, "bags embedding_dim"]:
    """Return a row for each bag; see :func:`firstlayer.torch.functional.embedding_bag`.

    Stale rows must have been caught up.

    Args:
        ids: Ids.
        weight: The table.
        offsets: Start of each bag, or None.
        weights: ``per_sample_weights`` or None.
        options: Options of the bags.
        gathered: Row of each of the flat ids, read instead of the table. Only for ordinary
            tensors on the CPU, a contiguous table and no ``max_norm``.
    """
    if is_row_tensor(weight):
        table: Any = weight
        table.check_whole_table()
        with without_catch_up():
            return _pool(ids, weight, offsets, weights, options, gathered)
    return _pool(ids, weight, offsets, weights, options, gathered)


def pool_checked(
    bags: Bags,
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    weights: Float[Tensor, " n"] | None,
    mode: Mode,
    sparse: bool,
    memory: GradientMemory | None = None,
) -> Float[Tensor, "bags embedding_dim"]:
    """Return a row for each bag, by the kernels; stale rows must have been caught up.

    Args:
        bags: Bags whose ids are in range and which no other code changes.
        weight: Contiguous table that the kernels can read.
        weights: ``per_sample_weights`` of the flat ids, in the compute dtype, or None.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        memory: Memory for the gradient of the table.
    """
    options = BagOptions(mode, None, 2.0, False, sparse, True, None, memory)
    ids = tensor_of(bags.ids)
    with without_catch_up():
        return _pool_by_kernels(
            weight, weights, ids=ids, bags=bags, options=options, gathered=None
        )


def _pool(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    options: BagOptions,
    gathered: Tensor | None,
) -> Tensor:
    if is_plain_cpu(ids, offsets, weights):
        stock = offsets is None and weights is None and _is_stock(ids, weight, options)
        kernels_run = (
            options.max_norm is None and kernel_eligible(weight) and weight.is_contiguous()
        )
        if kernels_run and stock:
            return _pool_by_torch(weight, ids, options, gathered)
        lookup_options = options.lookup_options(weight)
        bags = _checked_bags(ids, lookup_options, options, offsets=offsets, weights=weights)
        if kernels_run:
            return _pool_by_kernels(
                weight, weights, ids=ids, bags=bags, options=options, gathered=gathered
            )
    elif (ids.ndim, offsets is None) not in ((1, False), (2, True)):
        with torch_errors():
            bag_bounds(tuple(ids.shape), None if offsets is None else np.array([0]))
    return _pool_by_operators(
        as_index(ids), weight, offsets=offsets, weights=weights, options=options
    )


def _checked_bags(
    ids: Tensor,
    lookup_options: LookupOptions,
    options: BagOptions,
    *,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
) -> Bags:
    with torch_errors():
        return flatten_bags(
            array_of(ids),
            None if offsets is None else array_of(offsets),
            num_embeddings=lookup_options.num_embeddings,
            weights=None if weights is None else array_of(weights),
            padding_idx=options.padding_idx,
            include_last_offset=options.include_last_offset,
            dtype=dtype_name(compute_dtype(lookup_options.dtype)),
        )


# Kernels


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that bags pool: ``bags.ids`` are rows of ``array``.

    The array is a table, or has the row of each flat id of a call.
    """

    array: np.ndarray
    bags: Bags

    @staticmethod
    def of(weight: Tensor, bags: Bags, gathered: Tensor | None) -> "_Rows":
        if gathered is None:
            return _Rows(array_of_table(weight), bags)
        places = np.arange(len(gathered)) if bags.kept is None else bags.kept
        return _Rows(array_of(gathered), replace(bags, ids=places))

    def pool(self, mode: Mode) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a row for each bag, and the winners of ``"max"``."""
        with threads_of_torch():
            return pool_ragged(self.array, self.bags, mode=mode)


def _pool_by_kernels(
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
    return tensor_of(_Rows.of(weight, bags, gathered).pool(options.mode)[0])


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
        rows = _Rows.of(weight, bags, gathered)
        y, winners = rows.pool(options.mode)
        ctx.bags = _PooledBags(
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
class _PooledBags:
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


# Torch's operator


def _is_stock(ids: Tensor, weight: Tensor, options: BagOptions) -> bool:
    """Return whether torch's operator gives the same result, rounded the same, faster."""
    small = ids.numel() * weight.shape[1] <= SMALL_BAGS
    return (
        (small or options.padding_idx is None)
        and options.mode != "max"
        and weight.dtype not in HALF
        and ids.dtype in INDEX
        and ids.ndim == 2
        and ids.numel() * weight.shape[1] > 0
    )


def _pool_by_torch(
    weight: Tensor, ids: Tensor, options: BagOptions, gathered: Tensor | None
) -> Tensor:
    try:
        if weight.requires_grad and torch.is_grad_enabled():
            return _TorchBags.apply(weight, ids, options, gathered)  # pyright: ignore
        if gathered is not None:
            return _pool_gathered(weight, ids, options, gathered)
        return _torch_bags(weight, ids, options, trained=False)[0]
    except RuntimeError as error:
        # Raises an error that names the id if one is out of range.
        _checked_bags(ids, options.lookup_options(weight), options)
        # Torch has one message for float32 and another one for float64.
        if not any(words in str(error) for words in ("valid range", "Expected idx")):
            raise
        # Another thread has changed the ids again.
        raise OutOfRange(*changed_ids(len(weight)).args) from None


def _torch_bags(
    weight: Tensor, ids: Tensor, options: BagOptions, *, trained: bool
) -> tuple[Tensor, ...]:
    """Return the result of torch's operator, followed by the inputs of its backward."""
    # A copy for the backward: torch's does not check ids that were changed in between.
    flat = ids.reshape(-1)
    flat = flat.clone() if trained else flat.contiguous()
    skip = -1 if options.padding_idx is None else options.padding_idx
    length, like = ids.shape[1], {"dtype": ids.dtype, "device": ids.device}
    offsets = torch.arange(0, ids.numel(), length, **like)
    mode = MODES.index(options.mode)
    y, *rest = torch._embedding_bag(  # pyright: ignore
        weight, flat, offsets, False, mode, False, None, False, skip
    )
    return y, flat, offsets, *rest


def _pool_gathered(
    weight: Tensor, ids: Tensor, options: BagOptions, gathered: Tensor
) -> Tensor:
    """Return what torch's operator returns, from rows that were gathered before."""
    bags = _checked_bags(ids, options.lookup_options(weight), options)
    return tensor_of(_Rows.of(weight, bags, gathered).pool(options.mode)[0])


class _TorchBags(torch.autograd.Function):
    """Bags pooled by torch's operator."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        options: BagOptions,
        gathered: Tensor | None,
    ) -> Tensor:
        table = weight
        if gathered is not None:
            # The inputs of the backward do not depend on the rows: one zero stands for all.
            table = weight.new_zeros(1, 1).expand(len(weight), 1)
        y, *rest = _torch_bags(table, ids, options, trained=True)
        if gathered is not None:
            y = _pool_gathered(weight, ids, options, gathered)
        ctx.save_for_backward(ids, *rest)
        ctx.options, ctx.lookup_options = options, options.lookup_options(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids, *rest), options = ctx.saved_tensors, ctx.options
        table: LookupOptions = ctx.lookup_options
        if (
            torch.is_grad_enabled()
            or not kernel_eligible(grads[0])
            or table.needs_own_backward
        ):
            bags = _checked_bags(ids, table, options)
            pooled = _PooledBags(bags, options.mode, None, table, bags.ids)
            gradient, _ = pooled.gradients(grads[0], None, table=None, trained=True)
            return gradient, None, None, None
        skip = -1 if options.padding_idx is None else options.padding_idx
        gradient = torch.ops.aten._embedding_bag_backward(
            grads[0], *rest, table.num_embeddings, False, MODES.index(options.mode), False,
            None, skip,
        )  # fmt: skip
        return gradient, None, None, None


# Plain operators


def _pool_by_operators(
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
    # ONNX cannot search. The number of bounds up to each id is one more than its bag.
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
            # Traces have no index_add with repeated rows in ONNX.
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
