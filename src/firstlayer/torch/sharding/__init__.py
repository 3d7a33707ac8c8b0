"""Tables that are larger than one machine: rows or columns sharded over a device mesh.

Runs on ``torch.distributed``: start the processes with ``torchrun``, make a mesh, and shard
the tables before the optimizer is made.

    mesh = init_device_mesh("cpu", (world_size,))
    table = shard_rows(Embedding(400_000_000, 64, sparse=True, device="meta"), mesh)
    table.to_empty(device="cpu").reset_parameters()
    fully_shard(model, ignored_params=sharded_parameters(model))
    optimizer = RowAdamW(model.parameters())

A parameter is this rank's part of the table. ``state_dict`` has the whole table as a
DTensor under the same key, and so has the state of row optimizers, so that
``torch.distributed.checkpoint`` saves it on some ranks and loads it on any other number.
:func:`firstlayer.torch.optim.clip_grad_norm_` counts every row once.

An id out of range raises the same error on every rank. Other errors of one rank, such as an
exception in the data loader, end the process; the other ranks get torch's error after the
time-out of the process group.
"""

from .exchange import Traffic as Traffic
from .parallel import ShardedRows as ShardedRows
from .parallel import shard_columns as shard_columns
from .parallel import shard_rows as shard_rows
from .parallel import shard_rows_and_columns as shard_rows_and_columns
from .parallel import sharded_parameters as sharded_parameters
from .parallel import traffic as traffic
from .torchrec import copy_to_torchrec as copy_to_torchrec
from .torchrec import from_torchrec as from_torchrec

__all__ = [
    "ShardedRows",
    "Traffic",
    "copy_to_torchrec",
    "from_torchrec",
    "shard_columns",
    "shard_rows",
    "shard_rows_and_columns",
    "sharded_parameters",
    "traffic",
]
