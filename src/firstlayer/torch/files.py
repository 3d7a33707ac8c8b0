"""Layers of this face in files: ``save`` writes one, ``load`` builds it again.

The file and what it promises are described in :mod:`firstlayer.files.safetensors`, what its config may ask
for in :mod:`firstlayer.files.layer_configs`. Any face loads what another has saved. A layer is made without
its tables, which go straight from the file into it, the padding row as it is there. On
which device a layer was, what was frozen and whether gradients were sparse is not kept.
"""

import importlib
import inspect
import reprlib
from typing import Any

import torch
from torch import nn

from .._check import float_dtype
from ..files.layer_configs import KINDS, check_options, own_tensors
from ..files.safetensors import Path, Tensors, read, write
from ._tensors.dtypes import dtype_name
from ._tensors.memory import array_of, tensor_of
from .bag import EmbeddingBag
from .token import Embedding


def save(path: Path, layer: nn.Module) -> None:
    """Write a layer to one safetensors file, all of it or nothing.

    Args:
        path: Where. The folder must exist; a file that is there is replaced.
        layer: Any layer of this face but PartlyFrozenEmbedding, whose rows an Embedding
            holds as well, and HFRotary; not of a class derived from one.

    Example:
        >>> import tempfile
        >>> from firstlayer.torch.token import Embedding
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/a.safetensors", Embedding(10, 4, padding_idx=0))
        ...     load(folder + "/a.safetensors")
        Embedding(10, 4, padding_idx=0)
    """
    for part in (layer, getattr(layer, "position", None)):
        if part is not None and type(part) is not _class(type(part).__name__):
            raise TypeError(
                f"layer must be of a class that load knows, got {type(part).__qualname__}"
            )
    kind = KINDS[type(layer).__name__]
    # From the state, for which padding is repaired; without what a config makes again.
    state = layer.state_dict()
    tensors = {
        kind.prefix + name: array_of(state[name].cpu())
        for name, _ in layer.named_parameters()
    }
    config = {
        option: value
        for option, value in _config(layer).items()
        if option not in {"sparse", *kind.names}
    }
    check_options(type(layer), config, tensors)
    write(path, tensors, {"class": type(layer).__name__, **config})


def load(path: Path, *, device: Any = None) -> Any:
    """Return the layer that a file holds.

    Args:
        path: The file. One that :func:`save` did not write is a ValueError that says what
            is wrong with it.
        device: Where the layer shall be.
    """
    tensors, config = read(path)
    # Whatever a config makes a layer run into, it is the file that is wrong.
    try:
        layer = _built(config, tensors)
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold a layer: {words}") from error
    return layer if device is None else layer.to(device)


def _class(name: Any) -> Any:
    """Return the layer of that name, or None."""
    if not isinstance(name, str) or name not in KINDS:
        return None
    return getattr(importlib.import_module(f".{KINDS[name].module}", __package__), name)


def _config(layer: Any) -> dict[str, Any]:
    if not isinstance(layer, Embedding | EmbeddingBag):
        return layer.config()
    config = {
        "num_embeddings": layer.num_embeddings,
        "embedding_dim": layer.embedding_dim,
        "padding_idx": layer.padding_idx,
        "max_norm": layer.max_norm,
        "norm_type": layer.norm_type,
        "scale_grad_by_freq": layer.scale_grad_by_freq,
        "dtype": dtype_name(layer.weight.dtype),
    }
    if isinstance(layer, EmbeddingBag):
        config["mode"] = layer.mode
        config["include_last_offset"] = layer.include_last_offset
    return config


def _built(
    config: dict[str, Any], tensors: Tensors, *, file: Tensors | None = None
) -> nn.Module:
    """Return the layer of a config, of these tensors of a file."""
    options = dict(config)
    name = options.pop("class", None)
    layer = _class(name)
    if layer is None:
        raise ValueError(f"class must be that of a layer, got {reprlib.repr(name)}")
    check_options(layer, options, tensors if file is None else file)
    known = inspect.signature(layer).parameters
    if "dtype" in options:
        options["dtype"] = getattr(torch, float_dtype(options["dtype"]).name)
    if name == "EmbeddingLayer":
        options["position"] = _position(options.pop("position", None), tensors)
        held = tensors
    else:
        held = own_tensors(name, tensors)
    # On the meta device nothing is drawn, and no memory is taken that is not used.
    place = {"device": "meta"} if "device" in known else {}
    return _filled(layer(**options, **place), held)


def _position(config: Any, tensors: Tensors) -> nn.Module | None:
    """Return the position layer of a complete layer, of the config within its own."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ValueError(f"position must be a config, got {reprlib.repr(config)}")
    held = {key: tensors[key] for key in tensors if key.startswith("position.")}
    return _built(config, held, file=tensors)


def _filled(layer: nn.Module, held: Tensors) -> nn.Module:
    mine = dict(layer.named_parameters())
    missing, unknown = sorted(mine.keys() - held), sorted(held.keys() - mine)
    if missing or unknown:
        raise ValueError(
            f"the layer has the tensors {sorted(mine)}; "
            f"missing {missing}, unknown {reprlib.repr(unknown)}"
        )
    for name, value in mine.items():
        if held[name].shape != tuple(value.shape):
            raise ValueError(
                f"{name} must have shape {tuple(value.shape)}, got {held[name].shape}"
            )
    tensors = {name: tensor_of(value) for name, value in held.items()}
    layer.load_state_dict(tensors, assign=True, strict=False)
    return layer
