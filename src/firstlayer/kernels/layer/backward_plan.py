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

from ..group import grouped
from ..runtime.compile import kernel

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
        order, block_starts, positions = _block_by_position(
            position_rows, num_tokens, tokens, shared_rows
        )
    if ids is None:
        buffer_rows = unique_ids = np.arange(num_tokens)
        repeated, partial_starts = empty, np.array([num_tokens])
    else:
        skipped = -1 if skip is None else skip
        buffer_rows, unique_ids, repeated, partial_starts = _assign_buffer_rows(
            ids, order, block_starts, skipped
        )
        if not partial_starts.size:
            raise ValueError(f"ids must not be negative, got {ids.min()}")
    # Gradients keep their ids, and a view would keep Numba's longer array alive.
    unique_ids = unique_ids.copy()
    return BackwardPlan(
        buffer_rows, unique_ids, repeated, partial_starts, order, block_starts, *positions
    )


@kernel()
def _assign_buffer_rows(ids, token_order, block_starts, skip):
    # Tokens are ordered by block, so those of each id are too.
    order, bounds, unique = grouped(ids, token_order)
    buffer_rows, count = np.full(ids.size, -1), 0
    if not bounds.size:
        return buffer_rows, unique, unique, bounds
    repeated, partial_starts = np.empty_like(unique), np.empty_like(bounds)
    next_partial, row = (unique != skip).sum(), 0
    partial_starts[0] = next_partial
    blocks = _block_of_tokens(token_order, block_starts, ids.size)
    for group in range(unique.size):
        if unique[group] == skip:
            continue
        first, end = bounds[group], bounds[group + 1]
        unique[row] = unique[group]
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
    return buffer_rows, unique[:row], repeated[:count], partial_starts[: count + 1]


@kernel()
def _block_of_tokens(token_order, block_starts, num_tokens):
    blocks = np.empty(num_tokens, np.int64)
    for block in range(block_starts.size - 1):
        for i in range(block_starts[block], block_starts[block + 1]):
            blocks[token_order[i]] = block
    return blocks


@kernel()
def _block_by_position(position_rows, num_tokens, tokens, shared_rows):
    """Return the token order, the blocks' starts, and the last three fields of the plan."""
    indices, unique_rows, counts = _index_positions(position_rows, num_tokens, tokens)
    if (
        FREQUENT * counts > tokens.size
    ).any() and tokens.size >= FREQUENT * unique_rows.size:
        # Few rows with many tokens each: every block has position sums of its own.
        num_blocks = _num_blocks(tokens.size, shared_rows + unique_rows.size)
        starts = np.arange(num_blocks + 1) * tokens.size // num_blocks
        return tokens, starts, (unique_rows, indices, True)
    blocks, starts = _block_of_positions(
        counts, _num_blocks(tokens.size, shared_rows), tokens.size
    )
    order, free = np.empty_like(tokens), starts.copy()
    for token in tokens:
        block = blocks[indices[token]]
        order[free[block]] = token
        free[block] += 1
    return order, starts, (unique_rows, indices, False)


@kernel()
def _index_positions(position_rows, num_tokens, tokens):
    """Return each token's index in the unique rows, those rows, and their counts."""
    order, bounds, rows = grouped(position_rows, np.arange(position_rows.size))
    ranks, indices = np.empty_like(position_rows), np.empty(num_tokens, np.int64)
    for rank in range(rows.size):
        for i in range(bounds[rank], bounds[rank + 1]):
            ranks[order[i]] = rank
    for first in range(0, num_tokens, max(1, position_rows.size)):
        indices[first : first + position_rows.size] = ranks[: num_tokens - first]
    counts, used = np.zeros_like(rows), 0
    for token in tokens:
        counts[indices[token]] += 1
    # Rows that only masked tokens read are removed.
    for rank in range(rows.size):
        rows[used], counts[used], ranks[rank] = rows[rank], counts[rank], used
        used += counts[used] > 0
    if used < rows.size:
        for token in tokens:
            indices[token] = ranks[indices[token]]
    return indices, rows[:used], counts[:used]


@kernel()
def _block_of_positions(counts, max_blocks, num_tokens):
    """Return the block of each position row, and the blocks' starts.

    Args:
        counts: Number of tokens of each position row.
        max_blocks: Number of blocks; fewer if a row has more tokens than a block.
        num_tokens: Sum of ``counts``.
    """
    blocks, starts = np.empty_like(counts), np.empty(max_blocks + 1, np.int64)
    block, before, last = 0, 0, 0
    starts[0] = 0
    for row in range(counts.size):
        if before * max_blocks // num_tokens != last:
            last, block = before * max_blocks // num_tokens, block + 1
            starts[block] = before
        blocks[row], before = block, before + counts[row]
    starts[block + 1] = before
    return blocks, starts[: block + 2]


@kernel()
def _num_blocks(num_tokens, accumulator_rows):
    """Return the number of blocks, given the rows that each accumulates to."""
    share = MIN_TOKENS_PER_ACCUMULATOR_ROW * accumulator_rows
    return max(1, min(MAX_BLOCKS, num_tokens // share))
