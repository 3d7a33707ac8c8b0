"""The logic that ``save`` and ``load`` of every front end share."""

import importlib
import inspect
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._check import float_dtype, integer, padding_index
from .layer_configs import (
    ID_MAP,
    LAYER_KINDS,
    SCHEME,
    check_options,
    not_in_config,
    parameters_in,
)
from .safetensors import Path, StreamedTensor, Tensors, read, write

#: Name of the rows of a quantized table in a file, and of their format in its config.
ENCODED, QUANTIZED = "token.encoded", "quantized"


@dataclass(frozen=True)
class FrontEnd:
    """The parts of saving and loading that differ between front ends.

    Args:
        package: Package of the layer classes.
        arrays: Returns the parameters of a layer by name, as NumPy arrays, or as tensors
            that are written in parts if they are on disk.
        build: Returns a layer of a class with these options and these parameters.
        with_quantized: Returns a complete layer with these bytes as its token table, given
            the name of their format, ``padding_idx`` and the dtype of the output.
        config: Returns the constructor arguments of a layer.
    """

    package: str
    arrays: Callable[[Any], dict[str, np.ndarray | StreamedTensor]]
    build: Callable[[Any, dict[str, Any], Tensors], Any]
    with_quantized: Callable[..., Any]
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
    _check_has_rows(layer)
    for part in (layer, getattr(layer, "position", None), getattr(layer, "table", None)):
        if part is not None and type(part) is not front_end.layer_class(
            type(part).__name__
        ):
            raise TypeError(
                f"layer must be of a class that load knows, got {type(part).__qualname__}"
            )
    kind = LAYER_KINDS[layer_class.__name__]
    arrays = front_end.arrays(layer).items()
    tensors = {kind.prefix + name: array for name, array in arrays}
    if kind.has_scheme:
        tensors |= {SCHEME + name: array for name, array in layer._scheme_arrays().items()}
    skipped = not_in_config(layer_class)
    config = front_end.config(layer)
    config = {option: value for option, value in config.items() if option not in skipped}
    check_options(layer_class, config, tensors)
    if ENCODED in tensors:
        config[QUANTIZED] = layer.token.format_name
    write(path, tensors, {"class": layer_class.__name__, **config})


def _check_has_rows(layer: Any) -> None:
    """Raise TypeError if a layer reads its rows from a store and has none itself."""
    for name in ("", "token", "table"):
        part = getattr(layer, name, None) if name else layer
        if name == "token" and getattr(part, "encoded", None) is not None:
            continue  # A complete layer is saved with its quantized rows.
        store = getattr(part, "row_store", None)
        if store is not None:
            raise rows_not_saved(store)


def rows_not_saved(store: Any) -> TypeError:
    """Return the error for saving a layer whose rows are in a store."""
    return TypeError(
        f"the rows of a layer over {store!r} are not saved with it: write them with "
        "save(path) of the store, and load them with from_store(open_store(path))"
    )


def load_layer(path: Path, front_end: FrontEnd) -> Any:
    """Return the layer in a file; a file without one is a ValueError with the reason."""
    tensors, config = read(path)
    # Building a layer from a forged config can raise anything; the file is at fault.
    try:
        return _build_quantized(config, tensors, front_end)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold a layer: {reason}") from error


