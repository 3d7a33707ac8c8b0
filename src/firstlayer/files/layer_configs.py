"""Configs in files: which layer one names, and what it may ask for.

A config names the layer's class, which is looked up in the table below and nowhere else,
so that a file can cause nothing to be imported or called that is not a layer. Before
anything is made, a config has to agree with the tensors beside it: it cannot ask for more
memory than the file accounts for.
"""

import inspect
import math
import reprlib
from typing import Any, NamedTuple, get_args

from jaxtyping import Shaped

_NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")


class Kind(NamedTuple):
    """Where a face keeps a class, and what its tensors are called in a file.

    Args:
        module: The file of the class, the same in every face.
        names: Its parameters. Those of a complete layer depend on its options.
        prefix: What tensor names begin with in a file.
        turns: Whether it makes tables for its pairs of features; see :mod:`firstlayer.positions.phases`.
    """

    module: str
    names: tuple[str, ...] = ()
    prefix: str = ""
    phases: bool = False


KINDS = {
    "AlibiBias": Kind("alibi"),
    "Embedding": Kind("token", ("weight",), "token."),
    "EmbeddingBag": Kind("bag", ("weight",), "token."),
    "EmbeddingLayer": Kind("layer"),
    "FireBias": Kind("fire", ("c", "multiplier", *_NETWORK), "bias."),
    "FourierFeatures": Kind("fourier", phases=True),
    "KerpleBias": Kind("kerple", ("r1", "r2"), "bias."),
    "LearnedPositions": Kind("learned", ("weight",), "position."),
    "RotaryPositions": Kind("rotary", phases=True),
    "ShawScores": Kind("shaw", ("weight",), "bias."),
    "SinusoidalPositions": Kind("sinusoidal", phases=True),
    "T5Bias": Kind("t5", ("weight",), "bias."),
}

# What a size may be that no tensor accounts for.
_LARGEST = 2**16
# How many pairs of features may have tables, of 6 KB for each, or twice that, that no
# tensor accounts for.
_MOST_PAIRS = 2**13
# What only says how a layer is made, and is no part of what it is.
_MAKING = {"init", "rng", "key", "device", "sparse", "_weight", "_freeze"}


def config_of(layer: Any, **overrides: Any) -> dict[str, Any]:
    """Return the constructor arguments that rebuild a layer, as plain values.

    Each argument is read from the attribute of its name. Arguments that only say how
    parameters are made (``init``, ``rng``, ``device``, …) and the parameters themselves are
    left out.

    Args:
        layer: A layer of any front end.
        overrides: Values of arguments that the layer keeps in another form.

    Example:
        >>> from firstlayer.numpy import AlibiBias
        >>> config_of(AlibiBias(4, max_bias=2.0), factor=None)["max_bias"]
        2.0
    """
    cls = next(cls for cls in type(layer).__mro__ if cls.__name__ in KINDS)
    skipped = _MAKING | {*KINDS[cls.__name__].names}
    return {
        name: _plain(overrides[name] if name in overrides else getattr(layer, name))
        for name in inspect.signature(cls).parameters
        if name in overrides or name not in skipped
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: scaling rules as dicts, arrays and tuples as lists."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def own_tensors(name: str, tensors: dict[str, Any]) -> dict[str, Shaped[Any, "..."]]:
    """Return the tensors by the names of a layer's parameters, all of them there."""
    kind = KINDS[name]
    names = {kind.prefix + parameter: parameter for parameter in kind.names}
    missing, unknown = sorted(names.keys() - tensors), sorted(tensors.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"{name} has the tensors {sorted(names)}; "
            f"missing {missing}, unknown {reprlib.repr(unknown)}"
        )
    return {names[key]: tensor for key, tensor in tensors.items()}


def check_options(layer: type, options: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Refuse options that the layer does not have, and sizes that no tensor explains."""
    known = inspect.signature(layer).parameters
    names = set(KINDS[layer.__name__].names)
    for option in options.keys() - (known.keys() - names - _MAKING):
        raise ValueError(f"{layer.__name__} has no option {reprlib.repr(option)}")
    sizes = {
        option: value
        for option, value in options.items()
        if isinstance(value, int) and _is_whole(known[option].annotation)
    }
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    for option, size in sizes.items():
        _check_size(option, size, numbers, most=_LARGEST)
    if KINDS[layer.__name__].phases:
        _check_size("pairs", _pairs(options), numbers, most=_MOST_PAIRS)
    # Parameters that are no arguments exist before they can be compared with tensors,
    # unless they can be made on a device that has no memory.
    made = names - known.keys() and "device" not in known
    if made and math.prod(sizes.values()) > numbers:
        raise ValueError(f"a layer of {sizes} needs more than the {numbers} numbers here")


def _check_size(option: str, size: int, numbers: int, *, most: int) -> None:
    most = max(most, numbers)
    if size > most:
        raise ValueError(
            f"{option} must be at most {most} in a file of {numbers} numbers, "
            f"got {reprlib.repr(size)}"
        )


def _pairs(options: dict[str, Any]) -> int:
    """Return how many pairs of features, along how many axes, tables are made for."""
    for name in ("frequencies", "matrix"):
        if isinstance(rows := options.get(name), list):
            return sum(len(row) if isinstance(row, list) else 1 for row in rows)
    width = options.get("head_dim", options.get("embedding_dim"))
    sections = options.get("sections")
    axes = len(sections) if isinstance(sections, list) else 1
    return axes * width // 2 if isinstance(width, int) else 0


def _is_whole(annotation: Any) -> bool:
    return int in (annotation, *get_args(annotation))
