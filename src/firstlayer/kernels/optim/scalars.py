"""Array functions on numbers, as the ``ops`` of update rules that kernels compile."""

import math

import numpy as np
from numba.extending import register_jitable

sqrt = math.sqrt
sign = np.sign
absolute = abs
maximum = max


@register_jitable(inline="always")
def where(condition, x, y):
    """Return ``x`` if the condition is True, otherwise ``y``."""
    return x if condition else y


@register_jitable(inline="always")
def multiply(x, y):
    """Return ``x * y``."""
    return x * y


@register_jitable(inline="always")
def multiply_add(x, y, z):
    """Return ``x * y + z``."""
    return x * y + z


@register_jitable(inline="always")
def lerp(x, y, share):
    """Return ``x`` moved towards ``y`` by a share of their difference."""
    return (y - x) * share + x


@register_jitable(inline="always")
def addcmul(x, y, z, factor):
    """Return ``x + factor * y * z``."""
    return x + factor * y * z


@register_jitable(inline="always")
def addcdiv(x, y, z, factor):
    """Return ``x + factor * y / z``."""
    return x + factor * y / z
