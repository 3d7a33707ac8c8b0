"""What is done when a gradient has arrived at a parameter: marks it, shortens rows.

torch calls such a hook once the whole gradient of a backward is in ``.grad``. The hook
lives on the parameter, which neither a copy nor a pickle takes along, so layers ask for it
again before each lookup that needs one.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ... import kernels
from .._tensors.buffers import compute_dtype
from .._tensors.memory import array_of
from ..optim.sparse_gradient import coalesced
from .lookup import HALF, shortened


class GradHook:
    """Calls ``layer._on_grad_accumulated(parameter)``, as long as that layer lives."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)

    def __call__(self, parameter: Tensor) -> None:
        layer = self.layer()
        if layer is not None:
            layer._on_grad_accumulated(parameter)


def install_grad_hook(layer: Any, parameter: Tensor, *, anew: bool = False) -> None:
    """Have ``layer._on_grad_accumulated`` called for the gradients of the parameter, once for each.

    Args:
        layer: The layer.
        parameter: Its table.
        anew: Whether the parameter may have been swapped with another tensor, which takes
            away what calls the hooks and leaves their list.
    """
    if type(parameter) is not Parameter or not parameter.requires_grad:
        return
    hooks = parameter._post_accumulate_grad_hooks
    if hooks and anew:
        parameter._post_accumulate_grad_hooks = hooks
    found = (hooks or {}).values()
    if not any(isinstance(hook, GradHook) and hook.layer() is layer for hook in found):
        parameter.register_post_accumulate_grad_hook(GradHook(layer))


def coalesce_gradient(parameter: Tensor) -> None:
    """Mark a row gradient as what it is: summed by id, which accumulating forgets."""
    grad = parameter.grad
    if grad is None or not grad.is_sparse or grad.is_coalesced():
        return
    if _ascends(grad._indices()[0]):
        grad._coalesced_(True)
    elif grad.is_cpu and grad.dtype in HALF:
        # Made by torch's own lookup; torch would also sum in half precision.
        parameter.grad = coalesced(grad)
    else:
        parameter.grad = grad.coalesce()


def _ascends(ids: Tensor) -> bool:
    # What NumPy has seen cannot be resized, which torch does to no ids at all.
    if ids.is_cpu and ids.numel():
        return kernels.ascends(array_of(ids))
    return bool((ids[1:] > ids[:-1]).all())


@torch.no_grad()
def shorten_rows(
    weight: Tensor, rows: Tensor | None, *, max_norm: float, norm_type: float
) -> None:
    """Shorten rows of a table in place.

    Args:
        weight: The table.
        rows: Their ids, or for each row of the table whether it is meant; None is all.
        max_norm: As in the layers.
        norm_type: Likewise.
    """
    everything = {"dtype": torch.bool, "device": weight.device}
    found = torch.ones(weight.shape[0], **everything) if rows is None else rows
    if found.dtype == torch.bool:
        if not weight.is_cpu:
            # To ask which rows are too long would be to wait.
            short = shortened(weight, max_norm, norm_type=norm_type)
            weight.copy_(torch.where(found[:, None], short, weight))
            return
        kind = compute_dtype(weight.dtype)
        norms = torch.linalg.vector_norm(weight, norm_type, dim=1, dtype=kind)
        found = (found & (norms > max_norm)).nonzero()[:, 0]
    if found.numel():
        weight[found] = shortened(weight[found], max_norm, norm_type=norm_type)


@torch.no_grad()
def shorten_shard(weight: Any, *, max_norm: float, norm_type: float) -> None:
    """Shorten the rows here of a table split by rows over processes; leave any other alone.

    Its gradient comes from all processes, so only the rows that have one are shortened.

    Args:
        weight: The table.
        max_norm: As in the layers.
        norm_type: Likewise.
    """
    found = getattr(weight, "placements", ())
    whole_rows = all(part.is_replicate() or part.is_shard(0) for part in found)
    if found and whole_rows and weight.grad is not None:
        rows = (weight.grad.to_local() != 0).any(dim=1)
        shorten_rows(weight.to_local(), rows, max_norm=max_norm, norm_type=norm_type)


def after_backward(call: Callable[[], None]) -> None:
    """Have something called at the end of the backward that is going on."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # pyright: ignore


def is_alone() -> bool:
    """Tell whether no other process may have a copy or a part of what is here."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def rows_with_gradient(weight: Tensor) -> Tensor | None:
    """Return which rows a gradient has arrived for, or None for all rows.

    Ids for a row gradient; of a dense one, for each row whether it is not zero. Copies of a
    model on several machines must shorten the same rows, and each knows of its own ids
    only, so there it is always all of them.
    """
    grad = weight.grad
    if grad is None or not is_alone():
        return None
    return grad.indices()[0] if grad.is_sparse else (grad != 0).any(dim=1)
