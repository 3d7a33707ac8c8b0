"""Skip-gram kernels: draw targets, compute gradients, group them by target.

The targets of a position are its context words followed by negatives. Consecutive positions
share their negatives, whose rows then stay in the cache. Random draws are a function of the
position and a key, so they do not depend on the thread; the caller sums over positions in
order.
"""

import math

import numpy as np

from .runtime.compile import internal, kernel, prefetch
from .runtime.pool import pieces, run

#: Negatives per position, and number of consecutive positions that share them.
NEGATIVES = 16
SHARED = 8
#: Bits of a random draw, and of its prefix used as an index into the guide table.
BITS, GUIDE_BITS = 32, 14
# Rows are prefetched this many targets ahead.
AHEAD = 2
GRAIN = 128


def noise_table(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampling table of negatives: cumulative limits and a guide into them.

    Word ``i`` is drawn for numbers in ``[limits[i - 1], limits[i])``. The guide maps the
    leading bits of a number to the first candidate word.

    Args:
        shares: Unnormalized probability of each word; may contain zeros.
    """
    sums = np.cumsum(shares, dtype=np.float64)
    limits = np.round(sums / sums[-1] * 2**BITS).astype(np.int64)
    starts = np.arange(2**GUIDE_BITS) << (BITS - GUIDE_BITS)
    return limits, np.searchsorted(limits, starts, side="right").astype(np.int32)


def draw_targets(
    stream: np.ndarray,
    documents: np.ndarray,
    places: range,
    *,
    window: int,
    noise: tuple[np.ndarray, np.ndarray],
    key: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets of each position, and the number of context words among them.

    Context words are at most ``reach`` positions away in the same document, with ``reach``
    drawn uniformly from 1 to ``window``. ``NEGATIVES`` negatives follow them. The rest of a
    row of targets is uninitialized.

    Args:
        stream: The text as int32 ids.
        documents: Document number of each token, int32.
        places: Positions to draw for.
        window: Largest distance of a context word.
        noise: Sampling table from :func:`noise_table`.
        key: Key of the random draws.
    """
    targets = np.empty((len(places), 2 * window + NEGATIVES), np.int32)
    near = np.empty(len(places), np.int64)
    args = stream, documents, places.start, window, *noise, np.uint64(key)
    run(_draw, len(places), *args, targets, near, grain=GRAIN)
    return targets, near


def skipgram_gradients(
    table: np.ndarray,
    other: np.ndarray,
    centers: np.ndarray,
    *,
    targets: np.ndarray,
    near: np.ndarray,
    negatives: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return gradients of the logistic loss by dot product and by center row, and the loss.

    Args:
        table: Center rows, float32.
        other: Target rows, float32.
        centers: Center word of each position.
        targets: Targets from :func:`draw_targets`.
        near: Number of context words among the targets of each position.
        negatives: Weight of the negatives, in negatives per context word.
    """
    slopes = np.empty(targets.shape, np.float32)
    pulls = np.empty((centers.size, table.shape[1]), np.float32)
    losses = np.empty(centers.size)
    args = table, other, centers, targets, near, np.float32(negatives / NEGATIVES)
    run(_push, centers.size, *args, slopes, pulls, losses, grain=GRAIN)
    return slopes, pulls, losses


def group_targets(
    centers: np.ndarray,
    targets: np.ndarray,
    *,
    near: np.ndarray,
    slopes: np.ndarray,
    num_embeddings: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group dot products by target: return target ids, bounds, centers and slopes.

    Target ``ids[g]`` was multiplied with ``centers[bounds[g]:bounds[g + 1]]``, in the order
    of positions; ``slopes[bounds[g]:bounds[g + 1]]`` are the gradients of those products.

    Args:
        centers: Center word of each position.
        targets: Targets from :func:`draw_targets`.
        near: Number of context words among the targets of each position.
        slopes: Gradients by dot product from :func:`skipgram_gradients`.
        num_embeddings: Vocabulary size.
    """
    total = int(near.sum()) + near.size * NEGATIVES
    ends, bounds = np.zeros(num_embeddings, np.int64), np.zeros(total + 1, np.int64)
    ids, rows = np.empty(total, np.int64), np.empty(total, np.int64)
    weights = np.empty(total, np.float32)
    count = _group(centers, targets, near, slopes, ends, ids, bounds, rows, weights)
    return ids[:count], bounds[: count + 1], rows, weights


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
    state = key + (np.uint64(place) * np.uint64(64) + np.uint64(which)) * golden
    return np.int64(_mixed(state) >> np.uint64(32))


@kernel()
def _draw(ticket, stream, documents, start, window, limits, guide, key, targets, near):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            place, count = start + i, 0
            reach = 1 + (_number(key, place, 0) * window >> BITS)
            for j in range(max(place - reach, 0), min(place + reach + 1, stream.size)):
                if j != place and documents[j] == documents[place]:
                    targets[i, count] = stream[j]
                    count += 1
            near[i] = count
            for k in range(NEGATIVES):
                number = _number(key, place // SHARED * SHARED, 1 + k)
                word = guide[number >> (BITS - GUIDE_BITS)]
                while limits[word] <= number:
                    word += 1
                targets[i, count + k] = word


@kernel(reorder=True)
def _push(ticket, table, other, centers, targets, near, weight, slopes, pulls, losses):
    width, one, least = table.shape[1], np.float32(1), np.float32(1e-9)
    pull = np.empty(width, np.float32)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            center, count = centers[i], near[i]
            noise = np.float32(count) * weight
            # Multiplying likelihoods needs two logarithms per position instead of twenty.
            positive, negative = 1.0, 1.0
            pull[:] = 0
            for k in range(count + NEGATIVES):
                target = targets[i, k]
                if k + AHEAD < count + NEGATIVES:
                    prefetch(other, np.int64(targets[i, k + AHEAD]))
                dot = np.float32(0)
                for d in range(width):
                    dot += table[center, d] * other[target, d]
                if k < count:
                    wrong = one / (one + math.exp(dot))
                    slope, positive = -wrong, positive * max(one - wrong, least)
                else:
                    wrong = one / (one + math.exp(-dot))
                    slope, negative = noise * wrong, negative * max(one - wrong, least)
                slopes[i, k] = slope
                for d in range(width):
                    pull[d] += slope * other[target, d]
            for d in range(width):
                pulls[i, d] = pull[d]
            losses[i] = -math.log(positive) - noise * math.log(negative)


@kernel()
def _group(centers, targets, near, slopes, ends, ids, bounds, rows, weights):
    for i in range(near.size):
        for k in range(near[i] + NEGATIVES):
            ends[targets[i, k]] += 1
    count, end = 0, 0
    for word in range(ends.size):
        if ends[word]:
            ids[count] = word
            count += 1
            start, end = end, end + ends[word]
            ends[word], bounds[count] = start, end
    for i in range(near.size):
        for k in range(near[i] + NEGATIVES):
            place = ends[targets[i, k]]
            ends[targets[i, k]] = place + 1
            rows[place], weights[place] = centers[i], slopes[i, k]
    return count
