"""The complete layer: what is added, scaled, normalised and dropped, in which order.

Token rows → × √embedding_dim if ``scale`` → + positions (+ segments) → LayerNorm if asked →
dropout if asked → zero at padding if asked. This is BERT's and the original Transformer's
first layer, and GPT-2's without the norm. Only token rows are scaled (Vaswani et al. 2017),
and zeroing comes last, so that a norm's bias does not bring padding back to life.

The functions here run unchanged on NumPy, torch and JAX arrays.
"""

from typing import Any

from jaxtyping import Bool, Float, Shaped

from .._array import namespace_of
from .._check import one_of


def lead_of(
    ids: Shaped[Any, "*batch"] | None,
    embeds: Float[Any, "*batch embedding_dim"] | None,
    *,
    has_positions: bool,
) -> tuple[int, ...]:
    """Return the shape of the output without its last axis, as the arguments agree on it.

    Args:
        ids: Token ids, or None.
        embeds: Token rows that were looked up elsewhere, or None.
        has_positions: Whether the layer adds positions, which need a length.

    Example:
        >>> lead_of(None, None, has_positions=False)
        Traceback (most recent call last):
        ...
        ValueError: give ids or inputs_embeds, got neither
    """
    if embeds is not None:
        lead = tuple(embeds.shape[:-1])
    elif ids is not None:
        lead = tuple(ids.shape)
    else:
        raise ValueError("give ids or inputs_embeds, got neither")
    if ids is not None and tuple(ids.shape) != lead:
        raise ValueError(
            f"ids must have the shape {lead} of inputs_embeds, got {tuple(ids.shape)}"
        )
    if has_positions and not lead:
        raise ValueError("ids must have a length axis when there are positions, got one id")
    return lead


def check_segments(shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Refuse segments that are neither one for each token nor one for each place."""
    # Not `in`: a compiler that has symbols for sizes finds no number among them.
    if tuple(shape) != lead and tuple(shape) != lead[-1:]:
        raise ValueError(f"segments must have shape {lead}, got {tuple(shape)}")


def check_mask(dtype: str, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Refuse a mask that is not one bool for each token."""
    if dtype != "bool" or tuple(shape) != lead:
        raise ValueError(f"mask must be bools of shape {lead}, got {dtype} {tuple(shape)}")


def described_position(
    position: Any, *, max_positions: int | None, embedding_dim: int
) -> tuple[str, dict[str, Any]] | None:
    """Return the class and the arguments of the layer that ``position`` tells to make.

    None if it tells of none: it is a layer itself, or nothing.

    Args:
        position: As the complete layer takes it.
        max_positions: Likewise; for ``"learned"`` alone.
        embedding_dim: Width of a vector.

    Example:
        >>> described_position("learned", max_positions=9, embedding_dim=4)
        ('LearnedPositions', {'max_positions': 9, 'embedding_dim': 4})
    """
    if isinstance(position, str) and position == "learned":
        if max_positions is None:
            raise ValueError("position='learned' needs max_positions, got None")
        width = {"embedding_dim": embedding_dim}
        return "LearnedPositions", {"max_positions": max_positions, **width}
    if max_positions is not None:
        raise ValueError(
            f"max_positions is for position='learned', got {max_positions} "
            f"with {position!r}"
        )
    if isinstance(position, str):
        one_of("position", position, ("learned", "sinusoidal"))
        return "SinusoidalPositions", {"embedding_dim": embedding_dim}
    if isinstance(position, dict):
        known = ("LearnedPositions", "SinusoidalPositions")
        name = one_of("position['class']", position.get("class", ""), known)
        return name, {key: value for key, value in position.items() if key != "class"}
    return None


def check_adds(position: Any, embedding_dim: int) -> None:
    """Refuse what is no layer that adds positions, or one of another width."""
    if isinstance(position, type) or not hasattr(position, "encode"):
        found = type(position).__name__
        if isinstance(position, type):
            found = f"the class {position.__name__}"
        raise TypeError(
            "position must be 'learned', 'sinusoidal', None or a layer that adds "
            f"positions, got {found}"
        )
    if getattr(position, "embedding_dim", None) != embedding_dim:
        raise ValueError(
            f"position must have embedding_dim {embedding_dim}, "
            f"got {getattr(position, 'embedding_dim', None)}"
        )


def combine(
    token: Float[Any, "*batch embedding_dim"],
    *added: Float[Any, "*#batch embedding_dim"],
    scale: bool,
) -> Float[Any, "*batch embedding_dim"]:
    """Return the token rows, scaled if asked, plus everything that is ``added``.

    Example:
        >>> import numpy as np
        >>> combine(np.ones((1, 4)), np.ones((1, 4)), scale=True).tolist()
        [[3.0, 3.0, 3.0, 3.0]]
    """
    total = token * token.shape[-1] ** 0.5 if scale else token
    for part in added:
        total = total + part
    return total


def standardise(
    x: Float[Any, "*batch embedding_dim"], *, eps: float
) -> tuple[Float[Any, "*batch embedding_dim"], Float[Any, "*batch 1"]]:
    """Return ``x`` with mean 0 and variance 1 in each row, and what it was multiplied by.

    Args:
        x: In float32 or float64.
        eps: Added to the variance, so that a constant row stays finite.
    """
    xp = namespace_of(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    factor = (xp.mean(centred * centred, axis=-1, keepdims=True) + eps) ** -0.5
    return centred * factor, factor


def standardise_backward(
    dy: Float[Any, "*batch embedding_dim"],
    y: Float[Any, "*batch embedding_dim"],
    factor: Float[Any, "*batch 1"],
) -> Float[Any, "*batch embedding_dim"]:
    """Return the gradient of what :func:`standardise` was given, from that of its result.

    Args:
        dy: Gradient of the standardised rows.
        y: The standardised rows.
        factor: What they were multiplied by.
    """
    xp = namespace_of(y)
    along = xp.mean(dy * y, axis=-1, keepdims=True)
    return factor * (dy - xp.mean(dy, axis=-1, keepdims=True) - y * along)


def zero_where(
    x: Float[Any, "*batch embedding_dim"], mask: Bool[Any, "*batch"]
) -> Float[Any, "*batch embedding_dim"]:
    """Return ``x`` where ``mask`` is True and zero elsewhere, even where ``x`` is NaN."""
    xp = namespace_of(x)
    return xp.where(mask[..., None], x, xp.zeros_like(x))
