"""Lion on rows: a step with a gradient, and any number of missed steps in one pass.

Without a gradient the moment ``m`` only shrinks. Its sign, which determines the update,
does not change, so missed steps add up to ``w ← decay · w − step · sign(m)``.
"""

import numpy as np

from ..runtime.compile import kernel
from ..runtime.pool import pieces
from .coefficients import MOMENT_DECAY, SIGN_STEP, WEIGHT_DECAY
from .row_slice import RowSlice, StaleRows
from .rows import run_on_rows

# Lower bound of a shrinking moment: at zero it would lose its sign.
SMALLEST = 1e-37


def lion_catch_up(rows: StaleRows, coefficients: np.ndarray) -> None:
    """Apply missed steps of Lion to stale rows, in place."""
    mean, smallest = rows.state["exp_avg"], rows.weight.dtype.type(SMALLEST)
    args = rows.from_step, coefficients, rows.has_state, rows.weight, mean, smallest
    run_on_rows(_catch_up, rows, *args)


def lion_update(rows: RowSlice, gradient: np.ndarray, *hyperparameters: float) -> None:
    """Take a step of Lion with a gradient for each row, in place.

    Args:
        rows: Rows to update.
        gradient: Gradient of each row.
        hyperparameters: Sign of the gradient (−1 to maximize), ``1 − lr · decay``,
            learning rate, β₁, β₂.
    """
    mean, scalars = rows.state["exp_avg"], rows.scalars(*hyperparameters)
    run_on_rows(_update, rows, rows.weight, gradient, mean, scalars)


@kernel()
def _catch_up(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    coefficients,
    has_state,
    weight,
    mean,
    smallest,
):
    width, dtype = weight.shape[1], type(weight[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row, start = weight_rows[i], state_rows[i], from_step[i]
            decay = dtype(coefficients[WEIGHT_DECAY, start])
            step = dtype(coefficients[SIGN_STEP, start])
            if not has_state[row]:
                if decay != 1:
                    for d in range(width):
                        weight[wrow, d] *= decay
                continue
            moment_decay = dtype(coefficients[MOMENT_DECAY, start])
            for d in range(width):
                m = mean[row, d]
                weight[wrow, d] = decay * weight[wrow, d] - step * np.sign(m)
                mean[row, d] = np.sign(m) * max(abs(m) * moment_decay, smallest)


@kernel()
def _update(ticket, weight_rows, state_rows, weight, gradient, mean, hyperparameters):
    sign, decay, lr, beta1, beta2 = hyperparameters
    one = type(lr)(1)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            for d in range(weight.shape[1]):
                g, m = sign * gradient[i, d], mean[row, d]
                direction = np.sign(beta1 * m + (one - beta1) * g)
                weight[wrow, d] = decay * weight[wrow, d] - lr * direction
                mean[row, d] = beta2 * m + (one - beta2) * g
