"""Bags: the sum, mean or maximum of rows, for each of many ragged bags of ids.

A bag is a list of ids whose order does not matter, such as the words of a query. Bags are
2-D ids, one bag per row, or 1-D ids with the ``offsets`` at which bags start. With ``x``
for the rows looked up and ``w`` for ``per_sample_weights`` (1 by default):

- ``"sum"`` is ``Σ w x``, ``"mean"`` is ``Σ w x / Σ w``, ``"max"`` is the largest ``w x`` of
  each column. The first of equal maxima gets the gradient; NaN is larger than any number.
- Padding is left out of the sum, the divisor of the mean, and the maximum.
- A bag that is empty or has only padding gives zeros. So does a mean whose weights sum to
  zero; it passes no gradient to its rows or weights.
- ``scale_grad_by_freq`` divides a row's gradient by the number of times its id was counted
  in the call, in every mode.
- Sums are in float32 (float64 for float64) and rounded once, to the table's dtype.

TensorFlow's ``embedding_lookup_sparse`` defines the weighted mean like this; torch accepts
weights for sums only.
"""

from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int

from .. import kernels
from .._array import cast, compute_dtype, namespace_of
from .._check import changed_ids
from .ragged import Bags
from .row_gradient import GradientMemory, RowGradient

T = TypeVar("T")
Mode = Literal["sum", "mean", "max"]
MODES: tuple[Mode, ...] = ("sum", "mean", "max")


def divide_or_zero(
    sums: Float[Any, "*shape"], divisors: Float[Any, "*#shape"]
) -> Float[Any, "*shape"]:
    """Return ``sums / divisors``, with zero and a zero gradient where a divisor is zero.

    Example:
        >>> divide_or_zero(np.array([6.0, 6.0]), np.array([3.0, 0.0])).tolist()
        [2.0, 0.0]
    """
    return sums / namespace_of(divisors).where(divisors == 0, float("inf"), divisors)


def pool(
    rows: Float[Any, "*lead length embedding_dim"],
    counted: Any,
    *,
    steps: Int[Any, " length"],
    weights: Float[Any, "*lead length"] | None = None,
    mode: Mode = "mean",
) -> Float[Any, "*lead embedding_dim"]:
    """Pool rows over the length axis, with array operations of any library.

    Args:
        rows: Rows looked up, in float32 or float64.
        counted: ``(*lead, length)`` bools, False at padding.
        steps: ``0, 1, …`` along the length, of the same library.
        weights: ``per_sample_weights``, in the dtype of ``rows``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.

    Example:
        >>> rows = np.array([[1.0, 8.0], [3.0, 4.0], [9.0, 9.0]])
        >>> counted = np.array([True, True, False])
        >>> pool(rows, counted, steps=np.arange(3), mode="max").tolist()
        [3.0, 8.0]
    """
    xp = namespace_of(rows)
    ones = cast(counted, compute_dtype(rows.dtype))
    factors = ones if weights is None else xp.where(counted, weights, 0.0)
    terms = xp.where(counted[..., None], rows * factors[..., None], 0.0)
    if mode == "max" and rows.shape[-2]:
        terms = xp.where(counted[..., None], terms, -float("inf"))
        first = xp.argmax(terms, axis=-2, keepdims=True)
        largest = xp.sum(xp.where(steps[:, None] == first, terms, 0.0), axis=-2)
        return xp.where(xp.sum(ones, axis=-1)[..., None] == 0, 0.0, largest)
    sums = xp.sum(terms, axis=-2)
    if mode == "mean":
        return divide_or_zero(sums, xp.sum(factors, axis=-1)[..., None])
    return sums


def pool_ragged(
    table: Float[np.ndarray, "rows embedding_dim"], bags: Bags, *, mode: Mode
) -> tuple[Float[np.ndarray, "bags embedding_dim"], np.ndarray | None]:
    """Pool rows over ragged bags; for ``"max"`` also return the winners.

    Args:
        table: Table in any float dtype, which is also the dtype of the result.
        bags: Rows to pool. Their weights are in the compute dtype.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.

    Example:
        >>> bags = Bags(np.array([0, 1, 1]), np.array([0, 2, 3]), None, None)
        >>> pool_ragged(np.array([[1.0], [4.0]]), bags, mode="mean")[0].tolist()
        [[2.5], [4.0]]
    """
    flat = bags.ids, bags.bounds
    if mode == "max":
        return _if_in_range(kernels.max_bags(table, *flat, weights=bags.weights), table)
    divisors = mean_divisors(bags, table.dtype) if mode == "mean" else None
    sums = kernels.sum_bags(table, *flat, weights=bags.weights, divisors=divisors)
    return _if_in_range(sums, table), None


