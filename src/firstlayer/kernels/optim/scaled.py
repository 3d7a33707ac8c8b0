"""Adagrad and RMSprop on rows: steps scaled by the squares of past gradients."""

import math

import numpy as np

from ..runtime.compile import kernel
from ..runtime.pool import run
from ..runtime.share import pieces
from .rows import grain_of


def adagrad_update(
    weight: np.ndarray,
    weight_rows: np.ndarray,
    state_rows: np.ndarray,
    *,
    gradient: np.ndarray,
    squares: np.ndarray,
    hyperparameters: tuple[np.floating, ...],
) -> None:
    """Take a step of Adagrad with a gradient for each row, in place.

    Args:
        weight: Array that contains the rows, float32 or float64.
        weight_rows: Indices of the rows in ``weight``.
        state_rows: Indices of the rows in ``squares``.
        gradient: Gradient of each row.
        squares: Sum of squared gradients, one for each weight; of shape ``(rows, 1)`` for
            row-wise Adagrad, the sum of the mean squares of the row's gradients.
        hyperparameters: Sign of the gradient (−1 to maximize), coupled weight decay,
            learning rate, ε.
    """
    loop = _rowwise_adagrad if squares.shape[1] == 1 else _adagrad
    args = weight_rows, state_rows, weight, gradient, squares, hyperparameters
    run(loop, state_rows.size, *args, grain=grain_of(weight))


def rmsprop_update(
    weight: np.ndarray,
    weight_rows: np.ndarray,
    state_rows: np.ndarray,
    *,
    gradient: np.ndarray,
    square: np.ndarray,
    mean: np.ndarray,
    buffer: np.ndarray,
    hyperparameters: tuple[np.floating, ...],
) -> None:
    """Take a step of RMSprop with a gradient for each row, in place.

    Args:
        weight: Array that contains the rows, float32 or float64.
        weight_rows: Indices of the rows in ``weight``.
        state_rows: Indices of the rows in the other arrays.
        gradient: Gradient of each row.
        square: Average of squared gradients.
        mean: Average of gradients; empty unless centered.
        buffer: Momentum buffer; empty without momentum.
        hyperparameters: Sign of the gradient (−1 to maximize), coupled weight decay,
            learning rate, α, ε, momentum.
    """
    args = weight_rows, state_rows, weight, gradient, square, mean, buffer, hyperparameters
    run(_rmsprop, state_rows.size, *args, grain=grain_of(weight))


@kernel(reorder=True)
def _adagrad(ticket, weight_rows, state_rows, weight, gradient, squares, hyperparameters):
    sign, coupled, lr, eps = hyperparameters
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            for d in range(weight.shape[1]):
                g = sign * gradient[i, d] + coupled * weight[wrow, d]
                sum_ = squares[row, d] + g * g
                squares[row, d] = sum_
                weight[wrow, d] -= lr * g / (math.sqrt(sum_) + eps)


@kernel(reorder=True)
def _rowwise_adagrad(
    ticket, weight_rows, state_rows, weight, gradient, squares, hyperparameters
):
    sign, coupled, lr, eps = hyperparameters
    width = weight.shape[1]
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            sum_of_squares = type(lr)(0)
            for d in range(width):
                g = sign * gradient[i, d] + coupled * weight[wrow, d]
                sum_of_squares += g * g
            squares[row, 0] += sum_of_squares / type(lr)(width)
            size = lr / (math.sqrt(squares[row, 0]) + eps)
            for d in range(width):
                w = weight[wrow, d]
                weight[wrow, d] = w - size * (sign * gradient[i, d] + coupled * w)


@kernel(reorder=True)
def _rmsprop(
    ticket, weight_rows, state_rows, weight, gradient, square, mean, buffer, hyperparameters
):
    sign, coupled, lr, alpha, eps, momentum = hyperparameters
    width, share = weight.shape[1], type(lr)(1) - alpha
    updates = np.empty(width, weight.dtype)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            for d in range(width):
                g = sign * gradient[i, d] + coupled * weight[wrow, d]
                square[row, d] = alpha * square[row, d] + share * g * g
                updates[d] = g
            if mean.size:
                for d in range(width):
                    m = mean[row, d] + share * (updates[d] - mean[row, d])
                    mean[row, d] = m
                    updates[d] /= math.sqrt(square[row, d] - m * m) + eps
            else:
                for d in range(width):
                    updates[d] /= math.sqrt(square[row, d]) + eps
            if buffer.size:
                for d in range(width):
                    updates[d] += momentum * buffer[row, d]
                    buffer[row, d] = updates[d]
            for d in range(width):
                weight[wrow, d] -= lr * updates[d]
