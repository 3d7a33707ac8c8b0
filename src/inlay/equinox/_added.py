"""The positions that a complete layer adds: what its argument names, or is."""

from typing import Any

from .._check import one_of
from ._parameters import Key
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions


def position_layer(
    position: Any,
    *,
    max_positions: int | None,
    embedding_dim: int,
    dtype: Any,
    key: Key | None,
) -> Any:
    """Return the module that ``position`` names or is."""
    if isinstance(position, str) and position == "learned":
        if max_positions is None:
            raise ValueError("position='learned' needs max_positions, got None")
        return LearnedPositions(max_positions, embedding_dim, dtype=dtype, key=key)
    if max_positions is not None:
        raise ValueError(
            f"max_positions is for position='learned', got {max_positions} "
            f"with {position!r}"
        )
    if isinstance(position, str):
        one_of("position", position, ("learned", "sinusoidal"))
        return SinusoidalPositions(embedding_dim)
    if position is not None:
        _check_adds(position, embedding_dim)
    return position


def _check_adds(position: Any, embedding_dim: int) -> None:
    if not hasattr(position, "encode"):
        raise TypeError(
            "position must be 'learned', 'sinusoidal', None or a module that adds "
            f"positions, got {type(position).__name__}"
        )
    if position.embedding_dim != embedding_dim:
        raise ValueError(
            f"position must have embedding_dim {embedding_dim}, "
            f"got {position.embedding_dim}"
        )
