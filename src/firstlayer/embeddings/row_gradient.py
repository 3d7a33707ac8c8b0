"""Row gradients: the gradient of a table as the ids that were read and a row for each.

A batch of 4096 ids reads at most 4096 rows of a table of a million. Sums are float32
(float64 for float64) in any table dtype: an id that occurs 3000 times in bfloat16 gets
3000, while a sum in bfloat16 stops at 256.
"""

import sys
from dataclasses import dataclass
from typing import Any, Self

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
        """Return the gradient in the table's shape, zero for rows without a gradient.

        Example:
            >>> RowGradient(np.array([2]), np.ones((1, 2), np.float32)).dense(3).tolist()
            [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
        """
        out = np.zeros((num_embeddings, *self.values.shape[1:]), self.values.dtype)
        out[self.ids] = self.values
        return out

    def current(self) -> "RowGradient":
        """Return the gradient without rows that another id has got since."""
        return self

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """Return the sum of two gradients of one table, to accumulate batches."""
        return sum_by_id(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.values, other.values]),
        )


class GradientMemory:
    """Memory of a table's row gradients, used again for the next one.

    The operating system clears the pages of a large new array, which takes longer than
    writing a gradient to it. Memory is used again only if nothing else refers to it, so a
    gradient that is kept keeps its values. Copies and pickles start without memory.

    Example:
        >>> memory = GradientMemory()
        >>> first = memory.array((1 << 20, 4), np.float32)
        >>> second = memory.array((1 << 20, 4), np.float32)
        >>> np.shares_memory(first, second)
        False
    """

    #: Smaller arrays are allocated as usual.
    MIN_BYTES = 1 << 24

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, int], dtype: Any) -> np.ndarray:
        """Return an array with arbitrary values."""
        size = shape[0] * shape[1] * np.dtype(dtype).itemsize
        if size < self.MIN_BYTES:
            return np.empty(shape, dtype)
        # One reference is the attribute, the other one the argument.
        if self._bytes.size < size or sys.getrefcount(self._bytes) > 2:
            # An eighth more, because batches differ in size.
            self._bytes = np.empty(size + size // 8, np.uint8)
        return self._bytes[:size].view(dtype).reshape(shape)

    def __reduce__(self) -> Any:
        return GradientMemory, ()


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
    return IdGroups.of(ids).sum(values, skip=skip, mean=mean)


@dataclass(frozen=True, eq=False)
class IdGroups:
    """Ids of a batch with equal ones together, in ascending order.

    Args:
        order: Places of the ids in the batch, group by group.
        bounds: Where each group begins in ``order``, and the end of the last.
        unique: Id of each group.
    """

    order: Int64[np.ndarray, " n"]
    bounds: Int64[np.ndarray, " bounds"]
    unique: Int64[np.ndarray, " groups"]

    @classmethod
    def of(cls, ids: Int[np.ndarray, "*batch"]) -> Self:
        """Return the groups of ids in any shape. A negative id is an IndexError."""
        flat = np.ascontiguousarray(ids.reshape(-1), np.int64)
        return cls(*kernels.group_by_id(flat))

    def sum(
        self,
        values: Float[np.ndarray, "*batch width"],
        *,
        skip: int | None = None,
        mean: bool = False,
    ) -> RowGradient:
        """Return the sum of the values of each id; arguments as in :func:`sum_by_id`."""
        order, bounds, unique = self.order, self.bounds, self.unique
        values = np.ascontiguousarray(values).reshape(order.size, values.shape[-1])
        starts, ends = bounds[:-1], bounds[1:]
        if skip is not None:
            kept = unique != skip
            starts, ends, unique = starts[kept], ends[kept], unique[kept]
        sums = kernels.sum_groups(values, order, starts, ends)
        if mean:
            sums /= (ends - starts)[:, None].astype(sums.dtype)
        return RowGradient(unique, sums)
