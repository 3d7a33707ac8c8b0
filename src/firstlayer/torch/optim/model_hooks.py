"""Hooks that make torch's own layers catch up stale rows before they read a table.

The hooks are plain functions that look for ``table_state`` on the parameter when they run,
so copies and pickles of a model may keep them. Another hook, on the parameter, makes its
sparse gradients tensors that torch can clip.
"""

from typing import Any

from torch import Tensor, nn

from .sparse_gradient import RowGradientTensor
from .table_state import catch_up


def add_hooks(model: nn.Module) -> None:
    """Add hooks to every module that uses the table of an embedding with ``sparse=True``.

    Firstlayer's layers catch up without hooks.
    """
    # Imported here: the layers import this package.
    from .._table.module import TableModule
    from ..frozen import PartlyFrozenEmbedding

    modules = list(model.modules())
    tables = {
        parameter
        for module in modules
        if getattr(module, "sparse", False)
        for parameter in module.parameters(recurse=False)
    }
    for module in modules:
        uses_table = any(p in tables for p in module.parameters(recurse=False))
        if uses_table and not isinstance(module, TableModule | PartlyFrozenEmbedding):
            _add_hooks(module)
            if getattr(module, "sparse", False):
                for parameter in module.parameters(recurse=False):
                    _add_grad_hook(parameter)


def _add_hooks(module: nn.Module) -> None:
    is_lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    before_forward = _catch_up_ids if is_lookup else _catch_up_all
    if before_forward not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(before_forward, with_kwargs=True)
        module.register_state_dict_pre_hook(_catch_up_all)
        module.register_load_state_dict_pre_hook(_catch_up_all)


def _add_grad_hook(parameter: Tensor) -> None:
    hooks = parameter._post_accumulate_grad_hooks or {}  # pyright: ignore
    if parameter.requires_grad and _make_clippable not in hooks.values():
        parameter.register_post_accumulate_grad_hook(_make_clippable)


def _make_clippable(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = RowGradientTensor.from_sparse(parameter.grad)


def _catch_up_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids = args[0] if args else kwargs.get("input")
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.values()
    for parameter in module.parameters(recurse=False):
        catch_up(parameter, ids)


def _catch_up_all(module: nn.Module, *_: Any) -> None:
    for parameter in module.parameters(recurse=False):
        catch_up(parameter)
