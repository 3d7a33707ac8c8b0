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
    """

    module: str
    names: tuple[str, ...] = ()
    prefix: str = ""


KINDS = {
    "AlibiBias": Kind("alibi"),
    "Embedding": Kind("token", ("weight",), "token."),
    "EmbeddingBag": Kind("bag", ("weight",), "token."),
    "EmbeddingLayer": Kind("layer"),
    "FireBias": Kind("fire", ("c", "multiplier", *_NETWORK), "bias."),
    "FourierFeatures": Kind("fourier"),
    "KerpleBias": Kind("kerple", ("r1", "r2"), "bias."),
    "LearnedPositions": Kind("learned", ("weight",), "position."),
    "RotaryPositions": Kind("rotary"),
    "ShawScores": Kind("shaw", ("weight",), "bias."),
    "SinusoidalPositions": Kind("sinusoidal"),
    "T5Bias": Kind("relative", ("weight",), "bias."),
}

# What a size may be that no tensor accounts for: the width of a scheme without a table.
_LARGEST = 2**16
# What only says how a layer is made, and is no part of what it is.
_MAKING = {"init", "rng", "key", "device", "sparse", "_weight", "_freeze"}


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
    if isinstance(sections := options.get("sections"), list):
        # A rotary layer has tables for each of them.
        sizes["sections × head_dim"] = len(sections) * sizes.get("head_dim", 1)
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    most = max(_LARGEST, numbers)
    for option, size in sizes.items():
        if size > most:
            raise ValueError(
                f"{option} must be at most {most} in a file of {numbers} numbers, "
                f"got {reprlib.repr(size)}"
            )
    # Parameters that are no arguments exist before they can be compared with tensors,
    # unless they can be made on a device that has no memory.
    made = names - known.keys() and "device" not in known
    if made and math.prod(sizes.values()) > numbers:
        raise ValueError(f"a layer of {sizes} needs more than the {numbers} numbers here")


def _is_whole(annotation: Any) -> bool:
    return int in (annotation, *get_args(annotation))
