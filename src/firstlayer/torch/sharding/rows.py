"""Layers whose rows are sharded: lookups, bags and tied heads.

If ids differ by rank, each rank sends its distinct ids to the ranks that own them and gets
rows back. Bags are pooled by the owners: a vector travels for each bag, not for each id. If
every rank has the same ids, each looks up its own rows, and the results are summed.

The owner looks rows up as an ordinary layer does, so padding, ``max_norm``, stale rows and
half precision are handled there. The gradient goes the same way back: each rank sums the
gradients of an id before they travel, and the owner gets a gradient of its rows only.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .._table.lookup import as_index, lookup
from .._table.max_norm import renormalized
from .._table.module import tied_logits
from .._tensors.dtypes import upcast
from .._tensors.errors import check_ids, check_tensor
from .._tensors.row_parameter import without_catch_up
from .._tensors.shard import ShardLayout
from ..optim.table_state import catch_up, caught_up_rows, reads_out_of_place
from ..token import Embedding
from .exchange import (
    ARGUMENT_ERRORS,
    Route,
    collective,
    owner_counts,
    sum_gradient_over_ranks,
    sum_over_ranks,
)
from .gradient import with_averaged_gradient
from .module import ShardedTableModule


class UniqueRows(NamedTuple):
    """Rows of the distinct ids of a lookup, in the compute dtype.

    ``index`` has the row of each id.
    """

    rows: Float[Tensor, "unique embedding_dim"]
    index: Integer[Tensor, " n"]


class ShardedRowsModule(ShardedTableModule):
    """Base class of layers with some rows of the table."""

    #: Axis of the output that is divided among ranks with equal ids, or None.
    scattered_axis: int | None = None

    def owned_rows(self, ids: Integer[Tensor, " n"]) -> Float[Tensor, "n embedding_dim"]:
        """Return rows of this rank in the compute dtype.

        Args:
            ids: Rows, counted from the first row of this rank.
        """
        weight = self.weight
        if reads_out_of_place(weight, ids, training=self.training):
            rows = caught_up_rows(weight, ids)
            if self.max_norm is not None:
                rows = renormalized(rows, self.max_norm, norm_type=self.norm_type)
            return upcast(rows)
        catch_up(weight, ids)
        self._install_grad_hook(weight)
        with without_catch_up():
            return lookup(
                ids,
                with_averaged_gradient(weight, self.average),
                padding_idx=self._own_padding,
                max_norm=self.max_norm,
                norm_type=self.norm_type,
                sparse=self.sparse,
                upcast_output=True,
            )

    def unique_rows(self, ids: Any, error: Exception | None = None) -> UniqueRows:
        """Return the rows of ids, from all ranks that own some.

        Args:
            ids: Ids of any shape. All ranks raise the error of one.
            error: Error in other arguments of this rank, which all ranks raise.
        """
        if self.has_replicated_ids:
            unique, index = self._checked_ids(ids).unique(return_inverse=True)
            return UniqueRows(self._sum_own_rows(unique), index)
        unique, index, device = None, None, self.weight.device
        try:
            if error is None:
                unique, index = self._checked_ids(ids).unique(return_inverse=True)
        except ARGUMENT_ERRORS as caught:
            error = caught
        if unique is None or index is None:
            unique = index = torch.zeros(0, dtype=torch.int64, device=device)
        layout = self.shard.layout
        sent = owner_counts(unique, layout.chunk, layout.ranks)
        received = self.exchange.counts([[n] for n in sent], error=error, device=device)
        route = Route(self.exchange, sent, [n for (n,) in received])
        requested = route.send(unique, kind="ids") - self.shard.bounds[0]
        rows = self.owned_rows(requested)
        rows = route.reverse.send_values(rows, dtype=self.weight.dtype)
        return UniqueRows(rows, index)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Each rank multiplies with its rows. Every row gets a gradient.
        """
        return _logits(self, x)

    def project(self, ids: Integer[Tensor, "*batch"] | None = None) -> None:
        """Scale stored rows of this rank down to ``max_norm``: those of ``ids``, or all."""
        if self.max_norm is None:
            return
        own = None
        if ids is not None:
            flat, (start, stop) = self._checked_ids(ids), self.shard.bounds
            own = flat[(flat >= start) & (flat < stop)].unique() - start
        catch_up(self.weight, own)
        with without_catch_up():
            self._renormalize(own)

    def _checked_ids(self, ids: Any) -> Integer[Tensor, " n"]:
        """Return flat int64 ids in range, or raise."""
        check_tensor(ids, name="ids")
        check_ids(ids, self.num_embeddings)
        index = as_index(ids)
        if not index.is_cpu:
            check_ids(index.cpu(), self.num_embeddings)
        return index.reshape(-1).to(torch.int64)

    def _sum_own_rows(self, ids: Integer[Tensor, " n"]) -> Float[Tensor, "n width"]:
        """Return the rows of ids that all ranks have alike."""
        return sum_over_ranks(self._own_rows_or_zero(ids), self.exchange)

    def _own_rows_or_zero(self, ids: Integer[Tensor, " n"]) -> Float[Tensor, "n width"]:
        """Return the rows of ids that this rank has, and zeros for others."""
        start, stop = self.shard.bounds
        places = ((ids >= start) & (ids < stop)).nonzero()[:, 0]
        rows = self.owned_rows(ids[places] - start)
        return rows.new_zeros(len(ids), rows.shape[1]).index_copy(0, places, rows)


