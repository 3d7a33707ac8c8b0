"""Output heads that share the parameter of a sharded table."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .module import ShardedTableModule, ShardedWeight


class ShardedHead(ShardedWeight, nn.Linear):
    """Linear layer whose weight is that of a sharded table.

    Made by :func:`firstlayer.torch.sharding.shard_rows`.
    """

    #: The table, in a tuple, so that it is not a submodule.
    tied: tuple[ShardedTableModule]

    @torch.compiler.disable
    def forward(
        self, input: Float[Tensor, "*batch in_features"]
    ) -> Float[Tensor, "*batch out_features"]:
        """Return the product with every row of the table. All ranks must call it."""
        logits = self.tied[0].logits(input)
        return logits if self.bias is None else logits + self.bias


def table_of(head: nn.Linear) -> ShardedTableModule | None:
    """Return the sharded layer whose parameter a linear layer has, or None."""
    layer = getattr(head.weight, "table_layer", None)
    return None if layer is None else layer()


def tie_head(head: nn.Linear, table: ShardedTableModule) -> None:
    """Make a linear layer use the parameter of a sharded table, in place."""
    sharded: Any = head
    sharded.__class__ = ShardedHead
    sharded.shard, sharded.tied = table.shard, (table,)
    sharded.weight = table.weight
