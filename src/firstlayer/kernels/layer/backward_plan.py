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

from ..group import group_private
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
        order, block_starts = tokens, _even_blocks(tokens.size, shared_rows)
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
    # Tokens are ordered by block, so those of each id are too.
    order, bounds, unique = group_private(ids[token_order])
    blocks, repeated = np.empty(size, np.int64), np.empty(size, np.int64)
    buffer_rows, counts = np.empty(ids.size, np.int64), np.empty(2, np.int64)
    partial_starts = np.empty(size + 1, np.int64)
    written = blocks, buffer_rows, repeated, partial_starts, counts
    _assign_buffer_rows(token_order, block_starts, order, bounds, unique, skip, *written)
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
    groups = group_private(position_rows)
    order, starts = np.empty(tokens.size, np.int64), np.empty(MAX_BLOCKS + 1, np.int64)
    indices, counts = np.empty(num_tokens, np.int64), np.empty(2, np.int64)
    ranks, free = np.empty(position_rows.size, np.int64), np.empty(MAX_BLOCKS, np.int64)
    tokens_of_rows = np.zeros(groups[2].size, np.int64)
    args = order, starts, indices, counts, ranks, free, tokens_of_rows
    max_blocks = _num_blocks(tokens.size, shared_rows)
    splits = _block_by_position(*groups, tokens, max_blocks, *args)
    num_blocks, num_rows = counts.tolist()
    positions = groups[2][:num_rows], indices, splits
    if splits:
        return tokens, _even_blocks(tokens.size, shared_rows + num_rows), positions
    return order, starts[: num_blocks + 1], positions


def _even_blocks(num_tokens: int, accumulator_rows: int) -> np.ndarray:
    """Return the starts of equal blocks, given the rows that each accumulates to."""
    num_blocks = _num_blocks(num_tokens, accumulator_rows)
    return np.arange(num_blocks + 1) * num_tokens // num_blocks


def _num_blocks(num_tokens: int, accumulator_rows: int) -> int:
    share = MIN_TOKENS_PER_ACCUMULATOR_ROW * accumulator_rows
    return max(1, min(MAX_BLOCKS, num_tokens // share))


@kernel()
def _assign_buffer_rows(
    token_order,
    block_starts,
    order,
    bounds,
    unique,
    skip,
    blocks,
    buffer_rows,
    repeated,
    partial_starts,
    counts,
):
    """Write the first four fields of the plan, and the number of ids and repeated ids.

    Args:
        token_order: Field of the plan.
        block_starts: Field of the plan.
        order: Indices of ``token_order``, grouped by id.
        bounds: Bounds of the groups.
        unique: Id of each group; those that have a gradient are moved to the front.
        skip: Id that gets no gradient.
        blocks: Scratch memory of the size of ``token_order``.
        buffer_rows: Field of the plan.
        repeated: Field of the plan, in the beginning of this array.
        partial_starts: Field of the plan, in the beginning of this array.
        counts: Number of ids that have a gradient, and of repeated ones.
    """
    for block in range(block_starts.size - 1):
        for k in range(block_starts[block], block_starts[block + 1]):
            blocks[k] = block
    for token in range(buffer_rows.size):
        buffer_rows[token] = -1
    next_partial, row, count = 0, 0, 0
    for index in range(unique.size):
        next_partial += unique[index] != skip
    partial_starts[0] = next_partial
    for index in range(unique.size):
        if unique[index] == skip:
            continue
        first, end = bounds[index], bounds[index + 1]
        unique[row] = unique[index]
        if end - first == 1:
            buffer_rows[token_order[order[first]]] = row
        else:
            last = -1
            for i in range(first, end):
                token, block = token_order[order[i]], blocks[order[i]]
                if block == last:
                    buffer_rows[token] = -2 - (next_partial - 1)
                else:
                    buffer_rows[token] = next_partial
                    next_partial, last = next_partial + 1, block
            repeated[count] = row
            count += 1
            partial_starts[count] = next_partial
        row += 1
    counts[0], counts[1] = row, count


@kernel()
def _block_by_position(
    order_of_rows,
    bounds,
    unique_rows,
    tokens,
    max_blocks,
    order,
    starts,
    indices,
    counts,
    ranks,
    free,
    tokens_of_rows,
):
    """Write the token order, the blocks' starts, and the position rows with their indices.

    ``counts`` gets the number of blocks and of position rows. The last three arguments are
    scratch memory; ``tokens_of_rows`` is zero.

    Returns:
        Whether several blocks may read the same position row. The token order is then that
        of ``tokens`` in equal blocks, and neither is written.
    """
    size = ranks.size
    for rank in range(unique_rows.size):
        for i in range(bounds[rank], bounds[rank + 1]):
            ranks[order_of_rows[i]] = rank
    at = 0
    for i in range(indices.size):
        indices[i] = ranks[at]
        at = 0 if at + 1 == size else at + 1
    for token in tokens:
        tokens_of_rows[indices[token]] += 1
    # Rows that only masked tokens read are removed. ``ranks`` gets the new indices.
    num_rows, most = 0, 0
    for rank in range(unique_rows.size):
        count = tokens_of_rows[rank]
        unique_rows[num_rows], tokens_of_rows[num_rows] = unique_rows[rank], count
        ranks[rank] = num_rows
        if count > most:
            most = count
        num_rows += count > 0
    if num_rows < unique_rows.size:
        for token in tokens:
            indices[token] = ranks[indices[token]]
    counts[1] = num_rows
    if FREQUENT * most > tokens.size >= FREQUENT * num_rows:
        # Few rows with many tokens each: every block has position sums of its own.
        counts[0] = 0
        return True
    # Fewer blocks than ``max_blocks`` if a row has more tokens than a block.
    block, before, last, starts[0], free[0] = 0, 0, 0, 0, 0
    for row in range(num_rows):
        if before * max_blocks // tokens.size != last:
            last, block = before * max_blocks // tokens.size, block + 1
            starts[block], free[block] = before, before
        before += tokens_of_rows[row]
        # The block of the row takes the place of its number of tokens.
        tokens_of_rows[row] = block
    starts[block + 1], counts[0] = before, block + 1
    for token in tokens:
        block = tokens_of_rows[indices[token]]
        order[free[block]] = token
        free[block] += 1
    return False
