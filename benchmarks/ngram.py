"""Rows of n-grams: Engram's hash of 4096 tokens to 24 rows each.

Canonical ids, documents and a history are part of the call. The peer does the same with
NumPy's operators on whole arrays.
"""

from collections.abc import Iterator

import numpy as np

from firstlayer.ngram import Engram

from .timing import BATCHES, Case

VOCAB, TOKENS = 129_280, 4096


def cases() -> Iterator[Case]:
    """Yield the hash of a packed sequence."""
    rng = np.random.default_rng(0)
    canonical = np.unique(rng.integers(0, 99_092, VOCAB), return_inverse=True)[1]
    scheme = Engram(order=4, heads=8, layers=(1,), canonical=canonical, pad=2)
    ids = rng.integers(0, VOCAB, (BATCHES, 1, TOKENS))
    history = rng.integers(0, VOCAB, (BATCHES, 1, 3))
    documents = np.sort(rng.integers(0, 9, (BATCHES, 1, TOKENS)))

    def ours(batch: int) -> np.ndarray:
        return scheme(ids[batch], history=history[batch], documents=documents[batch])

    def theirs(batch: int) -> np.ndarray:
        return _rows(scheme, ids[batch], history[batch], documents[batch])

    name = "Engram hash of 4096 tokens to 24 rows, documents and history"
    # 0.25 ms is required, and the peer takes 0.55 ms.
    yield Case(name, ours, {"NumPy": theirs}, {"NumPy": 2.2})


def _rows(
    scheme: Engram, ids: np.ndarray, history: np.ndarray, documents: np.ndarray
) -> np.ndarray:
    layout, span = scheme.layout(), scheme.order
    numbers = scheme.canonical[np.concatenate([history, ids], -1)]
    missing = np.broadcast_to(documents[..., :1], history.shape)
    places = np.concatenate([missing, documents], -1)
    pad, length = scheme.canonical[scheme.pad], ids.shape[-1]
    mix: np.ndarray = numbers[..., span - 1 :] * layout.multipliers[0]
    is_open, rows = np.ones(ids.shape, bool), []
    for n in range(1, span):
        part = slice(span - 1 - n, span - 1 - n + length)
        is_open = is_open & (places[..., part] == documents)
        number = np.where(is_open, numbers[..., part], pad)
        mix = np.bitwise_xor(mix, number * layout.multipliers[n])
        heads = slice((n - 1) * scheme.heads, n * scheme.heads)
        local = mix[..., None] % np.array(layout.sizes[heads])
        rows.append(local + np.array(layout.offsets[heads]))
    return np.concatenate(rows, -1)
