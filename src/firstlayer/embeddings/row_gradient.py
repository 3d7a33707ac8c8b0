"""Row gradients: which rows of a table got a gradient, and what it is.

A batch of 4096 ids touches at most 4096 rows of a table of a million. Its gradient is kept
as those ids, each once and in ascending order, with the sum of what arrived for it. Sums
are made in float32 (float64 for float64) whatever the table's dtype: an id seen 3000 times
in bfloat16 gets 3000, where a sum in bfloat16 sticks at 256.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Int64

from .. import kernels


@dataclass(frozen=True, eq=False)
class RowGradient:
    """The gradient of a table, by row.

    Args:
        ids: The rows that have a gradient, ascending, each once.
        values: Their gradients, float32 or float64.

    Example:
        >>> grad = sum_by_id(np.array([4, 1, 4]), np.ones((3, 2), np.float32))
        >>> grad.ids.tolist(), grad.values[:, 0].tolist()
        ([1, 4], [1.0, 2.0])
    """

    ids: Int64[np.ndarray, " rows"]
    values: Float[np.ndarray, "rows *width"]

    def dense(self, num_embeddings: int) -> Float[np.ndarray, "num_embeddings *width"]:
        """Return the gradient as an array of the table's shape, zero where nothing came."""
        out = np.zeros((num_embeddings, *self.values.shape[1:]), self.values.dtype)
        out[self.ids] = self.values
        return out

    def __add__(self, other: "Rows") -> "Rows":
        """Return the sum of two gradients of one table, as accumulating batches asks."""
        return sum_by_id(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.values, other.values]),
        )


def sum_by_id(
    ids: Int[np.ndarray, "*batch"],
    values: Float[np.ndarray, "*batch width"],
    *,
    skip: int | None = None,
    mean: bool = False,
) -> RowGradient:
    """Return what arrived for each id, summed in the order it came.

    Args:
        ids: Not negative, any shape.
        values: One row for each id, in any float dtype.
        skip: An id that gets no gradient, as padding does.
        mean: Divide each sum by how often its id occurs.
    """
    flat = ids.reshape(-1).astype(np.int64, copy=False)
    values = np.ascontiguousarray(values).reshape(flat.size, values.shape[-1])
    order, bounds, unique = kernels.group_by_id(np.ascontiguousarray(flat))
    starts, ends = bounds[:-1], bounds[1:]
    if skip is not None:
        kept = unique != skip
        starts, ends, unique = starts[kept], ends[kept], unique[kept]
    sums = kernels.sum_groups(values, order, starts, ends)
    if mean:
        sums /= (ends - starts)[:, None].astype(sums.dtype)
    return RowGradient(unique, sums)
