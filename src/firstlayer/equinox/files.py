"""Layers of this face in files: ``save`` writes one, ``load`` builds it again.

The file and what it promises are described in :mod:`firstlayer.files.safetensors`, what its config may ask
for in :mod:`firstlayer.files.layer_configs`. Any face loads what another has saved. A file says what it
holds, where ``eqx.tree_deserialise_leaves`` has to be given a model of the same structure.
It has the layer's parameters, the padding row as it is read, and none of the numbers that a
config makes again.
"""

import importlib
import inspect
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..files.layer_configs import KINDS, check_options, own_tensors
from ..files.safetensors import Path, Tensors, read, write
from ._module import Module


def save(path: Path, layer: Module) -> None:
    """Write a layer to one safetensors file, all of it or nothing.

    Args:
        path: Where. The folder must exist; a file that is there is replaced.
        layer: Any layer of this face, not of a class derived from one.

    Example:
        >>> import tempfile
        >>> from firstlayer.equinox.token import Embedding
        >>> layer = Embedding(10, 4, padding_idx=0, key=jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/a.safetensors", layer)
        ...     bool(load(folder + "/a.safetensors") == layer)
        True
    """
    for part in (layer, getattr(layer, "position", None)):
        if part is not None and type(part) is not _class(type(part).__name__):
            raise TypeError(
                f"layer must be of a class that load knows, got {type(part).__qualname__}"
            )
    parameters = layer.parameters().items()
    tensors = {layer.prefix + name: np.asarray(value) for name, value in parameters}
    config = layer.config()
    check_options(type(layer), config, tensors)
    write(path, tensors, {"class": type(layer).__name__, **config})


def load(path: Path) -> Any:
    """Return the layer that a file holds.

    Args:
        path: The file. One that :func:`save` did not write is a ValueError that says what
            is wrong with it. Float64 needs ``jax_enable_x64``.
    """
    tensors, config = read(path)
    # Whatever a config makes a layer run into, it is the file that is wrong.
    try:
        return _built(config, tensors)
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold a layer: {words}") from error


def _class(name: Any) -> Any:
    """Return the layer of that name, or None."""
    if not isinstance(name, str) or name not in KINDS:
        return None
    return getattr(importlib.import_module(f".{KINDS[name].module}", __package__), name)


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
    known = inspect.signature(layer).parameters
    if held.keys() <= known.keys():
        return layer(**options, **held)
    return layer(**options, key=jax.random.key(0)).with_parameters(held)


def _complete(layer: Any, options: dict[str, Any], tensors: Tensors) -> Module:
    """Return a complete layer, which has its position layer's config within its own."""
    position = options.pop("position", None)
    if position is not None:
        if not isinstance(position, dict):
            raise ValueError(f"position must be a config, got {reprlib.repr(position)}")
        held = {key: tensors[key] for key in tensors if key.startswith("position.")}
        position = _built(position, held, file=tensors)

    def unfilled(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if any(tensor.shape == shape for tensor in tensors.values()):
            return jnp.zeros(shape, dtype)
        raise ValueError(f"no tensor has the shape {shape} that the config asks for")

    key = jax.random.key(0)
    built = layer(**options, position=position, init=unfilled, key=key)
    return built.with_parameters(tensors)
