"""Conversion of torch's layers to Firstlayer's and back, by changing their class.

``torch.nn.utils.parametrize`` and ``fully_shard`` change classes too. Parameters, buffers,
hooks, device, dtype and training mode stay those of the module, and everything that refers
to the module still does. A subclass of ``nn.Embedding``, such as transformers' scaled
tables, keeps its own forward, whose ``super().forward`` becomes Firstlayer's lookup.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ._table.module import TableModule
from ._tensors.dtypes import FLOATS, dtype_name
from .bag import EmbeddingBag
from .token import Embedding

#: Firstlayer's class for each class of torch.
OURS: dict[type[nn.Module], type[TableModule]] = {
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
}
_THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def reason_to_leave(module: nn.Embedding) -> str | None:
    """Return why a module's lookup cannot be replaced, or None if it can."""
    name, weight = type(module).__name__, module._parameters.get("weight")
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return "it is sharded by fully_shard: replace embeddings before sharding"
    if "forward" in vars(module):
        return "its forward was replaced on the instance, by accelerate's hooks for example"
    if weight is None:
        return f"weight of {name} is not a parameter, but computed"
    if weight.dtype not in FLOATS:
        return f"its table must be real, got {dtype_name(weight.dtype)}"
    if type(weight.data) is not Tensor and not hasattr(weight, "device_mesh"):
        return f"its table must be a plain tensor, got {type(weight.data).__name__}"
    for owner in type(module).__mro__:
        if owner is nn.Embedding:
            return None
        if "forward" in vars(owner) and not _calls_super(vars(owner)["forward"]):
            return f"{owner.__name__}.forward does not call that of nn.Embedding"
    return None


def to_ours(module: nn.Module) -> None:
    """Make a layer of torch, or of a subclass of ``nn.Embedding``, one of Firstlayer's."""
    layer: Any = module
    layer.__class__ = _with_lookup(type(layer))
    layer._bind()


def to_theirs(module: nn.Module) -> bool:
    """Undo :func:`to_ours`, and return whether there was something to undo."""
    cls: Any = type(module)
    theirs = cls.__bases__[1] if issubclass(cls, _Converted) else _THEIRS.get(cls)
    if theirs is None:
        return False
    layer: Any = module
    layer._release()
    layer.__class__ = theirs
    return True


class _Converted:
    """Base of the classes that :func:`_with_lookup` makes: pickling and TorchScript."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A class made at run time cannot be imported, so pickles name the original.
        state = super().__reduce_ex__(protocol)[2]
        return _uninitialized, (type(self).__bases__[1],), state

    def __prepare_scriptable__(self) -> nn.Module:
        # TorchScript cannot compile Firstlayer's lookup.
        twin: Any = copy.copy(self)
        to_theirs(twin)
        return twin


def _with_lookup(cls: Any) -> Any:
    """Return a class with the forward of ``cls`` and the lookup of Firstlayer."""
    if cls in OURS:
        return OURS[cls]
    bases: tuple[Any, ...] = (_Converted, cls, Embedding)
    for made in cls.__subclasses__():
        if made.__bases__ == bases:
            return made
    # In the order of the bases, super().forward in ``cls`` is that of Embedding.
    return type(f"Firstlayer{cls.__name__}", bases, {"__module__": cls.__module__})


def _uninitialized(cls: type[nn.Embedding]) -> nn.Embedding:
    made = _with_lookup(cls)
    return made.__new__(made)


def _calls_super(forward: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"super", "forward"} <= {*code.co_names}
