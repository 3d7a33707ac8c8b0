"""Memory of a training step of word vectors."""

from typing import NamedTuple

import numpy as np

from ..runtime.aligned import aligned_zeros

#: Positions per part. Parts are independent of each other within a step.
PART = 64
# Copied rows are padded with zeros to a multiple of this many numbers: one short Lanes, and
# one cache line.
LANE = 16
# Targets of a position whose sums are in registers at a time.
TILE = 6
# Rows are prefetched this many rows ahead.
AHEAD = 4
#: Classes of rows. One thread writes the rows of a class.
CLASSES = 16
# Rows whose counters share a cache line are in one class, which one thread writes.
CLASS_BITS = 4


class Copies(NamedTuple):
    """Rows of a table that parts copy and train.

    Args:
        rows: Copied rows of each part, ``(parts, slots, width)``.
        ids: Word of each copied row.
        counts: Number of copied rows of each part.
        keys: Hash table of each part from words to slots, -1 if an entry is empty.
        order: Slots of each part, by the class of their word.
        starts: First place of each class in ``order``, after one unused number, and the
            number of slots; then unused numbers up to a cache line.
        repeats: Number of copies that changed each row of the table; zeros between steps.
    """

    rows: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    keys: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    repeats: np.ndarray


class Workspace(NamedTuple):
    """Memory of a step.

    Args:
        inputs: Copies of the trained table. After the last slot comes a row for the mean of
            a window.
        outputs: Copies of the table of center words and negatives.
        before: Rows of ``inputs`` as they were copied, if words have several rows.
        mean: The slot of the mean.
        span: Slots of the words from the first window of each part to the last, -1 for a
            word that no window has.
        near: Slots of the context words of each position.
        far: Slots of the center word and the negatives of each position, then the center
            word again up to a multiple of ``TILE``.
        sizes: Number of context words of each position.
        slopes: Dot products of a position, then their gradients, for each part.
        sums: Changes of one lane of the targets of a position, for each part.
        losses: Sum of the losses of each part, and their number.
        negatives: Negatives of a position.
    """

    inputs: Copies
    outputs: Copies
    before: np.ndarray
    mean: np.ndarray
    span: np.ndarray
    near: np.ndarray
    far: np.ndarray
    sizes: np.ndarray
    slopes: np.ndarray
    sums: np.ndarray
    losses: np.ndarray
    negatives: int


def word2vec_workspace(
    batch: int,
    *,
    num_embeddings: int,
    embedding_dim: int,
    window: int,
    negatives: int,
    buckets: int = 0,
) -> Workspace:
    """Return the memory of steps of at most ``batch`` positions.

    Args:
        batch: Largest number of positions.
        num_embeddings: Number of words.
        embedding_dim: Width of a row.
        window: Largest distance of a context word.
        negatives: Negatives of a position.
        buckets: Number of rows of n-grams.
    """
    parts, width = -(-batch // PART), _whole_lines(embedding_dim)
    widest, targets = 2 * window, -(-(negatives + 1) // TILE) * TILE
    slots = _whole_lines(PART + widest)
    return Workspace(
        inputs=_copies(parts, slots, width, num_embeddings + buckets, extra=1),
        outputs=_copies(parts, PART * (negatives + 1), width, num_embeddings),
        before=aligned_zeros((parts, slots if buckets else 0, width)),
        mean=np.array([slots], np.int32),
        span=aligned_zeros((parts, slots), np.int32),
        near=aligned_zeros((parts, PART, widest), np.int32),
        far=aligned_zeros((parts, PART, targets), np.int32),
        sizes=aligned_zeros((parts, PART), np.int32),
        slopes=aligned_zeros((parts, _whole_lines(widest * targets + LANE))),
        sums=aligned_zeros((parts, targets * LANE)),
        losses=np.zeros((parts, 2)),
        negatives=negatives,
    )


def _whole_lines(count: int) -> int:
    return -(-count // LANE) * LANE


def _copies(
    parts: int, slots: int, width: int, num_embeddings: int, *, extra: int = 0
) -> Copies:
    return Copies(
        rows=aligned_zeros((parts, slots + extra, width)),
        ids=aligned_zeros((parts, slots), np.int32),
        counts=np.zeros(parts, np.int64),
        # At most half full.
        keys=aligned_zeros((parts, 2 << (slots - 1).bit_length()), np.int32),
        order=aligned_zeros((parts, slots), np.int32),
        # Threads do not write to a cache line of each other's parts.
        starts=aligned_zeros((parts, _whole_lines(CLASSES + 2)), np.int32),
        repeats=aligned_zeros((num_embeddings,), np.int32),
    )
