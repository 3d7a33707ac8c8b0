"""Parts of the complete layer: checked arguments, its position layer, its LayerNorm."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._check import dtype_text, host_array
from ..embeddings.layer import (
    check_mask,
    check_position,
    check_segments,
    leading_shape,
    mask_rows,
    normalize_rows,
    position_config,
    reject_mask,
)
from ._ids import IdsArgument
from ._parameters import Key
from ._positions import checked_vectors
from ._table import TableModule
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions


class LayerArguments(NamedTuple):
    """Arguments of one call of the complete layer, checked against each other.

    Args:
        ids: Token ids, or None if only ``embeds`` were given.
        embeds: Token vectors that replace the lookup, or None.
        segments: Segment of each token or of each place; None without segments.
        mask: The caller's mask, False where the output is zero, or None.
    """

    ids: IdsArgument | None
    embeds: Float[Array, "*batch length embedding_dim"] | None
    segments: IdsArgument | None
    mask: Bool[Array, "*batch length"] | None

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the output without its last axis."""
        if self.embeds is not None:
            return self.embeds.shape[:-1]
        return () if self.ids is None else self.ids.ids.shape


def check_arguments(
    layer: Any, ids: Any, *, segments: Any, inputs_embeds: Any, mask: Any
) -> LayerArguments:
    """Return the checked arguments of a call. Traced values are checked by shape only."""
    embeds = inputs_embeds
    if embeds is not None:
        embeds = checked_vectors(embeds, layer.embedding_dim, name="inputs_embeds")
    ids = None if ids is None else layer.token._check_ids(ids)
    lead = leading_shape(
        None if ids is None else ids.ids, embeds, has_positions=layer.position is not None
    )
    segments = _checked_segments(layer.segment, lead, segments)
    return LayerArguments(ids, embeds, segments, _checked_mask(layer, ids, lead, mask))


def _checked_segments(
    table: TableModule | None, lead: tuple[int, ...], segments: Any
) -> IdsArgument | None:
    if table is None:
        if segments is not None:
            raise ValueError("segments were given, but the layer was made without them")
        return None
    if segments is None:
        return table._check_ids(0)
    ids = table._check_ids(segments, name="segments", bound="the number of segments")
    check_segments(ids.ids.shape, lead)
    return ids


def _checked_mask(
    layer: Any, ids: IdsArgument | None, lead: tuple[int, ...], mask: Any
) -> Bool[Any, "*batch length"] | None:
    if not layer.zero_padding:
        return reject_mask(mask)
    if mask is None:
        if ids is None:
            raise ValueError("zero_padding needs ids or a mask with inputs_embeds")
        return None
    mask = mask if isinstance(mask, jax.Array) else host_array(mask, name="mask")
    check_mask(dtype_text(mask.dtype), mask.shape, lead)
    return mask


def position_layer(
    position: Any,
    *,
    max_positions: int | None,
    embedding_dim: int,
    dtype: Any,
    key: Key | None,
) -> Any:
    """Return the layer that ``position`` names or describes, or ``position`` itself."""
    described = position_config(
        position, max_positions=max_positions, embedding_dim=embedding_dim
    )
    if described is not None:
        name, options = described
        if name == "LearnedPositions":
            position = LearnedPositions(**{"dtype": dtype, "key": key, **options})
        else:
            position = SinusoidalPositions(**options)
    if position is not None:
        check_position(position, embedding_dim)
    return position


def layer_norm(
    x: Float[Array, "*batch embedding_dim"],
    norm: eqx.nn.LayerNorm | None,
    *,
    mask: Bool[Array, "*batch"] | None,
) -> Float[Array, "*batch embedding_dim"]:
    """Apply a LayerNorm that ignores masked rows. Returns ``x`` if ``norm`` is None.

    Args:
        x: Rows in float32 or float64.
        norm: The LayerNorm; its parameters may have another dtype.
        mask: False for rows that pass no gradient to ``x`` or ``norm``. None masks none.

    Example:
        >>> norm = eqx.nn.LayerNorm(2, eps=0.0)
        >>> layer_norm(jnp.array([[1.0, 3.0]]), norm, mask=None).tolist()
        [[-1.0, 1.0]]
    """
    if norm is None:
        return x
    if mask is None:
        y, _ = normalize_rows(x, eps=norm.eps)
    else:
        # Masked before and after: a row of zeros is NaN after standardizing if eps is 0.
        y, _ = normalize_rows(mask_rows(x, mask), eps=norm.eps)
        y = mask_rows(y, mask)
    weight, bias = (
        None if row is None else jnp.broadcast_to(row.astype(y.dtype), y.shape)
        for row in (norm.weight, norm.bias)
    )
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
