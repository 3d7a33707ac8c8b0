"""Firstlayer's lookups inside existing models: transformers' or any other.

A module is replaced by changing its class, as ``torch.nn.utils.parametrize`` and
``fully_shard`` do. Parameters, buffers, hooks, device, dtype and training mode are those of
the module, and everything that refers to the module still does. A subclass of
``nn.Embedding``, such as transformers' scaled tables, keeps its own forward, whose
``super().forward`` becomes firstlayer's lookup. transformers itself is never imported.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from ._table.module import remove_grad_hook
from ._tensors.dtypes import FLOATS, dtype_name
from .token import Embedding


@dataclass(frozen=True)
class ReplacedEmbeddings:
    """The result of :func:`replace_embeddings`.

    Args:
        replaced: Names of the replaced modules. A module with two names is listed twice.
        left: Names of the ``nn.Embedding`` modules that were not replaced, with the reason.
    """

    replaced: list[str]
    left: dict[str, str]


def replace_embeddings(
    model: nn.Module, *, sparse: bool | None = None
) -> ReplacedEmbeddings:
    """Replace the lookups of a model's embeddings by firstlayer's, in place.

    A plain ``nn.Embedding`` becomes a :class:`firstlayer.torch.Embedding`. A subclass, such
    as Gemma's scaled table or BART's positions, stays an instance of its class, and its
    forward calls firstlayer's lookup. Outputs keep their bits. Parameters stay the same
    objects: tied heads stay tied and optimizers continue. Checkpoints do not change.

    A module is left as it is if its forward does not call that of ``nn.Embedding``, or if
    its table is quantized, parametrized, or sharded by ``fully_shard`` (replace before
    sharding). Modules that are firstlayer's already are neither replaced nor left.

    Args:
        model: Any model.
        sparse: Make the gradient of the token table (``model.get_input_embeddings()``, or
            every table if the model does not have this method) a coalesced sparse tensor,
            for row optimizers. A tied head makes the sum of both gradients dense. None
            keeps the setting of each module.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
        >>> replace_embeddings(model, sparse=True)
        ReplacedEmbeddings(replaced=['0'], left={})
        >>> model[0](torch.tensor([5]))
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.OutOfRange: ids[0] is 5, but num_embeddings is 5
    """
    tables = embeddings_of(model)
    if not tables:
        raise ValueError("model must have an nn.Embedding, got none")
    token_table = None if sparse is None else _token_table(model)
    others = [(name, table) for name, table in tables if not isinstance(table, Embedding)]
    reasons = {name: reason_to_leave(table) for name, table in others}
    for name, table in others:
        if reasons[name] is None:
            change_class(table)
    if sparse is not None:
        for _, table in tables:
            if isinstance(table, Embedding) and token_table in (None, id(table.weight)):
                table.sparse = sparse
                table._bind()
    return ReplacedEmbeddings(
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


def embeddings_of(model: nn.Module) -> list[tuple[str, nn.Embedding]]:
    """Return every ``nn.Embedding`` of a model with each of its names."""
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
    ]


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


def change_class(module: nn.Embedding) -> None:
    """Make a module look up rows through firstlayer. Its class becomes a subclass."""
    table: Any = module
    if not isinstance(module, Embedding):
        table.__class__ = _with_lookup(type(table))
        table._bind()


def restore_class(module: nn.Embedding) -> None:
    """Undo :func:`change_class`."""
    table: Any = module
    if isinstance(module, Embedding):
        table._catch_up()
        remove_grad_hook(table, table.weight)
        table.__class__ = _original(type(table))


class _Converted:
    """Base of the classes that :func:`_with_lookup` makes: pickling and TorchScript."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A class made at run time cannot be imported, so pickles name the original.
        state = super().__reduce_ex__(protocol)[2]
        return _uninitialized, (_original(type(self)),), state

    def __prepare_scriptable__(self) -> nn.Module:
        # TorchScript cannot compile firstlayer's lookup.
        twin: Any = copy.copy(self)
        restore_class(twin)
        return twin


def _with_lookup(cls: type[nn.Embedding]) -> type[Embedding]:
    """Return a class with the forward of ``cls`` and the lookup of firstlayer."""
    if cls is nn.Embedding:
        return Embedding
    bases: tuple[Any, ...] = (_Converted, cls, Embedding)
    for made in cls.__subclasses__():
        if made.__bases__ == bases:
            return cast(type[Embedding], made)
    # In the order of the bases, super().forward in ``cls`` is that of Embedding.
    return type(f"Firstlayer{cls.__name__}", bases, {"__module__": cls.__module__})


def _original(cls: type) -> type[nn.Embedding]:
    return cls.__bases__[1] if issubclass(cls, _Converted) else nn.Embedding


def _uninitialized(cls: type[nn.Embedding]) -> nn.Embedding:
    made = _with_lookup(cls)
    return made.__new__(made)


def _calls_super(forward: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"super", "forward"} <= {*code.co_names}


def _token_table(model: nn.Module) -> int | None:
    """Return the id of the parameter with a model's token rows; None means every table."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        return id(getter().weight)
    except (AttributeError, NotImplementedError):
        raise ValueError(
            "sparse must be None for a model without a token table, "
            f"got one in {type(model).__name__}"
        ) from None
