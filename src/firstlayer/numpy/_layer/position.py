"""The position layer that a complete layer adds."""

from typing import Any

from ...embeddings.init import Seed
from ...embeddings.layer import check_position, position_config
from ..learned import LearnedPositions
from ..sinusoidal import SinusoidalPositions


def position_layer(
    position: Any, *, max_positions: int | None, embedding_dim: int, dtype: Any, rng: Seed
) -> Any:
    """Build the layer that ``position`` names, or return it if it is a layer or None."""
    config = position_config(
        position, max_positions=max_positions, embedding_dim=embedding_dim
    )
    if config is not None:
        name, options = config
        if name == "LearnedPositions":
            position = LearnedPositions(**{"dtype": dtype, "rng": rng, **options})
        else:
            position = SinusoidalPositions(**options)
    if position is not None:
        check_position(position, embedding_dim)
    return position
