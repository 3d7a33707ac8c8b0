"""Bags: the sum, the mean or the largest of some rows, for each of many ragged bags.

A bag is a few ids whose order does not matter: the words of a query, the items somebody
bought. Bags come as 2-D ids, a row each, or as 1-D ids with ``offsets``, where each bag
begins. What a bag gives is decided here, for every face, with ``x`` for the rows looked up
and ``w`` for ``per_sample_weights``, all 1 if not given:

- ``"sum"`` is ``Σ w x``, ``"mean"`` is ``Σ w x / Σ w``, ``"max"`` is the largest ``w x``,
  column by column. The first of equals gets the gradient; NaN is larger than any number.
- Padding does not count: not in the sum, not in the mean's divisor, not in the maximum.
- A bag without ids, or with nothing but padding, gives zeros. So does a mean whose weights
  sum to zero; it sends no gradient to its rows or to its weights.
- ``scale_grad_by_freq`` divides a row's gradient by how often its id was counted in the
  call, in every mode.
- Work is in float32 (float64 for float64) and rounded once, to the table's dtype.

TensorFlow's ``embedding_lookup_sparse`` takes the weighted mean like this; torch takes
weights for sums only.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from .. import kernels
from .._array import cast, compute_dtype, namespace_of
from .ragged import Bags, bag_numbers
from .row_gradient import RowGradient

Mode = Literal["sum", "mean", "max"]
MODES: tuple[Mode, ...] = ("sum", "mean", "max")


def divided(sums: Float[Any, "*shape"], by: Float[Any, "*#shape"]) -> Float[Any, "*shape"]:
    """Return ``sums / by``, and zero where ``by`` is zero, gradients included.

    Example:
        >>> divided(np.array([6.0, 6.0]), np.array([3.0, 0.0])).tolist()
        [2.0, 0.0]
    """
    return sums / namespace_of(by).where(by == 0, float("inf"), by)


def pool(
    rows: Float[Any, "*lead length embedding_dim"],
    counted: Any,
    *,
    steps: Int[Any, " length"],
    weights: Float[Any, "*lead length"] | None = None,
    mode: Mode = "mean",
) -> Float[Any, "*lead embedding_dim"]:
    """Pool rows over the length axis: what bags of 2-D ids give, in plain operations.

    Args:
        rows: What was looked up, in float32 or float64.
        counted: Which of them are not padding, ``(*lead, length)`` bools.
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
    return divided(sums, xp.sum(factors, axis=-1)[..., None]) if mode == "mean" else sums


def pooled(
    table: Float[np.ndarray, "rows embedding_dim"], bags: Bags, *, mode: Mode
) -> tuple[Float[np.ndarray, "bags embedding_dim"], np.ndarray | None]:
    """Pool rows over ragged bags; for ``"max"`` also return which id gave each entry.

    Args:
        table: Where the rows are, in any float dtype; the result has the same.
        bags: Which rows. Their weights are in the dtype of the work.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.

    Example:
        >>> bags = Bags(np.array([0, 1, 1]), np.array([0, 2, 3]), None, None)
        >>> pooled(np.array([[1.0], [4.0]]), bags, mode="mean")[0].tolist()
        [[2.5], [4.0]]
    """
    flat = bags.ids, bags.bounds
    if mode == "max":
        return kernels.max_bags(table, *flat, weights=bags.weights)
    by = _divisors(bags, table.dtype) if mode == "mean" else None
    return kernels.sum_bags(table, *flat, weights=bags.weights, divisors=by), None


def table_gradient(
    bags: Bags,
    dy: Float[np.ndarray, "bags embedding_dim"],
    *,
    mode: Mode,
    winners: np.ndarray | None = None,
    scale_grad_by_freq: bool = False,
) -> RowGradient:
    """Return the gradient of the table that :func:`pooled` took its rows from.

    The gradient of a sum over bags is a sum over bags: for each id, of the bags it was in.

    Args:
        bags: What was pooled, with the ids of the table.
        dy: The gradient of the result, in the dtype of the work.
        mode: As it was pooled.
        winners: Which id gave each entry, for ``"max"``.
        scale_grad_by_freq: Divide each row by how often its id was counted.
    """
    order, groups, unique = kernels.group_by_id(bags.ids)
    if winners is None:
        if mode == "mean":
            dy = dy / _divisors(bags, dy.dtype)[:, None]
        weights = None if bags.weights is None else bags.weights[order]
        sums = kernels.sum_bags(dy, _numbers(bags)[order], groups, weights=weights)
    else:
        row = np.empty_like(order)
        row[order] = np.repeat(np.arange(unique.size), np.diff(groups))
        won, d = _of_full_bags(bags, winners, dy)
        sums = np.zeros((unique.size, dy.shape[1]), dy.dtype)
        d = d if bags.weights is None else d * bags.weights[won]
        np.add.at(sums, (row[won], np.arange(dy.shape[1])), d)
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
        table: Where the rows were, as they were.
        bags: What was pooled; must have weights.
        dy: The gradient of the result, in the dtype of the work.
        mode: As it was pooled.
        winners: Which id gave each entry, for ``"max"``.
    """
    if winners is not None:
        won, d = _of_full_bags(bags, winners, dy)
        terms = table[bags.ids[won], np.arange(dy.shape[1])].astype(dy.dtype) * d
        return np.bincount(won.ravel(), terms.ravel(), minlength=bags.ids.size)
    if mode == "sum":
        return kernels.dot_bags(table, bags.ids, bags.bounds, others=dy)
    by, numbers = _divisors(bags, dy.dtype), _numbers(bags)
    dots = kernels.dot_bags(table, bags.ids, bags.bounds, others=dy / by[:, None])
    # Of Σ w x / Σ w: every weight also makes the divisor larger.
    shares = np.bincount(numbers, bags.weights * dots, minlength=by.size) / by
    return dots - shares[numbers]


def _numbers(bags: Bags) -> np.ndarray:
    return bag_numbers(bags.bounds, np.arange(bags.ids.size))


def _divisors(bags: Bags, dtype: Any) -> np.ndarray:
    """Return what the sums are divided by in a mean, infinity standing for zero."""
    totals = np.diff(bags.bounds)
    if bags.weights is not None:
        totals = np.bincount(_numbers(bags), bags.weights, minlength=totals.size)
    totals = totals.astype(compute_dtype(dtype))
    totals[totals == 0] = np.inf
    return totals


def _of_full_bags(
    bags: Bags, winners: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    full = np.diff(bags.bounds) > 0
    return winners[full], dy[full]
