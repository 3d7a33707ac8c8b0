"""The part of a table that one rank has, on the parameter with that part.

A sharded layer (:mod:`firstlayer.torch.sharding`) has an ordinary parameter with some rows
or columns of its table. State dicts of layers and optimizers have the whole table as a
DTensor, so that checkpoints do not depend on the number of ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import WrongValue


class ShardLayout(NamedTuple):
    """Division of rows or columns among ranks, the same as that of DTensor.

    Every rank has ⌈size / ranks⌉ of them, but the last ranks may have fewer or none.

    Example:
        >>> layout = ShardLayout(10, 4)
        >>> layout.counts, layout.bounds(3)
        ([3, 3, 3, 1], (9, 10))
    """

    size: int
    ranks: int

    @property
    def chunk(self) -> int:
        """Number of rows or columns of the first rank."""
        return max(1, -(-self.size // self.ranks))

    @property
    def counts(self) -> list[int]:
        """Number of rows or columns of each rank."""
        bounds = map(self.bounds, range(self.ranks))
        return [stop - start for start, stop in bounds]

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first row or column of a rank, and the first after its last."""
        start = rank * self.chunk
        return min(start, self.size), min(start + self.chunk, self.size)


@dataclass(frozen=True, eq=False)
class TableShard:
    """The rows or columns of a table that this rank has.

    Args:
        mesh: Mesh of one axis, or of two: replicas, then shards.
        shape: Shape of the whole table.
        dim: 0 if rows are sharded, 1 if columns are.
    """

    mesh: Any
    shape: tuple[int, int]
    dim: int

    @cached_property
    def group(self) -> Any:
        """Process group of the ranks that together have the table."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @cached_property
    def replica_group(self) -> Any:
        """Process group of the ranks with the same shard; None if there is one copy."""
        return self.mesh.get_group(0) if self.num_replicas > 1 else None

    @cached_property
    def num_replicas(self) -> int:
        """Number of copies of the table."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @cached_property
    def layout(self) -> ShardLayout:
        """Division of the rows or columns."""
        return ShardLayout(self.shape[self.dim], self.mesh.size(self.mesh.ndim - 1))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """First row or column of this rank, and the first after its last."""
        return self.layout.bounds(self.mesh.get_local_rank(self.mesh.ndim - 1))

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that has all rows or columns, as a view."""
        start, stop = self.bounds
        return whole.narrow(self.dim, start, stop - start)

    def to_dtensor(self, local: Tensor) -> Tensor:
        """Return the parts of all ranks as one DTensor, which shares their memory."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = list(local.shape)
        shape[self.dim] = self.shape[self.dim]
        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(self.dim)]
        return DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    def to_local(self, x: Tensor, *, name: str) -> Tensor:
        """Return this rank's part of a DTensor or of a tensor of the whole table.

        Args:
            x: Tensor with all rows or columns.
            name: Name in the error message.
        """
        if x.shape[self.dim] != self.shape[self.dim]:
            raise WrongValue(
                f"{name} must have {self.shape[self.dim]} "
                f"{'columns' if self.dim else 'rows'}, got shape {tuple(x.shape)}"
            )
        if not hasattr(x, "device_mesh"):
            return self.part(x)
        from torch.distributed.tensor import Replicate, Shard

        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(self.dim)]
        dtensor: Any = x
        if dtensor.device_mesh != self.mesh or list(dtensor.placements) != placements:
            return self.part(dtensor.full_tensor())
        return dtensor.to_local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableShard":
        # Process groups cannot be copied.
        return self


def shard_of(parameter: Any) -> TableShard | None:
    """Return which part of a table a parameter has, or None if it has the whole."""
    return getattr(parameter, "table_shard", None)