def array_of_shape(arrays: Tensors, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of that shape, so a layer allocates no more than its file has."""
    for array in arrays.values():
        if array.shape == shape:
            return array
    raise ValueError(f"no tensor has the shape {shape} of the config")


def _build_quantized(config: dict[str, Any], tensors: Tensors, front_end: FrontEnd) -> Any:
    """Return the layer of a file, whose token table may be quantized."""
    for name, tensor in tensors.items():
        is_wrong = (tensor.dtype == np.uint8) != (name == ENCODED)
        if is_wrong or (tensor.dtype == np.int64) != name.startswith((ID_MAP, SCHEME)):
            raise ValueError(f"{name} must not have dtype {tensor.dtype}")
    if QUANTIZED not in config and ENCODED not in tensors:
        return _build(config, tensors, front_end, file_tensors=tensors)
    options, file_tensors = dict(config), dict(tensors)
    format_name, encoded = options.pop(QUANTIZED, None), file_tensors.pop(ENCODED, None)
    if not isinstance(format_name, str) or encoded is None:
        raise ValueError(f"a quantized layer needs {QUANTIZED!r} and {ENCODED!r}")
    if options.get("class") != "EmbeddingLayer":
        raise ValueError("only an EmbeddingLayer can be quantized")
    rows, width = (
        integer(name, options.get(name, "none"))
        for name in ("num_embeddings", "embedding_dim")
    )
    if encoded.ndim != 2 or len(encoded) != rows:
        raise ValueError(f"{ENCODED} must have {rows} rows, got shape {encoded.shape}")
    padding_idx = padding_index(options.get("padding_idx"), rows)
    # A table of one row, replaced below: the numbers of the table itself never exist.
    options["num_embeddings"] = 1
    options["padding_idx"] = None if padding_idx is None else 0
    dtype = float_dtype(options.get("dtype"))
    file_tensors["token.weight"] = np.zeros((1, min(width, encoded.shape[1] * 2)), dtype)
    layer = _build(options, file_tensors, front_end, file_tensors=tensors)
    return front_end.with_quantized(
        layer, encoded, format_name, padding_idx=padding_idx, dtype=dtype.name
    )


def _build(
    config: dict[str, Any], tensors: Tensors, front_end: FrontEnd, *, file_tensors: Tensors
) -> Any:
    options = dict(config)
    name = options.pop("class", None)
    layer_class = front_end.layer_class(name)
    if layer_class is None:
        raise ValueError(f"class must be that of a layer, got {reprlib.repr(name)}")
    check_options(layer_class, options, file_tensors)
    for size in ("num_embeddings", "capacity", "embedding_dim"):
        # A constructor may take them from a given weight, but a file states them.
        if size in inspect.signature(layer_class).parameters:
            if size not in options:
                raise ValueError(f"missing the option {size!r}")
            integer(size, options[size])
    if LAYER_KINDS[name].grows:
        # No larger than the tensor of the file.
        array_of_shape(tensors, (options["capacity"] + 1, options["embedding_dim"]))
    if LAYER_KINDS[name].has_scheme:
        return _build_ngram(layer_class, options, tensors, front_end)
    if LAYER_KINDS[name].states_shapes:
        _check_shapes(layer_class._parameter_shapes(options), tensors)
        return front_end.build(layer_class, options, tensors)
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


def _build_ngram(
    layer_class: Any, options: dict[str, Any], tensors: Tensors, front_end: FrontEnd
) -> Any:
    """Return a layer over the table and the n-gram scheme of a file."""
    table, scheme = options.pop("table", None), options.pop("scheme", None)
    if not isinstance(table, dict) or table.get("class") != "Embedding":
        raise ValueError(
            f"table must be the config of an Embedding, got {reprlib.repr(table)}"
        )
    arrays = {
        name.removeprefix(SCHEME): tensor
        for name, tensor in tensors.items()
        if name.startswith(SCHEME)
    }
    prefix = LAYER_KINDS["Embedding"].prefix
    own = {
        prefix + name.removeprefix("table."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(SCHEME)
    }
    layer = _build(table, own, front_end, file_tensors=own)
    return layer_class(layer_class._scheme_from(scheme, arrays), layer, **options)


def _check_shapes(shapes: dict[str, tuple[int, ...]], tensors: Tensors) -> None:
    """Raise ValueError unless the tensors of a file have these names and shapes."""
    missing, unknown = sorted(shapes.keys() - tensors), sorted(tensors.keys() - shapes)
    if missing or unknown:
        raise ValueError(
            f"the layer has the tensors {sorted(shapes)}; "
            f"missing {missing}, unknown {reprlib.repr(unknown)}"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tensors[name].shape}")
