"""Features of a group of tables: ids as callers pass them, and vectors as they get them.

Ids may be tensors, jagged nested tensors, lists, or values of TorchRec, which is not
imported: its classes are recognized by their methods.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..._check import integers
from ...embeddings.table_group import FeatureIds, GroupLayout
from .._tensors.errors import WrongType, WrongValue, check_tensor, torch_errors
from .._tensors.memory import array_of, tensor_of
from .lookup import is_jagged

Features = Mapping[str, Any]


def read_features(
    features: Any, weights: Features, layout: GroupLayout, *, device: torch.device
) -> tuple[dict[str, FeatureIds], dict[str, Tensor]]:
    """Return the ids of each feature, and weights of some of them, as tensors."""
    if not isinstance(features, Mapping):
        if not hasattr(features, "to_dict"):
            raise WrongType(
                "features must be a dict or a KeyedJaggedTensor, "
                f"got {type(features).__name__}"
            )
        jagged = features.to_dict()
        features = {name: jagged[name] for name in jagged if name in layout.features}
    if not is_compiling():
        with torch_errors():
            layout.check_features(features)
            layout.check_features(weights, what="per_sample_weights")
    ids, factors = {}, {}
    for name, value in features.items():
        ids[name], own = _read_feature(value, name, device=device)
        if name in weights:
            own = _flat_weights(ids[name], weights[name], name)
        if own is not None:
            factors[name] = own
    absent = [name for name in weights if name not in ids]
    if absent:
        raise WrongValue(f"per_sample_weights must be of features with ids, got {absent}")
    return ids, factors


def _read_feature(
    value: Any, name: str, *, device: torch.device
) -> tuple[FeatureIds, Tensor | None]:
    """Return the ids of a feature, and the weights of a JaggedTensor."""
    if isinstance(value, Tensor):
        if not value.is_nested:
            return FeatureIds(value), None
        if not is_jagged(value):
            raise WrongValue(f"{name} must be a contiguous jagged nested tensor")
        jagged: Any = value
        return FeatureIds(jagged.values(), jagged.offsets()), None
    if hasattr(value, "weights_or_none"):
        return FeatureIds(value.values(), value.offsets()), value.weights_or_none()
    if isinstance(value, list):
        with torch_errors():
            one = FeatureIds.of(value, name)
            ids = tensor_of(integers(one.ids, name=name)).to(device)
        return FeatureIds(ids, _tensor_or_none(one.offsets, device=device)), None
    with torch_errors():
        one = FeatureIds.of(value, name)
    check_tensor(one.ids, name=name)
    if one.offsets is not None:
        check_tensor(one.offsets, name=f"offsets of {name}")
    return one, None


def _flat_weights(ids: FeatureIds, weights: Any, name: str) -> Tensor:
    """Return the weights of a feature in the shape of its ids."""
    if isinstance(weights, Tensor):
        return weights.values() if weights.is_nested else weights
    if not isinstance(weights, list):
        check_tensor(weights, name=f"per_sample_weights of {name}")
    return torch.as_tensor(ids.flat_weights(weights), device=ids.ids.device)


def _tensor_or_none(array: Any, *, device: torch.device) -> Tensor | None:
    return None if array is None else torch.as_tensor(array, device=device)


def array_ids(one: FeatureIds) -> FeatureIds:
    """Return ids and offsets as arrays over the same memory."""
    offsets = None if one.offsets is None else array_of(one.offsets)
    return FeatureIds(array_of(one.ids), offsets)


def nested_like(value: Any, vectors: Tensor, mode: str | None) -> Tensor:
    """Return vectors that are not pooled as a nested tensor if the ids are one."""
    if mode is None and isinstance(value, Tensor) and value.is_nested:
        jagged: Any = value
        return torch.nested.nested_tensor_from_jagged(vectors, jagged.offsets())
    return vectors
