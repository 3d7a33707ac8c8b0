"""Layers of this face in files: ``save`` writes one, ``load`` builds it again.

The file and what it promises are described in :mod:`firstlayer.files.safetensors`, what its config may ask
for in :mod:`firstlayer.files.layer_configs`. Tables go straight from the file into the layer, the padding
row as it is there.
"""

import importlib
import inspect
import reprlib
from typing import Any

import numpy as np

from ..files.layer_configs import KINDS as _LAYERS
from ..files.layer_configs import check_options, own_tensors
from ..files.safetensors import Path, Tensors, read, write
from ._module import Module


def save(path: Path, layer: Module) -> None:
    """Write a layer to one safetensors file, all of it or nothing.

    Args:
        path: Where. The folder must exist; a file that is there is replaced.
        layer: Any layer of this face, not of a class derived from one.

    Example:
        >>> import tempfile
        >>> from firstlayer.numpy.token import Embedding
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/a.safetensors", Embedding(10, 4, padding_idx=0))
        ...     load(folder + "/a.safetensors").padding_idx
        0
    """
    for part in (layer, getattr(layer, "position", None)):
        if part is not None and type(part) is not _class(type(part).__name__):
            raise TypeError(
                f"layer must be of a class that load knows, got {type(part).__qualname__}"
            )
    parameters = layer.parameters().items()
    tensors = {layer.prefix + name: value for name, value in parameters}
    config = layer.config()
    check_options(type(layer), config, tensors)
    write(path, tensors, {"class": type(layer).__name__, **config})


def load(path: Path) -> Any:
    """Return the layer that a file holds.

    Args:
        path: The file. One that :func:`save` did not write is a ValueError that says what
            is wrong with it.
    """
    tensors, config = read(path)
    # Whatever a config makes a layer run into, it is the file that is wrong.
    try:
        return _built(config, tensors)
    except Exception as error:
        raise ValueError(f"{path} does not hold a layer: {error}") from error


def _class(name: Any) -> Any:
    """Return the layer of that name, or None."""
    if not isinstance(name, str) or name not in _LAYERS:
        return None
    return getattr(importlib.import_module(f".{_LAYERS[name][0]}", __package__), name)


def _built(
    config: dict[str, Any], tensors: Tensors, *, file: Tensors | None = None
) -> Module:
    """Return the layer of a config, of these tensors of a file."""
    options = dict(config)
    name = options.pop("class", None)
    layer = _class(name)
    if layer is None:
        raise ValueError(f"class must be that of a layer, got {reprlib.repr(name)}")
    check_options(layer, options, tensors if file is None else file)
    if name == "EmbeddingLayer":
        return _complete(layer, options, tensors)
    held = own_tensors(name, tensors)
    if held.keys() <= inspect.signature(layer).parameters.keys():
        return layer(**options, **held)
    built = layer(**options)
    built.load_state_dict(held)
    return built


def _complete(layer: Any, options: dict[str, Any], tensors: Tensors) -> Module:
    """Return a complete layer, which has its position layer's config within its own."""
    position = options.pop("position", None)
    if position is not None:
        if not isinstance(position, dict):
            raise ValueError(f"position must be a config, got {reprlib.repr(position)}")
        held = {key: tensors[key] for key in tensors if key.startswith("position.")}
        position = _built(position, held, file=tensors)

    def unfilled(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        for tensor in tensors.values():
            if tensor.shape == shape:
                return np.empty_like(tensor)
        raise ValueError(f"no tensor has the shape {shape} that the config asks for")

    built = layer(**options, position=position, init=unfilled)
    built.load_state_dict(tensors)
    return built
