"""Random draws of windows and negatives, each a function of the position and a key."""

from typing import NamedTuple

import numpy as np

from ..runtime.compile import inlined, internal, prefetch_row
from .workspace import CLASS_BITS, CLASSES

#: Bits of a random draw, and of its prefix used as an index into the guide table.
BITS, GUIDE_BITS = 32, 16
# 2**64 divided by the golden ratio.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
    state = key + ((np.uint64(place) << np.uint64(16)) + np.uint64(which)) * GOLDEN
    return np.int64(_mixed(state) >> np.uint64(32))


@inlined
def _slot(keys, ids, count, word):
    """Return the slot of a word among the first ``count``, or a new one, ``count``."""
    mask = keys.size - 1
    # The upper bits of a product depend on all bits of the word.
    place = np.int64((np.uint64(word) * GOLDEN) >> np.uint64(32)) & mask
    while keys[place] >= 0 and ids[keys[place]] != word:
        place = (place + 1) & mask
    slot = np.int64(keys[place])
    if slot < 0:
        slot = count
        keys[place], ids[slot] = slot, word
    return slot


@internal
def draw_part(part, stream, documents, start, stop, noise, key, table, other, work):
    """Draw context words and negatives of a part, and give their words slots.

    Their rows in the two tables are prefetched: a draw takes about as long as a prefetch.
    """
    _draw_windows(part, stream, documents, start, stop, key, table, work)
    _draw_targets(part, stream, start, stop, noise, key, other, work)
    _sort_slots(work.inputs, part)
    _sort_slots(work.outputs, part)


@internal
def _draw_windows(part, stream, documents, start, stop, key, table, work):
    keys, ids, near = work.inputs.keys[part], work.inputs.ids[part], work.near[part]
    span, window, slots = work.span[part], near.shape[1] // 2, 0
    for i in range(keys.size):
        keys[i] = -1
    for i in range(span.size):
        span[i] = -1
    for place in range(start, stop):
        i, count, document = place - start, 0, documents[place]
        reach = 1 + (_number(key, place, 0) * window >> BITS)
        for j in range(max(place - reach, 0), min(place + reach + 1, stream.size)):
            if j != place and documents[j] == document:
                at = j - start + window
                if span[at] < 0:
                    slot = _slot(keys, ids, slots, stream[j])
                    span[at] = slot
                    if slot == slots:
                        prefetch_row(table, np.int64(stream[j]))
                        slots += 1
                near[i, count] = span[at]
                count += 1
        work.sizes[part, i] = count
    work.inputs.counts[part] = slots


@internal
def _draw_targets(part, stream, start, stop, noise, key, other, work):
    keys, ids, far = work.outputs.keys[part], work.outputs.ids[part], work.far[part]
    limits, guide, slots = noise.limits, noise.guide, 0
    for i in range(keys.size):
        keys[i] = -1
    for place in range(start, stop):
        i = place - start
        if work.sizes[part, i] == 0:
            continue
        for k in range(work.negatives + 1):
            word = np.int64(stream[place])
            if k > 0:
                number = _number(key, place, k)
                word = np.int64(guide[number >> (BITS - GUIDE_BITS)])
                while limits[word] <= number:
                    word += 1
            slot = _slot(keys, ids, slots, word)
            far[i, k] = slot
            if slot == slots:
                prefetch_row(other, word)
                slots += 1
        for k in range(work.negatives + 1, far.shape[1]):
            far[i, k] = far[i, 0]
    work.outputs.counts[part] = slots


@internal
def _sort_slots(copies, part):
    """Sort the slots of a part by the class of their word."""
    starts, count = copies.starts[part], copies.counts[part]
    ids, order = copies.ids[part], copies.order[part]
    for i in range(CLASSES + 2):
        starts[i] = 0
    for slot in range(count):
        starts[1 + (ids[slot] >> CLASS_BITS & (CLASSES - 1))] += 1
    for i in range(1, CLASSES + 2):
        starts[i] += starts[i - 1]
    # From the end of each class to its start.
    for slot in range(count - 1, -1, -1):
        i = 1 + (ids[slot] >> CLASS_BITS & (CLASSES - 1))
        starts[i] -= 1
        order[starts[i]] = slot
