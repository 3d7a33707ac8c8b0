"""Short calls of a layer whose arrays stay as they are.

A call of one token spends most of its time on checks, and on Numba's dispatcher. A
:class:`CallPlan` holds what depends on the layer alone, and compares it before each use. It
keeps no array alive.
"""

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import kernels
from ...embeddings.layer import ONE_THREAD_NUMBERS
from ..learned import LearnedPositions
from ..token import Embedding

if TYPE_CHECKING:
    from ..layer import EmbeddingLayer

# NumPy has one object for this dtype, but for other byte orders.
_INT64 = np.dtype(np.int64)


class CallPlan:
    """Kernel arguments of a layer, with everything that decides whether they are valid.

    Args:
        layer: The layer.
        arrays: What :func:`arrays_of` returns for it.
    """

    __slots__ = "_arrays", "_dtype", "_forward", "_settings", "_width"

    def __init__(self, layer: "EmbeddingLayer", arrays: list[np.ndarray | None]) -> None:
        from ...kernels.bound import BoundForward

        token, position, weight, bias = arrays
        # Weak references also make NumPy refuse to resize the arrays in place.
        self._arrays = [_KnownArray(x) if x is not None else None for x in arrays]
        self._settings = layer.scale, layer.norm_eps
        self._dtype, self._width = token.dtype, token.shape[1]  # pyright: ignore
        self._forward = BoundForward(
            token,  # pyright: ignore
            position_table=position,
            norm=None if weight is None else (weight, bias, layer.norm_eps),  # pyright: ignore
            scale=layer.embedding_dim**0.5 if layer.scale else 1.0,
        )

    def current_arrays(self, layer: "EmbeddingLayer") -> list[np.ndarray | None] | None:
        """Return the arrays of the layer if it is as it was, else None."""
        arrays = arrays_of(layer)
        if arrays is None or (layer.scale, layer.norm_eps) != self._settings:
            return None
        for x, known in zip(arrays, self._arrays, strict=True):
            if x is not known and (known is None or not known.is_unchanged(x)):
                return None
        return arrays

    def run(self, layer: "EmbeddingLayer", ids: Any, offset: Any) -> np.ndarray | None:
        """Return the layer's output, or None if the plan does not cover the call."""
        if (
            type(ids) is not np.ndarray
            or ids.dtype is not _INT64
            or type(offset) is not int
            or not ids.flags.c_contiguous
            or not 0 < ids.size * self._width < ONE_THREAD_NUMBERS
        ):
            return None
        # Held until the kernel has read them: another thread may replace the layer's.
        arrays = self.current_arrays(layer)
        if arrays is None:
            return None
        rows, shape, table = None, ids.shape, arrays[1]
        if table is not None:
            first = offset + layer.position.row_offset
            # row_offset may have been set to a negative number.
            if not shape or offset < 0 or first < 0 or first + shape[-1] > len(table):
                return None
            rows = range(first, first + shape[-1])
        out = np.empty((*shape, self._width), self._dtype)
        flag = self._forward(ids.ctypes.data, out.ctypes.data, ids.size, rows)
        return None if flag else out


class _KnownArray:
    """An array, with its shape, strides and dtype, which can be assigned."""

    __slots__ = "_array", "_dtype", "_shape", "_strides"

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._dtype = weakref.ref(array), array.dtype
        self._shape, self._strides = array.shape, array.strides

    def is_unchanged(self, x: Any) -> bool:
        """Return whether ``x`` is the array, in its shape, strides and dtype."""
        return (
            x is self._array()
            and x is not None
            and x.shape == self._shape
            and x.strides == self._strides
            and x.dtype is self._dtype
        )


def arrays_of(layer: "EmbeddingLayer") -> list[np.ndarray | None] | None:
    """Return the tables of tokens and positions, and the weight and bias of the norm.

    None stands for an array that the layer does not have. There is no list if the layer
    computes more than a norm of a sum of rows, or if rows may be stale or on disk.
    """
    token, position, norm = layer.token, layer.position, layer.norm
    if (
        layer.segment is not None
        or layer.zero_padding
        or (layer.training and layer.dropout)
        or not _is_plain(token)
    ):
        return None
    arrays: list[Any] = [token.stored_weight, None, None, None]
    if position is not None:
        if type(position) is not LearnedPositions or position.scale != 1.0:
            return None
        if not _is_plain(position.table):
            return None
        arrays[1] = position.table.stored_weight
    if norm is not None:
        arrays[2:] = norm
    return arrays


def _is_plain(table: Any) -> bool:
    """Return whether the rows of a table are in memory and up to date."""
    return type(table) is Embedding and table.table_state is None and table.store is None


def plan_of(layer: "EmbeddingLayer", size: int) -> CallPlan | None:
    """Return a plan for calls of a layer, or None if there can be none.

    Args:
        layer: A layer that has computed a call.
        size: Number of ids of that call.
    """
    if not 0 < size * layer.embedding_dim < ONE_THREAD_NUMBERS:
        return None
    arrays = arrays_of(layer)
    if arrays is None or not kernels.can_bind():
        return None
    for x in arrays:
        # Another thread may have replaced an array since the call.
        if x is not None and (
            not x.flags.c_contiguous or x.shape[-1] != layer.embedding_dim
        ):
            return None
    return CallPlan(layer, arrays)
