"""The complete layer: what is added, scaled, normalised and dropped, in which order.

Token rows → × √embedding_dim if ``scale`` → + positions (+ segments) → LayerNorm if asked →
dropout if asked → zero at padding if asked. This is BERT's and the original Transformer's
first layer, and GPT-2's without the norm. Only token rows are scaled (Vaswani et al. 2017),
and zeroing comes last, so that a norm's bias does not bring padding back to life.

The functions here run unchanged on NumPy, torch and JAX arrays.
"""

from typing import Any

from jaxtyping import Bool, Float

from ._array import namespace_of


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


def standardise_pull(
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
