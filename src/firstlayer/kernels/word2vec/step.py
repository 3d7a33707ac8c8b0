"""A step of stochastic gradient descent on many parts of a text at once.

A step trains a range of positions, cut into parts of ``PART`` positions. Each part copies
the rows that it needs and updates its copies position after position; after all parts are
done, their changes are added to the tables in the order of the parts. Threads never write
to a row that another one reads, so results do not depend on their number, and the copies of
a part fit into the cache of a core. A row that more than ``MAX_SUM`` parts change gets
``MAX_SUM`` times their mean change.

The update of a position is one small matrix product: the rows of its context words in one
table (skip-gram) or their mean (CBOW), times the rows of the center word and of the
negatives in the other. All context words of a position share its negatives (Ji et al.
2016).
"""

import numpy as np

from ..runtime.compile import internal, kernel, prefetch_row
from ..runtime.pool import pieces, run
from ..runtime.threads import get_num_threads
from .draws import Noise, draw_part
from .position import loss, multiply, slopes, update, update_mean, write_mean
from .word_rows import WordRows, add_to_rows, mean_rows
from .workspace import AHEAD, CLASSES, PART, Workspace

#: The loss is computed at every so many positions: logarithms are slow.
LOSS_EVERY = 16
#: Each part moves a frequent word most of the way to where its context pulls it, so the sum
#: of the changes of many parts would overshoot.
MAX_SUM = np.float32(2)


def word2vec_step(
    table: np.ndarray,
    other: np.ndarray,
    stream: np.ndarray,
    documents: np.ndarray,
    places: range,
    *,
    noise: Noise,
    key: int,
    lr: float,
    workspace: Workspace,
    cbow: bool = False,
    word_rows: WordRows | None = None,
) -> tuple[float, int]:
    """Train both tables on a range of positions; return a sum of losses and their number.

    The context words of a position are at most ``reach`` positions away in the same
    document, with ``reach`` drawn uniformly from 1 to the window. Negatives that equal the
    center word are skipped. Random draws are a function of the position and the key.

    Args:
        table: Rows of context words, float32, changed in place.
        other: Rows of center words and negatives, float32, changed in place.
        stream: The text as int32 ids.
        documents: Document number of each token, int32.
        places: Positions to train, at most as many as the workspace has memory for.
        noise: Sampling table from :func:`noise_table`.
        key: Key of the random draws.
        lr: Learning rate.
        workspace: Memory from :func:`word2vec_workspace`.
        cbow: Whether the mean of the context words predicts the center word, instead of
            each of them.
        word_rows: Rows of ``table`` whose mean is the vector of each word; None if word
            ``i`` has row ``i``. Each of them gets the change of the mean, as in fastText.
    """
    parts = -(-len(places) // PART)
    text = stream, documents, places.start, places.stop
    number = np.uint64(key), np.float32(lr)
    run(
        _train_parts,
        parts,
        *(table, other, *text, noise, *number, workspace, cbow),
        WordRows.none() if word_rows is None else word_rows,
        grain=1,
    )
    if word_rows is None:
        run(_write_rows, CLASSES, table, workspace.inputs, parts, MAX_SUM, grain=1)
    else:
        # Every class goes through the rows of all words, so there are only a few.
        classes = 1 << (get_num_threads() - 1).bit_length()
        args = table, workspace, word_rows, parts, classes, MAX_SUM
        run(add_to_rows, classes, *args, grain=1)
    run(_write_rows, CLASSES, other, workspace.outputs, parts, MAX_SUM, grain=1)
    total, count = workspace.losses[:parts].sum(axis=0)
    return float(total), int(count)


@internal
def _copy_rows(table, copies, part):
    width, count = table.shape[1], copies.counts[part]
    ids, rows = copies.ids[part], copies.rows[part]
    for slot in range(count):
        row = ids[slot]
        for d in range(width):
            rows[slot, d] = table[row, d]


# Views of arrays would count references, and threads contend for the counters.
@kernel(reorder=True)
def _train_parts(
    ticket,
    table,
    other,
    stream,
    documents,
    first,
    last,
    noise,
    key,
    lr,
    work,
    cbow,
    word_rows,
):
    for lo, hi in pieces(ticket):
        for part in range(lo, hi):
            start = first + part * PART
            stop = min(start + PART, last)
            draw_part(part, stream, documents, start, stop, noise, key, table, other, work)
            if word_rows.rows.size:
                mean_rows(table, word_rows, work.inputs, part, work.before)
            else:
                _copy_rows(table, work.inputs, part)
            _copy_rows(other, work.outputs, part)
            inputs, outputs = work.inputs.rows[part], work.outputs.rows[part]
            dots, sums = work.slopes[part], work.sums[part]
            total, count = 0.0, 0
            for i in range(stop - start):
                words, far = work.near[part, i, : work.sizes[part, i]], work.far[part, i]
                if words.size == 0:
                    continue
                near = words
                if cbow:
                    near = work.mean[:]
                    write_mean(inputs, words, near[0])
                multiply(inputs, outputs, near, far, dots)
                if (start + i) % LOSS_EVERY == 0:
                    total += loss(dots, near.size, far)
                    count += near.size
                slopes(dots, near.size, far, lr)
                if cbow:
                    update_mean(inputs, outputs, words, near[0], far, dots)
                else:
                    update(inputs, outputs, near, far, dots, sums)
            work.losses[part, 0], work.losses[part, 1] = total, count


@kernel()
def _write_rows(ticket, table, copies, parts, max_sum):
    """Write copied rows back; a row of several parts gets the sum of their changes."""
    width, repeats, starts = table.shape[1], copies.repeats, copies.starts
    for lo, hi in pieces(ticket):
        for class_ in range(lo, hi):
            for part in range(parts):
                start, end = starts[part, class_ + 1], starts[part, class_ + 2]
                for i in range(start, end):
                    repeats[copies.ids[part, copies.order[part, i]]] += 1
            for part in range(parts):
                start, end = starts[part, class_ + 1], starts[part, class_ + 2]
                ids, order = copies.ids[part], copies.order[part]
                for i in range(start, end):
                    if i + AHEAD < end:
                        prefetch_row(table, np.int64(ids[order[i + AHEAD]]))
                    slot = order[i]
                    row = ids[slot]
                    times = np.float32(abs(repeats[row]))
                    scale = min(np.float32(1), max_sum / times)
                    # old + scale * sum(copy - old): the first part takes the old row.
                    kept = np.float32(1)
                    if repeats[row] > 0:
                        kept -= times * scale
                        repeats[row] = -repeats[row]
                    for d in range(width):
                        table[row, d] = (
                            kept * table[row, d] + scale * copies.rows[part, slot, d]
                        )
            for part in range(parts):
                start, end = starts[part, class_ + 1], starts[part, class_ + 2]
                for i in range(start, end):
                    repeats[copies.ids[part, copies.order[part, i]]] = 0
