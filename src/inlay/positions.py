"""Position ids: plain, moved on by a cache, from a padding mask, per packed document.

Every scheme takes explicit positions, so that left padding, packed documents and cached
keys are a matter of these few functions and of nothing else. They run unchanged on NumPy,
torch and JAX arrays.
"""

from typing import Any

from jaxtyping import Shaped


def from_offset(steps: Shaped[Any, " length"], offset: Any = 0) -> Shaped[Any, "*seq"]:
    """Return ``steps`` moved on by ``offset``, as a cache of that many positions asks.

    Args:
        steps: ``0, 1, …`` as an array of the library in use.
        offset: How many positions came before: a number, or an array of one per row, which
            gives positions of shape ``(batch, length)``.

    Example:
        >>> import numpy as np
        >>> from_offset(np.arange(3), np.array([0, 10])).tolist()
        [[0, 1, 2], [10, 11, 12]]
    """
    if getattr(offset, "ndim", 0) == 0:
        return steps + offset
    return steps + offset[..., None]


def resolve(positions: Any, *, offset: Any, steps: Any) -> Any:
    """Return ``positions`` if they were given, else ``steps`` moved on by ``offset``.

    Args:
        positions: What the caller gave, or None.
        offset: As in :func:`from_offset`. Given together with positions it would be
            counted twice or not at all, so that is a ValueError.
        steps: ``0, 1, …`` as an array of the library in use.

    Example:
        >>> import numpy as np
        >>> resolve(None, offset=4, steps=np.arange(2)).tolist()
        [4, 5]
    """
    if positions is None:
        return from_offset(steps, offset)
    if not (isinstance(offset, int) and offset == 0):
        raise ValueError("give positions or offset, not both: add the offset to positions")
    return positions
