"""The complete layer's way back: every gradient in one pass over memory.

A row is put together again instead of being read from a second large array, and its
gradient is at once added to all that it belongs to. Places are gone through in fixed
blocks, each of which has its own sums of what many places share, so that nothing depends on
the number of threads.
"""

from dataclasses import dataclass

import numpy as np

from ._layer import AHEAD, GRAIN, Rows, factor_of, mean_of, put_together, three_of
from ._numba import bits_of, kernel, prefetch_row, widen
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
        added: Likewise.
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
        None if norm is None else bits_of(norm[0]),
        work(scale),
        work(0.0 if norm is None else norm[1]),
        bits_of(dy),
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
    for lo, hi in pieces(ticket):
        for block in range(lo, hi):
            own = min(block, dsecond.shape[0] - 1)
            for place in range(bounds[block], bounds[block + 1]):
                i, ahead = order[place], order[min(place + AHEAD, final)]
                prefetch_row(dy, ahead)
                if gain is None:
                    for d in range(width):
                        row[d] = widen(dy[i, d])
                else:
                    prefetch_row(token, ids[ahead])
                    put_together(row, i, token, ids, second, seconds, third, thirds, scale)
                    centre = mean_of(row, zero)
                    factor = factor_of(row, centre, eps)
                    mean, along = zero, zero
                    for d in range(width):
                        row[d] = (row[d] - centre) * factor
                        up = widen(dy[i, d])
                        shared[block, 0, d] += up * row[d]
                        shared[block, 1, d] += up
                        up *= widen(gain[d])
                        mean += up
                        along += up * row[d]
                    mean /= type(scale)(width)
                    along /= type(scale)(width)
                    for d in range(width):
                        up = widen(dy[i, d]) * widen(gain[d])
                        row[d] = factor * (up - mean - row[d] * along)
                slot = slots[i]
                if slot >= 0:
                    for d in range(width):
                        values[slot, d] = row[d] * scale
                if thirds is not None:
                    other = 2 + thirds[i]
                    for d in range(width):
                        shared[block, other, d] += row[d]
                if sums is not None:
                    at = sums[i]
                    for d in range(width):
                        dsecond[own, at, d] += row[d]
