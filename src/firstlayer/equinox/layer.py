"""The complete layer for Equinox: ids in, position-aware vectors out."""

from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._array import compute_dtype
from .._check import not_negative_number, positive, probability
from ..embeddings.layer import add_embeddings, mask_rows
from ._layer.arguments import Call, checked_call
from ._layer.norm import normalised
from ._layer.position import position_layer
from ._module import Module, replaced
from ._positions.arguments import Offset, Positions
from ._table.lookup import both, nan_outside
from ._table.module import Ids
from ._table.parameters import Init, Key, small_normal, table_dtype
from .token import Embedding


class EmbeddingLayer(Module):
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
        dropout: Probability that an entry is dropped while training: give calls a ``key``,
            or ``inference=True``, or use :func:`equinox.nn.inference_mode`.
        padding_idx: The id that is padding; negative counts from the end.
        zero_padding: Make the output zero at padding, last of all. Padding then trains
            nothing, positions and the norm included.
        init: How new token and segment rows are drawn; None is normal with standard
            deviation 0.02, or 1/√embedding_dim with ``scale``.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: What the tables are drawn with.

    Shape:
        - ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one for each id; None is ``0, 1, …`` moved on by
          ``offset``
        - output: ``(..., length, embedding_dim)``

    Everything is worked out in float32, float64 for float64, and rounded to the layer's
    dtype once. Where a traced id or segment is not a row, the output is NaN and trains
    nothing, positions and the norm included.

    Example:
        >>> layer = EmbeddingLayer(
        ...     100, 8, max_positions=32, layer_norm=True, key=jax.random.key(0)
        ... )
        >>> layer([[1, 2, 3]], offset=5).shape
        (1, 3, 8)
        >>> sorted(layer.parameters())
        ['norm.bias', 'norm.weight', 'position.weight', 'token.weight']
    """

    token: Embedding
    position: Any
    segment: Embedding | None
    norm: eqx.nn.LayerNorm | None
    dropout: eqx.nn.Dropout | None
    embedding_dim: int = eqx.field(static=True)
    scale: bool = eqx.field(static=True)
    zero_padding: bool = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

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
        key: Key | None = None,
    ) -> None:
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        p = probability("dropout", dropout)
        if zero_padding and padding_idx is None:
            raise ValueError("zero_padding needs padding_idx, got None")
        self.norm_eps = not_negative_number("norm_eps", norm_eps)
        self.scale, self.zero_padding = bool(scale), bool(zero_padding)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        dtype = table_dtype(dtype)
        if init is None:
            unit = jax.nn.initializers.normal(embedding_dim**-0.5)
            init = unit if scale else small_normal
        tables = {"init": init, "dtype": dtype}
        self.token = Embedding(
            num_embeddings, embedding_dim, padding_idx=padding_idx, key=keys[0], **tables
        )
        self.position = position_layer(
            position,
            max_positions=max_positions,
            embedding_dim=embedding_dim,
            dtype=dtype,
            key=keys[1],
        )
        self.segment = None
        if segments is not None:
            rows = positive("segments", segments)
            self.segment = Embedding(rows, embedding_dim, key=keys[2], **tables)
        self.norm = None
        if layer_norm:
            width = self.embedding_dim
            self.norm = eqx.nn.LayerNorm(width, self.norm_eps, dtype=dtype)
        self.dropout = eqx.nn.Dropout(p) if p else None

    def __call__(
        self,
        ids: Ids | None = None,
        *,
        positions: Positions | None = None,
        offset: Offset = 0,
        segments: Ids | None = None,
        inputs_embeds: Float[Any, "*batch length embedding_dim"] | None = None,
        mask: Bool[Any, "*batch length"] | list[Any] | None = None,
        key: Key | None = None,
        inference: bool | None = None,
    ) -> Float[Array, "*batch length embedding_dim"]:
        """Return the vectors of ``ids``.

        Args:
            ids: May be None if ``inputs_embeds`` is given.
            positions: Where each token stands.
            offset: How many positions came before, a number or one per row.
            segments: Which segment each token is in, 0 if None.
            inputs_embeds: Token rows that were looked up elsewhere; ``ids`` then only tell
                what is padding.
            mask: False at padding; None reads it off the ids.
            key: What is dropped is drawn with; not needed without dropout.
            inference: Whether nothing is dropped; None is what the layer says.
        """
        call = checked_call(
            self, ids, segments=segments, inputs_embeds=inputs_embeds, mask=mask
        )
        total = self._total(call, positions=positions, offset=offset)
        return _finished(self, total, call, key, inference)

    @property
    def num_embeddings(self) -> int:
        """How many ids there are."""
        return self.token.num_embeddings

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the token table and of the output."""
        return self.token.weight.dtype

    @property
    def padding_idx(self) -> int | None:
        """The id that is padding, counted from the front, or None."""
        return self.token.padding_idx

    def mask(self, ids: Ids) -> Bool[Array, "*batch length"]:
        """Return True where ``ids`` is a token and False where it is padding."""
        return self.token.mask(ids)

    def logits(
        self, x: Float[Any, "*batch embedding_dim"]
    ) -> Float[Array, "*batch num_embeddings"]:
        """Return the product of ``x`` with every token row: the tied output head."""
        return self.token.logits(x)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        """Return every trained array, by the names that files have them under."""
        found = {}
        for part in ("token", "position", "segment"):
            layer = getattr(self, part)
            if isinstance(layer, Module):
                for name, value in layer.parameters().items():
                    found[f"{part}.{name}"] = value
        for name in ("weight", "bias"):
            value = getattr(self.norm, name, None)
            if value is not None:
                found[f"norm.{name}"] = value
        return found

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
            "dropout": 0.0 if self.dropout is None else self.dropout.p,
            "padding_idx": self.padding_idx,
            "zero_padding": self.zero_padding,
            "dtype": self.dtype.name,
        }

    def _filled(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        parts: dict[str, Any] = {}
        for part in ("token", "position", "segment", "norm"):
            own = {
                name.removeprefix(f"{part}."): value
                for name, value in parameters.items()
                if name.startswith(f"{part}.")
            }
            layer = getattr(self, part)
            if own and isinstance(layer, Module):
                parts[part] = layer.with_parameters(own)
            elif own:
                parts[part] = replaced(layer, **own)
        return replaced(self, **parts)

    def _total(
        self, call: Call, *, positions: Positions | None, offset: Offset
    ) -> Float[Array, "*batch length embedding_dim"]:
        """Return the sum of rows in the dtype of the work."""
        rows: Any = call.embeds
        work = compute_dtype(self.dtype)
        if call.ids is not None and rows is None:
            rows = self.token._rows(call.ids, self.token._how(wide=True))
        total = add_embeddings(rows.astype(work), scale=self.scale)
        if self.position is not None:
            total = self.position(total, positions, offset=offset).astype(work)
        if self.segment is not None and call.segments is not None:
            rows = self.segment._rows(call.segments, self.segment._how(wide=True))
            total = total + jnp.broadcast_to(rows.astype(work), total.shape)
        return total

    def _dropped(
        self,
        x: Float[Array, "*batch embedding_dim"],
        *,
        key: Key | None,
        inference: bool | None,
    ) -> Float[Array, "*batch embedding_dim"]:
        if self.dropout is None:
            return x
        if self.dropout.p == 1.0 and key is not None:
            # Equinox would divide by zero.
            off = self.dropout.inference if inference is None else inference
            return x if off else jnp.zeros_like(x)
        return self.dropout(x, key=key, inference=inference)


# All that needs no check, so that it is one operation of an eager call.
@eqx.filter_jit
def _finished(
    layer: EmbeddingLayer,
    total: Float[Array, "*batch embedding_dim"],
    call: Call,
    key: Key | None,
    inference: bool | None,
) -> Float[Array, "*batch embedding_dim"]:
    out = normalised(total, layer.norm, used=both(call.mask, call.inside))
    out = layer._dropped(out, key=key, inference=inference)
    out = nan_outside(out.astype(layer.dtype), call.inside)
    return out if call.mask is None else mask_rows(out, call.mask)
