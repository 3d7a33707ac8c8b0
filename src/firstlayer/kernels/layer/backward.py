"""Backward of the complete layer: every gradient in one pass over memory.

A row is assembled again instead of being read from a second large array, and its gradient
is added at once to every sum that it is part of. Tokens are processed in fixed blocks,
each with its own sums for the rows that tokens share, so that results do not depend on the
number of threads.
"""

import numpy as np

from ..runtime.aligned import LINE, aligned_empty, aligned_zeros
from ..runtime.compile import inlined, kernel
from ..runtime.lanes import (
    LANES_BYTES,
    SHORT_LANES_BYTES,
    add_to,
    load,
    prefetch_lanes,
    prefetch_target,
    short_zeros,
    store,
    store_or_stream,
    total,
    zeros,
)
from ..runtime.pool import grain_for, pieces, run
from .backward_plan import BackwardPlan
from .forward import (
    AHEAD,
    GRAIN,
    TableRows,
    check_sizes,
    flat,
    flat_norm,
    flat_pair,
    prefetch_end,
    sum_at,
)

# Buffers from this size on use streaming stores for final gradient rows. Partial rows are
# read again soon and stay in the cache.
STREAMING_BYTES = 1 << 22


def layer_backward(
    token: TableRows,
    *,
    position: TableRows | None = None,
    segment: TableRows | None = None,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray] | None,
    dy: np.ndarray,
    plan: BackwardPlan,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of token rows, of position rows, and of shared rows.

    Args:
        token: As in :func:`firstlayer.kernels.layer_forward`. Rows of all tables must be in
            range, and no other thread may change them.
        position: As in the forward.
        segment: As in the forward.
        scale: As in the forward.
        norm: Weight of the LayerNorm, and the statistics of the forward, or None.
        dy: Gradient of the output, ``(tokens, embedding_dim)``.
        plan: Result of :func:`firstlayer.kernels.plan_backward` for the same tokens.

    Shape:
        - token rows: ``(plan.partial_starts[-1], embedding_dim)``
        - position rows: ``(len(plan.unique_position_rows), embedding_dim)``
        - shared rows: ``(2 + segments, embedding_dim)``: gradients of the norm's weight
          and bias, then of the segment table
    """
    num_tokens, width = dy.shape
    norm_weight, statistics = norm or (None, None)
    check_sizes(
        token,
        position,
        segment,
        num_tokens=num_tokens,
        width=width,
        statistics=statistics,
    )
    compute_dtype = np.float64 if dy.dtype == np.float64 else np.float32
    num_blocks = plan.block_starts.size - 1
    num_segments = 0 if segment is None else segment[0].shape[0]
    buffer = aligned_empty((plan.partial_starts[-1], width), compute_dtype)
    # The buffer is aligned to cache lines.
    streams = buffer.nbytes >= STREAMING_BYTES and buffer.strides[0] % LINE == 0
    num_position_sums = num_blocks if plan.splits_positions else 1
    num_positions = plan.unique_position_rows.size
    position_sums = aligned_zeros((num_position_sums, num_positions, width), compute_dtype)
    shared_sums = aligned_empty((num_blocks, 2 + num_segments, width), compute_dtype)
    scratch = aligned_empty((num_blocks, width), compute_dtype)
    run(
        _backward_blocks,
        num_blocks,
        *flat_pair(token),
        *flat_pair(position),
        *flat_pair(segment),
        flat_norm(norm_weight, width),
        statistics,
        compute_dtype(scale),
        flat(dy),
        plan.token_order,
        plan.block_starts,
        plan.buffer_rows,
        buffer,
        plan.ids.size if streams else 0,
        plan.position_indices,
        position_sums,
        shared_sums,
        scratch,
        grain=grain_for(GRAIN, plan.token_order.size * width, num_blocks),
    )
    return buffer, _sum_over_blocks(position_sums), _sum_over_blocks(shared_sums)


def _sum_over_blocks(blocks: np.ndarray) -> np.ndarray:
    """Return the sum of the blocks; a single block is returned itself."""
    if blocks.shape[0] == 1:
        return blocks[0]
    # NumPy adds one block after the other.
    return np.add.reduce(blocks, axis=0)


@inlined
def _center_row(
    row,
    token,
    token_at,
    position,
    position_at,
    segment,
    segment_at,
    scale,
    mean,
    dy,
    dy_at,
    next_at,
    weight,
    buffer,
    buffer_at,
    streams,
):
    """Write the centered sum of the tables' rows to ``row``, and return two means.

    They are the mean of the normalized row's gradient, and that of its product with the
    centered row. The next row of ``dy`` is prefetched, and the buffer row that will be
    written unless it is streamed.
    """
    width, zero = row.size, type(mean)(0)
    block = SHORT_LANES_BYTES // row.itemsize
    whole, sums = width - width % block, short_zeros(zero)
    products, rest, product_rest = sums, zero, zero
    for d in range(0, whole, block):
        prefetch_lanes(sums, dy, next_at + d)
        if not streams:
            prefetch_target(sums, buffer, buffer_at + d)
        part = sum_at(
            sums, d, token, token_at, position, position_at, segment, segment_at, scale
        )
        centered = part - mean
        store(centered, row, d)
        grad = load(sums, dy, dy_at + d) * load(sums, weight, d)
        sums, products = sums + grad, products + centered * grad
    for d in range(whole, width):
        number = sum_at(
            rest, d, token, token_at, position, position_at, segment, segment_at, scale
        )
        number = number - mean
        row[d] = number
        one = load(rest, dy, dy_at + d) * load(rest, weight, d)
        rest, product_rest = rest + one, product_rest + number * one
    count = type(mean)(width)
    return (total(sums) + rest) / count, (total(products) + product_rest) / count


@inlined
def _gradient_at(
    like, d, row, rstd, grad_mean, dot_mean, dy, dy_at, weight, shared_sums, block_at
):
    """Add to the norm's gradients at ``d``, and return that of the assembled row.

    It is lanes or one number, like ``like``.
    """
    grad = load(like, dy, dy_at + d)
    if weight is not None:
        centered = load(like, row, d)
        add_to(grad * (centered * rstd), shared_sums, block_at + d)
        add_to(grad, shared_sums, block_at + row.size + d)
        grad = (grad * load(like, weight, d) - grad_mean - centered * dot_mean) * rstd
    return grad


# Separate arguments: a NamedTuple costs half a microsecond per call. ``ids``,
# ``buffer_rows`` and ``position_indices`` have an entry for each row of ``dy``. A table and
# its rows are both None or both arrays. Buffer rows below ``streamed_rows`` are streamed.
# Each block assembles rows in its own row of ``scratch``.
@kernel(reorder=True)
def _backward_blocks(
    ticket,
    token_table,
    ids,
    position_table,
    position_rows,
    segment_table,
    segment_rows,
    weight,
    statistics,
    scale,
    dy,
    token_order,
    block_starts,
    buffer_rows,
    buffer,
    streamed_rows,
    position_indices,
    position_sums,
    shared_sums,
    scratch,
):
    width, final, zero = dy.shape[1], token_order.size - 1, type(scale)(0)
    lanes_size, lanes = LANES_BYTES // scratch.itemsize, zeros(zero)
    whole = width - width % lanes_size
    for lo, hi in pieces(ticket):
        for block in range(lo, hi):
            row, block_at = scratch[block], block * shared_sums.shape[1] * width
            for d in range(block_at, block_at + shared_sums.shape[1] * width):
                store(zero, shared_sums, d)
            own_sums = min(block, position_sums.shape[0] - 1)
            positions_at = own_sums * position_sums.shape[1] * width
            for k in range(block_starts[block], block_starts[block + 1]):
                i, next_ = token_order[k], token_order[min(k + 1, final)]
                dy_at, next_at, buffer_row = i * width, next_ * width, buffer_rows[i]
                adds, streams = buffer_row < -1, 0 <= buffer_row < streamed_rows
                buffer_at = (-2 - buffer_row if adds else buffer_row) * width
                rstd, grad_mean, dot_mean = zero, zero, zero
                if weight is not None:
                    position, segment = 0, 0
                    if position_table is not None:
                        position = position_rows[i % position_rows.size]
                    if segment_rows is not None:
                        segment = segment_rows[i % segment_rows.size]
                    rstd = statistics[i, 1]
                    grad_mean, product_mean = _center_row(
                        row,
                        token_table,
                        ids[i] * width,
                        position_table,
                        position * width,
                        segment_table,
                        segment * width,
                        scale,
                        statistics[i, 0],
                        dy,
                        dy_at,
                        next_at,
                        weight,
                        buffer,
                        buffer_at,
                        streams,
                    )
                    dot_mean = product_mean * rstd * rstd
                later, segment_at = 0, 0
                if weight is not None:
                    later = ids[token_order[min(k + AHEAD, final)]] * width
                if segment_rows is not None:
                    segment = segment_rows[i % segment_rows.size]
                    segment_at = block_at + (2 + segment) * width
                position_at = -1
                if position_indices is not None:
                    position_at = positions_at + position_indices[i] * width
                # These loops are not in a function: the call would make them 50% slower.
                for d in range(0, whole, lanes_size):
                    if weight is None:
                        prefetch_lanes(lanes, dy, next_at + d)
                    else:
                        prefetch_lanes(lanes, token_table, later + d)
                    grad = _gradient_at(
                        lanes,
                        d,
                        row,
                        rstd,
                        grad_mean,
                        dot_mean,
                        dy,
                        dy_at,
                        weight,
                        shared_sums,
                        block_at,
                    )
                    if adds:
                        add_to(grad * scale, buffer, buffer_at + d)
                    elif buffer_at >= 0:
                        store_or_stream(grad * scale, buffer, buffer_at + d, streams)
                    if segment_rows is not None:
                        add_to(grad, shared_sums, segment_at + d)
                    if position_indices is not None:
                        add_to(grad, position_sums, position_at + d)
                if weight is not None:
                    prefetch_end(token_table, later + whole, later + width)
                for d in range(whole, width):
                    rest = _gradient_at(
                        zero,
                        d,
                        row,
                        rstd,
                        grad_mean,
                        dot_mean,
                        dy,
                        dy_at,
                        weight,
                        shared_sums,
                        block_at,
                    )
                    if adds:
                        add_to(rest * scale, buffer, buffer_at + d)
                    elif buffer_at >= 0:
                        store(rest * scale, buffer, buffer_at + d)
                    if segment_rows is not None:
                        add_to(rest, shared_sums, segment_at + d)
                    if position_indices is not None:
                        add_to(rest, position_sums, position_at + d)
