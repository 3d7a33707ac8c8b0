"""Norms of Lucid."""

from typing import Any

import numpy as np

__all__ = ["norm"]


def norm(
    x: Any,
    ord: Any = None,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
) -> Any:
    """Return the norm along ``axis``, or of all of ``x`` as one vector.

    Args:
        x: Array or nested lists.
        ord: Order of the norm. None is the 2-norm.
        axis: Axes to reduce. None is all of them.
        keepdims: Keep reduced axes with size 1.

    Example:
        >>> float(norm([[3.0, 0.0], [0.0, 4.0]]))
        5.0
    """
    if axis is None and not keepdims:
        x = np.ravel(x)
    return np.linalg.norm(x, ord=ord, axis=axis, keepdims=keepdims)
