"""The complete layer on NumPy: ids in, position-aware vectors out."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from .._array import compute_dtype
from .._check import float_dtype, not_negative_number, positive, probability
from ..embeddings.layer import zero_where
from ..embeddings.token import Init, Seed, normal
from ..positions.learned import small_normal
from ._layer.call import dropped, looked_up
from ._layer.norm import normalised, normalised_backward
from ._layer.position import position_layer
from ._module import Module
from ._positions import gradient_of
from .learned import LearnedPositions
from .token import Embedding


class EmbeddingLayer(Module):
    """Token rows, positions, segments, LayerNorm and dropout, in this order.

    Token rows → × √embedding_dim if ``scale`` → + positions (+ segments) → LayerNorm if
    asked → dropout if asked → zero at padding if asked.

    Args:
        num_embeddings: How many ids there are.
        embedding_dim: Width of a vector.
        position: ``"learned"`` (needs ``max_positions``), ``"sinusoidal"``, None, or a
            layer that adds positions. Rotary, ALiBi and T5 act on attention, not here.
        max_positions: Rows of a learned position table; nothing else has one.
        scale: Multiply token rows by √embedding_dim, as the original Transformer does.
        segments: How many segments (BERT's token types) there are; None is no such table.
        layer_norm: Normalise the sum.
        norm_eps: What the norm adds to the variance; BERT's is 1e-12.
        dropout: Probability that an entry is dropped while training.
        padding_idx: The id that is padding; negative counts from the end.
        zero_padding: Make the output zero at padding, last of all. Padding then trains
            nothing, positions and the norm included.
        init: How new token and segment rows are drawn; None is normal with standard
            deviation 0.02, or 1/√embedding_dim with ``scale``.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator, for what is drawn and for dropout.

    Shape:
        - ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one for each id; None is ``0, 1, …`` moved on by
          ``offset``
        - output: ``(..., length, embedding_dim)``

    Example:
        >>> layer = EmbeddingLayer(100, 8, max_positions=32, layer_norm=True, rng=0)
        >>> layer([[1, 2, 3]], offset=5).shape
        (1, 3, 8)
        >>> sorted(layer.parameters())
        ['norm.bias', 'norm.weight', 'position.weight', 'token.weight']
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
        init: Init | None = None,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.dropout = probability("dropout", dropout)
        if zero_padding and padding_idx is None:
            raise ValueError("zero_padding needs padding_idx, got None")
        self.scale, self.zero_padding = bool(scale), bool(zero_padding)
        self.norm_eps = not_negative_number("norm_eps", norm_eps)
        self.training = False
        self.rng = np.random.default_rng(rng)
        drawn = init or (_unit_when_scaled if scale else small_normal)
        tables = {"init": drawn, "dtype": dtype, "rng": self.rng}
        self.token = Embedding(
            num_embeddings, embedding_dim, padding_idx=padding_idx, **tables
        )
        self.position = position_layer(
            position,
            max_positions=max_positions,
            embedding_dim=embedding_dim,
            dtype=dtype,
            rng=self.rng,
        )
        self.segment = None
        if segments is not None:
            self.segment = Embedding(
                positive("segments", segments), embedding_dim, **tables
            )
        #: Weight and bias of the LayerNorm, or None.
        self.norm: tuple[np.ndarray, np.ndarray] | None = None
        if layer_norm:
            found = float_dtype(dtype)
            self.norm = np.ones(embedding_dim, found), np.zeros(embedding_dim, found)

    def __call__(
        self,
        ids: Int[Any, "*batch length"] | list[Any] | None = None,
        *,
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        offset: Any = 0,
        segments: Int[Any, "*own"] | list[Any] | None = None,
        inputs_embeds: Float[Any, "*batch length embedding_dim"] | None = None,
        mask: Bool[Any, "*batch length"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "*batch length embedding_dim"]:
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
        call = looked_up(
            self,
            ids,
            positions=positions,
            offset=offset,
            segments=segments,
            inputs_embeds=inputs_embeds,
            mask=mask,
        )
        if self.training and self.dropout:
            out = call.rows(norm=self.norm, dtype=compute_dtype(self.dtype))
            out = _thinned(out, dropped(out.shape, self.dropout, self.rng))
            out = out.astype(self.dtype, copy=False)
        else:
            out = call.rows(norm=self.norm, dtype=self.dtype)
        return out if call.mask is None else zero_where(out, call.mask)

    def vjp(
        self,
        ids: Int[Any, "*batch length"] | list[Any] | None = None,
        *,
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        offset: Any = 0,
        segments: Int[Any, "*own"] | list[Any] | None = None,
        inputs_embeds: Float[Any, "*batch length embedding_dim"] | None = None,
        mask: Bool[Any, "*batch length"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, Any]]]:
        """Return the output and the function from its gradient to all others, by name.

        Tables have row gradients. ``inputs_embeds`` has one if it was given. All arguments
        are those of a call.

        Example:
            >>> layer = EmbeddingLayer(9, 4, max_positions=5, layer_norm=True, rng=0)
            >>> y, pull = layer.vjp([[7, 2]])
            >>> sorted(pull(np.ones_like(y)))
            ['norm.bias', 'norm.weight', 'position.weight', 'token.weight']
        """
        call = looked_up(
            self,
            ids,
            positions=positions,
            offset=offset,
            segments=segments,
            inputs_embeds=inputs_embeds,
            mask=mask,
        )
        counts, norm, eps = call.mask, self.norm, self.norm_eps
        total = call.rows(norm=None, dtype=compute_dtype(self.dtype))
        out = total if norm is None else normalised(total, norm=norm, eps=eps)
        # What is pulled back later is what was worked with now.
        weight = None if norm is None else norm[0].copy()
        kept = None
        if self.training and self.dropout:
            kept = dropped(out.shape, self.dropout, self.rng)
            out = _thinned(out, kept)
        y = out if counts is None else zero_where(out, counts)
        y = y.astype(self.dtype, copy=False)

        def pull(dy: Any) -> dict[str, Any]:
            dy = gradient_of(y, dy).astype(total.dtype, copy=False)
            dy = dy if counts is None else zero_where(dy, counts)
            dy = dy if kept is None else _thinned(dy, kept)
            if weight is None:
                return call.gradients(dy)
            back = normalised_backward(dy, total, weight=weight, eps=eps, mask=counts)
            return {**call.gradients(back[0]), **back[1]}

        return y, pull

    @property
    def num_embeddings(self) -> int:
        """How many ids there are."""
        return self.token.num_embeddings

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tables and of the output."""
        return self.token.weight.dtype

    @property
    def padding_idx(self) -> int | None:
        """The id that is padding, counted from the front, or None."""
        return self.token.padding_idx

    def mask(self, ids: Int[Any, "*batch length"] | list[Any]) -> np.ndarray:
        """Return True where ``ids`` is a token and False where it is padding."""
        return self.token.mask(ids)

    def train(self, mode: bool = True) -> "EmbeddingLayer":
        """Drop entries from now on if ``mode``, and return the layer.

        If not, every row is brought up to date.
        """
        self.training = mode
        if not mode:
            self.parameters()
        return self

    def eval(self) -> "EmbeddingLayer":
        """Drop nothing from now on, and return the layer."""
        return self.train(False)

    def logits(self, x: Float[Any, "*batch embedding_dim"]) -> np.ndarray:
        """Return the product of ``x`` with every token row: the tied output head."""
        return self.token.logits(x)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return every trained array, by the names that files have them under."""
        found = {f"token.{name}": value for name, value in self.token.parameters().items()}
        if isinstance(self.position, Module):
            for name, value in self.position.parameters().items():
                found[f"position.{name}"] = value
        if self.segment is not None:
            found["segment.weight"] = self.segment.parameters()["weight"]
        if self.norm is not None:
            found["norm.weight"], found["norm.bias"] = self.norm
        return found

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Copy ``state`` into the layer. Its padding rows become what padding is."""
        super().load_state_dict(state)
        self.token.keep_padding()
        if isinstance(self.position, LearnedPositions):
            self.position.table.keep_padding()

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        position = self.position
        if position is not None:
            position = {"class": type(position).__name__, **position.config()}
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "position": position,
            "scale": self.scale,
            "segments": None if self.segment is None else self.segment.num_embeddings,
            "layer_norm": self.norm is not None,
            "norm_eps": self.norm_eps,
            "dropout": self.dropout,
            "padding_idx": self.padding_idx,
            "zero_padding": self.zero_padding,
            "dtype": self.dtype.name,
        }


def _unit_when_scaled(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return normal(shape, rng, std=shape[-1] ** -0.5)


def _thinned(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    # By choice and not by product: 0 · NaN is NaN.
    return np.where(kept == 0, 0, x * kept).astype(x.dtype, copy=False)
