"""Numerical gradients, the reference for all others."""

from collections.abc import Callable

import numpy as np


def central_difference(f: Callable[[], float], x: np.ndarray, *, step: float = 1e-6):
    """Return the gradient of ``f()`` with respect to the float64 array ``x``."""
    grad = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        value = x[index]
        x[index] = value + step
        above = f()
        x[index] = value - step
        grad[index] = (above - f()) / (2 * step)
        x[index] = value
    return grad
