"""Base class and helpers of the layers that add a bias to attention scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from .._check import positions_array
from ._module import Module, checked_gradient, upcast

QPositions = Shaped[Any, "*#batch q_length"] | Sequence[Any]
KPositions = Shaped[Any, "*#batch k_length"] | Sequence[Any]


class Bias(Module):
    """Base class of the layers whose output is added to attention scores.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one
    """

    def bias(
        self, q_positions: QPositions, k_positions: KPositions, *, dtype: Any = None
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        """Return the bias of every query-key pair.

        Args:
            q_positions: Positions of the queries.
            k_positions: Positions of the keys.
            dtype: Dtype of the result. None is the dtype of the parameters, or float32
                without parameters. Computed in the compute dtype and rounded once.
        """
        raise NotImplementedError

    def __call__(
        self, q_positions: QPositions, k_positions: KPositions, *, dtype: Any = None
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        """Return the bias of every query-key pair; see :meth:`bias`."""
        return self.bias(q_positions, k_positions, dtype=dtype)


def checked_pair(
    q_positions: QPositions, k_positions: KPositions
) -> tuple[np.ndarray, np.ndarray]:
    """Return both positions as arrays of int64 or of finite reals, or raise."""
    return _checked("q_positions", q_positions), _checked("k_positions", k_positions)


def _checked(name: str, positions: Any) -> np.ndarray:
    array = positions_array(positions, name=name)
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    array = upcast(array)
    finite = np.isfinite(array)
    if not finite.all():
        raise ValueError(f"{name} must be finite, got {array[~finite].flat[0]}")
    return array


def gradient_like(
    gradient: Float[Any, "..."], output: np.ndarray, *, name: str = "dbias"
) -> Float[np.ndarray, "..."]:
    """Return ``gradient`` upcast, or raise if it does not have the shape of ``output``."""
    return upcast(checked_gradient(gradient, output.shape, name=name))


def sum_over_pairs(values: Float[np.ndarray, "*batch num_heads q k"]) -> np.ndarray:
    """Return the sum over each head, accumulated in float64, in the dtype of ``values``."""
    axes = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 3)
    return values.sum(axis=axes, dtype=np.float64).astype(values.dtype)


def upcast_together(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays in one compute dtype, float64 if any is float64."""
    dtype = "float64" if any(x.dtype == np.float64 for x in arrays) else "float32"
    return [x.astype(dtype, copy=False) for x in arrays]


def sum_to(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum ``gradient`` over the axes along which an array of ``shape`` was broadcast."""
    extra = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(extra)))
    axes = (at for at, size in enumerate(shape) if size == 1 != gradient.shape[at])
    return gradient.sum(axis=tuple(axes), keepdims=True)


def sum_by_row(
    d: Float[np.ndarray, "*lead q_length k_length"],
    index: Int[np.ndarray, "*#lead q_length k_length"],
    rows: int,
) -> Float[np.ndarray, "*lead q_length rows"]:
    """Return, for each query, the sum of the gradients of each row of the table."""
    length = d.shape[-2]
    # One bin per query and row, so that a single bincount sums all of them.
    bins = index + rows * np.arange(length)[:, None]
    bins = np.broadcast_to(bins, d.shape)
    out = np.empty((*d.shape[:-1], rows), d.dtype)
    for lead in np.ndindex(d.shape[:-2]):
        sums = np.bincount(bins[lead].ravel(), d[lead].ravel(), minlength=rows * length)
        out[lead] = sums.reshape(length, rows)
    return out
