"""Arguments of one call of the complete layer, checked, and the tables they read."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._array import compute_dtype, is_real, repeating
from ..._check import check_table, dtype_text, host_array, ids_in_range
from ...embeddings.layer import check_mask, check_segments, leading_shape, reject_mask
from ...embeddings.layer_gradients import layer_gradients
from ...embeddings.row_gradient import RowGradient
from ...positions.learned import check_positions
from .._positions import positions_of, vectors
from ..learned import LearnedPositions
from .tables import LayerTables, TableRows

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer


@dataclass(frozen=True, eq=False)
class LayerArguments:
    """Checked arguments of a call. The arrays are copies.

    Args:
        layer: Layer that is called.
        shape: Shape of the output.
        ids: Token ids; None if only ``embeds`` were given.
        embeds: ``inputs_embeds``, or None.
        positions: One position per token, or ``(length,)``; None without positions.
        segments: Segment of each token, or None.
        mask: False where the output is zeroed, or None.
    """

    layer: "EmbeddingLayer"
    shape: tuple[int, ...]
    ids: np.ndarray | None
    embeds: np.ndarray | None
    positions: np.ndarray | None
    segments: np.ndarray | None
    mask: np.ndarray | None

    def read_tables(self) -> LayerTables:
        """Catch up the rows that this call reads and return their tables."""
        layer = self.layer
        scale = layer.embedding_dim**0.5 if layer.scale else 1.0
        return LayerTables(self._token(), self._position(), self._segment(), scale)

    def saved_for_backward(self, tables: LayerTables) -> LayerTables:
        """Return the tables that :meth:`gradients` needs.

        The norm's backward recomputes its input. It reads copies of the rows, because the
        caller may change the tables before calling the pullback.
        """
        token, position, segment, scale = tables
        if self.layer.norm is None:
            # Without a norm, only tables that get a gradient are needed.
            has_gradient = hasattr(self.layer.position, "row_gradient")
            return tables._replace(position=position if has_gradient else None)
        return LayerTables(
            token.copy_rows() if self.embeds is None else token,
            position and position.copy_rows(),
            segment and segment._replace(table=segment.table.copy()),
            scale,
        )

    def gradients(
        self,
        tables: LayerTables,
        dy: np.ndarray,
        *,
        norm: tuple[np.ndarray, np.ndarray] | None,
    ) -> dict[str, Any]:
        """Return all gradients by name, given that of the output before zeroing.

        Args:
            tables: Tables returned by :meth:`saved_for_backward`.
            dy: Gradient, in the compute dtype. Masked tokens pass none on, even if NaN.
            norm: Weight of the norm during the call, and its statistics, or None.
        """
        token, position, segment, scale = tables
        by_table = layer_gradients(
            token[:2],
            position=position and position[:2],
            segment=segment and segment[:2],
            scale=scale,
            norm=norm,
            dy=dy.reshape(-1, dy.shape[-1]),
            by_id=self.embeds is None,
            token_padding=token.padding_idx,
            position_padding=position and position.padding_idx,
            mask=None if self.mask is None else self.mask.reshape(-1),
        )
        gradients: dict[str, Any] = {}
        if isinstance(by_table.token, RowGradient):
            gradients["token.weight"] = token.row_gradient(by_table.token)
        elif self.embeds is not None:
            dembeds = by_table.token.reshape(self.shape)
            gradients["inputs_embeds"] = dembeds.astype(self.embeds.dtype, copy=False)
        if position and by_table.position and hasattr(self.layer.position, "row_gradient"):
            drows = position.row_gradient(by_table.position)
            gradients["position.weight"] = self._position_gradient(drows)
        if segment is not None and by_table.segment is not None:
            used = np.unique(segment.rows)
            gradients["segment.weight"] = RowGradient(used, by_table.segment[used])
        if norm is not None:
            gradients["norm.weight"] = by_table.norm_weight
            gradients["norm.bias"] = by_table.norm_bias
        return gradients

    def _token(self) -> TableRows:
        if self.embeds is not None:
            rows = self.embeds.reshape(-1, self.shape[-1])
            rows = np.ascontiguousarray(rows, dtype=compute_dtype(self.layer.dtype))
            return TableRows(rows, np.arange(len(rows)))
        ids, token = np.ascontiguousarray(self.ids).reshape(-1), self.layer.token
        token.catch_up(ids)
        return TableRows(check_table(token.stored_weight), ids, token.padding_idx)

    def _segment(self) -> TableRows | None:
        if self.layer.segment is None or self.segments is None:
            return None
        self.layer.segment.catch_up(self.segments)
        rows = repeating(self.segments, self.shape[:-1])
        return TableRows(check_table(self.layer.segment.stored_weight), rows)

    def _position(self) -> TableRows | None:
        if self.positions is None:
            return None
        position, lead = self.layer.position, self.shape[:-1]
        if self._reads_position_table():
            check_positions(
                self.positions,
                max_positions=position.max_positions,
                row_offset=position.row_offset,
            )
            rows = self.positions.astype(np.int64) + position.row_offset
            position.table.catch_up(rows)
            padding_idx = position.table.padding_idx
            table = check_table(position.table.stored_weight)
            return TableRows(table, repeating(rows, lead), padding_idx)
        encoded = position.encode(self.positions, dtype=compute_dtype(self.layer.dtype))
        rows = np.arange(math.prod(encoded.shape[:-1])).reshape(encoded.shape[:-1])
        return TableRows(encoded.reshape(-1, self.shape[-1]), repeating(rows, lead))

    def _reads_position_table(self) -> bool:
        """Return whether positions are rows of a learned table, added as they are."""
        position = self.layer.position
        is_plain = isinstance(position, LearnedPositions) and position.scale == 1.0
        return is_plain and not is_real(self.positions)

    def _position_gradient(self, drows: RowGradient) -> RowGradient:
        if self.positions is None or self._reads_position_table():
            return drows
        # The rows are encoded positions: go from their gradient to that of the table.
        axes = getattr(self.layer.position, "axes", 1)
        lead = self.positions.shape if axes == 1 else self.positions.shape[1:]
        dense = drows.dense(math.prod(lead)).reshape(*lead, self.shape[-1])
        return self.layer.position.row_gradient(self.positions, dense)


def check_arguments(
    layer: "EmbeddingLayer",
    ids: Any,
    *,
    positions: Any,
    offset: Any,
    segments: Any,
    inputs_embeds: Any,
    mask: Any,
) -> LayerArguments:
    """Return the arguments of a call, checked against the layer and each other."""
    embeds = inputs_embeds
    if embeds is not None:
        embeds = vectors(embeds, layer.embedding_dim, name="inputs_embeds").copy()
    if ids is not None:
        ids = ids_in_range(ids, layer.token.num_embeddings).copy()
    lead = leading_shape(ids, embeds, has_positions=layer.position is not None)
    if embeds is None and layer.token.is_stored:
        embeds = layer.token.upcast_rows(ids)
    return LayerArguments(
        layer,
        (*lead, layer.embedding_dim),
        ids,
        embeds,
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
    segments = ids_in_range(
        segments, count, name="segments", bound="the number of segments"
    )
    check_segments(segments.shape, lead)
    return segments.copy()


def _mask(layer: Any, ids: Any, lead: tuple[int, ...], mask: Any) -> np.ndarray | None:
    if not layer.zero_padding:
        return reject_mask(mask)
    if mask is None:
        if ids is None:
            raise ValueError("zero_padding needs ids or a mask with inputs_embeds")
        return layer.token.mask(ids)
    mask = host_array(mask, name="mask").copy()
    check_mask(dtype_text(mask.dtype), mask.shape, lead)
    return mask
