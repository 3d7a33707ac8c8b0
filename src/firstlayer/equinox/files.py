"""Save Equinox layers to safetensors files and load them.

The file is described in :mod:`firstlayer.files.safetensors`. Every front end loads what any
other has saved. Unlike ``eqx.tree_deserialise_leaves``, :func:`load` needs no model of the
same structure. A file holds the parameters, and no array that the config determines.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..files.layer_configs import LAYER_KINDS
from ..files.layer_files import ENCODED, FrontEnd, array_of_shape, load_layer, save_layer
from ..files.safetensors import Path, Tensors
from ._module import Module, replace_fields
from ._stored import quantized_embedding
from .growing import GrowingEmbedding


def save(path: Path, layer: Module) -> None:
    """Write a layer to one safetensors file, atomically.

    A layer that reads a store has no rows of its own: it is a TypeError.

    Args:
        path: Path of the file. Its folder must exist; an existing file is replaced.
        layer: Any layer of this front end, not of a subclass.

    Example:
        >>> import tempfile
        >>> from firstlayer.equinox.token import Embedding
        >>> layer = Embedding(10, 4, padding_idx=0, key=jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/a.safetensors", layer)
        ...     bool(load(folder + "/a.safetensors") == layer)
        True
    """
    save_layer(path, layer, FRONT_END)


def load(path: Path) -> Any:
    """Return the layer in a file.

    Args:
        path: Path of the file. A file that :func:`save` did not write is a ValueError that
            states the reason. Float64 needs ``jax_enable_x64``.

    Example:
        >>> import tempfile
        >>> from firstlayer.numpy import Embedding
        >>> from firstlayer.numpy import save as save_from_numpy
        >>> path = tempfile.mkdtemp() + "/a.safetensors"
        >>> save_from_numpy(path, Embedding(10, 4, rng=0))
        >>> load(path).weight.shape
        (10, 4)
    """
    return load_layer(path, FRONT_END)


def _arrays(layer: Module) -> dict[str, Any]:
    if isinstance(layer, GrowingEmbedding):
        return {"table.weight": np.asarray(layer.table.weight), **layer.state()}
    arrays = {name: np.asarray(value) for name, value in layer.parameters().items()}
    encoded = getattr(getattr(layer, "token", None), "encoded", None)
    if encoded is not None:
        arrays[ENCODED] = np.asarray(encoded)
    return arrays


def _build(layer_class: Any, options: dict[str, Any], parameters: Tensors) -> Module:
    if parameters.keys() <= inspect.signature(layer_class).parameters.keys():
        return layer_class(**options, **parameters)
    kind = LAYER_KINDS[layer_class.__name__]
    if kind.grows:
        return layer_class(**options).with_state(parameters)
    if kind.has_parts:

        def zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jnp.zeros(array_of_shape(parameters, shape).shape, dtype)

        options = {**options, "init": zeros}
    layer = layer_class(**options, key=jax.random.key(0))
    return layer.with_parameters(parameters)


def _with_quantized(layer: Any, encoded: Any, format: str, **options: Any) -> Any:
    token = quantized_embedding(encoded, layer.embedding_dim, format, **options)
    return replace_fields(layer, token=token)


FRONT_END = FrontEnd("firstlayer.equinox", _arrays, _build, _with_quantized)
