"""Tables of TorchRec as layers of this library, and back.

TorchRec itself is not imported: its collections are recognized by their methods.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._tensors.errors import WrongType, WrongValue, check_module
from ..bag import EmbeddingBag
from ..token import Embedding


def from_torchrec(collection: nn.Module) -> nn.ModuleDict:
    """Return the tables of a TorchRec collection as layers, by name.

    Each layer has the memory of its table. Tables of an ``EmbeddingBagCollection`` become
    :class:`~firstlayer.torch.EmbeddingBag`, to be called with the ``values()`` and
    ``offsets()`` of a feature; those of an ``EmbeddingCollection`` become
    :class:`~firstlayer.torch.Embedding`. Give them to
    :func:`~firstlayer.torch.sharding.shard_rows` to shard them.

    Args:
        collection: ``EmbeddingBagCollection`` or ``EmbeddingCollection``, before
            ``DistributedModelParallel`` shards it.

    Example:
        >>> collection = nn.Module()  # in place of an EmbeddingBagCollection
        >>> collection.embedding_bags = nn.ModuleDict({"a": nn.EmbeddingBag(9, 4)})
        >>> from_torchrec(collection)
        ModuleDict(
          (a): EmbeddingBag(9, 4, mode='mean')
        )
    """
    bags = getattr(collection, "embedding_bags", None)
    tables = bags if bags is not None else getattr(collection, "embeddings", None)
    layers = nn.ModuleDict()
    for name, table in _tables(collection, tables).items():
        rows, width = table.weight.shape
        options = {"sparse": True, "_weight": table.weight.detach()}
        if bags is None:
            layers[name] = Embedding(rows, width, **options)
        else:
            layers[name] = EmbeddingBag(
                rows, width, mode=table.mode, include_last_offset=True, **options
            )
    return layers


@torch.no_grad()
def copy_to_torchrec(
    layers: nn.ModuleDict | Mapping[str, nn.Module], collection: nn.Module
) -> None:
    """Copy tables to a TorchRec collection of the same names, which may be sharded.

    Sharding an ``EmbeddingBagCollection`` on the CPU draws its tables again and loses the
    values they had. Call this afterwards, on all ranks.

    Args:
        layers: Layers by the names of their tables, such as :func:`from_torchrec` returns.
            Sharded layers are gathered one at a time.
        collection: ``EmbeddingBagCollection`` or ``EmbeddingCollection``, or what
            ``DistributedModelParallel`` made of it.
    """
    check_module("collection", collection)
    if not isinstance(layers, nn.ModuleDict | Mapping):
        raise WrongType(
            f"layers must be a ModuleDict or a mapping, got {type(layers).__name__}"
        )
    state = {key.split(".")[-2:][0]: x for key, x in collection.state_dict().items()}
    if state.keys() != dict(layers).keys():
        raise WrongValue(
            f"layers must have the tables {sorted(state)}, got {sorted(dict(layers))}"
        )
    for name, layer in layers.items():
        check_module(f"layers[{name!r}]", layer)
    for name, layer in layers.items():
        whole: Any = layer.state_dict()["weight"]
        whole = whole.full_tensor() if hasattr(whole, "device_mesh") else whole
        target: Any = state[name]
        if _shape(target) != tuple(whole.shape):
            raise WrongValue(
                f"{name} must have shape {_shape(target)}, got {tuple(whole.shape)}"
            )
        for tensor, (row, column) in _parts(target):
            rows, columns = tensor.shape
            part = whole[row : row + rows, column : column + columns]
            tensor.copy_(part)


def _tables(collection: Any, tables: Any) -> dict[str, Any]:
    """Return the unsharded tables of a collection by name, or raise."""
    if isinstance(tables, nn.ModuleDict):
        found = dict(tables.items())
        if all(
            isinstance(getattr(each, "weight", None), Tensor) for each in found.values()
        ):
            return found
    raise WrongType(
        "collection must be an EmbeddingBagCollection or EmbeddingCollection that is not "
        f"sharded, got {type(collection).__name__}"
    )


def _shape(target: Any) -> tuple[int, ...]:
    # ShardedTensor.size() warns that ShardedTensor is deprecated.
    is_sharded = hasattr(target, "local_shards")
    return tuple(target.metadata().size if is_sharded else target.shape)


def _parts(target: Any) -> list[tuple[Tensor, tuple[int, int]]]:
    """Return this rank's parts of a tensor, with their first row and column."""
    if hasattr(target, "local_shards"):
        shards = target.local_shards()
        return [(each.tensor, tuple(each.metadata.shard_offsets)) for each in shards]
    return [(target, (0, 0))]
