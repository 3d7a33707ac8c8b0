"""Shard the tables of layers over a device mesh."""

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from .._tensors.errors import WrongType, WrongValue
from .._tensors.shard import GridShard, TableShard, shard_of
from ..bag import EmbeddingBag
from ..growing import GrowingEmbedding
from ..layer import EmbeddingLayer
from ..optim.stored import store_of
from ..token import Embedding
from .bags import ShardedEmbeddingBag
from .columns import ShardedColumnsEmbedding, ShardedColumnsEmbeddingBag
from .exchange import Traffic
from .grid import ShardedGridEmbedding
from .head import table_of, tie_head
from .module import ShardedTableModule
from .rows import ShardedEmbedding

M = TypeVar("M", bound=nn.Module)


def shard_rows(
    module: M,
    mesh: DeviceMesh,
    *,
    input_layouts: Placement | None = None,
    output_layouts: Placement | None = None,
    head: nn.Linear | None = None,
) -> M:
    """Shard the rows of a layer's table over a mesh, in place, and return the layer.

    The parameter becomes this rank's rows, an ordinary tensor. With ``sparse=True`` its
    gradient has the rows of the batch that this rank owns, and row optimizers train it as
    they train any table. Call it on all ranks, before the optimizer is made. All ranks must
    have the same table, or a table on the meta device, which ``to_empty`` and
    ``reset_parameters`` then initialize.

    Gradients are averaged over ranks with different batches, as DDP does.

    Args:
        module: :class:`~firstlayer.torch.Embedding`,
            :class:`~firstlayer.torch.EmbeddingBag`, or a layer with one:
            :class:`~firstlayer.torch.EmbeddingLayer` (its token table), n-gram and hashed
            embeddings.
        mesh: Mesh with one axis. With two axes, rows are sharded over the second, and the
            ranks along the first have copies, as with ``fully_shard``.
        input_layouts: ``Shard(0)``, the default: ids differ by rank, as in data-parallel
            training. ``Replicate()``: all ranks of the last axis have the same ids, as in
            tensor-parallel training.
        output_layouts: ``Shard(n)`` divides the output of replicated ids along axis ``n``,
            as for sequence parallelism; None leaves it complete. Only for ``Embedding``.
        head: Linear layer whose weight is that of the table. It stays tied, and computes
            the logits of all rows. ``layer.logits`` does the same without such a layer.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from firstlayer.torch import Embedding
        >>> store = dist.HashStore()  # torchrun starts more processes than one
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> table = shard_rows(Embedding(10, 4, sparse=True), mesh)
        >>> table
        ShardedEmbedding(10, 4, sparse=True, rows 0 to 10 of 10)
        >>> table(torch.tensor([3, 9])).shape
        torch.Size([2, 4])
        >>> len(sharded_parameters(table)), traffic(table).rows
        (1, 0)
        >>> dist.destroy_process_group()
    """
    replicated = _has_replicated_ids(input_layouts)
    scattered_axis = None
    if output_layouts is not None and not output_layouts.is_replicate():
        if not isinstance(output_layouts, Shard) or not replicated:
            raise WrongValue(
                "output_layouts must be None or Replicate(), or Shard(n) with "
                f"input_layouts=Replicate(), got {output_layouts}"
            )
        scattered_axis = output_layouts.dim
    table = _checked_table(module, mesh, head, "shard_rows")
    is_bag = isinstance(table, EmbeddingBag)
    if is_bag and scattered_axis is not None:
        raise WrongValue(f"output_layouts must be None for bags, got {output_layouts}")
    if scattered_axis is not None:
        table.scattered_axis = scattered_axis
    _distribute(
        table,
        ShardedEmbeddingBag if is_bag else ShardedEmbedding,
        TableShard(mesh, (table.num_embeddings, table.embedding_dim), 0),
        input_layouts=input_layouts,
        head=head,
    )
    return module


def shard_columns(
    module: M,
    mesh: DeviceMesh,
    *,
    input_layouts: Placement | None = None,
    head: nn.Linear | None = None,
) -> M:
    """Shard the columns of a layer's table over a mesh, in place, and return the layer.

    Every rank has all rows, of fewer columns. Otherwise as :func:`shard_rows`. Optimizers
    whose state has one number for each row need whole rows and refuse such a table.

    Args:
        module: As in :func:`shard_rows`, without ``max_norm`` and ``scale_grad_by_freq``.
        mesh: As in :func:`shard_rows`.
        input_layouts: As in :func:`shard_rows`.
        head: As in :func:`shard_rows`.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from firstlayer.torch import Embedding
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> shard_columns(Embedding(10, 4, sparse=True), mesh)
        ShardedColumnsEmbedding(10, 4, sparse=True, columns 0 to 4 of 4)
        >>> dist.destroy_process_group()
    """
    table = _checked_table(module, mesh, head, "shard_columns")
    _check_without_whole_rows(table)
    is_bag = isinstance(table, EmbeddingBag)
    _distribute(
        table,
        ShardedColumnsEmbeddingBag if is_bag else ShardedColumnsEmbedding,
        TableShard(mesh, (table.num_embeddings, table.embedding_dim), 1),
        input_layouts=input_layouts,
        head=head,
    )
    return module


