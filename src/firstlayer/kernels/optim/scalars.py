"""Array functions on numbers, as the ``ops`` of update rules that kernels compile."""

import math

import numpy as np
from numba.extending import register_jitable

sqrt = math.sqrt
sign = np.sign
absolute = abs
maximum = max


@register_jitable(inline="always")
def multiply_add(x, y, z):
    """Return ``x * y + z``."""
    return x * y + z
