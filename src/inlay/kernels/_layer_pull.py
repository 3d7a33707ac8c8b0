"""The complete layer's way back: every gradient in one pass over memory.

A row is put together again instead of being read from a second large array, and its
gradient is at once added to all that it belongs to. Places are gone through in fixed
blocks, each of which has its own sums of what many places share, so that nothing depends on
the number of threads.
"""

from dataclasses import dataclass

import numpy as np

from ._lanes import WIDTH, fetch, load, store, total, zeros
from ._layer import AHEAD, GRAIN, Rows, factor_of, flat, put_together, three_of
from ._numba import inlined, kernel
from ._pool import run
from ._share import pieces


@dataclass(frozen=True, eq=False)
class Route:
    """In which order the places are gone through, and where their gradients go.

    Args:
        order: The places; those that are not in it are left out.
        bounds: Where in ``order`` each block begins, and the end of the last.
        slots: For each place the row of its token's gradient; -1 is none.
        size: How many such rows there are.
        sums: For each place the row of the second table's sums; None without that table.
        count: How many of those there are.
        is_split: Whether a row of these sums may be met in several blocks; each block then
            has sums of its own.
    """

    order: np.ndarray
    bounds: np.ndarray
    slots: np.ndarray
    size: int
    sums: np.ndarray | None = None
    count: int = 0
    is_split: bool = False


def layer_pull(
    token: Rows,
    added: tuple[Rows, ...],
    *,
    scale: float,
    norm: tuple[np.ndarray, float] | None,
    dy: np.ndarray,
    route: Route,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of token rows, those of the second table, and shared ones.

    Args:
        token: As in :func:`inlay.kernels.layer`.
        added: Likewise, with a row for each place.
        scale: Likewise.
        norm: Weight and epsilon of the LayerNorm, or None.
        dy: Gradient of the output, ``(places, embedding_dim)``.
        route: Where each goes.

    Shape:
        - the first: ``(route.size, embedding_dim)``
        - the second: ``(route.count, embedding_dim)``
        - shared: ``(2 + rows of the third table, embedding_dim)``: the gradients of the
          norm's weight and bias, then those of the third table
    """
    width, work = dy.shape[1], np.float64 if dy.dtype == np.float64 else np.float32
    blocks = route.bounds.size - 1
    third = added[1][0].shape[0] if len(added) > 1 else 0
    values = np.empty((route.size, width), work)
    seconds = np.zeros((blocks if route.is_split else 1, route.count, width), work)
    shared = np.zeros((blocks, 2 + third, width), work)
    run(
        _pull,
        blocks,
        *three_of(token, added),
        None if norm is None else flat(norm[0]),
        work(scale),
        work(0.0 if norm is None else norm[1]),
        flat(dy),
        route.order,
        route.bounds,
        route.slots,
        values,
        route.sums,
        seconds,
        shared,
        grain=max(1, GRAIN * blocks // max(1, route.order.size * width)),
    )
    return values, seconds.sum(0) if route.is_split else seconds[0], shared.sum(0)


@inlined
def _standard(like, d, row, centre, factor, dy, at, gain, shared, own):
    """Put the normalised row in place of the row, and add to the norm's gradients.

    Returns the normalised part and its gradient, as lanes or one number like ``like``.
    """
    value = (load(like, row, d) - centre) * factor
    store(value, row, d)
    up = load(like, dy, at + d)
    store(load(like, shared, own + d) + up * value, shared, own + d)
    beyond = own + row.size + d
    store(load(like, shared, beyond) + up, shared, beyond)
    return value, up * load(like, gain, d)


@inlined
def _means(row, centre, factor, dy, at, later, gain, shared, own):
    """Normalise the row, and return the means of its gradient and of their product.

    The gradient of the place that begins at ``later`` is asked for meanwhile.
    """
    width, zero = row.size, type(centre)(0)
    block = WIDTH // row.itemsize
    whole, sums, rest = width - width % block, zeros(zero), zero
    products, left = sums, zero
    for d in range(0, whole, block):
        fetch(sums, dy, later + d)
        value, up = _standard(sums, d, row, centre, factor, dy, at, gain, shared, own)
        sums, products = sums + up, products + up * value
    for d in range(whole, width):
        number, one = _standard(rest, d, row, centre, factor, dy, at, gain, shared, own)
        rest, left = rest + one, left + one * number
    count = type(centre)(width)
    return (total(sums) + rest) / count, (total(products) + left) / count


@inlined
def _back(like, d, row, factor, mean, along, dy, at, gain):
    """Return the gradient of the row, as lanes or one number like ``like``."""
    up = load(like, dy, at + d)
    if gain is not None:
        up = (up * load(like, gain, d) - mean - load(like, row, d) * along) * factor
    return up


@inlined
def _add(value, numbers, place):
    store(load(value, numbers, place) + value, numbers, place)


@kernel(reorder=True)
def _pull(
    ticket,
    token,
    ids,
    second,
    seconds,
    third,
    thirds,
    gain,
    scale,
    eps,
    dy,
    order,
    bounds,
    slots,
    values,
    sums,
    dsecond,
    shared,
):
    width, final = dy.shape[1], order.size - 1
    row, zero = np.empty(width, type(scale)), type(scale)(0)
    block, lanes = WIDTH // row.itemsize, zeros(zero)
    whole = width - width % block
    for lo, hi in pieces(ticket):
        for part in range(lo, hi):
            own = part * shared.shape[1] * width
            others = min(part, dsecond.shape[0] - 1) * dsecond.shape[1] * width
            for place in range(bounds[part], bounds[part + 1]):
                i, ahead = order[place], order[min(place + AHEAD, final)]
                at, later = i * width, ahead * width
                factor, mean, along = zero, zero, zero
                if gain is not None:
                    centre = put_together(
                        row, i, ahead, token, ids, second, seconds, third, thirds, scale
                    )
                    factor = factor_of(row, centre, eps)
                    mean, along = _means(
                        row, centre, factor, dy, at, later, gain, shared, own
                    )
                slot = slots[i] * width
                other = -1 if thirds is None else own + (2 + thirds[i]) * width
                to = -1 if sums is None else others + sums[i] * width
                # Not in a function of their own, which would take half as long again.
                for d in range(0, whole, block):
                    if gain is None:
                        fetch(lanes, dy, later + d)
                    back = _back(lanes, d, row, factor, mean, along, dy, at, gain)
                    if slot >= 0:
                        store(back * scale, values, slot + d)
                    if thirds is not None:
                        _add(back, shared, other + d)
                    if sums is not None:
                        _add(back, dsecond, to + d)
                for d in range(whole, width):
                    left = _back(zero, d, row, factor, mean, along, dy, at, gain)
                    if slot >= 0:
                        store(left * scale, values, slot + d)
                    if thirds is not None:
                        _add(left, shared, other + d)
                    if sums is not None:
                        _add(left, dsecond, to + d)
