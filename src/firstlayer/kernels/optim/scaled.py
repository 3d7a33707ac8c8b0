"""Steps that divide a gradient by what gradients have been: Adagrad's and RMSprop's."""

import math

import numpy as np

from ..row_io import grain_of
from ..runtime.compile import kernel
from ..runtime.pool import pieces, run


def adagrad_update(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    values: np.ndarray,
    total: np.ndarray,
    numbers: tuple[np.floating, ...],
) -> None:
    """Take a step of Adagrad with the gradients ``values`` of these rows.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of ``total``.
        values: A gradient for each row.
        total: Sum of squares: one for each weight, or ``(rows, 1)`` for row-wise Adagrad,
            which adds up the mean square of a row.
        numbers: What the gradient is multiplied by (−1 to climb), weight decay that is
            added to it, learning rate, ε.
    """
    loop = _rowwise if total.shape[1] == 1 else _adagrad
    args = places, rows, weight, values, total, numbers
    run(loop, rows.size, *args, grain=grain_of(weight))


def rmsprop_update(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    values: np.ndarray,
    square: np.ndarray,
    mean: np.ndarray,
    buffer: np.ndarray,
    numbers: tuple[np.floating, ...],
) -> None:
    """Take a step of RMSprop with the gradients ``values`` of these rows.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of the other arrays.
        values: A gradient for each row.
        square: Average of squared gradients.
        mean: Average of gradients; no rows if it is not ``centered``.
        buffer: The momentum; no rows if there is none.
        numbers: What the gradient is multiplied by (−1 to climb), weight decay that is
            added to it, learning rate, what is left of the averages, ε, momentum.
    """
    args = places, rows, weight, values, square, mean, buffer, numbers
    run(_rmsprop, rows.size, *args, grain=grain_of(weight))


@kernel(reorder=True)
def _adagrad(ticket, places, rows, weight, values, total, numbers):
    sign, coupled, lr, eps = numbers
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row = places[i], rows[i]
            for d in range(weight.shape[1]):
                g = sign * values[i, d] + coupled * weight[place, d]
                sum_ = total[row, d] + g * g
                total[row, d] = sum_
                weight[place, d] -= lr * g / (math.sqrt(sum_) + eps)


@kernel(reorder=True)
def _rowwise(ticket, places, rows, weight, values, total, numbers):
    sign, coupled, lr, eps = numbers
    width = weight.shape[1]
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row = places[i], rows[i]
            squares = type(lr)(0)
            for d in range(width):
                g = sign * values[i, d] + coupled * weight[place, d]
                squares += g * g
            total[row, 0] += squares / type(lr)(width)
            size = lr / (math.sqrt(total[row, 0]) + eps)
            for d in range(width):
                w = weight[place, d]
                weight[place, d] = w - size * (sign * values[i, d] + coupled * w)


@kernel(reorder=True)
def _rmsprop(ticket, places, rows, weight, values, square, mean, buffer, numbers):
    sign, coupled, lr, kept, eps, momentum = numbers
    width, share = weight.shape[1], type(lr)(1) - kept
    moves = np.empty(width, weight.dtype)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row = places[i], rows[i]
            for d in range(width):
                g = sign * values[i, d] + coupled * weight[place, d]
                square[row, d] = kept * square[row, d] + share * g * g
                moves[d] = g
            if mean.size:
                for d in range(width):
                    m = mean[row, d] + share * (moves[d] - mean[row, d])
                    mean[row, d] = m
                    moves[d] /= math.sqrt(square[row, d] - m * m) + eps
            else:
                for d in range(width):
                    moves[d] /= math.sqrt(square[row, d]) + eps
            if buffer.size:
                for d in range(width):
                    moves[d] += momentum * buffer[row, d]
                    buffer[row, d] = moves[d]
            for d in range(width):
                weight[place, d] -= lr * moves[d]
