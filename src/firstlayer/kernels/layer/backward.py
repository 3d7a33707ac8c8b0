"""The complete layer's way back: every gradient in one pass over memory.

A row is put together again instead of being read from a second large array, and its
gradient is at once added to all that it belongs to. Places are gone through in fixed
blocks, each of which has its own sums of what many places share, so that nothing depends on
the number of threads.
"""

import numpy as np

from ..runtime.compile import inlined, kernel
from ..runtime.lanes import (
    SHORT,
    WIDTH,
    fetch,
    is_streamed,
    load,
    short_zeros,
    store,
    total,
    write,
    zeros,
)
from ..runtime.pool import run
from ..runtime.share import pieces
from .backward_plan import BackwardPlan
from .forward import AHEAD, GRAIN, TableRows, factor_of, flat, flat_pairs, put_together

# Row gradients of so many bytes are written past the caches, but for those that are about
# to be summed: an optimizer finds them as soon, and the rest stays where it is.
LARGE = 1 << 22


def layer_backward(
    token: TableRows,
    *,
    position: TableRows | None = None,
    segment: TableRows | None = None,
    scale: float,
    norm: tuple[np.ndarray, float] | None,
    dy: np.ndarray,
    route: BackwardPlan,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of token rows, those of the second table, and shared ones.

    Args:
        token: As in :func:`firstlayer.kernels.layer_forward`.
        position: Likewise.
        segment: Likewise.
        scale: Likewise.
        norm: Weight and epsilon of the LayerNorm, or None.
        dy: Gradient of the output, ``(places, embedding_dim)``.
        route: Where each goes.

    Shape:
        - the first: ``(route.starts[-1], embedding_dim)``, and a few rows more that mean
          nothing if ids occur several times
        - the second: ``(rows of the route, embedding_dim)``
        - shared: ``(2 + rows of the third table, embedding_dim)``: the gradients of the
          norm's weight and bias, then those of the third table
    """
    width, work = dy.shape[1], np.float64 if dy.dtype == np.float64 else np.float32
    blocks = route.bounds.size - 1
    third = 0 if segment is None else segment[0].shape[0]
    rows = route.starts[-1]
    values = np.empty((rows + (blocks if route.several.size else 0), width), work)
    seconds = np.zeros((blocks if route.is_split else 1, route.rows.size, width), work)
    shared = np.empty((blocks, 2 + third, width), work)
    run(
        _pull,
        blocks,
        *flat_pairs(token, position, segment),
        None if norm is None else flat(norm[0]),
        work(scale),
        work(0.0 if norm is None else norm[1]),
        flat(dy),
        route.order,
        route.bounds,
        route.slots,
        values,
        route.ids.size if is_streamed(values, LARGE) else 0,
        rows,
        route.sums,
        seconds,
        shared,
        grain=max(1, GRAIN * blocks // max(1, route.order.size * width)),
    )
    return values, _folded(seconds), _folded(shared)


@kernel()
def _folded(blocks):
    """Return the sum of the blocks; if it is one, the block itself."""
    if blocks.shape[0] == 1:
        return blocks[0]
    sums = blocks[0].copy()
    for other in range(1, blocks.shape[0]):
        sums += blocks[other]
    return sums


@inlined
def _add(value, numbers, place):
    store(load(value, numbers, place) + value, numbers, place)


@inlined
def _add_row(zero, values, source, to):
    """Add one row of ``values`` to another; ``zero`` is one of their type."""
    width, block, lanes = values.shape[1], WIDTH // values.itemsize, zeros(zero)
    whole = width - width % block
    for d in range(0, whole, block):
        _add(load(lanes, values, source + d), values, to + d)
    for d in range(whole, width):
        _add(load(zero, values, source + d), values, to + d)


@inlined
def _standard(like, d, row, centre, factor, dy, at, gain, shared, own):
    """Add to the norm's gradients, and return the normalised part and its own.

    As lanes or one number like ``like``.
    """
    value = (load(like, row, d) - centre) * factor
    up = load(like, dy, at + d)
    _add(up * value, shared, own + d)
    _add(up, shared, own + row.size + d)
    return value, up * load(like, gain, d)


@inlined
def _means(row, centre, factor, dy, at, later, gain, shared, own, values, slot):
    """Return the mean of the gradient, and that of its product with the normalised row.

    The latter is multiplied by ``factor``, as the row is to be. The gradient of the place
    that begins at ``later`` is asked for meanwhile, and what will be written to.
    """
    width, zero = row.size, type(centre)(0)
    block = SHORT // row.itemsize
    # Two sums of long lanes would need all the registers there are.
    whole, sums, rest = width - width % block, short_zeros(zero), zero
    products, left = sums, zero
    for d in range(0, whole, block):
        fetch(sums, dy, later + d)
        fetch(sums, values, slot + d)
        value, up = _standard(sums, d, row, centre, factor, dy, at, gain, shared, own)
        sums, products = sums + up, products + up * value
    for d in range(whole, width):
        number, one = _standard(rest, d, row, centre, factor, dy, at, gain, shared, own)
        rest, left = rest + one, left + one * number
    count = type(centre)(width)
    return (total(sums) + rest) / count, (total(products) + left) / count * factor


@inlined
def _back(like, d, row, centre, factor, mean, along, dy, at, gain):
    """Return the gradient of the row, as lanes or one number like ``like``."""
    up = load(like, dy, at + d)
    if gain is not None:
        off = load(like, row, d) - centre
        up = (up * load(like, gain, d) - mean - off * along) * factor
    return up


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
    past,
    spare,
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
            shared[part] = 0
            others = min(part, dsecond.shape[0] - 1) * dsecond.shape[1] * width
            for place in range(bounds[part], bounds[part + 1]):
                i, ahead = order[place], order[min(place + AHEAD, final)]
                at, later = i * width, order[min(place + 1, final)] * width
                # What is to be added is written to a row that the block has for this first.
                adds, streams = slots[i] < -1, 0 <= slots[i] < past
                slot = (spare + part if adds else slots[i]) * width
                centre, factor, mean, along = zero, zero, zero, zero
                if gain is not None:
                    centre = put_together(
                        row, i, ahead, token, ids, second, seconds, third, thirds, scale
                    )
                    factor = factor_of(row, centre, eps)
                    # What is written past the caches is not asked for; row 0 is at hand.
                    soon = 0 if streams else slot
                    mean, along = _means(
                        row, centre, factor, dy, at, later, gain, shared, own, values, soon
                    )
                other = 0
                if thirds is not None:
                    other = own + (2 + thirds[i % thirds.size]) * width
                to = -1 if sums is None else others + sums[i] * width
                # Not in a function of their own, which would take half as long again.
                for d in range(0, whole, block):
                    if gain is None:
                        fetch(lanes, dy, later + d)
                    back = _back(lanes, d, row, centre, factor, mean, along, dy, at, gain)
                    if slot >= 0:
                        write(back * scale, values, slot + d, streams)
                    if thirds is not None:
                        _add(back, shared, other + d)
                    if sums is not None:
                        _add(back, dsecond, to + d)
                for d in range(whole, width):
                    left = _back(zero, d, row, centre, factor, mean, along, dy, at, gain)
                    if slot >= 0:
                        store(left * scale, values, slot + d)
                    if thirds is not None:
                        _add(left, shared, other + d)
                    if sums is not None:
                        _add(left, dsecond, to + d)
                if adds:
                    _add_row(zero, values, slot, (-2 - slots[i]) * width)
