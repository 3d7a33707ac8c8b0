"""The positions that a complete layer adds: what its argument names, describes or is."""

from typing import Any

from ...embeddings.layer import check_position, position_config
from .._table.parameters import Key
from ..learned import LearnedPositions
from ..sinusoidal import SinusoidalPositions


def position_layer(
    position: Any,
    *,
    max_positions: int | None,
    embedding_dim: int,
    dtype: Any,
    key: Key | None,
) -> Any:
    """Return the module that ``position`` names, describes or is."""
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
