"""Short calls of a layer whose modules and parameters stay as they are.

A call of one token spends most of its time on deciding what the kernel may read and on
passing it. Both depend on the layer alone. A :class:`CallPlan` holds the result. Before each
use it compares everything that it depends on, which takes a few microseconds. A plan owns
no memory of the layer and keeps no module or parameter alive.
"""

import weakref
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook

from ... import kernels
from .._tensors.errors import out_of_range_error
from .._tensors.memory import (
    LARGE_PAGES_FROM,
    array_of_table,
    is_plain_cpu,
    tensor_of,
    threads_of_torch,
)
from ..learned import LearnedPositions
from .arguments import LayerArguments
from .eligibility import has_own_hooks, is_idle
from .fused import LayerOptions, LayerTensors, recorded_layer

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer

# Outputs of fewer numbers are written on one thread.
ONE_THREAD = 1 << 16
_CPU = torch.device("cpu")


class CallPlan:
    """Kernel arguments of a layer, with everything that decides whether they are valid.

    Args:
        layer: A layer of tokens and, optionally, learned positions and a norm.
        tensors: The tensors of a call that was eligible for the kernels.
        options: The options of that call.
    """

    __slots__ = (
        "_dtype",
        "_is_sparse",
        "_kernel",
        "_modules",
        "_num_embeddings",
        "_options",
        "_position_rows",
        "_row_bytes",
        "_scale",
        "_ticket_for",
        "_width",
    )

    def __init__(
        self,
        layer: "EmbeddingLayer",
        tensors: LayerTensors[Tensor],
        options: LayerOptions,
    ) -> None:
        from ...kernels.layer.direct import bind_forward, forward_ticket

        self._modules = [_ModuleState(layer, *described) for described in _MODULES]
        self._scale, self._is_sparse = layer.scale, layer.token.sparse
        self._options, self._dtype = options, options.dtype
        self._num_embeddings, self._width = tensors.token_table.shape
        self._row_bytes = self._width * self._dtype.itemsize
        token, position = _array(tensors.token_table), _array(tensors.position_table)
        norm = _array(tensors.norm_weight), _array(tensors.norm_bias)
        # Every row of the table in order, and their address.
        self._position_rows = None
        if position is not None:
            rows = np.arange(len(position))
            self._position_rows = rows, rows.ctypes.data
        self._ticket_for = forward_ticket
        self._kernel = bind_forward(
            token,  # pyright: ignore
            position_table=position,
            norm=None if norm[0] is None else (*norm, options.eps),  # pyright: ignore
            scale=options.scale,
        )

    def run(self, layer: "EmbeddingLayer", ids: Any, offset: Any) -> Tensor | None:
        """Return the layer's output, or None if the plan does not cover the call."""
        modules: dict[str, Any] = layer._modules
        if (
            type(ids) is not Tensor
            or type(offset) is not int
            or not is_plain_cpu(ids)
            or ids.dtype is not torch.int64
            or ids.layout is not torch.strided
            or ids.is_nested
            or not ids.is_contiguous()
            or layer.scale is not self._scale
            or layer.zero_padding
            or modules.get("segment") is not None
            or not is_idle(modules["dropout"])
            or _has_any_global_hook()
        ):
            return None
        parameters: list[Any] = []
        for state in self._modules:
            if not state.append_parameters(modules, parameters):
                return None
        token, position, norm_weight, norm_bias = parameters
        lead, first = ids.shape, offset
        if not 0 < ids.numel() * self._row_bytes < LARGE_PAGES_FROM:
            return None
        if position is not None:
            module: Any = modules["position"]
            if not lead or not 0 <= offset <= module.max_positions - lead[-1]:
                return None
            first += module.row_offset
        if self._is_sparse:
            modules["token"].prepare_lookup(ids)
        if not torch.is_grad_enabled() or not any(
            x is not None and x.requires_grad for x in parameters
        ):
            return self._write(ids, first)
        rows = None
        if position is not None:
            rows = tensor_of(np.arange(first, first + lead[-1]))
        tensors = LayerTensors(
            token, ids, position, rows, None, None, norm_weight, norm_bias
        )
        return recorded_layer(lambda: self._write(ids, first), tensors, self._options)

    def _write(self, ids: Tensor, first: int) -> Tensor:
        """Return the output for ids whose positions begin in this row."""
        lead, size = ids.shape, ids.numel()
        out = torch.empty((*lead, self._width), dtype=self._dtype, device=_CPU)
        if size * self._width < ONE_THREAD:
            ticket = 0, size, 0, 0, 0
        else:
            with threads_of_torch():
                ticket = self._ticket_for(size, self._width)
        numbers = ids.data_ptr(), size, out.data_ptr(), size
        if self._position_rows is not None:
            address = self._position_rows[1] + 8 * first
            flag = self._kernel(*ticket, *numbers, address, lead[-1])
        else:
            flag = self._kernel(*ticket, *numbers)
        if flag:
            if flag < 0:
                raise MemoryError("the layer could not allocate memory")
            raise out_of_range_error(ids, self._num_embeddings)
        return out


