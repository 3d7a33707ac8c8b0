"""Array functions on numbers, as the ``ops`` of update rules that kernels compile."""

import math

import numpy as np

sqrt = math.sqrt
sign = np.sign
absolute = abs
maximum = max
