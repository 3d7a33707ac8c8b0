"""LayerNorm of rows that are there already, and the way back, on the kernels.

Rows that do not count (padding that becomes zero) are left out of the way back: whatever is
in them, NaN included, trains nothing.
"""

import numpy as np
from jaxtyping import Bool, Float

from ... import kernels
from ...embeddings.layer_gradients import layer_gradients

Rows = Float[np.ndarray, "*batch embedding_dim"]
Row = Float[np.ndarray, " embedding_dim"]


def normalised(x: Rows, *, norm: tuple[Row, Row], eps: float) -> Rows:
    """Return the LayerNorm of ``x``, in its dtype.

    Args:
        x: Contiguous rows in float32 or float64.
        norm: Weight and bias, in any float dtype.
        eps: What is added to the variance.

    Example:
        >>> weight, bias = np.ones(2, np.float32), np.zeros(2, np.float32)
        >>> normalised(np.array([[1.0, 3.0]]), norm=(weight, bias), eps=0.0).tolist()
        [[-1.0, 1.0]]
    """
    out = np.empty(x.shape, x.dtype)
    if out.size:
        flat = x.reshape(-1, x.shape[-1])
        token, into = (flat, np.arange(len(flat))), out.reshape(flat.shape)
        kernels.layer_forward(token, scale=1.0, norm=(*norm, eps), out=into)
    return out


def normalised_backward(
    dy: Rows, x: Rows, *, weight: Row, eps: float, mask: Bool[np.ndarray, "*batch"] | None
) -> tuple[Rows, dict[str, Row]]:
    """Return the gradient of ``x``, and those of the norm's parameters by name.

    Args:
        dy: Gradient of the normalised rows, in the dtype of ``x``.
        x: What was normalised.
        weight: Of the norm.
        eps: As it was normalised.
        mask: Which rows count; None is all.
    """
    flat, up = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    made = layer_gradients(
        (flat, np.arange(len(flat))),
        scale=1.0,
        norm=(weight, eps),
        dy=up,
        by_id=False,
        mask=None if mask is None else mask.reshape(-1),
    )
    gradients = {"norm.weight": made.norm_weight, "norm.bias": made.norm_bias}
    return made.token.reshape(x.shape), gradients  # pyright: ignore
