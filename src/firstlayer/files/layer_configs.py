"""Configs of layers: the classes that a file may name and the options that it may have.

The class in a config is looked up in :data:`LAYER_KINDS` and nowhere else, so a file cannot
cause anything but a layer to be imported or called. Options are checked against the tensors
of the file before a layer is built, so that a forged config cannot allocate much memory.
"""

import inspect
import math
import reprlib
from typing import Any, NamedTuple, get_args

from jaxtyping import Shaped

#: Prefix of the names of the arrays of an id map in files and state dicts.
ID_MAP = "id_map."
#: Prefix of the names of the arrays of an n-gram scheme in files.
SCHEME = "scheme."
_FIRE_NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")


class LayerKind(NamedTuple):
    """A layer class that files can hold.

    Args:
        module: Module of the class, the same in every front end.
        parameters: Names of its parameters. Empty if they depend on its options.
        prefix: Prefix of its tensor names in a file.
        has_phase_tables: Whether it builds tables for its pairs of features; see
            :mod:`firstlayer.positions.phases`.
        distances: Options that are integers but not sizes of anything.
        has_parts: Whether it consists of other layers, which have the parameters.
        states_shapes: Whether its class has ``_parameter_shapes``, which returns the shapes
            of the parameters of a config.
        has_scheme: Whether its rows are those of an n-gram scheme: the config has those of
            the scheme and of the table, and files have the arrays of the scheme.
        grows: Whether ids get rows while it is trained: ``init`` is part of its config, and
            files have the arrays of its id map.
    """

    module: str
    parameters: tuple[str, ...] = ()
    prefix: str = ""
    has_phase_tables: bool = False
    distances: tuple[str, ...] = ()
    has_parts: bool = False
    states_shapes: bool = False
    has_scheme: bool = False
    grows: bool = False


LAYER_KINDS = {
    "AlibiBias": LayerKind("alibi"),
    "CopeBias": LayerKind("cope", ("weight",), "bias."),
    "Embedding": LayerKind("token", ("weight",), "token."),
    "EmbeddingBag": LayerKind("bag", ("weight",), "token."),
    "EmbeddingLayer": LayerKind("layer", has_parts=True),
    "EngramGate": LayerKind("gates", states_shapes=True),
    "FireBias": LayerKind("fire", ("c", "multiplier", *_FIRE_NETWORK), "bias."),
    "FrequencyEmbedding": LayerKind("hashed", distances=("seed",), has_parts=True),
    "FourierFeatures": LayerKind("fourier", has_phase_tables=True),
    "GrowingEmbedding": LayerKind(
        "growing", distances=("min_count", "seed"), has_parts=True, grows=True
    ),
    "HashedEmbedding": LayerKind("hashed", distances=("seed",), has_parts=True),
    "KerpleBias": LayerKind("kerple", ("r1", "r2"), "bias."),
    "LearnedPositions": LayerKind("learned", ("weight",), "position."),
    "NgramAverage": LayerKind("gates", states_shapes=True),
    "NgramEmbedding": LayerKind("ngram", distances=("layer",), has_scheme=True),
    "QuotientRemainderEmbedding": LayerKind(
        "hashed", distances=("num_embeddings",), has_parts=True
    ),
    "RotaryPositions": LayerKind("rotary", has_phase_tables=True),
    "ShawScores": LayerKind("shaw", ("weight",), "bias."),
    "ShortConvGate": LayerKind("gates", states_shapes=True),
    "SinusoidalPositions": LayerKind("sinusoidal", has_phase_tables=True),
    "T5Bias": LayerKind("t5", ("weight",), "bias."),
    "TableGroup": LayerKind("table_group", has_parts=True),
    "Time2Vec": LayerKind("time2vec", ("weight", "bias"), "position."),
    "TransformerXLScores": LayerKind(
        *("transformer_xl", ("weight", "u", "v"), "bias."),
        has_phase_tables=True,
        distances=("max_distance",),
    ),
    "XPosRotary": LayerKind("xpos", has_phase_tables=True, distances=("center",)),
}

# Limit on a size that no tensor accounts for.
_MAX_SIZE = 2**16
# Limit on pairs of features that no tensor accounts for. Each needs 6 or 12 KB of tables.
_MAX_PAIRS = 2**13
# Constructor arguments that affect only how a layer is created or trained.
_NOT_IN_CONFIG = {
    *("init", "rng", "key", "device", "output_device", "sharding"),
    *("sparse", "_weight", "_freeze"),
}


