"""The distinct ids of a batch, in an array of fixed size."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

#: True of distinct ids, and of consecutive rows; lets XLA read and write rows in order.
INDEX_HINTS: dict[str, Any] = {
    "indices_are_sorted": True,
    "unique_indices": True,
    "wrap_negative_indices": False,
}


def unique_ids(ids: Int32[Array, " n"], *, end: int) -> Int32[Array, " rows"]:
    """Return the distinct ids below ``end``, ascending, padded with numbers from ``end``.

    The result has the size of ``ids``, but at least 1, and ascends to its end.

    Args:
        ids: Ids, not negative; those from ``end`` on are left out.
        end: Number of rows.

    Example:
        >>> unique_ids(jnp.array([7, 3, 9, 7]), end=9).tolist()
        [3, 7, 11, 12]
    """
    if ids.size == 0:
        return jnp.array([end], jnp.int32)
    ids = jnp.sort(ids)
    is_first = jnp.append(True, ids[1:] != ids[:-1]) & (ids < end)
    # Writing each first occurrence to its rank is faster than jnp.unique on a CPU.
    steps = jnp.arange(ids.size, dtype=jnp.int32)
    rank = jnp.where(is_first, jnp.cumsum(is_first) - 1, ids.size + steps)
    return (end + steps).at[rank].set(ids, mode="drop", unique_indices=True)