class ShardedEmbedding(ShardedRowsModule, Embedding):
    """Looks up rows by id; each rank has some of the rows.

    Made by :func:`firstlayer.torch.sharding.shard_rows`.
    """

    @torch.compiler.disable
    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids. All ranks must call it.

        Args:
            input: Ids of any shape and any integer dtype.
        """
        ids = self._to_host(input)
        if self.scattered_axis is not None:
            rows = self._scattered(ids, self.scattered_axis)
        else:
            unique, index = self.unique_rows(ids)
            rows = lookup(index, unique, scale_grad_by_freq=self.scale_grad_by_freq)
            rows = rows.view(*ids.shape, self.embedding_dim)
        return self._to_output_device(rows.to(self.weight.dtype))

    def _scattered(self, ids: Tensor, axis: int) -> Tensor:
        """Return this rank's part of the output, divided along an axis."""
        flat = self._checked_ids(ids)
        rows = self._own_rows_or_zero(flat).view(*ids.shape, self.embedding_dim)
        return scatter_sum(rows, axis, self)


def scatter_sum(
    x: Float[Tensor, "*shape"], axis: int, layer: ShardedTableModule
) -> Float[Tensor, "*part"]:
    """Return this rank's part, along an axis, of the sum over ranks.

    Args:
        x: Tensor of the same shape on every rank.
        axis: Axis, divided as ``torch.chunk`` divides.
        layer: Layer whose ranks they are.
    """
    exchange = layer.exchange
    layout = ShardLayout(x.shape[axis], exchange.size)
    mine = [layout.counts[exchange.rank]] * exchange.size

    def forward(x: Tensor) -> Tensor:
        moved = x.movedim(axis, 0)
        parts = exchange.all_to_all(moved, sent=layout.counts, received=mine, kind="rows")
        parts = parts.view(exchange.size, mine[0], *moved.shape[1:])
        return parts.sum(0).movedim(0, axis)

    def backward(gradient: Tensor) -> Tensor:
        moved = gradient.movedim(axis, 0).contiguous()
        parts = exchange.all_gather(moved, layout.counts, kind="gradients")
        return torch.cat(parts).movedim(0, axis)

    return collective(x, forward=forward, backward=backward)


def _logits(layer: ShardedRowsModule, x: Tensor) -> Tensor:
    exchange, weight = layer.exchange, layer.weight
    if layer.has_replicated_ids:
        check_tensor(x, name="x")
        catch_up(weight)
        layer._install_grad_hook(weight)
        x = sum_gradient_over_ranks(x, exchange)
        with without_catch_up():
            own = tied_logits(x, with_averaged_gradient(weight, layer.average))
        return _gather_last(own, layer)
    error = None
    try:
        with without_catch_up():
            # A table without rows has the checks of any other.
            tied_logits(x, weight[:0])
    except ARGUMENT_ERRORS as caught:
        error, x = caught, weight.new_zeros(0, weight.shape[1])
    num = x.numel() // max(1, x.shape[-1])
    received = exchange.counts([[num]] * exchange.size, error=error, device=weight.device)
    nums = [n for (n,) in received]
    catch_up(weight)
    layer._install_grad_hook(weight)
    every_x = _gather_batches(x.reshape(num, -1), nums, layer)
    with without_catch_up():
        own = tied_logits(every_x, with_averaged_gradient(weight, layer.average))
    return _return_logits(own, nums, layer).view(*x.shape[:-1], layer.num_embeddings)


def _gather_batches(x: Tensor, nums: list[int], layer: ShardedRowsModule) -> Tensor:
    """Return the vectors of all ranks; a gradient is the sum of what each rank has."""
    exchange = layer.exchange
    mine = [nums[exchange.rank]] * exchange.size

    def backward(gradient: Tensor) -> Tensor:
        parts = exchange.all_to_all(gradient, sent=nums, received=mine, kind="gradients")
        return parts.view(exchange.size, mine[0], -1).sum(0)

    return collective(
        x,
        forward=lambda x: torch.cat(exchange.all_gather(x, nums, kind="rows")),
        backward=backward,
    )


def _return_logits(own: Tensor, nums: list[int], layer: ShardedRowsModule) -> Tensor:
    """Return each rank the logits of its vectors, from all ranks' rows."""
    exchange, counts = layer.exchange, layer.shard.layout.counts
    num, count = nums[exchange.rank], counts[exchange.rank]
    there = [n * count for n in nums]
    back = [num * n for n in counts]

    def forward(own: Tensor) -> Tensor:
        flat = exchange.all_to_all(own.reshape(-1), sent=there, received=back, kind="rows")
        parts = flat.split(back)
        return torch.cat([p.view(num, n) for p, n in zip(parts, counts, strict=True)], 1)

    def backward(gradient: Tensor) -> Tensor:
        flat = torch.cat([part.reshape(-1) for part in gradient.split(counts, 1)])
        flat = exchange.all_to_all(flat, sent=back, received=there, kind="gradients")
        return flat.view(sum(nums), count)

    return collective(own, forward=forward, backward=backward)


def _gather_last(own: Tensor, layer: ShardedRowsModule) -> Tensor:
    """Return the logits of all ranks' rows."""
    exchange, layout = layer.exchange, layer.shard.layout
    start, stop = layer.shard.bounds

    def forward(own: Tensor) -> Tensor:
        moved = own.movedim(-1, 0).contiguous()
        return torch.cat(exchange.all_gather(moved, layout.counts, kind="rows")).movedim(
            0, -1
        )

    return collective(own, forward=forward, backward=lambda d: d[..., start:stop])
