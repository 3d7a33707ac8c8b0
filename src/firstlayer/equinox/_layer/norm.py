"""LayerNorm of the complete layer, which what does not count cannot reach."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...embeddings.layer import mask_rows, normalize_rows

Rows = Float[Array, "*batch embedding_dim"]


def normalised(
    x: Rows, norm: eqx.nn.LayerNorm | None, *, used: Bool[Array, "*batch"] | None
) -> Rows:
    """Return the LayerNorm of ``x``, in its dtype, or ``x`` if there is none.

    Args:
        x: Rows in float32 or float64.
        norm: Its weight and bias may be of another dtype.
        used: Which rows count: the others, padding and ids that are no rows, send no
            gradient to the norm. None is all.

    Example:
        >>> norm = eqx.nn.LayerNorm(2, eps=0.0)
        >>> normalised(jnp.array([[1.0, 3.0]]), norm, used=None).tolist()
        [[-1.0, 1.0]]
    """
    if norm is None:
        return x
    if used is None:
        y, _ = normalize_rows(x, eps=norm.eps)
    else:
        # Before the norm and inside it, where rows of zeros without an epsilon are NaN:
        # what does not count must not reach the norm's gradient.
        y, _ = normalize_rows(mask_rows(x, used), eps=norm.eps)
        y = mask_rows(y, used)
    weight, bias = (
        None if row is None else jnp.broadcast_to(row.astype(y.dtype), y.shape)
        for row in (norm.weight, norm.bias)
    )
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
