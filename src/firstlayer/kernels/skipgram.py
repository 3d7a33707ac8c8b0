"""Skip-gram kernels: stochastic gradient descent on many parts of a text at once.

A step trains a range of positions, cut into parts of ``PART`` positions. Each part copies
the rows that it needs, updates its copies position after position, and keeps the
differences from the tables; after all parts are done, the differences are added to the
tables in the order of the parts. Threads never write to a row that another one reads, so
results do not depend on their number, and the copies of a part fit into the cache of a
core. A row that more than ``MAX_SUM`` parts change gets ``MAX_SUM`` times their mean
change.

The update of a position is one small matrix product: the rows of its context words in one
table, times the rows of the center word and of the negatives in the other. All context
words of a position share its negatives (Ji et al. 2016).
"""

import math
from typing import NamedTuple

import numpy as np

from .runtime.compile import inlined, internal, kernel, prefetch_row
from .runtime.pool import pieces, run
from .runtime.threads import get_num_threads

#: Positions per part. Parts are independent of each other within a step.
PART = 64
#: Bits of a random draw, and of its prefix used as an index into the guide table.
BITS, GUIDE_BITS = 32, 14
#: The loss is computed at every so many positions: logarithms are slow.
LOSS_EVERY = 16
# Rows are prefetched this many rows ahead.
AHEAD = 4
# Copied rows are padded with zeros to a multiple of this many numbers.
LANE = 16
# tanh(4.97) by Lambert's fraction is just below 1.
LARGEST_TANH = 4.97
#: Each part moves a frequent word most of the way to where its context pulls it, so the sum
#: of the changes of many parts would overshoot.
MAX_SUM = np.float32(2)


class Noise(NamedTuple):
    """Sampling table of negatives, from :func:`noise_table`.

    Args:
        limits: Word ``i`` is drawn for numbers in ``[limits[i - 1], limits[i])``.
        guide: First candidate word for the leading bits of a number.
    """

    limits: np.ndarray
    guide: np.ndarray


class Copies(NamedTuple):
    """Rows of a table that parts copy and train.

    Args:
        rows: Copied rows of each part, then their change, ``(parts, slots, width)``.
        ids: Word of each copied row.
        counts: Number of copied rows of each part.
        keys: Hash table of each part from words to slots, -1 if an entry is empty.
        repeats: Number of parts that copied each row of the table; zeros between steps.
    """

    rows: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    keys: np.ndarray
    repeats: np.ndarray


class Workspace(NamedTuple):
    """Memory of a step.

    Args:
        inputs: Copies of the trained table.
        outputs: Copies of the table of contexts.
        near: Slots of the context words of each position.
        far: Slots of the center word and the negatives of each position.
        sizes: Number of context words of each position.
        slopes: Dot products of a position, then their gradients, for each part.
        changes: Changes of the context words of a position, for each part.
        losses: Sum of the losses of each part, and their number.
    """

    inputs: Copies
    outputs: Copies
    near: np.ndarray
    far: np.ndarray
    sizes: np.ndarray
    slopes: np.ndarray
    changes: np.ndarray
    losses: np.ndarray


def noise_table(shares: np.ndarray) -> Noise:
    """Return the sampling table of negatives.

    Args:
        shares: Unnormalized probability of each word; may contain zeros.
    """
    sums = np.cumsum(shares, dtype=np.float64)
    limits = np.round(sums / sums[-1] * 2**BITS).astype(np.int64)
    starts = np.arange(2**GUIDE_BITS) << (BITS - GUIDE_BITS)
    return Noise(limits, np.searchsorted(limits, starts, side="right").astype(np.int32))


