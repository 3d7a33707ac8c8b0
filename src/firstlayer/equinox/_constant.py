"""Precomputed arrays as static fields of a layer.

A table that can be recomputed from the layer's options is not a leaf of its tree: casts,
weight decay, ``eqx.filter`` and checkpoints ignore it, and a stack of layers holds it once.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Shaped


class Constant:
    """Read-only array for a static field.

    Two constants are equal if they hold the same bytes, so layers with equal options have
    equal tree structures and share compiled programs. Every call of a compiled function
    compares the tree structures of its arguments, so constants compare 32-byte digests.

    Example:
        >>> Constant(np.ones(3)) == Constant(np.ones(3)) != Constant(np.zeros(3))
        True
    """

    def __init__(self, array: Shaped[np.ndarray, "..."]) -> None:
        #: The array, read-only.
        self.array = np.array(array, order="C")
        self.array.flags.writeable = False
        # Bytes, not values: NaN equals itself, and 0.0 differs from -0.0.
        form = f"{self.array.dtype.name} {self.array.shape} ".encode()
        self._digest = blake2b(form + self.array.tobytes(), digest_size=32).digest()

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        return isinstance(other, Constant) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> Any:
        return Constant, (self.array,)

    def __repr__(self) -> str:
        return f"Constant({self.array.dtype}{list(self.array.shape)})"
