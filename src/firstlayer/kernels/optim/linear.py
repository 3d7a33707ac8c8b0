"""Rows whose missed steps are linear: those of SGD and of RMSprop, momentum included.

A step without a gradient takes a row's buffer ``b`` and weight ``w`` to a mix of the two,
the same for every column, so any number of missed steps is one two by two matrix. For each
step that rows may be at, ``lines`` has that matrix from there to now, and the factor that
averages of gradients shrink by.
"""

import numpy as np

from ..row_io import grain_of
from ..runtime.compile import kernel, prefetch
from ..runtime.pool import pieces, run
from .coefficients import AVERAGE, BB, BW, WB, WW

AHEAD = 2
# What is smaller is nothing: as float32 it would be a denormal, which is slow.
TINY = 1e-30


def linear_catch_up(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    since: np.ndarray,
    lines: np.ndarray,
    seen: np.ndarray,
    buffer: np.ndarray,
    averages: tuple[np.ndarray, np.ndarray],
) -> None:
    """Bring rows up to date.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of the other arrays.
        since: For each row where in ``lines`` it is.
        lines: Numbers by kind and step; see :mod:`firstlayer.kernels.optim.coefficients`.
        seen: For each row whether its state may be other than zero.
        buffer: The momentum; no rows if there is none.
        averages: Two arrays of averages; no rows if there are none.
    """
    run(
        _catch_up_loop,
        rows.size,
        places,
        rows,
        since,
        lines,
        seen,
        weight,
        buffer,
        *averages,
        grain=grain_of(weight),
    )


def sgd_update(
    weight: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    values: np.ndarray,
    buffer: np.ndarray,
    numbers: tuple[np.floating, ...],
) -> None:
    """Take a step of SGD with the gradients ``values`` of these rows.

    Args:
        weight: Where the rows are, float32 or float64.
        places: Which rows of ``weight``.
        rows: Which rows of ``buffer``.
        values: A gradient for each row.
        buffer: The momentum; no rows if there is none.
        numbers: What the gradient is multiplied by (−1 to climb), weight decay, learning
            rate, momentum, what a gradient adds to the buffer, and what of the gradient
            and of the buffer moves the weight.
    """
    args = places, rows, weight, values, buffer, numbers
    run(_sgd, rows.size, *args, grain=grain_of(weight))


@kernel(reorder=True)
def _catch_up_loop(ticket, places, rows, since, lines, seen, weight, buffer, first, second):
    width, kind = weight.shape[1], type(weight[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row, at = places[i], rows[i], since[i]
            if i + AHEAD < hi:
                prefetch(weight, places[i + AHEAD])
            ww, bw = kind(lines[WW, at]), kind(lines[BW, at])
            if not seen[row] and bw == 0 or not buffer.size:
                if ww != 1:
                    for d in range(width):
                        weight[place, d] *= ww
            else:
                wb, bb = kind(lines[WB, at]), lines[BB, at]
                bb = kind(bb if abs(bb) > TINY else 0.0)
                seen[row] = True
                for d in range(width):
                    w, b = weight[place, d], buffer[row, d]
                    weight[place, d] = ww * w + wb * b
                    buffer[row, d] = bw * w + bb * b
            if seen[row]:
                average = lines[AVERAGE, at]
                average = kind(average if average > TINY else 0.0)
                if first.size:
                    for d in range(width):
                        first[row, d] *= average
                if second.size:
                    for d in range(width):
                        second[row, d] *= average


@kernel(reorder=True)
def _sgd(ticket, places, rows, weight, values, buffer, numbers):
    sign, decay, lr, momentum, gain, direct, through = numbers
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, row = places[i], rows[i]
            if buffer.size:
                for d in range(weight.shape[1]):
                    w = weight[place, d]
                    g = sign * values[i, d] + decay * w
                    b = momentum * buffer[row, d] + gain * g
                    buffer[row, d] = b
                    weight[place, d] = w - lr * (direct * g + through * b)
            else:
                for d in range(weight.shape[1]):
                    w = weight[place, d]
                    weight[place, d] = w - lr * (sign * values[i, d] + decay * w)
