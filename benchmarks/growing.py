"""Rows of ids that get one when they are first seen, beside a dictionary in Python."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from firstlayer.embeddings.id_map import IdMap
from firstlayer.numpy import Embedding, GrowingEmbedding

from .ids import batches
from .timing import Case

CAPACITY, WIDTH, SHAPE = 1_000_000, 64, (32, 128)
# Number by which the ids of the dictionary benchmarks are spread over 64 bits.
SPREAD = 2**40 + 15


def cases() -> Iterator[Case]:
    """Yield batches of 32 × 128 ids in a full table of a million rows."""
    yield _assign(new=0)
    yield _assign(new=400)
    yield _lookup()


class DictionaryMap:
    """A map with eviction of the least recently used id, on an OrderedDict."""

    def __init__(self, ids: np.ndarray) -> None:
        self.rows = OrderedDict((id_, row + 1) for row, id_ in enumerate(ids.tolist()))

    def assign(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id; new ids get a row."""
        rows, flat = self.rows, ids.reshape(-1).tolist()
        missing = {}
        for id_ in flat:
            if id_ in rows:
                rows.move_to_end(id_)
            else:
                missing[id_] = 0
        for id_ in missing:
            rows[id_] = rows.popitem(last=False)[1]
        return np.array([rows[id_] for id_ in flat]).reshape(ids.shape)


def _assign(*, new: int) -> Case:
    """Return a case in which a batch has this many ids that were never seen."""
    ids = [batch * SPREAD for batch in batches("zipf", CAPACITY, SHAPE)]
    every = np.arange(CAPACITY) * SPREAD
    ours, theirs = IdMap(CAPACITY), DictionaryMap(every)
    ours.assign(every)
    calls = {"ours": 0, "theirs": 0}

    def batch_of(name: str, batch: int) -> np.ndarray:
        if not new:
            return ids[batch]
        calls[name] += 1
        given = ids[batch].copy()
        given.reshape(-1)[:new] = -calls[name] * new - np.arange(new)
        return given

    return Case(
        f"assign rows of {CAPACITY:,}, 32 × 128 ids, {new} of them new",
        lambda batch: ours.assign(batch_of("ours", batch)).rows,
        {"OrderedDict": lambda batch: theirs.assign(batch_of("theirs", batch))},
        {"OrderedDict": 2.0},
    )


def _lookup() -> Case:
    """Return the lookup of a growing table beside that of a plain one, given its rows."""
    layer = GrowingEmbedding(CAPACITY, WIDTH)
    ids = [batch * SPREAD for batch in batches("zipf", CAPACITY, SHAPE)]
    for batch in ids:
        layer.assign(batch)
    rows = [layer.rows(batch) for batch in ids]
    plain = Embedding(weight=layer.table.weight)
    return Case(
        f"growing lookup {CAPACITY:,} × {WIDTH}, 32 × 128 ids",
        lambda batch: layer.vjp(ids[batch])[0],
        {"Embedding, rows given": lambda batch: plain(rows[batch])},
    )
