"""Adagrad and RMSprop on rows: steps scaled by the squares of past gradients."""

import math

import numpy as np

from ..runtime.compile import kernel
from ..runtime.pool import pieces
from .row_slice import RowSlice
from .rows import run_on_rows


def adagrad_update(rows: RowSlice, gradient: np.ndarray, *hyperparameters: float) -> None:
    """Take a step of Adagrad with a gradient for each row, in place.

    The state is the sum of squared gradients of each weight. If it has shape ``(rows, 1)``,
    it is the sum of the mean squares of each row's gradients (row-wise Adagrad).

    Args:
        rows: Rows to update.
        gradient: Gradient of each row.
        hyperparameters: Sign of the gradient (−1 to maximize), coupled weight decay,
            learning rate, ε.
    """
    squares, scalars = rows.state["sum"], rows.scalars(*hyperparameters)
    loop = _rowwise_adagrad if squares.shape[1] == 1 else _adagrad
    run_on_rows(loop, rows, rows.weight, gradient, squares, scalars)


def rmsprop_update(
    rows: RowSlice,
    gradient: np.ndarray,
    *hyperparameters: float,
    is_centered: bool,
    has_momentum: bool,
) -> None:
    """Take a step of RMSprop with a gradient for each row, in place.

    Args:
        rows: Rows to update.
        gradient: Gradient of each row.
        hyperparameters: Sign of the gradient (−1 to maximize), coupled weight decay,
            learning rate, α, ε, momentum.
        is_centered: Whether to subtract the square of the average gradient.
        has_momentum: Whether there is a momentum buffer.
    """
    square, mean = rows.state["square_avg"], rows.array("grad_avg", used=is_centered)
    buffer = rows.array("momentum_buffer", used=has_momentum)
    scalars = rows.scalars(*hyperparameters)
    run_on_rows(_rmsprop, rows, rows.weight, gradient, square, mean, buffer, scalars)


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
