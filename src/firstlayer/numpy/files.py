"""Save NumPy layers to safetensors files and load them.

The file is described in :mod:`firstlayer.files.safetensors`. Every front end loads what any
other has saved.
"""

import inspect
from typing import Any

import numpy as np

from ..files.layer_configs import LAYER_KINDS
from ..files.layer_files import FrontEnd, array_of_shape, load_layer, save_layer
from ..files.safetensors import Path, StreamedTensor, Tensors
from ._disk import stores_of
from ._module import Module
from ._stored import quantized_embedding


def save(path: Path, layer: Module) -> None:
    """Write a layer to one safetensors file, atomically.

    A table that is trained on disk is written in chunks of rows, stale rows caught up. A
    layer that only reads a store has no rows of its own: it is a TypeError.

    Args:
        path: Path of the file. Its folder must exist; an existing file is replaced.
        layer: Any layer of this front end, not of a subclass.

    Example:
        >>> import tempfile
        >>> from firstlayer.numpy.token import Embedding
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/a.safetensors", Embedding(10, 4, padding_idx=0))
        ...     load(folder + "/a.safetensors").padding_idx
        0
    """
    save_layer(path, layer, FRONT_END)


def load(path: Path) -> Any:
    """Return the layer in a file.

    Args:
        path: Path of the file. A file that :func:`save` did not write is a ValueError that
            states the reason.

    Example:
        >>> import tempfile
        >>> from firstlayer.numpy.token import Embedding
        >>> path = tempfile.mkdtemp() + "/a.safetensors"
        >>> save(path, Embedding(10, 4, rng=0))
        >>> load(path).weight.shape
        (10, 4)
    """
    return load_layer(path, FRONT_END)


def _build(layer_class: Any, options: dict[str, Any], parameters: Tensors) -> Module:
    if parameters.keys() <= inspect.signature(layer_class).parameters.keys():
        return layer_class(**options, **parameters)
    kind = LAYER_KINDS[layer_class.__name__]
    if kind.has_parts and not kind.grows:

        def uninitialized(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
            return np.empty_like(array_of_shape(parameters, shape))

        options = {**options, "init": uninitialized}
    layer = layer_class(**options)
    layer.load_state_dict(parameters)
    return layer


def _arrays(layer: Module) -> dict[str, np.ndarray | StreamedTensor]:
    on_disk = {name: store.streamed() for name, store in stores_of(layer).items()}
    return {**layer.state_arrays(), **on_disk}


def _with_quantized(layer: Any, encoded: Any, format: str, **options: Any) -> Any:
    layer.token = quantized_embedding(encoded, layer.embedding_dim, format, **options)
    return layer


FRONT_END = FrontEnd("firstlayer.numpy", _arrays, _build, _with_quantized)
