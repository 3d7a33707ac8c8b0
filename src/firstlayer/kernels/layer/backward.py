"""Backward of the complete layer: every gradient in one pass over memory.

A row is assembled again instead of being read from a second large array, and its gradient
is added at once to every sum that it is part of. Tokens are processed in fixed blocks,
each with its own sums for the rows that tokens share, so that results do not depend on the
number of threads.
"""

import numpy as np

from ..runtime.compile import inlined, kernel
from ..runtime.lanes import (
    LANES_BYTES,
    SHORT_LANES_BYTES,
    add_to,
    is_streamed,
    load,
    prefetch_lanes,
    short_zeros,
    store,
    store_or_stream,
    total,
    zeros,
)
from ..runtime.pool import grain_for, pieces, run
from ..runtime.scratch import free_row, is_allocated, scratch_row
from .backward_plan import BackwardPlan
from .forward import (
    AHEAD,
    GRAIN,
    TableRows,
    assemble_row,
    check_sizes,
    flat,
    flat_norm,
    flat_pair,
    inverse_std,
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
    norm: tuple[np.ndarray, float] | None,
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
        norm: Weight and epsilon of the LayerNorm, or None.
        dy: Gradient of the output, ``(tokens, embedding_dim)``.
        plan: Result of :func:`firstlayer.kernels.plan_backward` for the same tokens.

    Shape:
        - token rows: ``(plan.partial_starts[-1], embedding_dim)``, followed by scratch rows
          if ids occur several times
        - position rows: ``(len(plan.unique_position_rows), embedding_dim)``
        - shared rows: ``(2 + segments, embedding_dim)``: gradients of the norm's weight
          and bias, then of the segment table
    """
    num_tokens, width = dy.shape
    check_sizes(token, position, segment, num_tokens=num_tokens, width=width)
    compute_dtype = np.float64 if dy.dtype == np.float64 else np.float32
    num_blocks = plan.block_starts.size - 1
    num_segments = 0 if segment is None else segment[0].shape[0]
    num_rows = plan.partial_starts[-1]
    num_scratch_rows = num_blocks if plan.repeated.size else 0
    buffer = np.empty((num_rows + num_scratch_rows, width), compute_dtype)
    num_position_sums = num_blocks if plan.splits_positions else 1
    position_shape = num_position_sums, plan.unique_position_rows.size, width
    position_sums = np.zeros(position_shape, compute_dtype)
    shared_sums = np.empty((num_blocks, 2 + num_segments, width), compute_dtype)
    run(
        _backward_blocks,
        num_blocks,
        *flat_pair(token),
        *flat_pair(position),
        *flat_pair(segment),
        None if norm is None else flat_norm(norm[0], width),
        compute_dtype(scale),
        compute_dtype(0.0 if norm is None else norm[1]),
        flat(dy),
        plan.token_order,
        plan.block_starts,
        plan.buffer_rows,
        buffer,
        plan.ids.size if is_streamed(buffer, STREAMING_BYTES) else 0,
        num_rows,
        plan.position_indices,
        position_sums,
        shared_sums,
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
def _add_row(zero, buffer, source, target):
    """Add the row that starts at ``source`` to the one at ``target``."""
    width, block, lanes = buffer.shape[1], LANES_BYTES // buffer.itemsize, zeros(zero)
    whole = width - width % block
    for d in range(0, whole, block):
        add_to(load(lanes, buffer, source + d), buffer, target + d)
    for d in range(whole, width):
        add_to(load(zero, buffer, source + d), buffer, target + d)


@inlined
def _norm_at(like, d, row, mean, rstd, dy, dy_at, weight, shared_sums, block_at):
    """Add to the norm's gradients at ``d``, and return the normalized row and its gradient.

    Both are lanes or one number, like ``like``.
    """
    value = (load(like, row, d) - mean) * rstd
    grad = load(like, dy, dy_at + d)
    add_to(grad * value, shared_sums, block_at + d)
    add_to(grad, shared_sums, block_at + row.size + d)
    return value, grad * load(like, weight, d)


@inlined
def _norm_means(
    row, mean, rstd, dy, dy_at, next_at, weight, shared_sums, block_at, buffer, buffer_at
):
    """Return the means of the normalized row's gradient and of its product with the row.

    The second is multiplied by ``rstd``. The next token's ``dy`` and the buffer row that
    will be written are prefetched.
    """
    width, zero = row.size, type(mean)(0)
    block = SHORT_LANES_BYTES // row.itemsize
    # Short lanes: two sums of long lanes would take all registers.
    whole, sums, rest = width - width % block, short_zeros(zero), zero
    products, product_rest = sums, zero
    for d in range(0, whole, block):
        prefetch_lanes(sums, dy, next_at + d)
        prefetch_lanes(sums, buffer, buffer_at + d)
        value, grad = _norm_at(
            sums, d, row, mean, rstd, dy, dy_at, weight, shared_sums, block_at
        )
        sums, products = sums + grad, products + grad * value
    for d in range(whole, width):
        number, one = _norm_at(
            rest, d, row, mean, rstd, dy, dy_at, weight, shared_sums, block_at
        )
        rest, product_rest = rest + one, product_rest + one * number
    count = type(mean)(width)
    return (total(sums) + rest) / count, (total(products) + product_rest) / count * rstd


@inlined
def _row_gradient_at(like, d, row, mean, rstd, grad_mean, dot_mean, dy, dy_at, weight):
    """Return the gradient of the assembled row at ``d``, as lanes or one number."""
    grad = load(like, dy, dy_at + d)
    if weight is not None:
        centered = load(like, row, d) - mean
        grad = (grad * load(like, weight, d) - grad_mean - centered * dot_mean) * rstd
    return grad


# Separate arguments: a NamedTuple costs half a microsecond per call. ``ids``,
# ``buffer_rows`` and ``position_indices`` have an entry for each row of ``dy``. A table and
# its rows are both None or both arrays. Buffer rows below ``streamed_rows`` are streamed;
# the scratch rows of the blocks begin at ``scratch_start``.
@kernel(reorder=True, allocates=False)
def _backward_blocks(
    ticket,
    token_table,
    ids,
    position_table,
    position_rows,
    segment_table,
    segment_rows,
    weight,
    scale,
    eps,
    dy,
    token_order,
    block_starts,
    buffer_rows,
    buffer,
    streamed_rows,
    scratch_start,
    position_indices,
    position_sums,
    shared_sums,
):
    width, final, zero = dy.shape[1], token_order.size - 1, type(scale)(0)
    row = scratch_row(width, zero)
    if not is_allocated(row):
        raise MemoryError
    lanes_size, lanes = LANES_BYTES // row.itemsize, zeros(zero)
    whole = width - width % lanes_size
    for lo, hi in pieces(ticket):
        for block in range(lo, hi):
            block_at = block * shared_sums.shape[1] * width
            for d in range(block_at, block_at + shared_sums.shape[1] * width):
                store(zero, shared_sums, d)
            own_sums = min(block, position_sums.shape[0] - 1)
            positions_at = own_sums * position_sums.shape[1] * width
            for k in range(block_starts[block], block_starts[block + 1]):
                i, ahead = token_order[k], token_order[min(k + AHEAD, final)]
                dy_at = i * width
                next_at = token_order[min(k + 1, final)] * width
                # A gradient to be added is written to the block's scratch row first.
                adds, streams = buffer_rows[i] < -1, 0 <= buffer_rows[i] < streamed_rows
                buffer_at = (scratch_start + block if adds else buffer_rows[i]) * width
                mean, rstd, grad_mean, dot_mean = zero, zero, zero, zero
                if weight is not None:
                    position, segment = 0, 0
                    if position_table is not None:
                        position = position_rows[i % position_rows.size]
                    if segment_rows is not None:
                        segment = segment_rows[i % segment_rows.size]
                    mean = assemble_row(
                        row,
                        token_table,
                        ids[i] * width,
                        ids[ahead] * width,
                        position_table,
                        position * width,
                        segment_table,
                        segment * width,
                        scale,
                    )
                    rstd = inverse_std(row, mean, eps)
                    # A streamed row is not prefetched; row 0 takes its place.
                    prefetched = 0 if streams else buffer_at
                    grad_mean, dot_mean = _norm_means(
                        row,
                        mean,
                        rstd,
                        dy,
                        dy_at,
                        next_at,
                        weight,
                        shared_sums,
                        block_at,
                        buffer,
                        prefetched,
                    )
                segment_at = 0
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
                    grad = _row_gradient_at(
                        lanes, d, row, mean, rstd, grad_mean, dot_mean, dy, dy_at, weight
                    )
                    if buffer_at >= 0:
                        store_or_stream(grad * scale, buffer, buffer_at + d, streams)
                    if segment_rows is not None:
                        add_to(grad, shared_sums, segment_at + d)
                    if position_indices is not None:
                        add_to(grad, position_sums, position_at + d)
                for d in range(whole, width):
                    rest = _row_gradient_at(
                        zero, d, row, mean, rstd, grad_mean, dot_mean, dy, dy_at, weight
                    )
                    if buffer_at >= 0:
                        store(rest * scale, buffer, buffer_at + d)
                    if segment_rows is not None:
                        add_to(rest, shared_sums, segment_at + d)
                    if position_indices is not None:
                        add_to(rest, position_sums, position_at + d)
                if adds:
                    _add_row(zero, buffer, buffer_at, (-2 - buffer_rows[i]) * width)
    free_row(row)
