"""Save torch layers to safetensors files and load them.

The file is described in :mod:`firstlayer.files.safetensors`. Every front end loads what any
other has saved. The device, frozen parameters and ``sparse`` are not saved.
"""

import inspect
import reprlib
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from ..files.layer_configs import ID_MAP, config_of
from ..files.layer_files import ENCODED, FrontEnd, load_layer, save_layer
from ..files.safetensors import Path, StreamedTensor, Tensors
from ._table.disk import store_of
from ._table.module import TableModule
from ._table.stored import quantized_embedding
from ._tensors.dtypes import as_torch_dtype, dtype_name
from ._tensors.memory import array_of, tensor_of
from .bag import EmbeddingBag
from .token import Embedding


def save(path: Path, layer: nn.Module) -> None:
    """Write a layer to one safetensors file, atomically.

    A table that is trained on disk is written in chunks of rows, stale rows caught up. A
    layer that only reads a store has no rows of its own: it is a TypeError.

    Args:
        path: Path of the file. Its folder must exist; an existing file is replaced.
        layer: Any layer of this front end, not of a subclass, except ``HFRotary`` and
            ``PartlyFrozenEmbedding`` (save an ``Embedding`` with its ``weight`` instead).

    Example:
        >>> import tempfile
        >>> from firstlayer.torch.token import Embedding
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/a.safetensors", Embedding(10, 4, padding_idx=0))
        ...     load(folder + "/a.safetensors")
        Embedding(10, 4, padding_idx=0)
    """
    save_layer(path, layer, FRONT_END)


def load(path: Path, *, device: Any = None) -> Any:
    """Return the layer in a file.

    Args:
        path: Path of the file. A file that :func:`save` did not write is a ValueError that
            states the reason.
        device: Device of the layer; None is the CPU.

    Example:
        >>> import tempfile
        >>> from firstlayer.torch import Embedding
        >>> path = tempfile.mkdtemp() + "/a.safetensors"
        >>> save(path, Embedding(10, 4))
        >>> load(path, device="cpu").weight.shape
        torch.Size([10, 4])
    """
    layer = load_layer(path, FRONT_END)
    return layer if device is None else layer.to(device)


def _arrays(layer: nn.Module) -> dict[str, np.ndarray | StreamedTensor]:
    with ExitStack() as hidden:
        on_disk = {}
        for name, module in layer.named_modules():
            store = store_of(module._parameters.get("weight"))
            if store is not None and isinstance(module, TableModule):
                on_disk[f"{name}.weight".lstrip(".")] = store.streamed()
                # Its state dict would refer to the store, and commit.
                hidden.enter_context(module.without_weight())
        tensors = _tensors(layer)
    return {name: array_of(value.cpu()) for name, value in tensors.items()} | on_disk


def _tensors(layer: nn.Module) -> dict[str, Any]:
    """Return the tensors of a file, by name.

    The state dict brings stale rows of row optimizers up to date. Its integers are
    constants, which the config determines, the rows of a quantized table, or an id map.
    """
    state = layer.state_dict()
    for name, value in state.items():
        if hasattr(value, "device_mesh"):
            raise TypeError(
                f"save needs whole tensors, but {name} is sharded; save the state_dict "
                "with torch.distributed.checkpoint"
            )
    return {
        name: value
        for name, value in state.items()
        if value.is_floating_point() or name == ENCODED or name.startswith(ID_MAP)
    }


def _config(layer: Any) -> dict[str, Any]:
    if isinstance(layer, Embedding | EmbeddingBag):
        return config_of(layer, dtype=dtype_name(layer.weight.dtype))
    return layer.config()


def _build(layer_class: Any, options: dict[str, Any], parameters: Tensors) -> nn.Module:
    if "dtype" in options:
        options = {**options, "dtype": as_torch_dtype(options["dtype"])}
    # On the meta device nothing is drawn and no memory is allocated.
    if "device" in inspect.signature(layer_class).parameters:
        options = {**options, "device": "meta"}
    layer = layer_class(**options)
    _check_parameters(layer, parameters)
    tensors = {name: tensor_of(array) for name, array in parameters.items()}
    layer.load_state_dict(tensors, assign=True, strict=False)
    return layer


def _check_parameters(layer: nn.Module, arrays: Tensors) -> None:
    own = _tensors(layer)
    missing, unknown = sorted(own.keys() - arrays), sorted(arrays.keys() - own)
    if missing or unknown:
        raise ValueError(
            f"the layer has the tensors {sorted(own)}; "
            f"missing {missing}, unknown {reprlib.repr(unknown)}"
        )
    for name, value in own.items():
        if arrays[name].shape != tuple(value.shape):
            raise ValueError(
                f"{name} must have shape {tuple(value.shape)}, got {arrays[name].shape}"
            )


def _with_quantized(
    layer: Any, encoded: np.ndarray, format: str, *, padding_idx: int | None, dtype: str
) -> Any:
    layer.token = quantized_embedding(
        tensor_of(encoded),
        layer.embedding_dim,
        format,
        padding_idx=padding_idx,
        dtype=as_torch_dtype(dtype) or torch.float32,
    )
    return layer


FRONT_END = FrontEnd("firstlayer.torch", _arrays, _build, _with_quantized, _config)
