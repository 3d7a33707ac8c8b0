"""The arguments of one call of the complete layer, checked against it and each other.

Values that are concrete on the CPU are refused in the core's own sentences; elsewhere only
shapes and dtypes are looked at. Ids that become rows are checked where they are read.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...embeddings.layer import check_mask, check_segments, leading_shape
from .._positions.arguments import Offset, Positions, check_vectors
from .._table.lookup import as_index
from .._tensors.buffers import name_of
from .._tensors.errors import WrongValue, check_ids


class Call(NamedTuple):
    """What was asked of a layer.

    Args:
        lead: Shape of the output without its last axis.
        ids: Token ids, or None if only ``embeds`` were given.
        embeds: Token rows that were looked up elsewhere, or None.
        positions: As the caller gave them.
        offset: Likewise.
        segments: A segment for each token, or for each place; None without segments.
        mask: False where the output shall be zero, or None.
    """

    lead: tuple[int, ...]
    ids: Tensor | None
    embeds: Tensor | None
    positions: Positions | None
    offset: Offset
    segments: Tensor | None
    mask: Tensor | None


def checked_call(
    layer: Any,
    ids: Any,
    *,
    positions: Any,
    offset: Any,
    segments: Any,
    inputs_embeds: Any,
    mask: Any,
) -> Call:
    """Return the arguments of a call, or say what is wrong with them."""
    if inputs_embeds is not None:
        check_vectors(inputs_embeds, layer.embedding_dim, name="inputs_embeds")
        _check_nested(layer, inputs_embeds, name="inputs_embeds")
    if ids is not None:
        ids = _ids(ids, layer._modules["token"])
        _check_nested(layer, ids, name="ids")
    lead = leading_shape(ids, inputs_embeds, has_positions=layer.position is not None)
    segments = _segments(layer, lead, segments)
    mask = _mask(layer, ids, lead, mask)
    return Call(lead, ids, inputs_embeds, positions, offset, segments, mask)


def _check_nested(layer: Any, value: Tensor, *, name: str) -> None:
    if not value.is_nested:
        return
    # Rows of different lengths: torch can neither count along them nor choose by a mask.
    if layer.position is not None or (layer.norm is not None and layer.zero_padding):
        raise WrongValue(
            f"{name} must not be nested in a layer with positions, or with layer_norm and "
            f"zero_padding, got layout {value.layout}"
        )


def _ids(
    value: Any, table: Any, *, name: str = "ids", bound: str = "num_embeddings"
) -> Tensor:
    ids = value
    if not isinstance(ids, Tensor):
        ids = torch.as_tensor(value, device=table.weight.device)
        if not ids.numel() and isinstance(value, list | tuple):
            ids = ids.to(torch.int64)  # an empty list has no dtype of its own
    found = as_index(ids, name=name)
    if found is not ids or name != "ids":
        # Before they are others: a wide one may have become negative.
        check_ids(ids, table.num_embeddings, name=name, bound=bound)
    return found


def _segments(layer: Any, lead: tuple[int, ...], segments: Any) -> Tensor | None:
    if layer.segment is None:
        if segments is not None:
            raise ValueError("segments were given, but the layer was made without them")
        return None
    if segments is None:
        return torch.zeros((), dtype=torch.int64, device=layer.segment.weight.device)
    bound = "the number of segments"
    found = _ids(segments, layer.segment, name="segments", bound=bound)
    check_segments(found.shape, lead)
    return found


def _mask(
    layer: Any, ids: Tensor | None, lead: tuple[int, ...], mask: Any
) -> Tensor | None:
    if not layer.zero_padding:
        return None
    if mask is None:
        if ids is None:
            raise ValueError("zero_padding needs ids or a mask with inputs_embeds")
        return layer.mask(ids)
    found = mask
    if not isinstance(mask, Tensor):
        found = torch.as_tensor(mask, device=layer.token.weight.device)
    check_mask(name_of(found.dtype), found.shape, lead)
    return found
