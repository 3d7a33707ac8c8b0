"""The complete layer on torch: ids in, position-aware vectors out."""

import os
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.functional import layer_norm as normalise

from .._check import not_negative, not_negative_number, positive, probability
from ..embeddings.layer import add_embeddings, mask_rows
from ._layer.arguments import Call, checked_call
from ._layer.eligibility import plan_of, watched
from ._layer.position import position_layer
from ._positions.arguments import Offset, Positions
from ._tensors.buffers import compute_dtype, dtype_of, name_of, upcast
from ._tensors.errors import check_ids
from ._tensors.large_pages import with_large_pages
from .learned import LearnedPositions
from .token import Embedding


class EmbeddingLayer(nn.Module):
    """Token rows, positions, segments, LayerNorm and dropout, in this order.

    Token rows → × √embedding_dim if ``scale`` → + positions (+ segments) → LayerNorm if
    asked → dropout if asked → zero at padding if asked.

    Args:
        num_embeddings: How many ids there are.
        embedding_dim: Width of a vector.
        position: ``"learned"`` (needs ``max_positions``), ``"sinusoidal"``, None, or a
            module that adds positions. Rotary, ALiBi and T5 act on attention, not here.
        max_positions: Rows of a learned position table; nothing else has one.
        scale: Multiply token rows by √embedding_dim, as the original Transformer does.
        segments: How many segments (BERT's token types) there are; None is no such table.
        layer_norm: Normalise the sum.
        norm_eps: What the norm adds to the variance; BERT's is 1e-12.
        dropout: Probability that an entry is dropped while training.
        padding_idx: The id that is padding; negative counts from the end.
        zero_padding: Make the output zero at padding, last of all. Padding then trains
            nothing, positions and the norm included.
        sparse: Whether the gradient of the token table is a coalesced sparse tensor.
        device: Where the parameters are.
        dtype: Of the parameters and of the output.

    Shape:
        - ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one for each id; None is ``0, 1, …`` moved on by
          ``offset``
        - output: ``(..., length, embedding_dim)``

    Tables are drawn with standard deviation 0.02; tokens and segments with
    1/√embedding_dim if ``scale``. Everything is worked out in float32, float64 for float64,
    and rounded to the layer's dtype once. Autocast changes nothing but the product of
    :meth:`logits`. Eager on the CPU the layer is one pass over memory.

    Example:
        >>> layer = EmbeddingLayer(100, 8, max_positions=32, layer_norm=True)
        >>> layer(torch.tensor([[1, 2, 3]]), offset=5).shape
        torch.Size([1, 3, 8])
        >>> list(layer.state_dict())
        ['token.weight', 'position.weight', 'norm.weight', 'norm.bias']
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        position: Any = "learned",
        max_positions: int | None = None,
        scale: bool = False,
        segments: int | None = None,
        layer_norm: bool = False,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        zero_padding: bool = False,
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        if zero_padding and padding_idx is None:
            raise ValueError("zero_padding needs padding_idx, got None")
        self.norm_eps = not_negative_number("norm_eps", norm_eps)
        probability("dropout", dropout)
        not_negative("num_embeddings", num_embeddings)
        self.scale, self.zero_padding = bool(scale), bool(zero_padding)
        place = {"device": device, "dtype": dtype_of(dtype)}
        empty = with_large_pages(torch.empty(num_embeddings, embedding_dim, **place))
        self.token = Embedding(
            num_embeddings, embedding_dim, padding_idx, sparse=sparse, _weight=empty
        )
        self.position = position_layer(
            position, max_positions=max_positions, embedding_dim=embedding_dim, **place
        )
        self.segment = None
        if segments is not None:
            empty = torch.empty(positive("segments", segments), embedding_dim, **place)
            self.segment = Embedding(segments, embedding_dim, _weight=empty)
        self.norm = None
        if layer_norm:
            self.norm = nn.LayerNorm(embedding_dim, self.norm_eps, **place)
        self.dropout = nn.Dropout(dropout)
        self._draw()

    @classmethod
    def from_hf(
        cls,
        checkpoint_dir: str | os.PathLike[str],
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the embedding layer of a transformers checkpoint.

        BERT, RoBERTa, GPT-2, OPT and Llama. Only the layer's own tensors are read, and not
        copied: they are the file's memory, mapped so that writing does not change the file.

        RoBERTa and OPT count positions from the padding mask; give
        ``positions=firstlayer.positions.from_mask(mask, at_padding=-1)`` where there is padding.

        Args:
            checkpoint_dir: The folder with ``config.json`` and the safetensors files.
            device: Where the layer shall be.
            dtype: What it shall be in; None is what is in the files.
        """
        from .checkpoint import embedding_tensors

        options, position, tensors = embedding_tensors(checkpoint_dir)
        found = {"device": "meta", "dtype": tensors["token.weight"].dtype}
        if position is not None:
            options["position"] = LearnedPositions(**position, **found)
        layer = cls(**{"position": None, **options}, **found)
        layer.load_state_dict(tensors, assign=True)
        return layer.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw every table anew and set the norm back; padding is zero."""
        self._draw()
        for module in (self.position, self.norm):
            if module is not None and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # pyright: ignore

    def forward(
        self,
        ids: Integer[Tensor, "*batch length"] | list[Any] | None = None,
        *,
        positions: Positions | None = None,
        offset: Offset = 0,
        segments: Integer[Tensor, "*seq"] | list[Any] | None = None,
        inputs_embeds: Float[Tensor, "*batch length embedding_dim"] | None = None,
        mask: Bool[Tensor, "*batch length"] | list[Any] | None = None,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return the vectors of ``ids``.

        Args:
            ids: May be None if ``inputs_embeds`` is given.
            positions: Where each token stands.
            offset: How many positions came before, a number or one per row.
            segments: Which segment each token is in, 0 if None.
            inputs_embeds: Token rows that were looked up elsewhere; ``ids`` then only tell
                what is padding.
            mask: False at padding; None reads it off the ids.
        """
        call = checked_call(
            self,
            ids,
            positions=positions,
            offset=offset,
            segments=segments,
            inputs_embeds=inputs_embeds,
            mask=mask,
        )
        dropout = self.dropout
        # Its own flag, not ours: it may stay on in evaluation, to see how sure a model is.
        idle = type(dropout) is nn.Dropout and not (dropout.training and dropout.p > 0)
        dropping = not idle or watched(dropout)
        plan = plan_of(self, call, wide=dropping)
        out = self._plain(call) if plan is None else plan.run()
        if plan is None or dropping:
            out = (dropout(out) if dropping else out).to(self.token.weight.dtype)
        return out if call.mask is None else mask_rows(out, call.mask)

    @property
    def padding_idx(self) -> int | None:
        """The id that is padding, counted from the front, or None."""
        return self.token.padding_idx

    def mask(self, ids: Integer[Tensor, "*batch length"]) -> Bool[Tensor, "*batch length"]:
        """Return True where ``ids`` is a token and False where it is padding."""
        return self.token.mask(ids)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every token row: the tied output head."""
        return self.token.logits(x)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        position = self.position
        if position is not None:
            position = {"class": type(position).__name__, **position.config()}
        return {
            "num_embeddings": self.token.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "position": position,
            "scale": self.scale,
            "segments": None if self.segment is None else self.segment.num_embeddings,
            "layer_norm": self.norm is not None,
            "norm_eps": self.norm_eps if self.norm is None else self.norm.eps,
            "dropout": getattr(self.dropout, "p", 0.0),
            "padding_idx": self.padding_idx,
            "zero_padding": self.zero_padding,
            "sparse": self.token.sparse,
            "dtype": name_of(self.token.weight.dtype),
        }

    def extra_repr(self) -> str:
        return f"scale={self.scale}, zero_padding={self.zero_padding}"

    def _plain(self, call: Call) -> Tensor:
        """Return the normalised sum of rows in the dtype of the work, by operators."""
        if call.ids is not None:
            check_ids(call.ids, self.token.num_embeddings)
        rows = self.token(call.ids) if call.embeds is None else call.embeds
        kind = compute_dtype(self.token.weight.dtype)
        total = add_embeddings(rows.to(kind), scale=self.scale)
        if self.position is not None:
            total = self.position(total, call.positions, offset=call.offset)
        if self.segment is not None:
            total = total + self.segment(call.segments).to(kind)
        if call.mask is not None and self.norm is not None:
            # A row that any norm takes: of NaN, or of zeros without an epsilon, the norm's
            # gradient would be NaN where nothing is trained.
            steps = torch.arange(self.embedding_dim, dtype=kind, device=total.device)
            total = torch.where(call.mask[..., None], total, steps)
        return _normalised(total, self.norm)

    def _draw(self) -> None:
        std = self.embedding_dim**-0.5 if self.scale else 0.02
        for table in (self.token, self.segment):
            if table is not None:
                nn.init.normal_(table.weight, std=std)
        if self.padding_idx is not None:
            self.token.set_padding(0.0)


def _normalised(x: Tensor, norm: nn.Module | None) -> Tensor:
    if norm is None:
        return x
    if type(norm) is not nn.LayerNorm or norm.weight is None:
        return norm(x).to(x.dtype)
    if norm.weight.dtype == x.dtype:
        return norm(x)
    # torch normalises half precision by a float32 weight, but not the other way round.
    bias = None if norm.bias is None else upcast(norm.bias).to(x.dtype)
    weight = upcast(norm.weight).to(x.dtype)
    return normalise(x, norm.normalized_shape, weight, bias, norm.eps)
