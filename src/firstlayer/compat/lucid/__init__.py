"""Drop-in API of Lucid on NumPy: tensors are arrays, and layers train through ``vjp``.

Use ``import firstlayer.compat.lucid as lucid, firstlayer.compat.lucid.nn as nn``. Lucid
itself needs an Apple processor; this module runs wherever NumPy does.
"""

from typing import Any

import numpy as np

from . import linalg as linalg
from . import nn as nn

int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
float16, float32, float64 = np.float16, np.float32, np.float64

__all__ = [
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "linalg",
    "nn",
    "tensor",
]


def tensor(data: Any, dtype: Any = None) -> np.ndarray:
    """Return a new array of ``data``.

    Args:
        data: Numbers, nested lists of numbers, or an array, which keeps its dtype.
        dtype: Dtype of the result. None converts Python floats to float32.

    Example:
        >>> tensor([[1, 5, 3], [0, 2, 7]], dtype=int64).shape
        (2, 3)
    """
    array = np.array(data, dtype=dtype)
    is_python = dtype is None and not isinstance(data, np.ndarray | np.generic)
    return array.astype(np.float32) if is_python and array.dtype == np.float64 else array
