"""Row gradients: the gradient of a table as the ids that were read and a row for each.

A batch of 4096 ids reads at most 4096 rows of a table of a million. Sums are float32
(float64 for float64) in any table dtype: an id that occurs 3000 times in bfloat16 gets
3000, while a sum in bfloat16 stops at 256.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Int64

from .. import kernels


@dataclass(frozen=True, eq=False)
class RowGradient:
    """Gradient of a table, by row.

    Args:
        ids: Rows that have a gradient, ascending, each once.
        values: Gradient of each of those rows, float32 or float64.

    Example:
        >>> grad = sum_by_id(np.array([4, 1, 4]), np.ones((3, 2), np.float32))
        >>> grad.ids.tolist(), grad.values[:, 0].tolist()
        ([1, 4], [1.0, 2.0])
    """

    ids: Int64[np.ndarray, " rows"]
    values: Float[np.ndarray, "rows *width"]

    def dense(self, num_embeddings: int) -> Float[np.ndarray, "num_embeddings *width"]:
        """Return the gradient in the table's shape, zero for rows without a gradient."""
        out = np.zeros((num_embeddings, *self.values.shape[1:]), self.values.dtype)
        out[self.ids] = self.values
        return out

    def current(self) -> "RowGradient":
        """Return the gradient without rows that have been given to another id since."""
        return self

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """Return the sum of two gradients of one table, to accumulate batches."""
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
    """Return the sum of the values of each id, added in order.

    Args:
        ids: Ids in any shape. A negative id is an IndexError.
        values: One row for each id, in any float dtype.
        skip: Id that gets no gradient, such as the padding row.
        mean: Whether to divide each sum by the number of times its id occurs.
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
