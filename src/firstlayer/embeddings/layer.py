"""The complete layer, with array operations of any library.

Token rows → × √embedding_dim if ``scale`` → + positions (+ segments) → LayerNorm → dropout
→ zero at padding; all but the token rows are optional. This is the first layer of BERT and
of the original Transformer, and without the norm that of GPT-2. Only token rows are scaled
(Vaswani et al. 2017). Zeroing comes last because the norm's bias makes padding nonzero.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped

from .._array import namespace_of
from .._check import one_of

#: Kernels write outputs of fewer numbers on one thread.
ONE_THREAD_NUMBERS = 1 << 16


def leading_shape(
    ids: Shaped[Any, "*batch"] | None,
    embeds: Float[Any, "*batch embedding_dim"] | None,
    *,
    has_positions: bool,
) -> tuple[int, ...]:
    """Return the shape of the output without its last axis.

    Args:
        ids: Token ids, or None.
        embeds: Token rows looked up by the caller, or None.
        has_positions: Whether the layer adds positions, which need a length axis.

    Example:
        >>> leading_shape(None, None, has_positions=False)
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
    """Raise if segments have neither the shape of the ids nor ``(length,)``."""
    # Not `in`: torch.compile cannot search a tuple of symbolic sizes.
    if tuple(shape) != lead and tuple(shape) != lead[-1:]:
        raise ValueError(f"segments must have shape {lead}, got {tuple(shape)}")


def reject_mask(mask: Any) -> None:
    """Raise if a mask is given to a layer without ``zero_padding``, which ignores it."""
    if mask is not None:
        raise ValueError("mask was given, but the layer was made without zero_padding")


def check_mask(dtype: str, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Raise if a mask is not one bool per token."""
    if dtype != "bool" or tuple(shape) != lead:
        raise ValueError(f"mask must be bools of shape {lead}, got {dtype} {tuple(shape)}")


def position_config(
    position: Any, *, max_positions: int | None, embedding_dim: int
) -> tuple[str, dict[str, Any]] | None:
    """Return the class name and arguments of the position layer to build.

    None if there is nothing to build: ``position`` is a layer or None.

    Args:
        position: The complete layer's argument.
        max_positions: Number of positions, for ``"learned"`` only.
        embedding_dim: Width of each vector.

    Example:
        >>> position_config("learned", max_positions=9, embedding_dim=4)
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
        if position != "sinusoidal":
            raise ValueError(
                "position must be 'learned', 'sinusoidal', None or a layer that adds "
                f"positions, got {position!r}: use None with layers that act on "
                "attention, such as RotaryPositions"
            )
        return "SinusoidalPositions", {"embedding_dim": embedding_dim}
    if isinstance(position, dict):
        known = ("LearnedPositions", "SinusoidalPositions")
        name = one_of("position['class']", position.get("class", ""), known)
        return name, {key: value for key, value in position.items() if key != "class"}
    return None


def check_position(position: Any, embedding_dim: int) -> None:
    """Raise if ``position`` is not a layer that adds vectors of this width."""
    if isinstance(position, type) or not hasattr(position, "encode"):
        got = type(position).__name__
        if isinstance(position, type):
            got = f"the class {position.__name__}"
        raise TypeError(
            "position must be 'learned', 'sinusoidal', None or a layer that adds "
            f"positions, got {got}"
        )
    if getattr(position, "embedding_dim", None) != embedding_dim:
        raise ValueError(
            f"position must have embedding_dim {embedding_dim}, "
            f"got {getattr(position, 'embedding_dim', None)}"
        )


def add_embeddings(
    token: Float[Any, "*batch embedding_dim"],
    *others: Float[Any, "*#batch embedding_dim"],
    scale: bool,
) -> Float[Any, "*batch embedding_dim"]:
    """Return the token rows, times √embedding_dim if ``scale``, plus all ``others``.

    Example:
        >>> import numpy as np
        >>> add_embeddings(np.ones((1, 4)), np.ones((1, 4)), scale=True).tolist()
        [[3.0, 3.0, 3.0, 3.0]]
    """
    total = token * token.shape[-1] ** 0.5 if scale else token
    for other in others:
        total = total + other
    return total


def empty_statistics(num_tokens: int, dtype: Any) -> Float[np.ndarray, "num_tokens 2"]:
    """Return memory for the mean and the inverse standard deviation of each row.

    They are those of the rows before the norm. Kernels fill it in the forward and read it
    in the backward.

    Args:
        num_tokens: Number of rows.
        dtype: The compute dtype.
    """
    return np.empty((num_tokens, 2), dtype)


def normalize_rows(
    x: Float[Any, "*batch embedding_dim"], *, eps: float
) -> tuple[Float[Any, "*batch embedding_dim"], Float[Any, "*batch 1"]]:
    """Return rows with mean 0 and variance 1, and the reciprocal standard deviations."""
    xp = namespace_of(x)
    centered = x - xp.mean(x, axis=-1, keepdims=True)
    rstd = (xp.mean(centered * centered, axis=-1, keepdims=True) + eps) ** -0.5
    return centered * rstd, rstd


def normalize_rows_backward(
    dy: Float[Any, "*batch embedding_dim"],
    y: Float[Any, "*batch embedding_dim"],
    rstd: Float[Any, "*batch 1"],
) -> Float[Any, "*batch embedding_dim"]:
    """Return the gradient of the input of :func:`normalize_rows`."""
    xp = namespace_of(y)
    projection = xp.mean(dy * y, axis=-1, keepdims=True)
    return rstd * (dy - xp.mean(dy, axis=-1, keepdims=True) - y * projection)


def mask_rows(
    x: Float[Any, "*batch embedding_dim"], mask: Bool[Any, "*batch"]
) -> Float[Any, "*batch embedding_dim"]:
    """Return ``x`` where ``mask`` is True and zero elsewhere, even where ``x`` is NaN."""
    xp = namespace_of(x)
    return xp.where(mask[..., None], x, xp.zeros_like(x))
