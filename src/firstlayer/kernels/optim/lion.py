"""Rows under Lion: a step with a gradient, and any number of steps without one at once.

Without a gradient the average ``m`` only shrinks, so its sign, which is what moves the
weight, stays: after any number of steps ``w`` is ``shrink · w − way · sign(m)``.
"""

import numpy as np

from ..row_io import grain_of
from ..runtime.compile import kernel
from ..runtime.pool import pieces, run
from .coefficients import MEAN, SHRINK, WAY

# An average that shrinks below this stays there: at zero it would lose its sign.
LEAST = 1e-37


def lion_catch_up(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    since: np.ndarray,
    lines: np.ndarray,
    seen: np.ndarray,
    mean: np.ndarray,
) -> None:
    """Bring rows up to date.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of the other arrays.
        since: For each row where in ``lines`` it is.
        lines: Numbers by kind and step; see :mod:`firstlayer.kernels.optim.coefficients`.
        seen: For each row whether its state may be other than zero.
        mean: Average of gradients.
    """
    args = places, rows, since, lines, seen, weight, mean, weight.dtype.type(LEAST)
    run(_catch_up_loop, rows.size, *args, grain=grain_of(weight))


def lion_update(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    values: np.ndarray,
    mean: np.ndarray,
    numbers: tuple[np.floating, ...],
) -> None:
    """Take a step of Lion with the gradients ``values`` of these rows.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of ``mean``.
        values: A gradient for each row.
        mean: Average of gradients.
        numbers: What the gradient is multiplied by (−1 to climb), what decay leaves of a
            weight, learning rate, β₁, β₂.
    """
    args = places, rows, weight, values, mean, numbers
    run(_update, rows.size, *args, grain=grain_of(weight))


@kernel()
def _catch_up_loop(ticket, places, rows, since, lines, seen, weight, mean, least):
    width, kind = weight.shape[1], type(weight[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row, at = places[i], rows[i], since[i]
            shrink, way = kind(lines[SHRINK, at]), kind(lines[WAY, at])
            if not seen[row]:
                if shrink != 1:
                    for d in range(width):
                        weight[place, d] *= shrink
                continue
            less = kind(lines[MEAN, at])
            for d in range(width):
                m = mean[row, d]
                weight[place, d] = shrink * weight[place, d] - way * np.sign(m)
                mean[row, d] = np.sign(m) * max(abs(m) * less, least)


@kernel()
def _update(ticket, places, rows, weight, values, mean, numbers):
    sign, shrink, lr, beta1, beta2 = numbers
    one = type(lr)(1)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row = places[i], rows[i]
            for d in range(weight.shape[1]):
                g, m = sign * values[i, d], mean[row, d]
                towards = np.sign(beta1 * m + (one - beta1) * g)
                weight[place, d] = shrink * weight[place, d] - lr * towards
                mean[row, d] = beta2 * m + (one - beta2) * g
