"""Precomputed numbers that are part of a layer's structure, and of no optimizer's world.

A table that the layer's options make again is no leaf of its tree. No cast, no weight decay
and no ``eqx.filter`` finds it, no checkpoint stores it, a stack of layers has it once; and
``optax.adam`` runs over ``eqx.filter(model, eqx.is_array)``, which it refuses to do over
arrays of integers.
"""

from typing import Any

import numpy as np
from jaxtyping import Shaped


class Constant:
    """An array for a static field. It is never written to.

    Two are equal if they hold the same bytes, so that layers made alike have one structure
    and share a compiled program.

    Example:
        >>> Constant(np.ones(3)) == Constant(np.ones(3)) != Constant(np.zeros(3))
        True
    """

    def __init__(self, array: Shaped[np.ndarray, "..."]) -> None:
        #: The array itself.
        self.array = np.array(array, order="C")
        self.array.flags.writeable = False
        self._hash = hash((self.array.shape, self.array.dtype, self.array.tobytes()))

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Constant) or self._hash != other._hash:
            return False
        mine, theirs = self.array, other.array
        alike = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        # As bytes: NaN is equal to itself here, and 0 is not -0.
        return self is other or (alike and mine.tobytes() == theirs.tobytes())

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Another process hashes the same bytes to another number.
        return Constant, (self.array,)

    def __repr__(self) -> str:
        return f"Constant({self.array.dtype}{list(self.array.shape)})"