def table_gradient(
    bags: Bags,
    dy: Float[np.ndarray, "bags embedding_dim"],
    *,
    mode: Mode,
    winners: np.ndarray | None = None,
    scale_grad_by_freq: bool = False,
    memory: GradientMemory | None = None,
) -> RowGradient:
    """Return the gradient of the table that :func:`pool_ragged` read.

    The gradient of a row is itself a sum, over the bags that contain its id.

    Args:
        bags: Pooled bags, with ids into the table.
        dy: Gradient of the output, in the compute dtype.
        mode: Mode they were pooled with.
        winners: Index in ``bags.ids`` of each maximum, for ``"max"``.
        scale_grad_by_freq: Divide each row by the number of times its id was counted.
        memory: Memory for the gradient.
    """
    if winners is None:
        if mode == "mean":
            dy = dy / mean_divisors(bags, dy.dtype)[:, None]
        bag, weights = _bag_of_each_id(bags), bags.weights
        if weights is None:
            bag, groups, unique = kernels.group_by_id(bags.ids, bag)
        else:
            order, groups, unique = kernels.group_by_id(bags.ids)
            bag, weights = bag[order], weights[order]
        out = None
        if memory is not None:
            out = memory.array((unique.size, dy.shape[1]), dy.dtype)
        sums = kernels.sum_bags(dy, bag, groups, weights=weights, out=out)
        sums = _if_in_range(sums, dy)
    else:
        order, groups, unique = kernels.group_by_id(bags.ids)
        row = np.empty_like(order)
        row[order] = np.repeat(np.arange(unique.size), np.diff(groups))
        won, dwon = _nonempty(bags, winners, dy)
        dwon = dwon if bags.weights is None else dwon * bags.weights[won]
        sums = np.zeros((unique.size, dy.shape[1]), dy.dtype)
        np.add.at(sums, (row[won], np.arange(dy.shape[1])), dwon)
    if scale_grad_by_freq:
        sums /= np.diff(groups)[:, None].astype(sums.dtype)
    return RowGradient(unique, sums)


def weights_gradient(
    table: Float[np.ndarray, "rows embedding_dim"],
    bags: Bags,
    *,
    dy: Float[np.ndarray, "bags embedding_dim"],
    mode: Mode,
    winners: np.ndarray | None = None,
) -> Float[np.ndarray, " counted"]:
    """Return the gradient of ``per_sample_weights``, for each id that counts.

    Args:
        table: Table as it was when pooled.
        bags: Pooled bags, with weights.
        dy: Gradient of the output, in the compute dtype.
        mode: Mode they were pooled with.
        winners: Index in ``bags.ids`` of each maximum, for ``"max"``.
    """
    flat = bags.ids, bags.bounds
    if winners is not None:
        won, dwon = _nonempty(bags, winners, dy)
        terms = table[bags.ids[won], np.arange(dy.shape[1])].astype(dy.dtype) * dwon
        return np.bincount(won.ravel(), terms.ravel(), minlength=bags.ids.size)
    if mode == "sum":
        return _if_in_range(kernels.dot_bags(table, *flat, others=dy), table)
    divisors, bag = mean_divisors(bags, dy.dtype), _bag_of_each_id(bags)
    others = dy / divisors[:, None]
    dots = _if_in_range(kernels.dot_bags(table, *flat, others=others), table)
    # The quotient rule for Σ w x / Σ w: each weight is also part of the divisor.
    shares = np.bincount(bag, bags.weights * dots, minlength=divisors.size) / divisors
    if bags.is_mean is not None:
        shares[~bags.is_mean] = 0
    return dots - shares[bag]


def _if_in_range(result: T | None, table: np.ndarray) -> T:
    """Return the result of a kernel that is None if an id is out of range."""
    if result is None:
        raise changed_ids(len(table))
    return result


def _bag_of_each_id(bags: Bags) -> np.ndarray:
    return np.repeat(np.arange(bags.bounds.size - 1), np.diff(bags.bounds))


def mean_divisors(bags: Bags, dtype: Any) -> Float[np.ndarray, " bags"]:
    """Return the divisors of a mean, with infinity in place of zero; 1 for a sum."""
    totals = np.diff(bags.bounds)
    if bags.weights is not None:
        totals = np.bincount(_bag_of_each_id(bags), bags.weights, minlength=totals.size)
    totals = totals.astype(compute_dtype(dtype))
    totals[totals == 0] = np.inf
    if bags.is_mean is not None:
        totals[~bags.is_mean] = 1
    return totals


def _nonempty(
    bags: Bags, winners: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    nonempty = np.diff(bags.bounds) > 0
    return winners[nonempty], dy[nonempty]
