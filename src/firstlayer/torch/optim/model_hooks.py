"""Torch's own layers under a row optimizer: hooks that settle before rows are read.

The hooks are plain functions that look for what is pending on the parameter when they are
called, so copies and pickles of a model may keep them: nothing is pending there.
"""

from typing import Any

from torch import Tensor, nn

from .._table.module import TableModule
from ..frozen import PartlyFrozenEmbedding
from .table_state import catch_up


def add_hooks(model: nn.Module) -> None:
    """Have every module that uses a table which is trained by rows settle before it does.

    Tables are the parameters of embeddings with ``sparse=True``. Layers of Firstlayer need no
    hooks.
    """
    modules = list(model.modules())
    tables = {
        parameter
        for module in modules
        if getattr(module, "sparse", False)
        for parameter in module.parameters(recurse=False)
    }
    for module in modules:
        used = {p for p in module.parameters(recurse=False) if p in tables}
        if used and not isinstance(module, TableModule | PartlyFrozenEmbedding):
            _add(module)


def _add(module: nn.Module) -> None:
    is_lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    before_call = _before_lookup if is_lookup else _before_use
    if before_call not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(before_call, with_kwargs=True)
        module.register_state_dict_pre_hook(_before_saving)
        module.register_load_state_dict_pre_hook(_before_loading)


def _before_lookup(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    ids = args[0] if args else kwargs.get("input")
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.values()
    for parameter in module.parameters(recurse=False):
        catch_up(parameter, ids)


def _before_use(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter in module.parameters(recurse=False):
        catch_up(parameter)


def _before_saving(module: nn.Module, *_: Any) -> None:
    _before_use(module, (), {})


def _before_loading(module: nn.Module, *_: Any) -> None:
    _before_use(module, (), {})
