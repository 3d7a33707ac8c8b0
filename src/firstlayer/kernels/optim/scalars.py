"""Array functions on numbers, as the ``ops`` of update rules that kernels compile."""

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from ..runtime.compile import FUSE, WITHOUT_WRAPPERS

_compiled: Any = register_jitable(fastmath=FUSE, error_model="numpy", **WITHOUT_WRAPPERS)
sqrt = math.sqrt
sign = np.sign
absolute = abs
maximum = max


@_compiled
def where(condition, x, y):
    """Return ``x`` if the condition is True, otherwise ``y``."""
    return x if condition else y


@_compiled
def multiply(x, y):
    """Return ``x * y``."""
    return x * y


@_compiled
def multiply_add(x, y, z):
    """Return ``x * y + z``."""
    return x * y + z


@_compiled
def lerp(x, y, share):
    """Return ``x`` moved towards ``y`` by a share of their difference."""
    return (y - x) * share + x


@_compiled
def addcmul(x, y, z, factor):
    """Return ``x + factor * y * z``."""
    return x + factor * y * z


@_compiled
def addcdiv(x, y, z, factor):
    """Return ``x + factor * y / z``."""
    return x + factor * y / z
