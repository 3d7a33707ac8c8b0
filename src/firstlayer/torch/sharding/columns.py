"""Layers whose columns are sharded: every rank has all rows, of fewer columns.

For tables that are wide rather than long. A lookup reads this rank's columns of every
rank's ids, so that no rank reads more than another, however the ids are distributed.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .._table.lookup import lookup
from .._tensors.dtypes import upcast
from .._tensors.row_parameter import without_catch_up
from ..optim.table_state import catch_up, caught_up_rows, reads_out_of_place
from .bags import ShardedBags, TorchBags, kind_of_weights, weights_of_kind
from .collectives import (
    gather_batches,
    gather_columns,
    return_columns,
    scatter_sum,
    sum_gradient_over_ranks,
    sum_over_ranks,
)
from .gradient import with_averaged_gradient
from .module import ShardedTableModule, ShardedTokens


class ShardedColumnsModule(ShardedTableModule):
    """Base class of layers with some columns of the table."""

    def owned_columns(
        self, ids: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch columns"]:
        """Return this rank's columns of rows, in the compute dtype."""
        weight = self.weight
        if reads_out_of_place(weight, ids, training=self.training):
            return upcast(caught_up_rows(weight, ids))
        catch_up(weight, ids)
        self._install_grad_hook(weight)
        with without_catch_up():
            return lookup(
                ids,
                with_averaged_gradient(weight, self.average),
                padding_idx=self._own_padding,
                sparse=self.sparse,
                upcast_output=True,
            )

    @torch.compiler.disable
    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Each rank multiplies with its columns. Every row gets a gradient.
        """
        exchange, (start, stop) = self.exchange, self.shard.bounds
        nums = self.exchange_batch_sizes(x)
        if self.has_replicated_ids:
            x = sum_gradient_over_ranks(x, exchange)
            return sum_over_ranks(self.own_logits(x[..., start:stop]), exchange)
        every_x = gather_batches(x.reshape(-1, self.embedding_dim), nums, exchange)
        own = self.own_logits(every_x[:, start:stop])
        logits = scatter_sum(own, 0, nums, exchange)
        return logits.view(*x.shape[:-1], self.num_embeddings)


class ShardedColumnsEmbedding(ShardedColumnsModule, ShardedTokens):
    """Looks up rows by id; each rank has some of the columns.

    Made by :func:`firstlayer.torch.sharding.shard_columns`.
    """

    def _rows_of(self, ids: Tensor) -> Tensor:
        counts, dtype = self.shard.layout.counts, self.weight.dtype
        if self.has_replicated_ids:
            own = self.owned_columns(self.replicated_ids(ids).view(ids.shape))
            return gather_columns(own, counts, self.exchange)
        every_id, nums = self._gather_ids(ids)
        own = self.owned_columns(every_id)
        rows = return_columns(own, nums, counts, self.exchange, dtype=dtype)
        return rows.reshape(*ids.shape, self.embedding_dim)

    def _gather_ids(self, ids: Any) -> tuple[Integer[Tensor, " all"], list[int]]:
        """Return the ids of all ranks, and how many each has."""
        flat, error = self.ids_or_error(ids)
        received = self.exchange_counts([[len(flat)]] * self.exchange.size, error)
        nums = [n for (n,) in received]
        return torch.cat(self.exchange.all_gather(flat, nums, kind="ids")), nums


class ShardedColumnsEmbeddingBag(ShardedColumnsModule, ShardedBags):
    """Looks up rows and pools them; each rank has some of the columns.

    Columns are pooled independently, so pooled vectors are sent in every mode, never rows.
    Made by :func:`firstlayer.torch.sharding.shard_columns`.
    """

    num_counts = 3

    def _pool(self, bags: TorchBags, error: Exception | None) -> Tensor:
        exchange, counts = self.exchange, self.shard.layout.counts
        lengths = bags.bounds.diff()
        if self.has_replicated_ids:
            weights = bags.weights
            if weights is not None:
                weights = sum_gradient_over_ranks(weights, exchange)
            return gather_columns(
                self._pool_columns(bags.ids, lengths, weights), counts, exchange
            )
        kind = kind_of_weights(bags.weights)
        numbers = [len(bags.ids), bags.num_bags, kind]
        received = self.exchange_counts([numbers] * exchange.size, error)
        num_ids, num_bags = ([each[n] for each in received] for n in (0, 1))
        kind = max(each[2] for each in received)
        ids = torch.cat(exchange.all_gather(bags.ids, num_ids, kind="ids"))
        lengths = torch.cat(exchange.all_gather(lengths, num_bags, kind="ids"))
        dtype = self.weight.dtype
        weights = weights_of_kind(bags.weights, kind, like=bags.ids, dtype=dtype)
        if weights is not None:
            weights = gather_batches(weights[:, None], num_ids, exchange)[:, 0]
        own = self._pool_columns(ids, lengths, weights)
        return return_columns(own, num_bags, counts, exchange, dtype=dtype)

    def _pool_columns(
        self, ids: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Float[Tensor, "bags columns"]:
        mode: Any = self.mode
        read = self.owned_columns
        return self._pool_part(ids, lengths, weights, mode=mode, read=read)
