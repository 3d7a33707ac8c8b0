"""The positions that a complete layer adds: what its argument names, describes or is."""

from typing import Any

from .._check import one_of
from ..layer import check_adds
from ..token import Seed
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions

POSITIONS = {
    "LearnedPositions": LearnedPositions,
    "SinusoidalPositions": SinusoidalPositions,
}


def position_layer(
    position: Any, *, max_positions: int | None, embedding_dim: int, dtype: Any, rng: Seed
) -> Any:
    """Return the layer that ``position`` names, describes or is."""
    if isinstance(position, str) and position == "learned":
        if max_positions is None:
            raise ValueError("position='learned' needs max_positions, got None")
        return LearnedPositions(max_positions, embedding_dim, dtype=dtype, rng=rng)
    if max_positions is not None:
        raise ValueError(
            f"max_positions is for position='learned', got {max_positions} "
            f"with {position!r}"
        )
    if isinstance(position, str):
        one_of("position", position, ("learned", "sinusoidal"))
        return SinusoidalPositions(embedding_dim)
    if isinstance(position, dict):
        name = one_of("position['class']", position.get("class", ""), tuple(POSITIONS))
        rest = {key: value for key, value in position.items() if key != "class"}
        position = POSITIONS[name](**rest)
    if position is not None:
        check_adds(position, embedding_dim)
    return position
