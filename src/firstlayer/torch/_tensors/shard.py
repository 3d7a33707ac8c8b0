"""The part of a table that one rank has, on the parameter with that part.

A sharded layer (:mod:`firstlayer.torch.sharding`) has an ordinary parameter with some rows
or columns of its table. State dicts of layers and optimizers have the whole table as a
DTensor, so that checkpoints do not depend on the number of ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

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
        mesh: Mesh of one axis, or of two: replicas, then parts.
        shape: Shape of the whole table.
        dim: 0 if rows are sharded, 1 if columns are.
    """

    mesh: Any
    shape: tuple[int, int]
    dim: int

    @property
    def axis(self) -> int:
        """Axis of the mesh over which rows or columns are sharded."""
        return self.mesh.ndim - 1

    @cached_property
    def group(self) -> Any:
        """Process group of the ranks that together have the rows or columns."""
        return self.mesh.get_group(self.axis)

    @property
    def groups(self) -> tuple[Any, ...]:
        """Process groups over which entries of the table are sharded."""
        return (self.group,)

    @cached_property
    def replica_group(self) -> Any:
        """Process group of the ranks with the same shard; None if there is one copy."""
        return self.mesh.get_group(0) if self.num_replicas > 1 else None

    @cached_property
    def num_replicas(self) -> int:
        """Number of copies of the table."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def num_parts(self) -> int:
        """Number of ranks that together have the table."""
        return self.mesh.size() // self.num_replicas

    @cached_property
    def layout(self) -> ShardLayout:
        """Division of the rows or columns."""
        return ShardLayout(self.shape[self.dim], self.mesh.size(self.axis))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """First row or column of this rank, and the first after its last."""
        return self.layout.bounds(self.mesh.get_local_rank(self.axis))

    @property
    def row_bounds(self) -> tuple[int, int]:
        """First row of this rank, and the first after its last."""
        return self.bounds if self.dim == 0 else (0, self.shape[0])

    @property
    def column_bounds(self) -> tuple[int, int]:
        """First column of this rank, and the first after its last."""
        return self.bounds if self.dim == 1 else (0, self.shape[1])

    @property
    def has_whole_rows(self) -> bool:
        """Whether a rank has all columns of its rows."""
        return self.dim == 0

    def describe(self) -> str:
        """Return the part in words, as ``"rows 0 to 6 of 11"``."""
        start, stop = self.bounds
        name = "columns" if self.dim else "rows"
        return f"{name} {start} to {stop} of {self.shape[self.dim]}"

    @property
    def placements(self) -> list[Any]:
        """Placements of the whole table as a DTensor."""
        from torch.distributed.tensor import Replicate, Shard

        return [*[Replicate()] * (self.mesh.ndim - 1), Shard(self.dim)]

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that has all rows or columns, as a view."""
        start, stop = self.bounds
        return whole.narrow(self.dim, start, stop - start)

    def to_dtensor(self, local: Tensor) -> Tensor:
        """Return the parts of all ranks as one DTensor, which shares their memory."""
        from torch.distributed.tensor import DTensor

        shape = self.whole_shape(local)
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    def whole_shape(self, local: Tensor) -> list[int]:
        """Return the shape of the array of the whole table, of which ``local`` is a part.

        A state with one number for each row has another width than the table.
        """
        shape = list(local.shape)
        shape[self.dim] = self.shape[self.dim]
        return shape

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
        dtensor: Any = x
        is_alike = list(dtensor.placements) == self.placements
        if dtensor.device_mesh != self.mesh or not is_alike:
            return self.part(dtensor.full_tensor())
        return dtensor.to_local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableShard":
        # Process groups cannot be copied.
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a sharded table cannot be pickled; save its layer's state_dict, "
            "or weight.detach() for this part"
        )


class GridShard(TableShard):
    """The rows and columns of a table that this rank has.

    Args:
        mesh: Mesh of two axes: rows are sharded over the first, columns over the second.
        shape: Shape of the whole table.
        dim: 0. What is inherited is about the rows.
    """

    @property
    def axis(self) -> int:
        """Axis of the mesh over which rows are sharded."""
        return 0

    @cached_property
    def column_group(self) -> Any:
        """Process group of the ranks that together have the columns."""
        return self.mesh.get_group(1)

    @property
    def groups(self) -> tuple[Any, ...]:
        """Process groups over which entries of the table are sharded."""
        return self.group, self.column_group

    @cached_property
    def num_replicas(self) -> int:
        """Number of copies of the table."""
        return 1

    @cached_property
    def column_layout(self) -> ShardLayout:
        """Division of the columns."""
        return ShardLayout(self.shape[1], self.mesh.size(1))

    @property
    def column_bounds(self) -> tuple[int, int]:
        """First column of this rank, and the first after its last."""
        return self.column_layout.bounds(self.mesh.get_local_rank(1))

    @property
    def has_whole_rows(self) -> bool:
        """Whether a rank has all columns of its rows."""
        return False

    def describe(self) -> str:
        """Return the part in words."""
        start, stop = self.column_bounds
        return f"{super().describe()} and columns {start} to {stop} of {self.shape[1]}"

    @property
    def placements(self) -> list[Any]:
        """Placements of the whole table as a DTensor."""
        from torch.distributed.tensor import Shard

        return [Shard(0), Shard(1)]

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that has all rows and columns, as a view."""
        start, stop = self.column_bounds
        return super().part(whole)[:, start:stop]

    def whole_shape(self, local: Tensor) -> list[int]:
        """Return the shape of the array of the whole table."""
        return list(self.shape)


def is_distributed() -> bool:
    """Return whether a process group is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shard_of(parameter: Any) -> TableShard | None:
    """Return which part of a table a parameter has, or None if it has the whole."""
    return getattr(parameter, "table_shard", None)