def shard_rows_and_columns(
    module: M,
    mesh: DeviceMesh,
    *,
    input_layouts: Placement | None = None,
    head: nn.Linear | None = None,
) -> M:
    """Shard a layer's table over both axes of a mesh, in place, and return the layer.

    For tables that are long and wide: rows are sharded over the first axis, columns over
    the second. Otherwise as :func:`shard_columns`.

    Args:
        module: :class:`~firstlayer.torch.Embedding`, or a layer with one, without
            ``max_norm`` and ``scale_grad_by_freq``.
        mesh: Mesh with two axes.
        input_layouts: ``Shard(0)``, the default: ids differ by rank. ``Replicate()``: all
            ranks of the mesh have the same ids.
        head: As in :func:`shard_rows`.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from firstlayer.torch import Embedding
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1))
        >>> shard_rows_and_columns(Embedding(10, 4, sparse=True), mesh)
        ShardedGridEmbedding(10, 4, sparse=True, rows 0 to 10 of 10 and columns 0 to 4 of 4)
        >>> dist.destroy_process_group()
    """
    name = "shard_rows_and_columns"
    table = _checked_table(module, mesh, head, name)
    if isinstance(table, EmbeddingBag):
        raise WrongType(f"{name} needs an Embedding, got EmbeddingBag")
    if mesh.ndim != 2:
        raise WrongValue(f"mesh must have 2 axes, got {mesh.ndim}")
    _check_without_whole_rows(table)
    _distribute(
        table,
        ShardedGridEmbedding,
        GridShard(mesh, (table.num_embeddings, table.embedding_dim), 0),
        input_layouts=input_layouts,
        head=head,
    )
    return module


class ShardedRows(ParallelStyle):
    """Shards rows in a plan of ``parallelize_module``; see :func:`shard_rows`.

    A ``torch.nn.Linear`` with the weight of a table is named after the table in the plan,
    with this style too: it stays tied, as the ``head`` of :func:`shard_rows`.

    Args:
        input_layouts: As in :func:`shard_rows`.
        output_layouts: As in :func:`shard_rows`.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from firstlayer.torch import Embedding
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> model = torch.nn.Sequential(Embedding(10, 4), torch.nn.Linear(4, 2))
        >>> plan = {"0": ShardedRows(input_layouts=Replicate())}
        >>> parallelize_module(model, mesh, plan)[0]
        ShardedEmbedding(10, 4, rows 0 to 10 of 10)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        self.input_layouts, self.output_layouts = input_layouts, output_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            table = table_of(module)
            if table is None:
                raise WrongValue(
                    "ShardedRows needs a torch.nn.Linear with the weight of a sharded table"
                )
            tie_head(module, table)
            return module
        return shard_rows(
            module,
            device_mesh,
            input_layouts=self.input_layouts,
            output_layouts=self.output_layouts,
        )


def sharded_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are parts of tables.

    Other wrappers must ignore them: ``fully_shard(model, ignored_params=...)``.

    Args:
        module: Any module.
    """
    return {each for each in module.parameters() if shard_of(each) is not None}


def traffic(module: nn.Module) -> Traffic:
    """Return the bytes that this rank has sent for the sharded tables of a module.

    Subtract two results to get the bytes in between.

    Args:
        module: Any module.
    """
    total = Traffic()
    for each in module.modules():
        if isinstance(each, ShardedTableModule):
            for exchange in each.exchanges:
                total = total + exchange.sent
    return total


def _distribute(
    table: Any,
    layer_class: type[ShardedTableModule],
    shard: TableShard,
    *,
    input_layouts: Placement | None,
    head: nn.Linear | None,
) -> None:
    """Make a checked layer one of a sharded class, with this rank's part of its table."""
    replicated = _has_replicated_ids(input_layouts)
    table.__class__ = layer_class
    table.distribute(shard, has_replicated_ids=replicated)
    if head is not None:
        tie_head(head, table)


def _check_without_whole_rows(table: Any) -> None:
    """Raise if a layer has options that need whole rows."""
    if table.max_norm is not None or table.scale_grad_by_freq:
        raise WrongValue(
            "max_norm and scale_grad_by_freq need whole rows, but columns are sharded"
        )


def _has_replicated_ids(layout: Placement | None) -> bool:
    if layout is None or (isinstance(layout, Shard) and layout.dim == 0):
        return False
    if isinstance(layout, Replicate):
        return True
    raise WrongValue(f"input_layouts must be Shard(0) or Replicate(), got {layout}")


def _checked_table(
    module: nn.Module, mesh: DeviceMesh, head: nn.Linear | None, name: str
) -> Any:
    """Return the table of a layer, or raise if it cannot be sharded."""
    table: Any = module.token if isinstance(module, EmbeddingLayer) else module
    # A growing layer writes to its table by row, and each process has ids of its own.
    if not isinstance(table, GrowingEmbedding):
        table = getattr(table, "table", table)
    if type(table) not in (Embedding, EmbeddingBag):
        is_torch = type(table).__module__.startswith("torch.nn.")
        kind = f"{'torch.nn.' if is_torch else ''}{type(table).__name__}"
        raise WrongType(
            f"{name} needs a layer of firstlayer.torch with a table in memory, got {kind}"
        )
    weight = table.weight
    if mesh.ndim not in (1, 2):
        raise WrongValue(f"mesh must have 1 or 2 axes, got {mesh.ndim}")
    if store_of(weight) is not None or type(weight) is not nn.Parameter:
        kind = "a table on disk" if store_of(weight) is not None else type(weight).__name__
        raise WrongType(
            f"{name} needs a table that is an ordinary parameter without an optimizer, "
            f"got {kind}"
        )
    if head is not None and (type(head) is not nn.Linear or head.weight is not weight):
        raise WrongValue("head must be a torch.nn.Linear with the weight of the table")
    return table
