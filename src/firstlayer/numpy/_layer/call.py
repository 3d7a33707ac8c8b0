"""What one call of the complete layer looks up, and where the gradients go back to."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import kernels
from ..._array import compute_dtype, is_real, repeating
from ..._check import ids_in_range, integers
from ...embeddings.layer import check_mask, check_segments, lead_of
from ...positions.learned import check_positions
from .._positions import positions_of, vectors
from ..learned import LearnedPositions

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer


@dataclass(frozen=True, eq=False)
class Lookup:
    """The checked arguments of a call.

    Args:
        layer: Whose call it is.
        shape: Of the output.
        ids: Token ids, or None if only ``embeds`` were given.
        embeds: Token rows that were looked up elsewhere, or None.
        positions: A position for each token, or ``(length,)``; None without positions.
        segments: A segment for each token, or None.
        mask: False where the output shall be zero, or None.
    """

    layer: "EmbeddingLayer"
    shape: tuple[int, ...]
    ids: np.ndarray | None
    embeds: np.ndarray | None
    positions: np.ndarray | None
    segments: np.ndarray | None
    mask: np.ndarray | None

    def rows(self, *, norm: Any, dtype: Any) -> np.ndarray:
        """Return token rows plus what is added, normalised if there is a ``norm``."""
        layer, out = self.layer, np.empty(self.shape, dtype)
        width = layer.embedding_dim
        if out.size == 0:
            return out
        kernels.layer_forward(
            self._token(),
            position=self._position(),
            segment=self._segment(),
            scale=width**0.5 if layer.scale else 1.0,
            norm=norm and (*norm, layer.norm_eps),
            out=out.reshape(-1, width),
        )
        return out

    def gradients(self, dy: np.ndarray) -> dict[str, Any]:
        """Return the gradients of the tables, given that of the sum of rows."""
        layer, found = self.layer, {}
        dtoken = dy * layer.embedding_dim**0.5 if layer.scale else dy
        if self.embeds is not None:
            found["inputs_embeds"] = dtoken.astype(self.embeds.dtype)
        elif self.ids is not None:
            found["token.weight"] = layer.token.row_gradient(self.ids, dtoken)
        if self.positions is not None and hasattr(layer.position, "row_gradient"):
            found["position.weight"] = layer.position.row_gradient(self.positions, dy)
        if layer.segment is not None and self.segments is not None:
            segments = np.broadcast_to(self.segments, dy.shape[:-1])
            found["segment.weight"] = layer.segment.row_gradient(segments, dy)
        return found

    def _token(self) -> tuple[np.ndarray, np.ndarray]:
        if self.embeds is not None:
            flat = self.embeds.reshape(-1, self.shape[-1])
            work = compute_dtype(self.layer.dtype)
            return np.ascontiguousarray(flat, dtype=work), np.arange(len(flat))
        ids = np.ascontiguousarray(self.ids).reshape(-1)
        self.layer.token.make_ready(ids)
        return self.layer.token.weight, ids

    def _position(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.positions is None:
            return None
        table, rows = self._position_rows(self.positions)
        return table, repeating(rows, self.shape[:-1])

    def _segment(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.layer.segment is None or self.segments is None:
            return None
        self.layer.segment.make_ready(self.segments)
        return self.layer.segment.weight, repeating(self.segments, self.shape[:-1])

    def _position_rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position = self.layer.position
        plain = isinstance(position, LearnedPositions) and position.scale == 1.0
        if plain and not is_real(positions):
            check_positions(
                positions,
                max_positions=position.max_positions,
                row_offset=position.row_offset,
            )
            rows = positions.astype(np.int64) + position.row_offset
            position.table.make_ready(rows)
            return position.weight, rows
        made = position.encode(positions, dtype=compute_dtype(self.layer.dtype))
        lead = made.shape[:-1]
        return made.reshape(-1, self.shape[-1]), np.arange(math.prod(lead)).reshape(lead)


def looked_up(
    layer: "EmbeddingLayer",
    ids: Any,
    *,
    positions: Any,
    offset: Any,
    segments: Any,
    inputs_embeds: Any,
    mask: Any,
) -> Lookup:
    """Return the arguments of a call, checked against the layer and each other."""
    embeds = inputs_embeds
    if embeds is not None:
        embeds = vectors(embeds, layer.embedding_dim, name="inputs_embeds")
    if ids is not None:
        # A copy: what is pulled back later must be what was looked up now.
        ids = ids_in_range(ids, layer.token.num_embeddings).copy()
    lead = lead_of(ids, embeds, has_positions=layer.position is not None)
    return Lookup(
        layer,
        (*lead, layer.embedding_dim),
        ids,
        None if embeds is None else embeds.copy(),
        _positions(layer, lead, positions, offset),
        _segments(layer, lead, segments),
        _mask(layer, ids, lead, mask),
    )


def _positions(layer: Any, lead: tuple[int, ...], positions: Any, offset: Any) -> Any:
    if layer.position is None:
        return None
    shape = (*lead, layer.embedding_dim)
    axes = getattr(layer.position, "axes", 1)
    return positions_of(shape, positions=positions, offset=offset, axes=axes).copy()


def _segments(layer: Any, lead: tuple[int, ...], segments: Any) -> np.ndarray | None:
    if layer.segment is None:
        if segments is not None:
            raise ValueError("segments were given, but the layer was made without them")
        return None
    if segments is None:
        return np.zeros((), np.int64)
    count = layer.segment.num_embeddings
    found = ids_in_range(segments, count, name="segments", bound="the number of segments")
    check_segments(found.shape, lead)
    return found.copy()


def _mask(layer: Any, ids: Any, lead: tuple[int, ...], mask: Any) -> np.ndarray | None:
    if not layer.zero_padding:
        return None
    if mask is None:
        if ids is None:
            raise ValueError("zero_padding needs ids or a mask with inputs_embeds")
        return layer.token.mask(integers(ids))
    found = np.array(mask)
    check_mask(found.dtype.name, found.shape, lead)
    return found


def dropped(
    shape: tuple[int, ...], probability: float, rng: np.random.Generator
) -> np.ndarray:
    """Return what to multiply by: 0 with that probability, else what keeps the mean."""
    if probability == 1.0:
        return np.zeros(shape, np.float32)
    kept = rng.random(shape, dtype=np.float32) >= probability
    return kept * np.float32(1 / (1 - probability))
