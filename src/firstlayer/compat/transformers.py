"""Embeddings of transformers models, and replacement of modules in existing models.

:class:`Embeddings` is the layer of "NLP with Transformers" (Tunstall et al. 2022, chapter
3); :class:`BertEmbeddings` and :class:`GPT2Embeddings` are the layers of those models.
Parameters have the original names, so checkpoints load. :func:`swapped` replaces the
modules of an existing model inside a ``with`` block. transformers is never imported.
"""

# Imported first: raises the error that names the package to install without torch.
from ..torch import Embedding, LearnedPositions

# isort: split

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from ..torch._conversion import to_theirs
from ..torch._positions.arguments import Offset, Positions
from ..torch._replaced import Replaced
from ..torch.hf import Place, RotaryModule, replace_rotary_modules, rotary_places
from ..torch.hf_embeddings import replace_tables

__all__ = ["BertEmbeddings", "Embeddings", "GPT2Embeddings", "swapped"]

Ids = Integer[Tensor, "*batch length"]
Vectors = Float[Tensor, "*batch length hidden_size"]


class Embeddings(nn.Module):
    """Token rows + positions → LayerNorm → dropout, as in the book.

    Args:
        config: Object with ``vocab_size``, ``hidden_size`` and
            ``max_position_embeddings``, and optionally ``hidden_dropout_prob`` (default
            0.1) and ``pad_token_id``.

    Shape:
        - input_ids: ``(..., length)``
        - position_ids: ``(length,)`` or one per id; None is ``0, 1, …``
        - output: ``(..., length, hidden_size)``

    Example:
        >>> from types import SimpleNamespace
        >>> sizes = {"vocab_size": 30, "hidden_size": 8, "max_position_embeddings": 16}
        >>> Embeddings(SimpleNamespace(**sizes))(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.token_embeddings = _tokens(config)
        self.position_embeddings = _positions(config)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1))

    def forward(self, input_ids: Ids, position_ids: Positions | None = None) -> Vectors:
        embeddings = self.token_embeddings(input_ids)
        embeddings = self.position_embeddings(embeddings, position_ids)
        return self.dropout(self.layer_norm(embeddings))


class BertEmbeddings(nn.Module):
    """Token rows + token types + positions → LayerNorm → dropout.

    Args:
        config: A ``BertConfig`` or an object with its attributes.

    Shape:
        - input_ids: ``(..., length)``; or ``inputs_embeds``, precomputed token rows
        - token_type_ids: one per id; None is 0
        - position_ids: as in :class:`Embeddings`
        - output: ``(..., length, hidden_size)``

    Example:
        >>> from types import SimpleNamespace
        >>> sizes = {"vocab_size": 30, "hidden_size": 8, "max_position_embeddings": 16}
        >>> more = {"layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1}
        >>> layer = BertEmbeddings(SimpleNamespace(**sizes, **more, type_vocab_size=2))
        >>> layer(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = _tokens(config)
        self.position_embeddings = _positions(config)
        self.token_type_embeddings = _table(config, config.type_vocab_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Ids | None = None,
        token_type_ids: Ids | None = None,
        position_ids: Positions | None = None,
        inputs_embeds: Vectors | None = None,
        past_key_values_length: Offset = 0,
    ) -> Vectors:
        rows = _rows(self.word_embeddings, input_ids, inputs_embeds)
        if token_type_ids is None:
            token_type_ids = torch.zeros((), dtype=torch.int64, device=rows.device)
        rows = rows + self.token_type_embeddings(token_type_ids)
        offset = past_key_values_length if position_ids is None else 0
        rows = self.position_embeddings(rows, position_ids, offset=offset)
        return self.dropout(self.LayerNorm(rows))


class GPT2Embeddings(nn.Module):
    """Token rows + positions → dropout.

    Args:
        config: A ``GPT2Config`` or an object with its attributes.

    Shape:
        - input_ids: ``(..., length)``; or ``inputs_embeds``, precomputed token rows
        - token_type_ids: ids whose token rows are added, or None
        - position_ids: as in :class:`Embeddings`
        - output: ``(..., length, hidden_size)``

    Example:
        >>> from types import SimpleNamespace
        >>> sizes = {"vocab_size": 30, "hidden_size": 8, "max_position_embeddings": 16}
        >>> layer = GPT2Embeddings(SimpleNamespace(**sizes, embd_pdrop=0.1))
        >>> layer(torch.tensor([[3]]), past_key_values_length=15).shape
        torch.Size([1, 1, 8])
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = _table(config, config.vocab_size)
        self.wpe = _positions(config)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(
        self,
        input_ids: Ids | None = None,
        token_type_ids: Ids | None = None,
        position_ids: Positions | None = None,
        inputs_embeds: Vectors | None = None,
        past_key_values_length: Offset = 0,
    ) -> Vectors:
        offset = past_key_values_length if position_ids is None else 0
        rows = _rows(self.wte, input_ids, inputs_embeds)
        rows = self.wpe(rows, position_ids, offset=offset)
        if token_type_ids is not None:
            rows = rows + self.wte(token_type_ids)
        return self.drop(rows)


@contextmanager
def swapped(model: nn.Module) -> Generator[Replaced, None, None]:
    """Replace the embeddings and rotary modules of a model inside a ``with`` block.

    Every ``nn.Embedding`` is replaced as by :func:`firstlayer.torch.replace_embeddings`:
    tied heads stay tied, optimizers keep working, and training inside the block persists.
    Every rotary module is replaced as by :func:`firstlayer.torch.replace_rotary`. Modules
    that cannot be replaced stay.

    Args:
        model: Any model.

    Yields:
        Number of replaced modules, with ``names`` and ``left`` as in those functions.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
        >>> with swapped(model) as places:
        ...     places, model[0](torch.tensor([5]))
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.OutOfRange: ids[0] is 5, but num_embeddings is 5
        >>> type(model[0])
        <class 'torch.nn.modules.sparse.Embedding'>
    """
    places = rotary_places(model)
    rotary = replace_rotary_modules(places)
    tables = replace_tables(model)
    modules = {model.get_submodule(name) for name in tables.names}
    try:
        yield Replaced(rotary.names + tables.names, rotary.left | tables.left)
    finally:
        for module in modules:
            to_theirs(module)
        for place in places:
            _restore_rotary(place)


def _restore_rotary(place: Place) -> None:
    new = place.parent._modules.get(place.attribute)
    # Modules set by other code inside the block stay.
    if isinstance(new, RotaryModule):
        place.module.to(next(new.buffers()).device)
        setattr(place.parent, place.attribute, place.module.train(new.training))


def _rows(table: Embedding, ids: Ids | None, inputs_embeds: Vectors | None) -> Vectors:
    if ids is None and inputs_embeds is None:
        raise ValueError("give input_ids or inputs_embeds, got neither")
    return table(ids) if inputs_embeds is None else inputs_embeds


def _tokens(config: Any) -> Embedding:
    padding = getattr(config, "pad_token_id", None)
    return _table(config, config.vocab_size, padding_idx=padding)


def _table(config: Any, rows: int, *, padding_idx: int | None = None) -> Embedding:
    table = Embedding(rows, config.hidden_size, padding_idx)
    nn.init.normal_(table.weight, std=getattr(config, "initializer_range", 0.02))
    if padding_idx is not None:
        table.set_padding(0.0)
    return table


def _positions(config: Any) -> LearnedPositions:
    return LearnedPositions(config.max_position_embeddings, config.hidden_size)
