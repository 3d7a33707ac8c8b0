"""Hook that a layer installs on its table, called when a gradient is accumulated."""

import weakref
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ... import kernels
from .._tensors.dtypes import HALF
from .._tensors.memory import array_of
from .._tensors.row_parameter import RowParameter, without_catch_up
from .._tensors.shard_tensor import RowShardParameter, ShardParameter
from ..optim.sparse_gradient import RowGradientTensor, coalesced


class GradHook:
    """Post-accumulate-grad hook that calls ``layer._on_grad_accumulated(parameter)``.

    Copies and pickles of a parameter have no hooks, so layers install it before lookups.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)
        self.has_warned = False

    @property
    def expects_sparse(self) -> bool:
        """Whether the layer's lookups give the parameter a sparse gradient."""
        return getattr(self.layer(), "sparse", False)

    def __call__(self, parameter: Tensor) -> None:
        layer = self.layer()
        if layer is None:
            return
        # Only rows with a gradient are read, and they are up to date.
        with without_catch_up():
            layer._on_grad_accumulated(parameter)


def install_grad_hook(layer: Any, parameter: Tensor, *, reattach: bool = False) -> None:
    """Install the layer's :class:`GradHook` on a parameter, unless it is there already.

    Args:
        layer: The layer.
        parameter: The layer's table.
        reattach: Whether the parameter may have been swapped with another tensor. Swapping
            keeps the list of hooks but detaches it from autograd.
    """
    if type(parameter) in (RowParameter, ShardParameter, RowShardParameter):
        with without_catch_up():
            _install_grad_hook(layer, parameter, reattach=reattach)
    elif type(parameter) is Parameter:
        _install_grad_hook(layer, parameter, reattach=reattach)


def _install_grad_hook(layer: Any, parameter: Any, *, reattach: bool) -> None:
    if not parameter.requires_grad:
        return
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        if reattach:
            parameter._post_accumulate_grad_hooks = hooks
        for hook in hooks.values():
            if type(hook) is GradHook and hook.layer() is layer:
                return
    parameter.register_post_accumulate_grad_hook(GradHook(layer))


def coalesce_gradient(parameter: Tensor) -> None:
    """Coalesce a sparse gradient and make it a tensor that torch can clip.

    Accumulation clears its ``is_coalesced`` flag.
    """
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return
    if not grad.is_coalesced():
        grad = _coalesced(grad)
    parameter.grad = RowGradientTensor.from_sparse(grad)


def _coalesced(grad: Tensor) -> Tensor:
    ids = grad._indices()
    # An empty tensor must not be exposed to NumPy: accumulation resizes it.
    if ids.is_cpu and ids.shape[1]:
        ascends = kernels.ascends(array_of(ids)[0])
    else:
        ascends = bool((ids[0, 1:] > ids[0, :-1]).all())
    if ascends:
        return grad._coalesced_(True)
    if grad.is_cpu and grad.dtype in HALF:
        # A gradient of torch's own lookup, which torch would sum in half precision.
        return coalesced(grad)
    return grad.coalesce()
