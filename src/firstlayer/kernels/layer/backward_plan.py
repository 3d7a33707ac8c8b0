"""Order in which the layer's backward visits tokens, and where each writes its gradient.

The gradient of a token row whose id occurs once is written to its final row. An id that
occurs several times has one partial row for each block of tokens that it occurs in; the
partial rows are summed afterwards.

Threads process blocks of tokens. If possible, all tokens with the same position row are in
one block, in memory order: the block's position sums then fit in a cache, and no other
block adds to them.
"""

from typing import NamedTuple

import numpy as np

from ..group import group_tokens
from ..runtime.compile import internal, kernel

# More blocks would cost more memory for accumulators than they gain in speed.
MAX_BLOCKS = 32
# A block has at least this many tokens for each row that it accumulates to.
MIN_TOKENS_PER_ACCUMULATOR_ROW = 4
# A position row is frequent if more than one token in this many reads it. Position rows are
# few if there are at least this many tokens for each.
FREQUENT = 8


class BackwardPlan(NamedTuple):
    """Order of tokens, and the rows their gradients go to.

    Token gradients go to a buffer. Its first ``len(ids)`` rows are the gradient of each id;
    after them come the partial rows of ids that occur several times.

    Args:
        buffer_rows: Row of the buffer for each token. A token that writes the row has
            ``row``, one that adds to a row that its block wrote before has ``-2 - row``,
            and one without a gradient has -1.
        ids: Ids that have a gradient, ascending.
        repeated: Indices of the ids that occur several times.
        partial_starts: First partial row of each of ``repeated``, and the end of the last.
        token_order: Tokens in the order of processing. Masked tokens are omitted.
        block_starts: Start of each block in ``token_order``, and the end of the last.
        unique_position_rows: Rows of the position table that are read, ascending.
        position_indices: For each token the index of its row in ``unique_position_rows``;
            None without a position table.
        splits_positions: Whether several blocks may read the same position row. Each then
            has position sums of its own.
    """

    buffer_rows: np.ndarray
    ids: np.ndarray
    repeated: np.ndarray
    partial_starts: np.ndarray
    token_order: np.ndarray
    block_starts: np.ndarray
    unique_position_rows: np.ndarray
    position_indices: np.ndarray | None
    splits_positions: bool


def plan_backward(
    ids: np.ndarray | None,
    position_rows: np.ndarray | None,
    *,
    tokens: np.ndarray,
    num_tokens: int,
    skip: int | None,
    shared_rows: int,
) -> BackwardPlan:
    """Return the plan for a backward over ``tokens``.

    Args:
        ids: Id of each token. None gives each token its own row of the buffer, in order.
            No other thread may change the ids, nor ``position_rows``.
        position_rows: Row of the position table for each token. A shorter array is
            repeated.
        tokens: Indices of the tokens that have a gradient, ascending.
        num_tokens: Number of all tokens.
        skip: Id that gets no gradient.
        shared_rows: Number of rows that each block accumulates to besides position rows.

    Example:
        >>> options = {"num_tokens": 3, "skip": None, "shared_rows": 2}
        >>> plan = plan_backward(np.array([7, 3, 7]), None, tokens=np.arange(3), **options)
        >>> plan.ids.tolist(), plan.repeated.tolist(), plan.partial_starts.tolist()
        ([3, 7], [1], [2, 3])
        >>> plan.buffer_rows.tolist()
        [2, 0, -4]
    """
    empty = tokens[:0]
    if position_rows is None:
        num_blocks = _num_blocks(tokens.size, shared_rows)
        order, block_starts = tokens, np.arange(num_blocks + 1) * tokens.size // num_blocks
        positions: tuple[np.ndarray, np.ndarray | None, bool] = empty, None, False
    else:
        order, block_starts, positions = _order_by_position(
            position_rows, num_tokens, tokens, shared_rows
        )
    if ids is None:
        buffer_rows = unique_ids = np.arange(num_tokens)
        repeated, partial_starts = empty, np.array([num_tokens])
    else:
        buffer_rows, unique_ids, repeated, partial_starts = _rows_of_ids(
            ids, order, block_starts, -1 if skip is None else skip
        )
    return BackwardPlan(
        buffer_rows, unique_ids, repeated, partial_starts, order, block_starts, *positions
    )


