"""Make torch's constructors build Firstlayer's layers, and turn layers into torch's."""

import functools
import sys
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from ._conversion import OURS, to_ours, to_theirs
from ._tensors.errors import WrongValue, check_module

# Attribute of the constructors that build Firstlayer's layers.
_MARK = "builds_firstlayer"
_QUANTIZE = "torch.ao.quantization.quantize"
Model = TypeVar("Model", bound=nn.Module)


def install() -> "Installation":
    """Make ``torch.nn.Embedding(...)`` and ``EmbeddingBag(...)`` build Firstlayer's layers.

    Torch's classes stay the same objects; only their constructors change. Code that
    imported them before therefore builds Firstlayer's layers too, and ``isinstance`` is
    true for layers built before and after. Copies and pickles of torch's layers stay
    torch's. Subclasses of torch's classes do not change, nor do ``torch.nn.functional`` and
    existing layers.

    ``torch.ao.quantization`` quantizes only layers of torch's classes and skips others.
    While installed, it first turns the layers that it is to quantize into torch's, as
    :func:`to_torch` does, and raises a ValueError for options that its quantized layers
    ignore.

    Returns:
        A handle. Its ``remove()``, or the end of its ``with`` block, restores torch. While
        one handle is active, others have no effect.

    Example:
        >>> import torch
        >>> with install():
        ...     layer = torch.nn.Embedding(10, 4)
        >>> type(layer)
        <class 'firstlayer.torch.token.Embedding'>
        >>> type(torch.nn.Embedding(10, 4))
        <class 'torch.nn.modules.sparse.Embedding'>
    """
    return Installation()


class Installation:
    """Handle of :func:`install`, also a context manager."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        if hasattr(nn.Embedding.__init__, _MARK):
            return
        for theirs, ours in OURS.items():
            self._replace(theirs, "__init__", _constructor(theirs, ours))
        # Torch versions without this module have nothing to change.
        quantize = sys.modules.get(_QUANTIZE)
        if quantize is not None:
            propagate = _propagate_qconfig(quantize.propagate_qconfig_)
            self._replace(quantize, "propagate_qconfig_", propagate)

    def remove(self) -> None:
        """Restore torch's constructors. Layers that were built stay ours."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)


def to_torch(model: Model) -> Model:
    """Turn each ``Embedding`` and ``EmbeddingBag`` of a model into torch's, in place.

    For tools that compare classes, such as ``torch.ao.quantization``, and to undo
    :func:`replace_embeddings`. Layers keep their parameters, hooks and names. Other layers
    that are subclasses of Firstlayer's do not change.

    Args:
        model: A model, or a single layer.

    Returns:
        The same model.

    Example:
        >>> from firstlayer.torch import Embedding
        >>> model = to_torch(nn.Sequential(Embedding(10, 4)))
        >>> type(model[0]) is nn.Embedding
        True
    """
    check_module("model", model)
    for layer in model.modules():
        to_theirs(layer)
    return model


def _constructor(theirs: Any, ours: Any) -> Any:
    original = theirs.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if type(self) is theirs:
            # In the constructor, not in __new__: copies and pickles of torch's layers skip
            # it, and Python cannot restore a class whose __new__ was replaced.
            self.__class__ = ours
            self.__init__(*args, **options)
        else:
            original(self, *args, **options)

    setattr(__init__, _MARK, True)
    return __init__


def _propagate_qconfig(original: Any) -> Any:
    @functools.wraps(original)
    def propagate_qconfig_(module: nn.Module, *args: Any, **options: Any) -> None:
        kept = {layer for layer in module.modules() if to_theirs(layer)}
        try:
            original(module, *args, **options)
            quantized = {x for x in kept if getattr(x, "qconfig", None) is not None}
            for layer in quantized:
                _check_quantizable(layer)
            kept -= quantized
        finally:
            for layer in kept:
                to_ours(layer)

    return propagate_qconfig_


def _check_quantizable(layer: Any) -> None:
    """Raise if torch's quantized layer would ignore an option."""
    if layer.max_norm is not None:
        raise WrongValue(
            f"max_norm must be None in a layer to quantize, got {layer.max_norm}: "
            "quantized layers do not rescale rows"
        )
    if not isinstance(layer, nn.EmbeddingBag):
        return
    if layer.mode != "sum":
        raise WrongValue(f"mode must be 'sum' in a bag to quantize, got {layer.mode!r}")
    weight: Tensor = layer.weight
    if layer.padding_idx is not None and weight[layer.padding_idx].any():
        raise WrongValue(
            "the padding row must be zero in a bag to quantize, since quantized bags add "
            f"it, got padding_idx {layer.padding_idx}"
        )
