"""SGD on rows, and catching up rules whose missed steps are linear: SGD and RMSprop.

A step without a gradient replaces a row's momentum buffer ``b`` and weight ``w`` by linear
combinations of the two, the same for every column. Any number of missed steps is therefore
one 2 × 2 matrix, and one factor for averages of gradients.
"""

import numpy as np

from ..runtime.compile import kernel, prefetch
from ..runtime.pool import pieces
from .coefficients import (
    AVERAGE_DECAY,
    BUFFER_FROM_BUFFER,
    BUFFER_FROM_WEIGHT,
    WEIGHT_FROM_BUFFER,
    WEIGHT_FROM_WEIGHT,
)
from .row_slice import RowSlice, StaleRows
from .rows import run_on_rows

# Rows that are prefetched ahead of the current one.
AHEAD = 2
# Smaller decay factors count as zero: arithmetic on float32 denormals is slow.
TINY = 1e-30


def linear_catch_up(rows: StaleRows, coefficients: np.ndarray) -> None:
    """Apply missed steps of SGD or RMSprop to stale rows, in place."""
    buffer, square = rows.array("momentum_buffer"), rows.array("square_avg")
    mean, has_state = rows.array("grad_avg"), rows.has_state
    args = rows.from_step, coefficients, has_state, rows.weight, buffer, square, mean
    run_on_rows(_catch_up, rows, *args)


def sgd_update(
    rows: RowSlice, gradient: np.ndarray, *hyperparameters: float, has_momentum: bool
) -> None:
    """Take a step of SGD with a gradient for each row, in place.

    Args:
        rows: Rows to update.
        gradient: Gradient of each row.
        hyperparameters: Sign of the gradient (−1 to maximize), weight decay, learning rate,
            momentum, factor of the gradient in the buffer, and the factors of gradient and
            buffer in the update of the weight.
        has_momentum: Whether there is a momentum buffer.
    """
    buffer = rows.array("momentum_buffer", used=has_momentum)
    scalars = rows.scalars(*hyperparameters)
    run_on_rows(_sgd, rows, rows.weight, gradient, buffer, scalars)


@kernel(reorder=True)
def _catch_up(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    coefficients,
    has_state,
    weight,
    buffer,
    first,
    second,
):
    width, dtype = weight.shape[1], type(weight[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row, start = weight_rows[i], state_rows[i], from_step[i]
            if i + AHEAD < hi:
                prefetch(weight, weight_rows[i + AHEAD])
            ww = dtype(coefficients[WEIGHT_FROM_WEIGHT, start])
            bw = dtype(coefficients[BUFFER_FROM_WEIGHT, start])
            if not has_state[row] and bw == 0 or not buffer.size:
                if ww != 1:
                    for d in range(width):
                        weight[wrow, d] *= ww
            else:
                wb = dtype(coefficients[WEIGHT_FROM_BUFFER, start])
                bb = coefficients[BUFFER_FROM_BUFFER, start]
                bb = dtype(bb if abs(bb) > TINY else 0.0)
                has_state[row] = True
                for d in range(width):
                    w, b = weight[wrow, d], buffer[row, d]
                    weight[wrow, d] = ww * w + wb * b
                    buffer[row, d] = bw * w + bb * b
            if has_state[row]:
                average = coefficients[AVERAGE_DECAY, start]
                average = dtype(average if average > TINY else 0.0)
                if first.size:
                    for d in range(width):
                        first[row, d] *= average
                if second.size:
                    for d in range(width):
                        second[row, d] *= average


@kernel(reorder=True)
def _sgd(ticket, weight_rows, state_rows, weight, gradient, buffer, hyperparameters):
    sign, decay, lr, momentum, gain, direct, through = hyperparameters
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            if buffer.size:
                for d in range(weight.shape[1]):
                    w = weight[wrow, d]
                    g = sign * gradient[i, d] + decay * w
                    b = momentum * buffer[row, d] + gain * g
                    buffer[row, d] = b
                    weight[wrow, d] = w - lr * (direct * g + through * b)
            else:
                for d in range(weight.shape[1]):
                    w = weight[wrow, d]
                    weight[wrow, d] = w - lr * (sign * gradient[i, d] + decay * w)
