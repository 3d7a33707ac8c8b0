"""Configs and collections of TorchRec as tables of a group."""

from typing import Any

import torch
from torch import Tensor

from ...embeddings.table_group import Table
from .._tensors.errors import WrongType, WrongValue, torch_errors

#: Attributes of a config that are read.
CONFIG = "name", "num_embeddings", "embedding_dim", "feature_names", "data_type", "init_fn"


def configs_of(collection: Any) -> tuple[list[Any], dict[str, Tensor] | None]:
    """Return the configs of a collection of TorchRec, and its tables if it has any."""
    for configs, modules in (
        ("embedding_bag_configs", "embedding_bags"),
        ("embedding_configs", "embeddings"),
    ):
        if hasattr(collection, configs) and hasattr(collection, modules):
            tables = getattr(collection, modules)
            own = getattr(collection, configs)()
            return own, {one.name: tables[one.name].weight for one in own}
    if not isinstance(collection, list | tuple):
        raise WrongType(
            "tables must be a collection of TorchRec or a list of its configs, "
            f"got {type(collection).__name__}"
        )
    for number, config in enumerate(collection):
        if not all(hasattr(config, name) for name in CONFIG):
            raise WrongType(
                f"tables[{number}] must be a config of TorchRec, "
                f"got {type(config).__name__}"
            )
    if not collection:
        raise WrongValue("tables must have at least one config, got none")
    return list(collection), None


def table_of(config: Any) -> Table:
    pooling = getattr(config, "pooling", None)
    mode: Any = None if pooling is None else pooling.value.lower()
    with torch_errors():
        return Table(
            config.num_embeddings,
            config.embedding_dim,
            features=config.feature_names or (config.name,),
            mode=mode,
        )


def dtype_of(configs: list[Any]) -> torch.dtype:
    """Return the dtype of the tables of TorchRec's configs."""
    names = {config.data_type.value: config.name for config in configs}
    dtypes = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    for name, table in names.items():
        if name not in dtypes or len(names) > 1:
            raise WrongValue(
                "tables must have one data_type of FP32, FP16 or BF16, "
                f"got {sorted(names)} (table {table!r})"
            )
    return dtypes[next(iter(names))]
