"""Lucid's norms."""

from typing import Any

import numpy as np

__all__ = ["norm"]


def norm(
    x: Any,
    ord: Any = None,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
) -> Any:
    """Return the norm of a vector, or of everything in ``x``.

    Args:
        x: Numbers.
        ord: Which norm; None is the root of the sum of squares.
        axis: Along which axes; None is all of them, as one vector.
        keepdims: Keep those axes, with size 1.

    Example:
        >>> float(norm([[3.0, 0.0], [0.0, 4.0]]))
        5.0
    """
    if axis is None and not keepdims:
        x = np.ravel(x)
    return np.linalg.norm(x, ord=ord, axis=axis, keepdims=keepdims)
