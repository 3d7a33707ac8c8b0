"""Gradients by central differences, to hold every other gradient against."""

from collections.abc import Callable

import numpy as np


def central_difference(f: Callable[[], float], x: np.ndarray, *, step: float = 1e-6):
    """Return the gradient of the number ``f()`` with respect to the float64 array ``x``."""
    grad = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        kept = x[place]
        x[place] = kept + step
        above = f()
        x[place] = kept - step
        grad[place] = (above - f()) / (2 * step)
        x[place] = kept
    return grad
