"""Arguments of one call of the complete layer, checked against the layer and each other.

Values are checked if they are on the CPU and readable; elsewhere only shapes and dtypes.
Ids that are looked up are checked by the lookup.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..._check import not_masked
from ...embeddings.layer import check_mask, check_segments, leading_shape, reject_mask
from .._positions.arguments import Offset, Positions, check_vectors
from .._table.lookup import INDEX, as_index
from .._tensors.dtypes import dtype_name
from .._tensors.errors import WrongType, WrongValue, check_ids, reject_torchrec

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer


class LayerArguments(NamedTuple):
    """Checked arguments of a call.

    Args:
        lead: Shape of the output without its last axis.
        ids: Token ids, or None if only ``embeds`` are given.
        embeds: Precomputed token vectors, or None.
        positions: Positions as given.
        offset: Offset as given.
        segments: Segment of each token, or of each position; None without segments.
        mask: False where the output is zero, or None.
    """

    lead: tuple[int, ...]
    ids: Tensor | None
    embeds: Tensor | None
    positions: Positions | None
    offset: Offset
    segments: Tensor | None
    mask: Tensor | None


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
    """Return the arguments of a call, or raise an error that names the wrong one."""
    if inputs_embeds is not None:
        check_vectors(inputs_embeds, layer.embedding_dim, name="inputs_embeds")
        _check_nested(layer, inputs_embeds, name="inputs_embeds")
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.dtype not in INDEX:
            ids = _as_ids(ids, layer.token)
        elif inputs_embeds is not None:
            # No lookup will check them.
            check_ids(ids, layer.token.num_embeddings)
        _check_nested(layer, ids, name="ids")
    # The dict is faster than the attribute.
    has_positions = layer._modules.get("position") is not None
    lead = leading_shape(ids, inputs_embeds, has_positions=has_positions)
    if segments is not None or layer.segment is not None:
        segments = _segments(layer, lead, segments)
    mask = _mask(layer, ids, lead, mask)
    return LayerArguments(lead, ids, inputs_embeds, positions, offset, segments, mask)


def _check_nested(layer: "EmbeddingLayer", value: Tensor, *, name: str) -> None:
    if not value.is_nested:
        return
    # Torch can neither count along a ragged axis nor select by a ragged mask.
    if layer.position is not None or (layer.norm is not None and layer.zero_padding):
        raise WrongValue(
            f"nested {name} must be contiguous and jagged in the second axis if the layer "
            "has positions, or layer_norm and zero_padding, "
            f"got layout {value.layout} and {value.dim()} axes"
        )


def _as_ids(
    value: Any, table: Any, *, name: str = "ids", bound: str = "num_embeddings"
) -> Tensor:
    """Return ids or segments as int64 or int32, and check that they are in range."""
    ids = value
    if not isinstance(ids, Tensor):
        reject_torchrec(
            ids, "torch.nested.nested_tensor_from_jagged(ids.values(), ids.offsets())"
        )
        ids = _as_tensor(value, name=name, device=_device_of(table))
        if not ids.numel() and isinstance(value, list | tuple):
            ids = ids.to(torch.int64)  # torch makes floats of an empty list
    index = as_index(ids, name=name)
    # Before the conversion, which makes a large uint64 negative.
    check_ids(ids, table.num_embeddings, name=name, bound=bound)
    return index


def _as_tensor(value: Any, *, name: str, device: torch.device) -> Tensor:
    value = not_masked(value, name=name)
    try:
        return torch.as_tensor(value, device=device)
    except RuntimeError:
        kind = type(value).__name__
        raise WrongType(
            f"{name} must be a tensor or lists of 64-bit numbers, got {kind}"
        ) from None


def _device_of(table: Any) -> torch.device:
    return table.device if getattr(table, "is_stored", False) else table.weight.device


def _segments(layer: "EmbeddingLayer", lead: tuple[int, ...], segments: Any) -> Tensor:
    if layer.segment is None:
        raise ValueError("segments were given, but the layer was made without them")
    if segments is None:
        return torch.zeros((), dtype=torch.int64, device=layer.segment.weight.device)
    bound = "the number of segments"
    index = _as_ids(segments, layer.segment, name="segments", bound=bound)
    check_segments(index.shape, lead)
    return index


def _mask(
    layer: "EmbeddingLayer", ids: Tensor | None, lead: tuple[int, ...], mask: Any
) -> Tensor | None:
    if not layer.zero_padding:
        return reject_mask(mask)
    if mask is None:
        if ids is None:
            raise ValueError("zero_padding needs ids or a mask with inputs_embeds")
        return layer.mask(ids)
    if not isinstance(mask, Tensor):
        mask = _as_tensor(mask, name="mask", device=_device_of(layer.token))
    check_mask(dtype_name(mask.dtype), mask.shape, lead)
    return mask