def skipgram_workspace(
    batch: int, *, num_embeddings: int, embedding_dim: int, window: int, negatives: int
) -> Workspace:
    """Return the memory of steps of at most ``batch`` positions."""
    parts, width = -(-batch // PART), -(-embedding_dim // LANE) * LANE
    widest, targets = 2 * window, negatives + 1
    return Workspace(
        inputs=_copies(parts, PART + widest, width, num_embeddings),
        outputs=_copies(parts, PART * targets, width, num_embeddings),
        near=np.zeros((parts, PART, widest), np.int32),
        far=np.zeros((parts, PART, targets), np.int32),
        sizes=np.zeros((parts, PART), np.int32),
        slopes=np.zeros((parts, widest, targets), np.float32),
        changes=np.zeros((parts, widest, width), np.float32),
        losses=np.zeros((parts, 2)),
    )


def _copies(parts: int, slots: int, width: int, num_embeddings: int) -> Copies:
    return Copies(
        rows=np.zeros((parts, slots, width), np.float32),
        ids=np.zeros((parts, slots), np.int32),
        counts=np.zeros(parts, np.int64),
        # At most half full.
        keys=np.full((parts, 2 << (slots - 1).bit_length()), -1, np.int32),
        repeats=np.zeros(num_embeddings, np.int32),
    )


def skipgram_step(
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
        workspace: Memory from :func:`skipgram_workspace`.
    """
    parts = -(-len(places) // PART)
    text = stream, documents, places.start, places.stop
    args = table, other, *text, noise, np.uint64(key), np.float32(lr), workspace
    run(_train_parts, parts, *args, grain=1)
    classes = 2 * get_num_threads()
    for rows, copies in ((table, workspace.inputs), (other, workspace.outputs)):
        run(_add_changes, classes, rows, copies, parts, classes, grain=1)
    loss, count = workspace.losses[:parts].sum(axis=0)
    return float(loss), int(count)


@internal
def _mixed(x):
    """Return the SplitMix64 finalizer of ``x``."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@internal
def _number(key, place, which):
    """Return the random 32-bit draw number ``which`` of a position."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = key + ((np.uint64(place) << np.uint64(16)) + np.uint64(which)) * golden
    return np.int64(_mixed(state) >> np.uint64(32))


@internal
def _slot(copies, part, word):
    """Return the slot of a word in a part, a new one if it has none."""
    mask = copies.keys.shape[1] - 1
    place = np.int64(_mixed(np.uint64(word)) & np.uint64(mask))
    while True:
        slot = copies.keys[part, place]
        if slot < 0:
            slot = copies.counts[part]
            copies.keys[part, place] = slot
            copies.ids[part, slot] = word
            copies.counts[part] = slot + 1
            return slot
        if copies.ids[part, slot] == word:
            return np.int64(slot)
        place = (place + 1) & mask


@internal
def _draw(part, stream, documents, start, stop, noise, key, work):
    """Draw context words and negatives of a part, and give their words slots."""
    work.inputs.counts[part] = work.outputs.counts[part] = 0
    work.inputs.keys[part] = -1
    work.outputs.keys[part] = -1
    window = work.near.shape[2] // 2
    for place in range(start, stop):
        i, count, document = place - start, 0, documents[place]
        reach = 1 + (_number(key, place, 0) * window >> BITS)
        for j in range(max(place - reach, 0), min(place + reach + 1, stream.size)):
            if j != place and documents[j] == document:
                work.near[part, i, count] = _slot(work.inputs, part, stream[j])
                count += 1
        work.sizes[part, i] = count
        if count:
            work.far[part, i, 0] = _slot(work.outputs, part, stream[place])
            for k in range(1, work.far.shape[2]):
                number = _number(key, place, k)
                word = noise.guide[number >> (BITS - GUIDE_BITS)]
                while noise.limits[word] <= number:
                    word += 1
                work.far[part, i, k] = _slot(work.outputs, part, word)


@internal
def _copy_rows(table, copies, part):
    width, count = table.shape[1], copies.counts[part]
    for slot in range(count):
        if slot + AHEAD < count:
            prefetch_row(table, np.int64(copies.ids[part, slot + AHEAD]))
        row = copies.ids[part, slot]
        for d in range(width):
            copies.rows[part, slot, d] = table[row, d]


@internal
def _subtract_rows(table, copies, part):
    width, count = table.shape[1], copies.counts[part]
    for slot in range(count):
        if slot + AHEAD < count:
            prefetch_row(table, np.int64(copies.ids[part, slot + AHEAD]))
        row = copies.ids[part, slot]
        for d in range(width):
            copies.rows[part, slot, d] -= table[row, d]


@inlined
def _sigmoid(x):
    """Return the logistic function of ``x`` within 2e-5, without a call, for SIMD."""
    y = min(max(x * np.float32(0.5), np.float32(-LARGEST_TANH)), np.float32(LARGEST_TANH))
    s = y * y
    # Lambert's continued fraction of tanh.
    p = y * (np.float32(135135) + s * (np.float32(17325) + s * (np.float32(378) + s)))
    q = np.float32(135135) + s * (
        np.float32(62370) + s * (np.float32(3150) + s * np.float32(28))
    )
    return np.float32(0.5) + np.float32(0.5) * (p / q)


@internal
def _loss(dots, far):
    """Return the logistic loss of the dot products of a position, in nats."""
    loss = 0.0
    for a in range(dots.shape[0]):
        for k in range(dots.shape[1]):
            if k == 0 or far[k] != far[0]:
                x = np.float64(dots[a, k]) * (-1.0 if k == 0 else 1.0)
                loss += max(x, 0.0) + math.log1p(math.exp(-abs(x)))
    return loss


@inlined
def _multiply(inputs, outputs, near, far, dots):
    width, n = inputs.shape[1], far.size
    for a in range(near.size):
        row = inputs[near[a]]
        k = 0
        while k + 3 <= n:
            x, y, z = outputs[far[k]], outputs[far[k + 1]], outputs[far[k + 2]]
            p, q, r = np.float32(0), np.float32(0), np.float32(0)
            for d in range(width):
                p += row[d] * x[d]
                q += row[d] * y[d]
                r += row[d] * z[d]
            dots[a, k], dots[a, k + 1], dots[a, k + 2] = p, q, r
            k += 3
        while k < n:
            x, p = outputs[far[k]], np.float32(0)
            for d in range(width):
                p += row[d] * x[d]
            dots[a, k] = p
            k += 1


@internal
def _slopes(dots, far, lr):
    """Replace dot products by their negative gradient, times the learning rate."""
    for a in range(dots.shape[0]):
        for k in range(dots.shape[1]):
            dots[a, k] = -lr * _sigmoid(dots[a, k])
        dots[a, 0] += lr
    for k in range(1, dots.shape[1]):
        if far[k] == far[0]:
            for a in range(dots.shape[0]):
                dots[a, k] = 0


@inlined
def _update(inputs, outputs, near, far, slopes, changes):
    _add_products(changes, slopes, outputs, far)
    width, m = inputs.shape[1], near.size
    for k in range(far.size):
        out = outputs[far[k]]
        a = 0
        while a + 3 <= m:
            x, y, z = inputs[near[a]], inputs[near[a + 1]], inputs[near[a + 2]]
            p, q, r = slopes[a, k], slopes[a + 1, k], slopes[a + 2, k]
            for d in range(width):
                out[d] += p * x[d] + q * y[d] + r * z[d]
            a += 3
        while a < m:
            x, p = inputs[near[a]], slopes[a, k]
            for d in range(width):
                out[d] += p * x[d]
            a += 1
    for a in range(m):
        row = inputs[near[a]]
        for d in range(width):
            row[d] += changes[a, d]


@inlined
def _add_products(changes, slopes, outputs, far):
    width, n = outputs.shape[1], far.size
    for a in range(slopes.shape[0]):
        change = changes[a]
        change[:] = 0
        k = 0
        while k + 3 <= n:
            x, y, z = outputs[far[k]], outputs[far[k + 1]], outputs[far[k + 2]]
            p, q, r = slopes[a, k], slopes[a, k + 1], slopes[a, k + 2]
            for d in range(width):
                change[d] += p * x[d] + q * y[d] + r * z[d]
            k += 3
        while k < n:
            x, p = outputs[far[k]], slopes[a, k]
            for d in range(width):
                change[d] += p * x[d]
            k += 1


@kernel(reorder=True)
def _train_parts(
    ticket, table, other, stream, documents, first, last, noise, key, lr, work
):
    for lo, hi in pieces(ticket):
        for part in range(lo, hi):
            start = first + part * PART
            stop = min(start + PART, last)
            _draw(part, stream, documents, start, stop, noise, key, work)
            _copy_rows(table, work.inputs, part)
            _copy_rows(other, work.outputs, part)
            loss, losses = 0.0, 0
            for i in range(stop - start):
                m, far = work.sizes[part, i], work.far[part, i]
                near, dots = work.near[part, i, :m], work.slopes[part, :m]
                inputs, outputs = work.inputs.rows[part], work.outputs.rows[part]
                _multiply(inputs, outputs, near, far, dots)
                if (start + i) % LOSS_EVERY == 0:
                    loss += _loss(dots, far)
                    losses += m
                _slopes(dots, far, lr)
                _update(inputs, outputs, near, far, dots, work.changes[part])
            work.losses[part, 0], work.losses[part, 1] = loss, losses
            _subtract_rows(table, work.inputs, part)
            _subtract_rows(other, work.outputs, part)


@kernel()
def _add_changes(ticket, table, copies, parts, classes):
    width, repeats = table.shape[1], copies.repeats
    for lo, hi in pieces(ticket):
        for class_ in range(lo, hi):
            # The rows of a class belong to one thread, which adds parts in order.
            for part in range(parts):
                for slot in range(copies.counts[part]):
                    row = copies.ids[part, slot]
                    if row % classes == class_:
                        repeats[row] += 1
            for part in range(parts):
                for slot in range(copies.counts[part]):
                    row = copies.ids[part, slot]
                    if row % classes == class_:
                        scale = min(np.float32(1), MAX_SUM / np.float32(repeats[row]))
                        for d in range(width):
                            table[row, d] += scale * copies.rows[part, slot, d]
            for part in range(parts):
                for slot in range(copies.counts[part]):
                    row = copies.ids[part, slot]
                    if row % classes == class_:
                        repeats[row] = 0
