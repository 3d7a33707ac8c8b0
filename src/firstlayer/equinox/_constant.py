"""Precomputed arrays as static fields of a layer.

A table that can be recomputed from the layer's options is not a leaf of its tree: casts,
weight decay, ``eqx.filter`` and checkpoints ignore it, and a stack of layers holds it once.
"""

from typing import Any

import numpy as np
from jaxtyping import Shaped


class Constant:
    """Read-only array for a static field.

    Two constants are equal if they hold the same bytes, so layers with equal options have
    equal tree structures and share compiled programs.

    Example:
        >>> Constant(np.ones(3)) == Constant(np.ones(3)) != Constant(np.zeros(3))
        True
    """

    def __init__(self, array: Shaped[np.ndarray, "..."]) -> None:
        #: The array, read-only.
        self.array = np.array(array, order="C")
        self.array.flags.writeable = False
        self._hash = hash((self.array.shape, self.array.dtype, self.array.tobytes()))

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Constant) or self._hash != other._hash:
            return False
        a, b = self.array, other.array
        same_form = (a.shape, a.dtype) == (b.shape, b.dtype)
        # Bytes, not values: NaN equals itself, and 0.0 differs from -0.0.
        return self is other or (same_form and a.tobytes() == b.tobytes())

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Hashes of bytes differ between processes, so the hash is not pickled.
        return Constant, (self.array,)

    def __repr__(self) -> str:
        return f"Constant({self.array.dtype}{list(self.array.shape)})"
