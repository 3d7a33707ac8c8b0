"""Rows of a table by id.

Another thread may change the ids during a call, so an id is read once, into a variable that
is checked and then used.
"""

import numpy as np

from .runtime.compile import bits_of, is_row, kernel, prefetch_row
from .runtime.lanes import (
    SHORT_LANES_BYTES,
    is_streamed,
    load,
    short_zeros,
    store_or_stream,
)
from .runtime.pool import grain_for, pieces, run

# Up to this many ids, one compiled check and copy costs less than NumPy's two calls.
FEW_IDS = 256
# Number of bytes between the row that is copied and the one that is prefetched.
AHEAD_BYTES = 1 << 12
# Minimum number of bytes per thread.
GRAIN = 1 << 19
# A shorter row takes as long as one of this many bytes: the time is that of a cache miss.
MIN_ROW_BYTES = 256


def gather_rows(
    weight: np.ndarray,
    ids: np.ndarray,
    *,
    out: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return ``weight[ids]`` for flat ids, or None if one of them is out of range.

    Args:
        weight: Table.
        ids: Flat ids.
        out: Contiguous array of the result's shape and dtype to write to; None allocates.
        order: Order in which the rows are copied. Ascending ids give each thread the rows
            that it updates in a training step: a row that another core has read takes far
            longer to write.
    """
    bits = bits_of(weight)
    if out is None:
        out = np.empty((ids.size, weight.shape[1]), bits.dtype)
    out = bits_of(out)
    if ids.size <= FEW_IDS and order is None:
        return out.view(weight.dtype) if _check_and_copy(bits, ids, out) else None
    has_bad_id = np.zeros(1, np.int64)
    order = ids[:0] if order is None else order
    row_bytes = max(1, out.strides[0])
    ahead = 1 + AHEAD_BYTES // row_bytes
    grain = grain_for(GRAIN, max(row_bytes, MIN_ROW_BYTES))
    if row_bytes % SHORT_LANES_BYTES == 0 and bits.flags.c_contiguous:
        # One kernel for every dtype.
        table, copies = bits.view(np.float32), out.view(np.float32)
        streams = is_streamed(out, has_rest=False)
        args = table, ids, order, ahead, streams, copies, has_bad_id
        run(_copy_lanes, ids.size, *args, grain=grain)
    else:
        args = bits, ids, order, ahead, out, has_bad_id
        run(_copy_rows, ids.size, *args, grain=grain)
    return None if has_bad_id[0] else out.view(weight.dtype)


@kernel()
def _check_and_copy(weight, ids, out):
    num_embeddings, width = weight.shape
    for i in range(ids.size):
        row = ids[i]
        if not is_row(row, num_embeddings):
            return False
        for d in range(width):
            out[i, d] = weight[row, d]
    return True


@kernel()
def _copy_rows(ticket, weight, ids, order, ahead, out, has_bad_id):
    num_embeddings, width = weight.shape
    for lo, hi in pieces(ticket):
        for place in range(lo, hi):
            i, later = place, min(place + ahead, hi - 1)
            if order.size:
                i, later = order[i], order[later]
            prefetch_row(weight, ids[later])
            row = ids[i]
            if not is_row(row, num_embeddings):
                # Every thread that writes here writes the same value.
                has_bad_id[0] = 1
                continue
            for d in range(width):
                out[i, d] = weight[row, d]


@kernel()
def _copy_lanes(ticket, weight, ids, order, ahead, streams, out, has_bad_id):
    num_embeddings, width = weight.shape
    lanes, block = short_zeros(np.float32(0)), SHORT_LANES_BYTES // 4
    for lo, hi in pieces(ticket):
        for place in range(lo, hi):
            i, later = place, min(place + ahead, hi - 1)
            if order.size:
                i, later = order[i], order[later]
            prefetch_row(weight, ids[later])
            id_ = ids[i]
            if not is_row(id_, num_embeddings):
                has_bad_id[0] = 1
                continue
            row = id_ * width
            for d in range(0, width, block):
                part = load(lanes, weight, row + d)
                store_or_stream(part, out, i * width + d, streams)
