"""The positions that a complete layer adds: what its argument names, describes or is."""

from typing import Any

import torch

from ...embeddings.layer import check_position, position_config
from ..learned import LearnedPositions
from ..sinusoidal import SinusoidalPositions


def position_layer(
    position: Any,
    *,
    max_positions: int | None,
    embedding_dim: int,
    device: Any,
    dtype: torch.dtype | None,
) -> Any:
    """Return the module that ``position`` names, describes or is."""
    described = position_config(
        position, max_positions=max_positions, embedding_dim=embedding_dim
    )
    if described is not None:
        name, options = described
        if name == "LearnedPositions":
            position = LearnedPositions(**{"device": device, "dtype": dtype, **options})
        else:
            position = SinusoidalPositions(**options)
            position = position if device is None else position.to(device)
    if position is not None:
        check_position(position, embedding_dim)
    return position
