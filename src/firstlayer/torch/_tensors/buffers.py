"""Precomputed numbers that no cast, no optimizer and no checkpoint takes for parameters.

A layer's tables are float32, made on the host, and kept as the int32 with the same bits:
``.half()``, FSDP's ``buffer_dtype`` and loops over buffers leave integers alone. They are
not part of a state_dict, for the layer's arguments make them. ``to_empty`` and its kin
leave a buffer without its contents, so every move builds them again.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ... import _array
from ..._check import float_dtype
from ...files.layer_configs import config_of


class Precomputed(nn.Module):
    """Base of the layers that may hold tables. Each of ``_tables`` becomes a buffer."""

    def _tables(self) -> dict[str, np.ndarray]:
        """Return the tables by the name of their buffer: float32, or int32 as they are."""
        return {}

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values."""
        return config_of(self)

    def reset_parameters(self) -> None:
        """Build the tables again, as FSDP asks of every module that has buffers."""
        for buffer in self.buffers(recurse=False):
            return self._build(buffer.device)

    def _build(self, device: torch.device | None = None) -> None:
        device = torch.get_default_device() if device is None else device
        # Never on the meta device: nothing else would fill them afterwards.
        device = torch.device("cpu") if device.type == "meta" else device
        for name, table in self._tables().items():
            bits = torch.from_numpy(table.view(np.int32)).to(device)
            self.register_buffer(name, bits, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        Precomputed.reset_parameters(self)
        return self

    def _integers(self, name: str, device: torch.device) -> Tensor:
        bits = self._buffers[name]
        # A loop over buffers that casts whatever it meets, or moves it to the meta device,
        # does not go through _apply.
        if bits is None or bits.dtype != torch.int32 or bits.is_meta:
            self._build(device)
            bits = self.get_buffer(name)
        return bits.to(device) if device.type == "meta" else bits

    def _floats(
        self, name: str, dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "*table"]:
        """Return a table in the dtype that numbers of ``dtype`` are worked on in."""
        return self._integers(name, device).view(torch.float32).to(compute_dtype(dtype))

    def extra_repr(self) -> str:
        return repr_of(self)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that numbers of ``dtype`` are worked on in: float32 or float64."""
    return getattr(torch, _array.compute_dtype(dtype))


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype that its numbers are worked on in."""
    return x.to(compute_dtype(x.dtype))


def in_full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off inside, which would multiply matrices in half precision."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    # Nothing if it is off anyway: an exported program need not know of it.
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that may be given by its name, as configs have it.

    Example:
        >>> dtype_of("bfloat16"), dtype_of(torch.float16)
        (torch.bfloat16, torch.float16)
    """
    if not isinstance(dtype, str):
        return dtype
    return getattr(torch, float_dtype(dtype).name)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its library."""
    return str(dtype).removeprefix("torch.")


def repr_of(layer: Any) -> str:
    """Return the arguments of a layer: the leading ones, and what is not the default."""
    words, config = [], layer.config()
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            words.append(repr(config[name]))
        elif name != "dtype" and config.get(name) != parameter.default and name in config:
            words.append(f"{name}={config[name]!r}")
    return ", ".join(words)