class _ModuleState:
    """A submodule of a layer as it was when a plan was made.

    Args:
        layer: The layer.
        name: Name of the submodule.
        settings: Attributes that must stay the same.
        parameters: Names of its parameters.
    """

    __slots__ = "_class", "_memory", "_module", "_name", "_read", "_settings"

    def __init__(
        self,
        layer: "EmbeddingLayer",
        name: str,
        settings: tuple[str, ...],
        parameters: tuple[str, ...],
    ) -> None:
        module: Any = layer._modules.get(name)
        self._name, self._class, self._read = name, type(module), itemgetter(*settings)
        self._memory = [(name, None) for name in parameters]
        if module is not None:
            self._module = weakref.ref(module)
            self._settings = self._read(vars(module))
            self._memory = [
                (name, _Memory(module._parameters[name])) for name in parameters
            ]

    def append_parameters(self, modules: dict[str, Any], found: list[Any]) -> bool:
        """Append the parameters to a list, and return whether nothing has changed.

        Args:
            modules: Submodules of the layer.
            found: The list. None stands for a parameter of an absent module.
        """
        module = modules.get(self._name)
        if type(module) is not self._class:
            return False
        if module is None:
            found += [None] * len(self._memory)
            return True
        state = module.__dict__
        if (
            module is not self._module()
            or self._read(state) != self._settings
            or has_own_hooks(state)
        ):
            return False
        parameters = state["_parameters"]
        for name, memory in self._memory:
            x = parameters.get(name)
            if not memory.is_of(x):
                return False
            found.append(x)
        return True


class _Memory:
    """A parameter, and its memory when a plan was made."""

    __slots__ = "_address", "_dtype", "_parameter", "_shape"

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._address = weakref.ref(parameter), parameter.data_ptr()
        self._shape, self._dtype = parameter.shape, parameter.dtype

    def is_of(self, x: Any) -> bool:
        return (
            x is self._parameter()
            # Not a parameter under a row optimizer, which may have stale rows.
            and type(x) is Parameter
            and x.data_ptr() == self._address
            and x.shape == self._shape
            and x.dtype is self._dtype
            and x.is_contiguous()
        )


# Submodules, their attributes that the output or its gradient depends on, and their
# parameters. Attributes are read from the dicts of modules, which is faster.
_MODULES = (
    (
        "token",
        (
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "scale_grad_by_freq",
            "sparse",
            "_output_device",
        ),
        ("weight",),
    ),
    ("position", ("max_positions", "row_offset", "padding_idx", "scale"), ("weight",)),
    ("norm", ("eps", "normalized_shape"), ("weight", "bias")),
)


def plan_of(
    layer: "EmbeddingLayer",
    arguments: LayerArguments,
    inputs: tuple[LayerTensors[Tensor], LayerOptions],
) -> CallPlan | None:
    """Return a plan for calls like this one, or None if there can be none.

    Args:
        layer: The layer.
        arguments: Arguments of a call.
        inputs: Inputs of the kernels for that call.
    """
    tensors, options = inputs
    position: Any = layer._modules.get("position")
    others = arguments.positions, arguments.segments, arguments.embeds, arguments.mask
    if any(x is not None for x in others) or not _can_bind():
        return None
    if position is not None and (
        type(position) is not LearnedPositions
        or position.scale != 1.0
        or position.padding_idx is not None
    ):
        return None
    for name, settings, parameters in _MODULES:
        module = layer._modules.get(name)
        if module is None:
            continue
        # A parametrized weight is not among the parameters, and one under a row optimizer
        # may have stale rows.
        if not vars(module).keys() >= set(settings) or any(
            type(module._parameters.get(each)) is not Parameter for each in parameters
        ):
            return None
    return CallPlan(layer, tensors, options)


def _can_bind() -> bool:
    if not kernels.has_compiler():
        return False
    from ...kernels.runtime.direct import can_bind

    return can_bind()


def _array(x: Tensor | None) -> np.ndarray | None:
    return None if x is None else array_of_table(x, keeps_alive=False)