def config_of(layer: Any, **overrides: Any) -> dict[str, Any]:
    """Return the constructor arguments that rebuild a layer, as JSON values.

    Each argument is read from the attribute of the same name. Parameters are left out, and
    so are arguments that only affect creation and training (``init``, ``rng``, ``device``,
    ``sparse``, …).

    Args:
        layer: A layer of any front end.
        overrides: Values of arguments that the layer keeps in another form.

    Example:
        >>> from firstlayer.numpy import AlibiBias
        >>> config_of(AlibiBias(4, max_bias=2.0), factor=None)["max_bias"]
        2.0
    """
    # A subclass has the config of the layer class it extends.
    layer_class = next(base for base in type(layer).__mro__ if base.__name__ in LAYER_KINDS)
    skipped = not_in_config(layer_class)
    return {
        name: _json_value(overrides[name] if name in overrides else getattr(layer, name))
        for name in inspect.signature(layer_class).parameters
        if name in overrides or name not in skipped
    }


def not_in_config(layer_class: type) -> set[str]:
    """Return the constructor arguments of a layer class that a config leaves out."""
    kind = LAYER_KINDS[layer_class.__name__]
    return (_NOT_IN_CONFIG - ({"init"} if kind.grows else set())) | {*kind.parameters}


def parameters_in(
    class_name: str, tensors: dict[str, Any]
) -> dict[str, Shaped[Any, "..."]]:
    """Return the tensors of a file by parameter name; all must be there, and no others."""
    kind = LAYER_KINDS[class_name]
    names = {kind.prefix + parameter: parameter for parameter in kind.parameters}
    missing, unknown = sorted(names.keys() - tensors), sorted(tensors.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"{class_name} has the tensors {sorted(names)}; "
            f"missing {missing}, unknown {reprlib.repr(unknown)}"
        )
    return {names[key]: tensor for key, tensor in tensors.items()}


def check_options(
    layer_class: type, options: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Refuse options that the class does not have and sizes that no tensor accounts for."""
    known = inspect.signature(layer_class).parameters
    kind = LAYER_KINDS[layer_class.__name__]
    for option in options.keys() - (known.keys() - not_in_config(layer_class)):
        raise ValueError(f"{layer_class.__name__} has no option {reprlib.repr(option)}")
    tables = options.get("tables")
    if isinstance(tables, dict) and {f"tables.{name}.weight" for name in tables} != {
        *tensors
    }:
        raise ValueError("tables must be those of the file's tensors, got others")
    sizes = {
        option: value
        for option, value in options.items()
        if isinstance(value, int)
        and _accepts_int(known[option].annotation)
        and option not in kind.distances
    }
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    for option, size in sizes.items():
        _check_size(option, size, numbers, limit=_MAX_SIZE)
    if kind.has_phase_tables:
        _check_size("pairs", _pairs(options), numbers, limit=_MAX_PAIRS)
    # Parameters that are not constructor arguments are allocated before their shapes can be
    # compared with the tensors, except on torch's meta device.
    is_allocated = set(kind.parameters) - known.keys() and "device" not in known
    if is_allocated and math.prod(sizes.values()) > numbers:
        raise ValueError(f"a layer of {sizes} needs more than the {numbers} numbers here")


def _json_value(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _check_size(option: str, size: int, numbers: int, *, limit: int) -> None:
    limit = max(limit, numbers)
    if size > limit:
        raise ValueError(
            f"{option} must be at most {limit} in a file of {numbers} numbers, "
            f"got {reprlib.repr(size)}"
        )


def _pairs(options: dict[str, Any]) -> int:
    """Return the number of pairs of features, over all axes, that need tables."""
    for name in ("frequencies", "matrix"):
        if isinstance(rows := options.get(name), list):
            return sum(len(row) if isinstance(row, list) else 1 for row in rows)
    width = options.get("embedding_dim")
    if width is None and isinstance(head_dim := options.get("head_dim"), int):
        heads = options.get("num_heads")
        width = head_dim * heads if isinstance(heads, int) else head_dim
    sections = options.get("sections")
    axes = len(sections) if isinstance(sections, list) else 1
    return axes * width // 2 if isinstance(width, int) else 0


def _accepts_int(annotation: Any) -> bool:
    return int in (annotation, *get_args(annotation))
