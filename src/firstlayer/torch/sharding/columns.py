"""Layers whose columns are sharded: every rank has all rows, of fewer columns.

For tables that are wide rather than long. A lookup reads this rank's columns of every
rank's ids, and no rank reads more than another, however the ids are distributed.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .._table.lookup import as_index, lookup
from .._table.module import tied_logits
from .._tensors.dtypes import upcast
from .._tensors.errors import check_ids, check_tensor
from .._tensors.row_parameter import without_catch_up
from ..optim.table_state import catch_up, caught_up_rows, reads_out_of_place
from ..token import Embedding
from .exchange import ARGUMENT_ERRORS, collective, sum_gradient_over_ranks
from .gradient import with_averaged_gradient
from .module import ShardedTableModule


class ShardedColumnsEmbedding(ShardedTableModule, Embedding):
    """Looks up rows by id; each rank has some of the columns.

    Made by :func:`firstlayer.torch.sharding.shard_columns`.
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
        if self.has_replicated_ids:
            flat, nums = self._checked_ids(ids), None
        else:
            flat, nums = self._every_id(ids)
        columns = self._own_columns_of(flat)
        rows = self._exchange_columns(columns, nums).view(*ids.shape, self.embedding_dim)
        return self._to_output_device(rows.to(self.weight.dtype))

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Each rank multiplies with its columns. Every row gets a gradient.
        """
        raise NotImplementedError
