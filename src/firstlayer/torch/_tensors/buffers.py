"""Buffers with precomputed tables that casts and checkpoints do not change.

Float32 tables are computed on the host and stored as int32 tensors with the same bits:
``.half()``, FSDP's ``buffer_dtype`` and loops over buffers do not convert integers. The
constants of float64 are int64 (:mod:`firstlayer.positions.turns`). The buffers are not
in the state dict, because the layer's arguments determine them. ``to_empty`` leaves
buffers uninitialized, so ``_apply`` computes them again.

Graphs of ``torch.export``, ``torch.jit.trace`` and the exporters of ONNX hold the tables as
float constants instead: neither ONNX nor TorchScript can view integers as floats, and casts
of the layer do not reach constants.
"""

import inspect
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ...files.layer_configs import config_of
from .memory import is_recorded


def constant_result(function: Any) -> Any:
    """Return a function whose result is a constant for ``torch.compile``.

    The same as ``torch.compiler.assume_constant_result``, which imports the compiler: that
    takes as long as the import of torch.
    """
    function._dynamo_marked_constant = True
    return function


class PrecomputedBuffers(nn.Module):
    """Base class of layers with precomputed tables, one buffer for each of ``_tables``."""

    def _tables(self) -> dict[str, np.ndarray]:
        """Return the tables by buffer name, of 32 or 64 bits."""
        return {}

    def _float64_constants(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the float64 tables and rates that recorded graphs hold."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> from firstlayer.torch import AlibiBias
            >>> config = AlibiBias(4, max_bias=2.0).config()
            >>> AlibiBias(**config).max_bias
            2.0
        """
        return config_of(self)

    def reset_parameters(self) -> None:
        """Compute the buffers again. FSDP calls this on every module with buffers."""
        for buffer in self.buffers(recurse=False):
            return self._build(buffer.device)

    def _build(self, device: torch.device | None = None) -> None:
        device = torch.get_default_device() if device is None else device
        # Not on the meta device: nothing would fill the buffers afterwards.
        device = torch.device("cpu") if device.type == "meta" else device
        for name, table in self._tables().items():
            integers = np.int32 if table.itemsize == 4 else np.int64
            bits = torch.from_numpy(table.view(integers)).to(device)
            self.register_buffer(name, bits, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        PrecomputedBuffers.reset_parameters(self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Tables for the float64 kernels are computed again when they are needed, and a plan
        # has addresses of this process.
        derived = "_float64_tables", "_plan"
        return {k: v for k, v in self.__dict__.items() if k not in derived}

    def _integers(
        self, name: str, device: torch.device, dtype: torch.dtype = torch.int32
    ) -> Tensor:
        bits = self._buffers[name]
        # A loop over buffers may cast them or move them to the meta device without _apply.
        if bits is None or bits.dtype != dtype or bits.is_meta:
            self._build(device)
            bits = self.get_buffer(name)
        return bits.to(device) if device.type == "meta" else bits

    def _floats(
        self, name: str, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*table"]:
        """Return a table of floats, whose ``dtype`` is that of the table."""
        if is_recorded():
            return self._constant(name, dtype).to(device)
        integers = torch.int32 if dtype is torch.float32 else torch.int64
        return self._integers(name, device, integers).view(dtype)

    @constant_result
    def _constant(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a table of floats that does not depend on the buffers."""
        return _constant_tensor(self._tables()[name], dtype)

    def _recorded_float64(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tables and rates of float64 phases in a recorded graph."""
        tables, rates = self._constant64(0), self._constant64(1)
        return tables.to(device), rates.to(device)

    @constant_result
    def _constant64(self, number: int) -> Tensor:
        return _constant_tensor(self._float64_constants()[number], torch.float64)

    def _turns(self, device: torch.device) -> Int64[Tensor, "7 *axes pairs"]:
        """Return the constants of float64 phases."""
        return self._integers("turns", device, torch.int64)

    def extra_repr(self) -> str:
        return repr_of(self)


def _constant_tensor(table: np.ndarray, dtype: torch.dtype) -> Tensor:
    table = np.array(table, order="C")
    # Not from_numpy, which warns under torch.jit.trace that the result is a constant.
    return torch.frombuffer(table, dtype=dtype).reshape(table.shape)


def repr_of(layer: Any) -> str:
    """Return a layer's arguments: positional ones, and others that are not the default."""
    words, config = [], layer.config()
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if name not in config:
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            words.append(repr(config[name]))
        elif name != "dtype" and config[name] != parameter.default:
            words.append(f"{name}={config[name]!r}")
    return ", ".join(words)
