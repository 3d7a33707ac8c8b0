"""Layers whose rows and columns are sharded, over two axes of a mesh.

The ranks along the second axis have the same rows and different columns. They gather their
ids, look up their own columns of the rows along the first axis, as
:mod:`firstlayer.torch.sharding.rows` does, and return each other the columns.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .._table.lookup import lookup
from .._tensors.shard import GridShard
from .collectives import (
    gather_batches,
    gather_columns,
    return_columns,
    scatter_sum,
    sum_gradient_over_ranks,
    sum_over_ranks,
)
from .exchange import Exchange
from .module import ShardedTokens
from .rows import ShardedRowsModule


class ShardedGridEmbedding(ShardedRowsModule, ShardedTokens):
    """Looks up rows by id; each rank has some of the rows and of their columns.

    Made by :func:`firstlayer.torch.sharding.shard_rows_and_columns`.
    """

    shard: GridShard
    #: Collectives of the ranks with the other columns of the same rows.
    column_exchange: Exchange

    def distribute(self, shard: GridShard, *, has_replicated_ids: bool) -> None:  # pyright: ignore
        """Keep this rank's part of the table; see :class:`ShardedTableModule`."""
        self.column_exchange = Exchange(shard.column_group)
        super().distribute(shard, has_replicated_ids=has_replicated_ids)

    @property
    def exchanges(self) -> list[Exchange]:
        """Collectives that this layer uses."""
        return [*super().exchanges, self.column_exchange]

    def _rows_of(self, ids: Tensor) -> Tensor:
        exchange, counts = self.column_exchange, self.shard.column_layout.counts
        if self.has_replicated_ids:
            unique, index = self.unique_rows(ids)
            return gather_columns(lookup(index.view(ids.shape), unique), counts, exchange)
        every_id, nums = self._gather_ids(ids)
        unique, index = self.unique_rows(every_id)
        own, dtype = lookup(index, unique), self.weight.dtype
        rows = return_columns(own, nums, counts, exchange, dtype=dtype)
        return rows.reshape(*ids.shape, self.embedding_dim)

    @torch.compiler.disable
    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Each rank multiplies its columns with its rows. Every row gets a gradient.
        """
        rows, columns = self.exchange, self.column_exchange
        counts, (start, stop) = self.shard.layout.counts, self.shard.column_bounds
        num, error = self._count_vectors(x)
        if self.has_replicated_ids:
            self.raise_together(error)
            x = sum_gradient_over_ranks(sum_gradient_over_ranks(x, rows), columns)
            own = sum_over_ranks(self.own_logits(x[..., start:stop]), columns)
            return gather_columns(own, counts, rows)
        nums = self._exchange_sizes(num, error)
        sizes = rows.counts([[sum(nums)]] * rows.size, error=None, device=x.device)
        flat = x.reshape(-1, self.embedding_dim)
        near = gather_batches(flat, nums, columns)
        every_x = gather_batches(near, [size for (size,) in sizes], rows)
        own = self.own_logits(every_x[:, start:stop])
        # The logits of all ranks along the second axis, from this rank's columns.
        parts = return_columns(own, [size for (size,) in sizes], counts, rows)
        logits = scatter_sum(parts, 0, nums, columns)
        return logits.view(*x.shape[:-1], self.num_embeddings)

    def announce(self, error: Exception) -> None:
        """Raise an error of this rank on all ranks, which look up rows in this call.

        Args:
            error: Error in the arguments of a layer with this table.
        """
        if self.has_replicated_ids:
            raise error
        self._exchange_sizes(0, error)

    def _exchange_sizes(self, num: int, error: Exception | None) -> list[int]:
        """Return a number of each rank along the second axis, or raise an error on all."""
        columns = self.column_exchange
        numbers = columns.counts(
            [[num]] * columns.size,
            error=error,
            device=self.weight.device,
            others=self.exchange,
        )
        return [n for (n,) in numbers]

    def _gather_ids(self, ids: Any) -> tuple[Integer[Tensor, " all"], list[int]]:
        """Return the ids of the ranks along the second axis, and how many each has."""
        flat, error = self.ids_or_error(ids)
        nums = self._exchange_sizes(len(flat), error)
        return torch.cat(self.column_exchange.all_gather(flat, nums, kind="ids")), nums