def _rows_of_ids(
    ids: np.ndarray, token_order: np.ndarray, block_starts: np.ndarray, skip: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the first four fields of the plan."""
    size = token_order.size
    buffer_rows = np.empty(ids.size, np.int64)
    unique, repeated = np.empty(size, np.int64), np.empty(size, np.int64)
    partial_starts, counts = np.empty(size + 1, np.int64), np.empty(2, np.int64)
    args = buffer_rows, unique, repeated, partial_starts, counts
    if not _assign_buffer_rows(ids, token_order, block_starts, skip, *args):
        raise IndexError(f"ids must not be negative, got {ids.min()}")
    num_ids, num_repeated = counts.tolist()
    # Gradients keep their ids, and a view would keep the longer array alive.
    return (
        buffer_rows,
        unique[:num_ids].copy(),
        repeated[:num_repeated],
        partial_starts[: num_repeated + 1],
    )


def _order_by_position(
    position_rows: np.ndarray, num_tokens: int, tokens: np.ndarray, shared_rows: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, bool]]:
    """Return the token order, the blocks' starts, and the last three fields of the plan."""
    order, starts = np.empty(tokens.size, np.int64), np.empty(MAX_BLOCKS + 1, np.int64)
    unique_rows = np.empty(position_rows.size, np.int64)
    indices, counts = np.empty(num_tokens, np.int64), np.empty(2, np.int64)
    args = order, starts, unique_rows, indices, counts
    splits = _block_by_position(position_rows, tokens, shared_rows, *args)
    num_blocks, num_rows = counts.tolist()
    positions = unique_rows[:num_rows], indices, splits
    return tokens if splits else order, starts[: num_blocks + 1], positions


# The kernels below write to arrays that Python allocated: an interrupt that is pending when
# Numba creates an array becomes a SystemError.
@kernel()
def _assign_buffer_rows(
    ids,
    token_order,
    block_starts,
    skip,
    buffer_rows,
    unique,
    repeated,
    partial_starts,
    counts,
):
    """Write the first four fields of the plan, and the number of ids and repeated ids.

    Returns:
        False if one of the ids is negative.
    """
    order, spare = np.empty_like(token_order), np.empty_like(token_order)
    bounds = np.empty(token_order.size + 1, np.int64)
    # Tokens are ordered by block, so those of each id are too.
    num_groups = group_tokens(ids, token_order, order, spare, bounds, unique)
    if num_groups < 0:
        return False
    buffer_rows[:] = -1
    next_partial, row, count = 0, 0, 0
    for index in range(num_groups):
        next_partial += unique[index] != skip
    partial_starts[0] = next_partial
    blocks = _block_of_tokens(token_order, block_starts, ids.size)
    for index in range(num_groups):
        if unique[index] == skip:
            continue
        first, end = bounds[index], bounds[index + 1]
        unique[row] = unique[index]
        if end - first == 1:
            buffer_rows[order[first]] = row
        else:
            for i in range(first, end):
                if i > first and blocks[order[i]] == blocks[order[i - 1]]:
                    buffer_rows[order[i]] = -2 - (next_partial - 1)
                else:
                    buffer_rows[order[i]], next_partial = next_partial, next_partial + 1
            repeated[count], count = row, count + 1
            partial_starts[count] = next_partial
        row += 1
    counts[0], counts[1] = row, count
    return True


@internal
def _block_of_tokens(token_order, block_starts, num_tokens):
    blocks = np.empty(num_tokens, np.int64)
    for block in range(block_starts.size - 1):
        for i in range(block_starts[block], block_starts[block + 1]):
            blocks[token_order[i]] = block
    return blocks


@kernel()
def _block_by_position(
    position_rows, tokens, shared_rows, order, starts, unique_rows, indices, counts
):
    """Write the token order, the blocks' starts, and the position rows with their indices.

    ``counts`` gets the number of blocks and of position rows.

    Returns:
        Whether several blocks may read the same position row. The token order is then that
        of ``tokens``, and ``order`` is not written.
    """
    tokens_of_rows, num_rows = _index_positions(position_rows, tokens, unique_rows, indices)
    counts[1] = num_rows
    most_tokens = 0
    for count in tokens_of_rows:
        most_tokens = max(most_tokens, count)
    if FREQUENT * most_tokens > tokens.size >= FREQUENT * num_rows:
        # Few rows with many tokens each: every block has position sums of its own.
        num_blocks = _num_blocks(tokens.size, shared_rows + num_rows)
        for block in range(num_blocks + 1):
            starts[block] = block * tokens.size // num_blocks
        counts[0] = num_blocks
        return True
    max_blocks = _num_blocks(tokens.size, shared_rows)
    blocks, num_blocks = _block_of_positions(
        tokens_of_rows, max_blocks, tokens.size, starts
    )
    counts[0], free = num_blocks, np.empty(num_blocks, np.int64)
    for block in range(num_blocks):
        free[block] = starts[block]
    for token in tokens:
        block = blocks[indices[token]]
        order[free[block]] = token
        free[block] += 1
    return False


@internal
def _index_positions(position_rows, tokens, rows, indices):
    """Write the unique rows and each token's index in them; return counts and their number.

    The counts are those of the tokens of each row.
    """
    size, num_tokens = position_rows.size, indices.size
    order, spare = np.empty(size, np.int64), np.empty(size, np.int64)
    bounds = np.empty(size + 1, np.int64)
    all_rows, ranks = np.empty(size, np.int64), np.empty(size, np.int64)
    for i in range(size):
        all_rows[i] = i
    num_rows = group_tokens(position_rows, all_rows, order, spare, bounds, rows)
    for rank in range(num_rows):
        for i in range(bounds[rank], bounds[rank + 1]):
            ranks[order[i]] = rank
    for first in range(0, num_tokens, max(1, size)):
        for i in range(min(size, num_tokens - first)):
            indices[first + i] = ranks[i]
    counts, used = np.zeros(max(0, num_rows), np.int64), 0
    for token in tokens:
        counts[indices[token]] += 1
    # Rows that only masked tokens read are removed.
    for rank in range(num_rows):
        rows[used], counts[used], ranks[rank] = rows[rank], counts[rank], used
        used += counts[used] > 0
    if used < num_rows:
        for token in tokens:
            indices[token] = ranks[indices[token]]
    return counts[:used], used


@internal
def _block_of_positions(counts, max_blocks, num_tokens, starts):
    """Write the blocks' starts; return the block of each position row and their number.

    Args:
        counts: Number of tokens of each position row.
        max_blocks: Number of blocks; fewer if a row has more tokens than a block.
        num_tokens: Sum of ``counts``.
        starts: Start of each block, and the end of the last.
    """
    blocks, block, before, last = np.empty_like(counts), 0, 0, 0
    starts[0] = 0
    for row in range(counts.size):
        if before * max_blocks // num_tokens != last:
            last, block = before * max_blocks // num_tokens, block + 1
            starts[block] = before
        blocks[row], before = block, before + counts[row]
    starts[block + 1] = before
    return blocks, block + 1


@kernel()
def _num_blocks(num_tokens, accumulator_rows):
    """Return the number of blocks, given the rows that each accumulates to."""
    share = MIN_TOKENS_PER_ACCUMULATOR_ROW * accumulator_rows
    return max(1, min(MAX_BLOCKS, num_tokens // share))
