"""Adam on rows: a step with a gradient, and any number of missed steps in one pass.

After missed steps, a weight is

    w · Π decayᵢ  −  m · Σᵢ aᵢ / (bᵢ √v + ε)

with ``aᵢ`` and ``bᵢ`` the same for every column. The sum has no closed form, but as a
function of ``u = ε / (ε + scale · √v)`` it is ``u / ε`` times a function that is smooth on
[0, 1]. A polynomial of degree 11 through Chebyshev points approximates that function to
1e-8, usually to rounding. Polynomials add up, so the coefficients of each step contain one,
and catching up a row is one pass over it. Where the polynomial's highest terms show that it
is not accurate enough (β₁² > β₂, or the first steps with a large β₁), the missed steps are
replayed one by one.
"""

import math

import numpy as np

from ..runtime.compile import kernel, prefetch_row
from ..runtime.pool import pieces
from .coefficients import (
    BETA1,
    BETA2,
    FIRST_DECAY,
    POLYNOMIAL,
    ROOT_SCALE,
    SECOND_CORRECTION,
    SECOND_DECAY,
    STEP_SIZE,
    WEIGHT_DECAY,
)
from .row_slice import RowSlice, StaleRows
from .rows import run_on_rows

# Rows that are prefetched ahead of the current one.
AHEAD = 2
# Smaller decay factors count as zero: arithmetic on float32 denormals is slow.
TINY = 1e-30
# A term this much smaller than the first changes no bit of the sum.
NEGLIGIBLE = 1e-18
# Largest accurate size of a polynomial's highest terms, relative to its constant term.
ACCURATE = 1e-5


def adam_catch_up(
    rows: StaleRows,
    coefficients: np.ndarray,
    *,
    steps: np.ndarray,
    count: int,
    eps: float,
    amsgrad: bool,
) -> None:
    """Apply missed steps to stale rows, in place.

    Args:
        rows: Stale rows.
        coefficients: See :mod:`firstlayer.kernels.optim.coefficients`.
        steps: Hyperparameters of each recorded step.
        count: Number of recorded steps.
        eps: Term added to the root of the second moment.
        amsgrad: Whether the largest second moment so far is used.
    """
    square = rows.state["exp_avg_sq"]
    run_on_rows(
        _catch_up,
        rows,
        rows.from_step,
        rows.has_state,
        coefficients,
        steps,
        count,
        rows.weight,
        rows.state["exp_avg"],
        square,
        rows.state["max_exp_avg_sq"] if amsgrad else square,
        amsgrad,
        rows.weight.dtype.type(eps),
    )


def adam_update(
    rows: RowSlice, gradient: np.ndarray, *hyperparameters: float, amsgrad: bool
) -> None:
    """Take a step of Adam with a gradient for each row, in place.

    Args:
        rows: Rows to update.
        gradient: Gradient of each row.
        hyperparameters: Sign of the gradient (−1 to maximize), coupled weight decay,
            ``1 − lr · decay`` of decoupled weight decay, 1 − β₁, β₂, 1 − β₂,
            lr / (1 − β₁ᵗ), 1 / √(1 − β₂ᵗ), ε.
        amsgrad: Whether to divide by the largest second moment so far.
    """
    mean, square = rows.state["exp_avg"], rows.state["exp_avg_sq"]
    largest = rows.array("max_exp_avg_sq", used=amsgrad)
    scalars = rows.scalars(*hyperparameters)
    run_on_rows(_update, rows, rows.weight, gradient, mean, square, largest, scalars)


