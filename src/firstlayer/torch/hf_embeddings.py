"""Firstlayer's lookups inside existing models: transformers' or any other.

transformers itself is never imported.
"""

from typing import Any

from torch import nn

from ._conversion import reason_to_leave, to_ours
from ._replaced import Replaced
from ._tensors.errors import check_module
from .token import Embedding


def replace_embeddings(model: nn.Module, *, sparse: bool | None = None) -> Replaced:
    """Replace the lookups of a model's embeddings by Firstlayer's, in place.

    A plain ``nn.Embedding`` becomes a :class:`firstlayer.torch.Embedding`. A subclass, such
    as Gemma's scaled table or BART's positions, stays an instance of its class, and its
    forward calls Firstlayer's lookup. Outputs keep their bits. Parameters stay the same
    objects: tied heads stay tied and optimizers continue. Checkpoints do not change.
    :func:`firstlayer.torch.to_torch` undoes it.

    A module is left as it is if its forward does not call that of ``nn.Embedding``, or if
    its table is quantized, parametrized, or sharded by ``fully_shard`` (replace before
    sharding).

    Args:
        model: Any model.
        sparse: Make the gradient of the token table (``model.get_input_embeddings()``, or
            every table if the model does not have this method) a coalesced sparse tensor,
            for row optimizers. A tied head makes the sum of both gradients dense. None
            keeps the setting of each module.

    Returns:
        The number of replaced modules, an int. Its ``names`` are those of the modules, and
        its ``left`` has the reason for each module that was not replaced. Modules that are
        Firstlayer's already are in neither. Raises a ValueError if the model then has no
        module of Firstlayer's.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
        >>> replace_embeddings(model, sparse=True)
        Replaced(['0'], left={})
        >>> model[0](torch.tensor([5]))
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.OutOfRange: ids[0] is 5, but num_embeddings is 5
    """
    check_module("model", model)
    token_table = None if sparse is None else _token_table(model, sparse)
    replaced = replace_tables(model)
    replaced.check(model, Embedding, "model must have an nn.Embedding, got none")
    if sparse is not None:
        for table in model.modules():
            if isinstance(table, Embedding) and token_table in (None, id(table.weight)):
                table.sparse = sparse
                table._bind()
    return replaced


def replace_tables(model: nn.Module) -> Replaced:
    """Replace the embeddings that can be replaced.

    Args:
        model: Any model.
    """
    tables = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding) and not isinstance(module, Embedding)
    }
    reasons = {name: reason_to_leave(module) for name, module in tables.items()}
    names = [name for name, reason in reasons.items() if reason is None]
    for module in {tables[name] for name in names}:
        to_ours(module)
    return Replaced(names, {name: why for name, why in reasons.items() if why is not None})


def _token_table(model: nn.Module, sparse: bool) -> int | None:
    """Return the id of the parameter with a model's token rows; None means every table."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        return id(getter().weight)
    except (AttributeError, NotImplementedError):
        raise ValueError(
            "sparse must be None for a model without a token table, "
            f"got {sparse} for {type(model).__name__}"
        ) from None
