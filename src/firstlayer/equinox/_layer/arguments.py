"""The arguments of one call of the complete layer, checked against it and each other.

Values that are concrete are refused in the core's own sentences; of traced ones only shapes
and dtypes are looked at, and ids that are not rows are kept apart.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...embeddings.layer import check_mask, check_segments, leading_shape
from .._positions.arguments import vectors
from .._table.lookup import Found, both
from .._table.module import Table


class Call(NamedTuple):
    """What was asked of a layer.

    Args:
        lead: Shape of the output without its last axis.
        ids: Token ids, or None if only ``embeds`` were given.
        embeds: Token rows that were looked up elsewhere, or None.
        segments: A segment for each token, or for each place; None without segments.
        mask: False where the output shall be zero, or None.
    """

    lead: tuple[int, ...]
    ids: Found | None
    embeds: Float[Array, "*batch length embedding_dim"] | None
    segments: Found | None
    mask: Bool[Array, "*batch length"] | None

    @property
    def inside(self) -> Bool[Array, "*#batch length"] | None:
        """Where every id is a row; None if that is everywhere."""
        found = None
        for ids in (self.ids, self.segments):
            if ids is not None and ids.inside is not None:
                found = both(found, jnp.broadcast_to(ids.inside, self.lead))
        return found


def checked_call(
    layer: Any, ids: Any, *, segments: Any, inputs_embeds: Any, mask: Any
) -> Call:
    """Return the arguments of a call, or say what is wrong with them."""
    embeds = inputs_embeds
    if embeds is not None:
        embeds = vectors(embeds, layer.embedding_dim, name="inputs_embeds")
    found = None if ids is None else layer.token._find(ids)
    kept = None if found is None else found.ids
    lead = leading_shape(kept, embeds, has_positions=layer.position is not None)
    return Call(
        lead,
        found,
        embeds,
        _segments(layer.segment, lead, segments),
        _mask(layer, found, lead, mask),
    )


def _segments(table: Table | None, lead: tuple[int, ...], segments: Any) -> Found | None:
    if table is None:
        if segments is not None:
            raise ValueError("segments were given, but the layer was made without them")
        return None
    if segments is None:
        return table._find(0)
    found = table._find(segments, name="segments", bound="the number of segments")
    check_segments(found.ids.shape, lead)
    return found


def _mask(
    layer: Any, found: Found | None, lead: tuple[int, ...], mask: Any
) -> Bool[Array, "*batch length"] | None:
    if not layer.zero_padding:
        return None
    if mask is None:
        if found is None:
            raise ValueError("zero_padding needs ids or a mask with inputs_embeds")
        return None if found.is_padding is None else ~found.is_padding
    given = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    check_mask(given.dtype.name, given.shape, lead)
    return jnp.asarray(given)
