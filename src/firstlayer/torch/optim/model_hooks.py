"""Hooks on torch's own layers that share a table with an embedding with ``sparse=True``.

Operations on a parameter catch up by themselves, except where torch does not call its
class: the transforms of ``torch.func`` wrap it in plain tensors, and jagged tensors handle
operations first. Hooks before the forward catch up in these cases too. They are plain
functions that look at the parameter when they run, so copies and pickles of a model may
keep them.
"""

import warnings
from typing import Any

from torch import Tensor, nn

from .._tensors.row_parameter import is_row_tensor
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


def warn_of_dense_gradient(parameter: Any, optimizer: str, lr: float | Tensor) -> None:
    """Warn, once for each table, that a table with ``sparse=True`` has a dense gradient.

    Args:
        parameter: Parameter with a dense gradient, which may be a table or not.
        optimizer: Name of the row optimizer.
        lr: Learning rate of the step.
    """
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    marks = [hook for hook in hooks if getattr(hook, "expects_sparse", False)]
    if is_row_tensor(parameter):
        marks.append(parameter.table_state)
    if not marks or any(mark.has_warned for mark in marks):
        return
    if not lr:
        # torch.distributed.checkpoint creates states by a step with gradients of zeros.
        return
    for mark in marks:
        mark.has_warned = True
    warnings.warn(
        f"the gradient of a table of {len(parameter)} rows is dense, as that of a tied "
        f"output head is, so {optimizer} updates every row. This is exact, but costs as "
        "much as a dense optimizer. A sampled softmax through the table, "
        "F.linear(x, layer(sampled_ids)), keeps the gradient sparse and the result exact",
        stacklevel=2,
    )


def _add_grad_hook(parameter: Tensor) -> None:
    hooks = parameter._post_accumulate_grad_hooks or {}  # pyright: ignore
    if parameter.requires_grad and ClippableHook not in map(type, hooks.values()):
        parameter.register_post_accumulate_grad_hook(ClippableHook())


class ClippableHook:
    """Post-accumulate-grad hook that makes sparse gradients tensors that torch can clip."""

    #: Whether the parameter is that of an embedding with ``sparse=True``.
    expects_sparse = True

    def __init__(self) -> None:
        self.has_warned = False

    def __call__(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = RowGradientTensor.from_sparse(grad)


def _catch_up_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids = args[0] if args else kwargs.get("input")
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.values()
    for parameter in module.parameters(recurse=False):
        catch_up(parameter, ids)


def _catch_up_all(module: nn.Module, *_: Any) -> None:
    for parameter in module.parameters(recurse=False):
        catch_up(parameter)
