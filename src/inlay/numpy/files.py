"""Layers of this face in files: ``save`` writes one, ``load`` builds it again.

The file and what it promises are described in :mod:`inlay.files`. Its config names the
layer's class, which is looked up in the table below and nowhere else, so that a file can
cause nothing to be imported or called that is not a layer of this face. Tables go straight
from the file into the layer, the padding row as it is there. Before anything is made, a
config has to agree with the tensors: it cannot ask for more memory than the file accounts
for.
"""

import importlib
import inspect
import math
import reprlib
from typing import Any, get_args

import numpy as np

from ..files import Path, Tensors, read, write
from ._module import Module

_NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")
# Where each class lives and which parameters it has. Those of a complete layer depend on
# its options.
_LAYERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AlibiBias": ("alibi", ()),
    "Embedding": ("token", ("weight",)),
    "EmbeddingBag": ("bag", ("weight",)),
    "EmbeddingLayer": ("layer", ()),
    "FireBias": ("fire", ("c", "multiplier", *_NETWORK)),
    "FourierFeatures": ("fourier", ()),
    "KerpleBias": ("kerple", ("r1", "r2")),
    "LearnedPositions": ("learned", ("weight",)),
    "RotaryPositions": ("rotary", ()),
    "ShawScores": ("shaw", ("weight",)),
    "SinusoidalPositions": ("sinusoidal", ()),
    "T5Bias": ("relative", ("weight",)),
}

# What a size may be that no tensor accounts for: the width of a scheme without a table.
_LARGEST = 2**16


def save(path: Path, layer: Module) -> None:
    """Write a layer to one safetensors file, all of it or nothing.

    Args:
        path: Where. The folder must exist; a file that is there is replaced.
        layer: Any layer of this face, not of a class derived from one.

    Example:
        >>> import tempfile
        >>> from inlay.numpy.token import Embedding
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
    write(path, tensors, {"class": type(layer).__name__, **layer.config()})


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


def _built(config: dict[str, Any], tensors: Tensors) -> Module:
    options = dict(config)
    name = options.pop("class", None)
    layer = _class(name)
    if layer is None:
        raise ValueError(f"class must be that of a layer, got {reprlib.repr(name)}")
    _check_options(layer, options, tensors)
    if name == "EmbeddingLayer":
        return _complete(layer, options, tensors)
    held = _own_tensors(layer, tensors)
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
        position = _built(position, held)

    def unfilled(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        for tensor in tensors.values():
            if tensor.shape == shape:
                return np.empty_like(tensor)
        raise ValueError(f"no tensor has the shape {shape} that the config asks for")

    built = layer(**options, position=position, init=unfilled)
    built.load_state_dict(tensors)
    return built


def _own_tensors(layer: Any, tensors: Tensors) -> Tensors:
    """Return the tensors by the names of the layer's parameters, all of them there."""
    names = {layer.prefix + name: name for name in _LAYERS[layer.__name__][1]}
    missing, unknown = sorted(names.keys() - tensors), sorted(tensors.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"{layer.__name__} has the tensors {sorted(names)}; "
            f"missing {missing}, unknown {reprlib.repr(unknown)}"
        )
    return {names[key]: tensor for key, tensor in tensors.items()}


def _check_options(layer: Any, options: dict[str, Any], tensors: Tensors) -> None:
    """Refuse options that the layer does not have, and sizes that no tensor explains."""
    known = inspect.signature(layer).parameters
    names = set(_LAYERS[layer.__name__][1])
    for option in options.keys() - (known.keys() - names - {"init", "rng"}):
        raise ValueError(f"{layer.__name__} has no option {reprlib.repr(option)}")
    sizes = {
        option: value
        for option, value in options.items()
        if isinstance(value, int) and _is_whole(known[option].annotation)
    }
    if isinstance(sections := options.get("sections"), list):
        # A rotary layer has tables for each of them.
        sizes["sections × head_dim"] = len(sections) * sizes.get("head_dim", 1)
    numbers = sum(tensor.size for tensor in tensors.values())
    most = max(_LARGEST, numbers)
    for option, size in sizes.items():
        if size > most:
            raise ValueError(
                f"{option} must be at most {most} in a file of {numbers} numbers, "
                f"got {reprlib.repr(size)}"
            )
    # Parameters that are no arguments exist before they can be compared with tensors.
    if names - known.keys() and math.prod(sizes.values()) > numbers:
        raise ValueError(f"a layer of {sizes} needs more than the {numbers} numbers here")


def _is_whole(annotation: Any) -> bool:
    return int in (annotation, *get_args(annotation))
