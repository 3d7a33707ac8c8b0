"""Arrays of a layer's parameters that calls without a gradient reuse.

A call of one token spends most of its time on deciding which parameters the kernel may read
and on making arrays of them. Both depend on the layer alone. A :class:`CallPlan` holds the
result. Before each use it compares everything that it depends on, which takes a few
microseconds. A plan owns no memory and keeps no parameter alive.
"""

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from .._tensors.memory import (
    array_of,
    array_of_table,
    is_plain_cpu,
    request_large_pages,
    threads_of_torch,
)
from ..learned import LearnedPositions
from .arguments import LayerArguments
from .eligibility import has_hooks
from .fused import LayerOptions, LayerTensors

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer


# Kernels write fewer numbers than this on one thread, whatever their number of threads.
ONE_THREAD = 1 << 16


class CallPlan:
    """Kernel arguments of a layer, with everything that decides whether they are valid.

    Args:
        layer: A layer of tokens and, optionally, learned positions and a norm.
        tensors: The tensors of a call that was eligible for the kernels.
        options: The options of that call.
    """

    __slots__ = (
        "_dtype",
        "_memory",
        "_others",
        "_parameters",
        "_position",
        "_settings",
        "_token",
        "_width",
        "_write_rows",
    )

    def __init__(
        self,
        layer: "EmbeddingLayer",
        tensors: LayerTensors[Tensor],
        options: LayerOptions,
    ) -> None:
        from ...kernels.layer.forward import write_rows

        self._settings, self._write_rows = _settings(layer), write_rows
        self._width, self._dtype = options.shape[-1], options.dtype
        parameters = _parameters(layer)
        self._parameters = [weakref.ref(x) for x in parameters]
        self._memory = [(x.data_ptr(), x.shape, x.dtype) for x in parameters]
        number = np.float64 if options.dtype is torch.float64 else np.float32
        tables = tensors.token_table, tensors.position_table
        self._token, self._position = map(_array, tables)
        norm = map(_array, (tensors.norm_weight, tensors.norm_bias))
        self._others = (*norm, number(options.scale), number(options.eps))

    def run(self, layer: "EmbeddingLayer", arguments: LayerArguments) -> Tensor | None:
        """Return the layer's output, or None if the plan does not cover the call.

        None too if an id is out of range. Gradients must be disabled, and dropout too.
        """
        ids, lead, offset = arguments.ids, arguments.lead, arguments.offset
        if ids is None or not _is_simple(arguments) or _settings(layer) != self._settings:
            return None
        parameters = _parameters(layer)
        if len(parameters) != len(self._parameters) or not is_plain_cpu(*parameters, ids):
            return None
        for x, known, memory in zip(
            parameters, self._parameters, self._memory, strict=True
        ):
            address, shape, dtype = memory
            if (
                x is None
                or x is not known()
                or x.data_ptr() != address
                or x.shape != shape
                or x.dtype is not dtype
                or not x.is_contiguous()
            ):
                return None
        position_rows = None
        if self._position is not None:
            module: Any = layer._modules["position"]
            if not 0 <= offset <= module.max_positions - lead[-1]:  # pyright: ignore
                return None
            first = offset + module.row_offset  # pyright: ignore
            position_rows = np.arange(first, first + lead[-1])
        out = torch.empty((*lead, self._width), dtype=self._dtype, device="cpu")
        rows = ids.numpy().reshape(-1)
        args = self._token, rows, self._position, position_rows, None, None, *self._others
        array = array_of(out).reshape(-1, self._width)
        if array.size < ONE_THREAD:
            return out if self._write_rows(*args, out=array) else None
        request_large_pages(out)
        with threads_of_torch():
            return out if self._write_rows(*args, out=array) else None


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
    position: Any = layer._modules.get("position")
    if not _is_simple(arguments) or layer._modules.get("segment") is not None:
        return None
    if position is not None and (
        type(position) is not LearnedPositions
        or position.scale != 1.0
        or position.padding_idx is not None
    ):
        return None
    # A parametrized weight is not among the parameters.
    owned = {id(x) for x in _parameters(layer)}
    read = (inputs[0].token_table, inputs[0].position_table, *inputs[0][6:8])
    if not kernels.has_compiler() or owned != {id(x) for x in read if x is not None}:
        return None
    return CallPlan(layer, *inputs)


def _is_simple(arguments: LayerArguments) -> bool:
    """Return whether a call has ids and an offset only."""
    ids, embeds, positions, offset = arguments[1:5]
    return (
        ids is not None
        and ids.dtype is torch.int64
        and ids.is_contiguous()
        and type(offset) is int
        and embeds is positions is arguments.segments is arguments.mask is None
        and 0 not in arguments.lead
    )


def _settings(layer: "EmbeddingLayer") -> tuple[Any, ...]:
    """Return everything besides parameters that decides how the kernels compute a call."""
    modules: dict[str, Any] = layer._modules
    token, position, norm = map(modules.get, ("token", "position", "norm"))
    of_position = of_norm = None
    if type(position) is LearnedPositions:
        of_position = (
            position.max_positions,
            position.row_offset,
            position.scale,
            position.padding_idx,
        )
    if norm is not None:
        of_norm = getattr(norm, "eps", None)
    return (
        layer.scale,
        type(token),
        getattr(token, "num_embeddings", None),
        getattr(token, "embedding_dim", None),
        getattr(token, "max_norm", None),
        getattr(token, "scale_grad_by_freq", None),
        getattr(token, "output_device", None),
        type(position),
        of_position,
        modules.get("segment") is None,
        type(norm),
        of_norm,
        has_hooks(token, position, norm),
    )


def _parameters(layer: "EmbeddingLayer") -> list[Any]:
    """Return the parameters of the modules; None for one that is absent."""
    modules: dict[str, Any] = layer._modules
    found = []
    for name in ("token", "position", "norm"):
        module = modules.get(name)
        if module is not None:
            found.extend(module._parameters.values())
    return found


def _array(x: Tensor | None) -> np.ndarray | None:
    """Return a parameter as the kernel takes it."""
    # Numba is imported by then.
    from ...kernels.runtime.compile import bits_of

    return None if x is None else bits_of(array_of_table(x, keeps_alive=False))
