"""Layers whose rows are sharded: lookups, bags and tied heads.

If ids differ by rank, each rank sends its distinct ids to the ranks that own them and gets
rows back. Bags are pooled by the owners, which send one vector for each bag, not for each
id. If every rank has the same ids, each looks up its own rows, and the results are summed.

The owner looks rows up as an ordinary layer does, so padding, ``max_norm``, stale rows and
half precision are handled there. Gradients are sent the same way back: each rank sums the
gradients of an id before it sends them, and the owner gets a gradient of its rows only.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .._table.lookup import lookup
from .._table.max_norm import renormalized
from .._tensors.dtypes import upcast
from .._tensors.row_parameter import without_catch_up
from .._tensors.shard import ShardLayout
from ..optim.table_state import catch_up, caught_up_rows, reads_out_of_place
from .collectives import (
    gather_batches,
    gather_columns,
    return_columns,
    scatter_sum,
    sum_gradient_over_ranks,
    sum_over_ranks,
)
from .exchange import Route
from .gradient import with_averaged_gradient
from .module import ShardedTableModule, ShardedTokens


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
            unique, index = self.replicated_ids(ids).unique(return_inverse=True)
            return UniqueRows(self._sum_own_rows(unique), index)
        flat, own_error = self.ids_or_error(ids)
        error = own_error if error is None else error
        unique, index = flat.unique(return_inverse=True)
        layout = self.shard.layout
        sent = torch.bincount(unique // layout.chunk, minlength=layout.ranks).tolist()
        received = self.exchange_counts([[n] for n in sent], error)
        route = Route(self.exchange, sent, [n for (n,) in received])
        requested = route.send(unique, kind="ids") - self.shard.bounds[0]
        rows = self.owned_rows(requested)
        rows = route.reverse.send_values(rows, dtype=self.weight.dtype)
        return UniqueRows(rows, index)

    @torch.compiler.disable
    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Each rank multiplies with its rows. Every row gets a gradient.
        """
        exchange, counts = self.exchange, self.shard.layout.counts
        nums = self.exchange_batch_sizes(x)
        if self.has_replicated_ids:
            x = sum_gradient_over_ranks(x, exchange)
            return gather_columns(self.own_logits(x), counts, exchange)
        every_x = gather_batches(x.reshape(-1, self.embedding_dim), nums, exchange)
        logits = return_columns(self.own_logits(every_x), nums, counts, exchange)
        return logits.view(*x.shape[:-1], self.num_embeddings)

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

    def _sum_own_rows(self, ids: Integer[Tensor, " n"]) -> Float[Tensor, "n width"]:
        """Return the rows of ids that all ranks have alike."""
        return sum_over_ranks(self._own_rows_or_zero(ids), self.exchange)

    def _own_rows_or_zero(self, ids: Integer[Tensor, " n"]) -> Float[Tensor, "n width"]:
        """Return the rows of ids that this rank has, and zeros for others."""
        start, stop = self.shard.bounds
        places = ((ids >= start) & (ids < stop)).nonzero()[:, 0]
        rows = self.owned_rows(ids[places] - start)
        return rows.new_zeros(len(ids), rows.shape[1]).index_copy(0, places, rows)


class ShardedEmbedding(ShardedRowsModule, ShardedTokens):
    """Looks up rows by id; each rank has some of the rows.

    Made by :func:`firstlayer.torch.sharding.shard_rows`.
    """

    def _rows_of(self, ids: Tensor) -> Tensor:
        if self.scattered_axis is not None:
            return self._scattered(ids, self.scattered_axis)
        unique, index = self.unique_rows(ids)
        index = index.view(ids.shape)
        return lookup(index, unique, scale_grad_by_freq=self.scale_grad_by_freq)

    def _scattered(self, ids: Tensor, axis: int) -> Tensor:
        """Return this rank's part of the output, divided along an axis."""
        flat = self.replicated_ids(ids)
        rows = self._own_rows_or_zero(flat).view(*ids.shape, self.embedding_dim)
        counts = ShardLayout(rows.shape[axis], self.exchange.size).counts
        return scatter_sum(rows, axis, counts, self.exchange)
