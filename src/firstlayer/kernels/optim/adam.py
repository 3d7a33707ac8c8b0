"""Rows under Adam: a step with a gradient, and any number of steps without one at once.

After ``k`` missed steps from step ``s`` a weight is

    w · Π shrinkᵢ  −  m · Σᵢ aᵢ / (bᵢ √v + ε)

with numbers ``aᵢ`` and ``bᵢ`` that are the same for every column. The sum has no closed
form, but as a function of ``u = ε / (ε + scale · √v)`` it is ``u / ε`` times something
smooth on [0, 1], which a polynomial of degree 11 through Chebyshev's points matches to
1e-8 and mostly to rounding. Polynomials add up, so each line of ``lines`` keeps one and
takes it along from step to step; bringing a row up to date is one pass over it, whatever it
has missed. Where the polynomial's last terms say that it is not good enough (β₁² > β₂, or
the very first steps with a large β₁) the steps are taken one by one.
"""

import math

import numpy as np

from ..row_io import grain_of
from ..runtime.compile import kernel, prefetch_row
from ..runtime.pool import pieces, run
from .coefficients import BETA1, BETA2, FIRST, POLY, SCALE, SECOND, SHRINK, SIZE, UNBIAS

AHEAD = 2
# What is smaller is nothing: as float32 it would be a denormal, which is slow.
TINY = 1e-30
# A term of the sum that is this much smaller than the first changes no bit of it.
FADED = 1e-18
# How small the last terms of a polynomial must be, against its first.
GOOD = 1e-5


def adam_catch_up(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    since: np.ndarray,
    lines: np.ndarray,
    steps: np.ndarray,
    count: int,
    seen: np.ndarray,
    mean: np.ndarray,
    square: np.ndarray,
    largest: np.ndarray,
    eps: float,
) -> None:
    """Bring rows up to date.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of the other arrays.
        since: For each row where in ``lines`` it is.
        lines: Numbers by kind and step; see :mod:`firstlayer.kernels.optim.coefficients`.
        steps: What each step did, by kind and step.
        count: How many steps there were.
        seen: For each row whether its state may be other than zero.
        mean: Average of gradients.
        square: Average of their squares.
        largest: The largest ``square`` so far; no rows if that is not asked for.
        eps: What is added to the root of the squares.
    """
    run(
        _catch_up_loop,
        rows.size,
        places,
        rows,
        since,
        seen,
        lines,
        steps,
        count,
        weight,
        mean,
        square,
        largest if largest.size else square,
        largest.size > 0,
        weight.dtype.type(eps),
        grain=grain_of(weight),
    )


def adam_update(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    values: np.ndarray,
    mean: np.ndarray,
    square: np.ndarray,
    largest: np.ndarray,
    numbers: tuple[np.floating, ...],
) -> None:
    """Take a step of Adam with the gradients ``values`` of these rows.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of the other arrays.
        values: A gradient for each row.
        mean: Average of gradients.
        square: Average of their squares.
        largest: The largest ``square`` so far; no rows if that is not asked for.
        numbers: What the gradient is multiplied by (−1 to climb), weight decay that is
            added to it, what decoupled decay leaves of a weight, 1 − β₁, β₂, 1 − β₂,
            learning rate over its bias correction, one over the root of the other bias
            correction, ε.
    """
    args = places, rows, weight, values, mean, square, largest, numbers
    run(_update, rows.size, *args, grain=grain_of(weight))


@kernel(reorder=True)
def _catch_up_loop(
    ticket,
    places,
    rows,
    since,
    seen,
    lines,
    steps,
    count,
    weight,
    mean,
    square,
    used,
    amsgrad,
    eps,
):
    width, kind = weight.shape[1], type(weight[0, 0])
    one, two = kind(1), kind(2)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row, at = places[i], rows[i], since[i]
            if i + AHEAD < hi:
                prefetch_row(weight, places[i + AHEAD])
                prefetch_row(mean, rows[i + AHEAD])
                prefetch_row(used, rows[i + AHEAD])
            shrink = kind(lines[SHRINK, at])
            if not seen[row]:
                if shrink != one:
                    for d in range(width):
                        weight[place, d] *= shrink
                continue
            p = lines[POLY:, at]
            doubt = abs(p[11]) / 1024 + abs(p[10]) / 512
            # Written so that NaN is doubted too.
            if doubt <= GOOD * abs(p[0]):
                scale = kind(lines[SCALE, at])
                p0, p1, p2, p3 = kind(p[0]), kind(p[1]), kind(p[2]), kind(p[3])
                p4, p5, p6, p7 = kind(p[4]), kind(p[5]), kind(p[6]), kind(p[7])
                p8, p9, p10, p11 = kind(p[8]), kind(p[9]), kind(p[10]), kind(p[11])
                for d in range(width):
                    over = one / (eps + scale * math.sqrt(used[row, d]))
                    z = two * eps * over - one
                    y = ((((p11 * z + p10) * z + p9) * z + p8) * z + p7) * z + p6
                    y = (((((y * z + p5) * z + p4) * z + p3) * z + p2) * z + p1) * z + p0
                    weight[place, d] = shrink * weight[place, d] - mean[row, d] * over * y
            else:
                for d in range(width):
                    weight[place, d] *= shrink
                first, second = 1.0, 1.0
                for k in range(at + 1, count + 1):
                    first *= steps[BETA1, k]
                    second *= steps[BETA2, k]
                    kept = 1.0 if amsgrad else second
                    if first <= FADED * math.sqrt(kept):
                        break
                    # What is left of that step's move after the decay of those after it.
                    size = kind(lines[SHRINK, k] * steps[SIZE, k] * first)
                    root = kind(math.sqrt(kept * steps[UNBIAS, k]))
                    for d in range(width):
                        under = root * math.sqrt(used[row, d]) + eps
                        weight[place, d] -= size * mean[row, d] / under
            first, second = lines[FIRST, at], lines[SECOND, at]
            first = kind(first if first > TINY else 0.0)
            second = kind(second if second > TINY else 0.0)
            for d in range(width):
                mean[row, d] *= first
                square[row, d] *= second


@kernel(reorder=True)
def _update(ticket, places, rows, weight, values, mean, square, largest, numbers):
    sign, coupled, shrink, share1, beta2, share2, size, unbias, eps = numbers
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row = places[i], rows[i]
            if i + AHEAD < hi:
                prefetch_row(weight, places[i + AHEAD])
                prefetch_row(mean, rows[i + AHEAD])
                prefetch_row(square, rows[i + AHEAD])
            if not largest.size:
                for d in range(weight.shape[1]):
                    w = weight[place, d]
                    g = sign * values[i, d] + coupled * w
                    m = mean[row, d] + share1 * (g - mean[row, d])
                    v = beta2 * square[row, d] + share2 * g * g
                    mean[row, d], square[row, d] = m, v
                    weight[place, d] = shrink * w - size * m / (math.sqrt(v) * unbias + eps)
                continue
            for d in range(weight.shape[1]):
                g = sign * values[i, d] + coupled * weight[place, d]
                mean[row, d] += share1 * (g - mean[row, d])
                square[row, d] = beta2 * square[row, d] + share2 * g * g
            for d in range(weight.shape[1]):
                largest[row, d] = max(largest[row, d], square[row, d])
                under = math.sqrt(largest[row, d]) * unbias + eps
                weight[place, d] = shrink * weight[place, d] - size * mean[row, d] / under
