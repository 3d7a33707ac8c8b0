"""Calls of a layer whose modules and parameters stay as they are.

A call of one token spends most of its time on deciding what the kernel may read and on
passing it; in a call of thousands of tokens it takes as long as a tenth of the work. Both
depend on the layer alone. A :class:`CallPlan` holds the result. Before each use it compares
everything that it depends on, which takes a few microseconds. A plan has addresses of the
layer's memory and refers to no module or parameter.
"""

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook

from ... import kernels
from ...embeddings.layer import ONE_THREAD_NUMBERS
from .._tensors.errors import out_of_range_error
from .._tensors.memory import (
    TensorMemory,
    array_of_table,
    is_plain_cpu,
    request_large_pages,
    threads_of_torch,
)
from ..learned import LearnedPositions
from .arguments import LayerArguments
from .eligibility import has_own_hooks, is_idle
from .fused import LayerInputs, LayerOptions, LayerTensors, recorded_layer

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer

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
        "_forward",
        "_has_positions",
        "_is_sparse",
        "_modules",
        "_num_embeddings",
        "_options",
        "_scale",
        "_width",
    )

    def __init__(
        self,
        layer: "EmbeddingLayer",
        tensors: LayerTensors[Tensor],
        options: LayerOptions,
    ) -> None:
        from ...kernels.bound import BoundForward

        self._modules = [_ModuleState(layer, *described) for described in _MODULES]
        self._scale, self._is_sparse = layer.scale, layer.token.sparse
        self._options, self._dtype = options, options.dtype
        self._num_embeddings, self._width = tensors.token_table.shape
        self._has_positions = tensors.position_table is not None
        names = "token_table", "position_table", "norm_weight", "norm_bias"
        token, position, *norm = (_array(getattr(tensors, name)) for name in names)
        self._forward = BoundForward(
            token,
            position_table=position,
            norm=None if norm[0] is None else (*norm, options.eps),
            scale=options.scale,
        )

    def run(self, layer: "EmbeddingLayer", ids: Any, offset: Any) -> Tensor | None:
        """Return the layer's output, or None if the plan does not cover the call."""
        if (
            type(ids) is not Tensor
            or type(offset) is not int
            or not is_plain_cpu(ids)
            or ids.dtype is not torch.int64
            or ids.layout is not torch.strided
            or ids.is_nested
            or not ids.is_contiguous()
            # A zero tensor, such as a tangent, has no memory.
            or not ids.data_ptr()
            or is_functorch_wrapped_tensor(ids)
            or layer.zero_padding
            or not is_idle(layer._modules["dropout"])
            or _has_any_global_hook()
        ):
            return None
        parameters = self.parameters_of(layer)
        if parameters is None:
            return None
        modules: dict[str, Any] = layer._modules
        lead, size, rows = ids.shape, ids.numel(), None
        if not size * self._width:
            return None
        if self._has_positions:
            module: Any = modules["position"]
            if not lead or not 0 <= offset <= module.max_positions - lead[-1]:
                return None
            first = offset + module.row_offset
            rows = range(first, first + lead[-1])
        if self._is_sparse:
            modules["token"].prepare_lookup(ids)
        if torch.is_grad_enabled():
            for x in parameters:
                if x is not None and x.requires_grad:
                    return self._record(ids, rows, parameters)
        return self._write(ids, lead, size, rows)

    def parameters_of(self, layer: "EmbeddingLayer") -> list[Any] | None:
        """Return the parameters of the layer if it is as it was, else None."""
        modules, parameters = layer._modules, []
        if layer.scale is not self._scale or modules.get("segment") is not None:
            return None
        for state in self._modules:
            if not state.append_parameters(modules, parameters):
                return None
        return parameters

    def _record(self, ids: Tensor, rows: range | None, parameters: list[Any]) -> Tensor:
        token, position, norm_weight, norm_bias = parameters
        return recorded_layer(
            lambda tensors, statistics: self._write(
                ids, ids.shape, ids.numel(), rows, statistics
            ),
            LayerTensors(token, ids, position, None, None, None, norm_weight, norm_bias),
            self._options,
            position_rows=rows,
        )

    def _write(
        self,
        ids: Tensor,
        lead: torch.Size,
        size: int,
        rows: range | None,
        statistics: np.ndarray | None = None,
    ) -> Tensor:
        """Return the output for ids of this shape and number, with these position rows."""
        out = torch.empty((*lead, self._width), dtype=self._dtype, device=_CPU)
        request_large_pages(out)
        numbers = ids.data_ptr(), out.data_ptr(), size
        if size * self._width < ONE_THREAD_NUMBERS:
            flag = self._forward(*numbers, rows, statistics)
        else:
            with threads_of_torch():
                flag = self._forward.on_threads(*numbers, rows, statistics)
        if flag > 0:
            raise out_of_range_error(ids, self._num_embeddings)
        if flag < 0:
            raise MemoryError("the layer could not allocate memory")
        return out


class _ModuleState:
    """A submodule of a layer as it was when a plan was made.

    Args:
        layer: The layer.
        name: Name of the submodule.
        settings: Attributes that must stay the same.
        parameters: Names of its parameters.
    """

    __slots__ = "_class", "_memory", "_name", "_read", "_settings"

    def __init__(
        self,
        layer: "EmbeddingLayer",
        name: str,
        settings: tuple[str, ...],
        parameters: tuple[str, ...],
    ) -> None:
        module: Any = layer._modules.get(name)
        self._name, self._class, self._read = name, type(module), itemgetter(*settings)
        self._memory: list[Any] = [(name, None) for name in parameters]
        if module is not None:
            self._settings = self._read(vars(module))
            self._memory = [
                (name, TensorMemory(module._parameters[name])) for name in parameters
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
        if self._read(state) != self._settings or has_own_hooks(state):
            return False
        parameters = state["_parameters"]
        for name, memory in self._memory:
            x = parameters.get(name)
            if not memory.is_that_of(x):
                return False
            found.append(x)
        return True


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


def plan_for(
    plan: CallPlan | None,
    layer: "EmbeddingLayer",
    arguments: LayerArguments,
    inputs: LayerInputs,
) -> CallPlan | None:
    """Return the plan for the next calls, or None if there can be none.

    A short call replaces a plan that is no longer valid. Making a plan takes longer than it
    saves in a long call, and parameters may move from call to call, so a long call only
    makes the first plan.

    Args:
        plan: The plan of the layer so far.
        layer: The layer.
        arguments: Arguments of a call that the plan did not cover.
        inputs: Inputs of the kernels for that call.
    """
    is_long = math.prod(arguments.lead) * layer.embedding_dim >= ONE_THREAD_NUMBERS
    if plan is not None and (is_long or plan.parameters_of(layer) is not None):
        return plan
    tensors, options, _ = inputs
    position: Any = layer._modules.get("position")
    others = arguments.positions, arguments.segments, arguments.embeds, arguments.mask
    if any(x is not None for x in others):
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
    return CallPlan(layer, tensors, options) if kernels.can_bind() else None


def _array(x: Tensor | None) -> Any:
    return None if x is None else array_of_table(x, keeps_alive=False)
