"""Skip-gram with noise: draw what each place should tell apart, and what that teaches.

A place in a text has the words around it as targets, and after them words of a noise
distribution. Places that follow each other share their noise, whose rows then stay in the
cache. What is drawn is a function of the place and a key, so it does not depend on who
draws it; sums over places are made by their caller, in order.
"""

import math

import numpy as np

from .runtime.compile import kernel, prefetch
from .runtime.pool import pieces, run

#: Words of noise at a place, and how many places in a row have the same.
NOISE = 16
SHARED = 8
#: Bits of a number that noise is drawn with, and of those that a guide is asked with.
BITS, GUIDE_BITS = 32, 14
# Rows are asked for this many targets before they are needed.
AHEAD = 2
GRAIN = 128


def noise_table(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what noise is drawn with: limits, and a guide to them.

    Word ``i`` is drawn for numbers from ``limits[i - 1]`` up to ``limits[i]``; the guide
    says for the first bits of a number with which word to begin looking.

    Args:
        shares: How often each word is to be drawn, in proportion; some may be 0.
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
    """Return the targets of each place, and how many of them are its neighbours.

    Neighbours are the words at most ``reach`` away in the same document, with ``reach``
    drawn evenly from 1 to ``window``; the nearer a word, the oftener it is one. ``NOISE``
    words of noise follow them. What is beyond in a row of targets is not set.

    Args:
        stream: The text as int32 ids.
        documents: Which document each of them is in, int32.
        places: Which of them to draw for.
        window: The farthest neighbour.
        noise: What noise is drawn with, see :func:`noise_table`.
        key: Another key draws other words.
    """
    targets = np.empty((len(places), 2 * window + NOISE), np.int32)
    near = np.empty(len(places), np.int64)
    args = stream, documents, places.start, window, *noise, np.uint64(key)
    run(_draw, len(places), *args, targets, near, grain=GRAIN)
    return targets, near


def push_targets(
    table: np.ndarray,
    other: np.ndarray,
    centers: np.ndarray,
    *,
    targets: np.ndarray,
    near: np.ndarray,
    negatives: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return gradients of the logistic loss: by each product, by each center, and the loss.

    Args:
        table: Rows of the centers, float32.
        other: Rows of the targets, float32.
        centers: The word at each place.
        targets: What it is multiplied with, see :func:`draw_targets`.
        near: How many of those should be told from the noise.
        negatives: How many words of noise count as much as one neighbour.
    """
    slopes = np.empty(targets.shape, np.float32)
    pulls = np.empty((centers.size, table.shape[1]), np.float32)
    losses = np.empty(centers.size)
    args = table, other, centers, targets, near, np.float32(negatives / NOISE)
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
    """Return what reaches each target: the ids of targets, bounds, centers and slopes.

    Target ``ids[g]`` was multiplied with ``centers[bounds[g]:bounds[g + 1]]``, in the order
    of their places, and those products have the slopes ``slopes[bounds[g]:bounds[g + 1]]``.

    Args:
        centers: The word at each place.
        targets: What it was multiplied with, see :func:`draw_targets`.
        near: How many of those are neighbours.
        slopes: The gradient by each product, see :func:`push_targets`.
        num_embeddings: How many words there are.
    """
    total = int(near.sum()) + near.size * NOISE
    ends, bounds = np.zeros(num_embeddings, np.int64), np.zeros(total + 1, np.int64)
    ids, rows = np.empty(total, np.int64), np.empty(total, np.int64)
    weights = np.empty(total, np.float32)
    count = _group(centers, targets, near, slopes, ends, ids, bounds, rows, weights)
    return ids[:count], bounds[: count + 1], rows, weights


@kernel()
def _mixed(x):
    """Return 64 bits of which each depends on every bit of ``x`` (SplitMix64's finish)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel()
def _number(key, place, which):
    """Return number ``which`` of a place: 32 even bits."""
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
            for k in range(NOISE):
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
            # Products of likelihoods: two logarithms a place and not twenty.
            told, untold = 1.0, 1.0
            pull[:] = 0
            for k in range(count + NOISE):
                target = targets[i, k]
                if k + AHEAD < count + NOISE:
                    prefetch(other, np.int64(targets[i, k + AHEAD]))
                dot = np.float32(0)
                for d in range(width):
                    dot += table[center, d] * other[target, d]
                if k < count:
                    wrong = one / (one + math.exp(dot))
                    slope, told = -wrong, told * max(one - wrong, least)
                else:
                    wrong = one / (one + math.exp(-dot))
                    slope, untold = noise * wrong, untold * max(one - wrong, least)
                slopes[i, k] = slope
                for d in range(width):
                    pull[d] += slope * other[target, d]
            for d in range(width):
                pulls[i, d] = pull[d]
            losses[i] = -math.log(told) - noise * math.log(untold)


@kernel()
def _group(centers, targets, near, slopes, ends, ids, bounds, rows, weights):
    for i in range(near.size):
        for k in range(near[i] + NOISE):
            ends[targets[i, k]] += 1
    count, end = 0, 0
    for word in range(ends.size):
        if ends[word]:
            ids[count] = word
            count += 1
            start, end = end, end + ends[word]
            ends[word], bounds[count] = start, end
    for i in range(near.size):
        for k in range(near[i] + NOISE):
            place = ends[targets[i, k]]
            ends[targets[i, k]] = place + 1
            rows[place], weights[place] = centers[i], slopes[i, k]
    return count
