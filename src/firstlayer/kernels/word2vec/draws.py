"""Random draws of windows and negatives, each a function of the position and a key."""

from typing import NamedTuple

import numpy as np

from ..runtime.compile import internal

#: Bits of a random draw, and of its prefix used as an index into the guide table.
BITS, GUIDE_BITS = 32, 14


class Noise(NamedTuple):
    """Sampling table of negatives, from :func:`noise_table`.

    Args:
        limits: Word ``i`` is drawn for numbers in ``[limits[i - 1], limits[i])``.
        guide: First candidate word for the leading bits of a number.
    """

    limits: np.ndarray
    guide: np.ndarray


def noise_table(shares: np.ndarray) -> Noise:
    """Return the sampling table of negatives.

    Args:
        shares: Unnormalized probability of each word; may contain zeros.
    """
    sums = np.cumsum(shares, dtype=np.float64)
    limits = np.round(sums / sums[-1] * 2**BITS).astype(np.int64)
    starts = np.arange(2**GUIDE_BITS) << (BITS - GUIDE_BITS)
    return Noise(limits, np.searchsorted(limits, starts, side="right").astype(np.int32))


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
def draw_part(part, stream, documents, start, stop, noise, key, work):
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
            for k in range(1, work.negatives + 1):
                number = _number(key, place, k)
                word = noise.guide[number >> (BITS - GUIDE_BITS)]
                while noise.limits[word] <= number:
                    word += 1
                work.far[part, i, k] = _slot(work.outputs, part, word)
            for k in range(work.negatives + 1, work.far.shape[2]):
                work.far[part, i, k] = work.far[part, i, 0]
