"""The logic that ``save`` and ``load`` of every front end share."""

import importlib
import inspect
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._check import integer
from .layer_configs import LAYER_KINDS, check_options, not_in_config, parameters_in
from .safetensors import Path, Tensors, read, write


@dataclass(frozen=True)
class FrontEnd:
    """The parts of saving and loading that differ between front ends.

    Args:
        package: Package of the layer classes.
        arrays: Returns the parameters of a layer by name, as NumPy arrays.
        build: Returns a layer of a class with these options and these parameters.
        config: Returns the constructor arguments of a layer.
    """

    package: str
    arrays: Callable[[Any], Tensors]
    build: Callable[[Any, dict[str, Any], Tensors], Any]
    config: Callable[[Any], dict[str, Any]] = operator.methodcaller("config")

    def layer_class(self, name: Any) -> Any:
        """Return the layer class of that name, or None if there is none."""
        if not isinstance(name, str) or name not in LAYER_KINDS:
            return None
        module = f"{self.package}.{LAYER_KINDS[name].module}"
        return getattr(importlib.import_module(module), name)


def save_layer(path: Path, layer: Any, front_end: FrontEnd) -> None:
    """Write a layer to a file that :func:`load_layer` can load in any front end."""
    layer_class = type(layer)
    for part in (layer, getattr(layer, "position", None)):
        if part is not None and type(part) is not front_end.layer_class(
            type(part).__name__
        ):
            raise TypeError(
                f"layer must be of a class that load knows, got {type(part).__qualname__}"
            )
    prefix = LAYER_KINDS[layer_class.__name__].prefix
    tensors = {prefix + name: array for name, array in front_end.arrays(layer).items()}
    skipped = not_in_config(layer_class)
    config = front_end.config(layer)
    config = {option: value for option, value in config.items() if option not in skipped}
    check_options(layer_class, config, tensors)
    write(path, tensors, {"class": layer_class.__name__, **config})


def load_layer(path: Path, front_end: FrontEnd) -> Any:
    """Return the layer in a file; a file without one is a ValueError with the reason."""
    tensors, config = read(path)
    # Building a layer from a forged config can raise anything; the file is at fault.
    try:
        return _build(config, tensors, front_end, file_tensors=tensors)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold a layer: {reason}") from error


def array_of_shape(arrays: Tensors, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of that shape, so a layer allocates no more than its file has."""
    for array in arrays.values():
        if array.shape == shape:
            return array
    raise ValueError(f"no tensor has the shape {shape} of the config")


def _build(
    config: dict[str, Any], tensors: Tensors, front_end: FrontEnd, *, file_tensors: Tensors
) -> Any:
    options = dict(config)
    name = options.pop("class", None)
    layer_class = front_end.layer_class(name)
    if layer_class is None:
        raise ValueError(f"class must be that of a layer, got {reprlib.repr(name)}")
    check_options(layer_class, options, file_tensors)
    for size in ("num_embeddings", "embedding_dim"):
        # A constructor may take them from a given weight, but a file states them.
        if size in inspect.signature(layer_class).parameters:
            if size not in options:
                raise ValueError(f"missing the option {size!r}")
            integer(size, options[size])
    if not LAYER_KINDS[name].has_parts:
        return front_end.build(layer_class, options, parameters_in(name, tensors))
    if "position" not in inspect.signature(layer_class).parameters:
        return front_end.build(layer_class, options, tensors)
    # The config of its position layer is nested in that of a complete layer.
    position = options.get("position")
    if position is not None and not isinstance(position, dict):
        raise ValueError(f"position must be a config, got {reprlib.repr(position)}")
    if position is not None:
        own = {key: tensors[key] for key in tensors if key.startswith("position.")}
        position = _build(position, own, front_end, file_tensors=tensors)
    return front_end.build(layer_class, {**options, "position": position}, tensors)