@kernel(reorder=True)
def _catch_up(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    has_state,
    coefficients,
    steps,
    count,
    weight,
    mean,
    square,
    divisor,
    amsgrad,
    eps,
):
    width, dtype = weight.shape[1], type(weight[0, 0])
    one, two = dtype(1), dtype(2)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row, start = weight_rows[i], state_rows[i], from_step[i]
            if i + AHEAD < hi:
                prefetch_row(weight, weight_rows[i + AHEAD])
                prefetch_row(mean, state_rows[i + AHEAD])
                prefetch_row(divisor, state_rows[i + AHEAD])
            decay = dtype(coefficients[WEIGHT_DECAY, start])
            if not has_state[row]:
                if decay != one:
                    for d in range(width):
                        weight[wrow, d] *= decay
                continue
            p = coefficients[POLYNOMIAL:, start]
            error = abs(p[11]) / 1024 + abs(p[10]) / 512
            # False for NaN too.
            if error <= ACCURATE * abs(p[0]):
                scale = dtype(coefficients[ROOT_SCALE, start])
                p0, p1, p2, p3 = dtype(p[0]), dtype(p[1]), dtype(p[2]), dtype(p[3])
                p4, p5, p6, p7 = dtype(p[4]), dtype(p[5]), dtype(p[6]), dtype(p[7])
                p8, p9, p10, p11 = dtype(p[8]), dtype(p[9]), dtype(p[10]), dtype(p[11])
                for d in range(width):
                    inverse = one / (eps + scale * math.sqrt(divisor[row, d]))
                    z = two * eps * inverse - one
                    y = ((((p11 * z + p10) * z + p9) * z + p8) * z + p7) * z + p6
                    y = (((((y * z + p5) * z + p4) * z + p3) * z + p2) * z + p1) * z + p0
                    weight[wrow, d] = decay * weight[wrow, d] - mean[row, d] * inverse * y
            else:
                for d in range(width):
                    weight[wrow, d] *= decay
                first, second = 1.0, 1.0
                for k in range(start + 1, count + 1):
                    first *= steps[BETA1, k]
                    second *= steps[BETA2, k]
                    kept = 1.0 if amsgrad else second
                    if first <= NEGLIGIBLE * math.sqrt(kept):
                        break
                    # The weight decay of later steps applies to this step's update too.
                    size = dtype(
                        coefficients[WEIGHT_DECAY, k] * steps[STEP_SIZE, k] * first
                    )
                    root = dtype(math.sqrt(kept * steps[SECOND_CORRECTION, k]))
                    for d in range(width):
                        under = root * math.sqrt(divisor[row, d]) + eps
                        weight[wrow, d] -= size * mean[row, d] / under
            first, second = (
                coefficients[FIRST_DECAY, start],
                coefficients[SECOND_DECAY, start],
            )
            first = dtype(first if first > TINY else 0.0)
            second = dtype(second if second > TINY else 0.0)
            for d in range(width):
                mean[row, d] *= first
                square[row, d] *= second


@kernel(reorder=True)
def _update(
    ticket,
    weight_rows,
    state_rows,
    weight,
    gradient,
    mean,
    square,
    largest,
    hyperparameters,
):
    sign, coupled, decay, share1, beta2, share2, size, unbias, eps = hyperparameters
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            if i + AHEAD < hi:
                prefetch_row(weight, weight_rows[i + AHEAD])
                prefetch_row(mean, state_rows[i + AHEAD])
                prefetch_row(square, state_rows[i + AHEAD])
            if not largest.size:
                for d in range(weight.shape[1]):
                    w = weight[wrow, d]
                    g = sign * gradient[i, d] + coupled * w
                    m = mean[row, d] + share1 * (g - mean[row, d])
                    v = beta2 * square[row, d] + share2 * g * g
                    mean[row, d], square[row, d] = m, v
                    weight[wrow, d] = decay * w - size * m / (math.sqrt(v) * unbias + eps)
                continue
            for d in range(weight.shape[1]):
                g = sign * gradient[i, d] + coupled * weight[wrow, d]
                mean[row, d] += share1 * (g - mean[row, d])
                square[row, d] = beta2 * square[row, d] + share2 * g * g
            for d in range(weight.shape[1]):
                largest[row, d] = max(largest[row, d], square[row, d])
                under = math.sqrt(largest[row, d]) * unbias + eps
                weight[wrow, d] = decay * weight[wrow, d] - size * mean[row, d] / under
