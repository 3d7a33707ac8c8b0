"""N-gram schemes for tests: golden values, random schemes, and rows in every library."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from hypothesis import strategies as st

from firstlayer.ngram import ByteGroups, Engram, LongCatNgram, QwenNgram, SaltedNgram

FOLDER = Path(__file__).parent.parent / "data" / "ngram"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())["files"]
# "torch operators" are what runs under tracing and on accelerators.
LIBRARIES = ["numpy", "torch", "torch operators", "jax"]
NUM_IDS = 40


def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the arrays of a golden file."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return MANIFEST[f"{name}.npz"]["config"], dict(arrays)


def rows_in(
    library: str, scheme: Any, ids: Any, *, layer: Any = None, **arrays: Any
) -> Any:
    """Return the rows of a batch of ids as a NumPy array, computed by a library."""
    names = [name for name, value in arrays.items() if value is not None]

    def rows(*values):
        return scheme(values[0], layer=layer, **dict(zip(names, values[1:], strict=True)))

    values = [np.asarray(ids), *(np.asarray(arrays[name]) for name in names)]
    match library:
        case "numpy":
            found = rows(*values)
            assert found.dtype == np.int64
        case "torch":
            found = rows(*map(torch.tensor, values))
            assert found.dtype == torch.int64
        case "torch operators":
            found = torch.vmap(rows)(*map(torch.tensor, values))
            assert found.dtype == torch.int64
        case _:
            found = jax.jit(rows)(*map(jax.numpy.asarray, values))
            assert found.dtype == np.int32
    return np.asarray(found)


def advanced_in(library: str, scheme: Any, history: Any, ids: Any) -> np.ndarray:
    """Return the history after a batch of ids, computed by a library."""
    array = jax.numpy.asarray if library == "jax" else torch.tensor
    before = None if history is None else array(history)
    return np.asarray(scheme.advance(before, array(ids)))


def canonical_map(seed: int, size: int = NUM_IDS) -> np.ndarray:
    """Return a map of ``size`` ids to fewer canonical ids."""
    ids = np.random.default_rng(seed).integers(0, size * 3 // 4, size)
    return np.unique(ids, return_inverse=True)[1]


@st.composite
def schemes(draw: Any) -> Any:
    """Draw a scheme for ids below ``NUM_IDS`` with any hyper-parameters."""
    order, heads = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True))
    base = draw(st.integers(2, 3000) | st.integers(70_000, 10**7))
    seed = draw(st.integers(0, 2**31))
    token = draw(st.integers(0, NUM_IDS - 1))
    match draw(st.sampled_from(["engram", "qwen", "longcat", "bytes", "salted"])):
        case "engram":
            bases = st.lists(st.integers(2, 3000), min_size=order - 1, max_size=order - 1)
            return Engram(
                order=order,
                heads=heads,
                base=draw(st.one_of(st.just(base), bases)),
                layers=layers,
                canonical=canonical_map(seed),
                pad=token,
                seed=seed,
                bits=draw(st.sampled_from([32, 64])),
                hash_negative=draw(st.booleans()),
            )
        case "qwen":
            return QwenNgram(
                order=order,
                heads=heads,
                base=base,
                layers=layers,
                vocab_size=NUM_IDS,
                eos=token,
                seed=seed,
                multiple_of=draw(st.integers(1, 100)),
            )
        case "longcat":
            return LongCatNgram(
                order=order,
                splits=heads,
                ratio=draw(st.floats(0.1, 80) | st.floats(2000, 1e5)),
                vocab_size=NUM_IDS,
                eos=draw(st.one_of(st.none(), st.just(token))),
            )
        case "bytes":
            sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
            functions = draw(st.integers(1, 11))
            return ByteGroups(sizes=sizes, rows=base, functions=functions)
        case _:
            orders = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
            return SaltedNgram(orders=orders, salts=heads, rows=base)


def last_layer(scheme: Any) -> int | None:
    """Return a layer of the scheme that is not the first if there are several."""
    return scheme.layers[-1] if hasattr(scheme, "layers") else None


def reference_rows(
    scheme: Any,
    ids: list[int],
    *,
    layer: int | None,
    documents: list[int] | None = None,
    dead: list[bool] | None = None,
) -> list[list[int]]:
    """Return the rows of one sequence, one position at a time, with Python's integers."""
    layout = scheme.layout(layer)
    return [
        [_row(scheme, layout, c, window) for c in range(scheme.columns)]
        for window in (_window(scheme, p, ids, documents, dead) for p in range(len(ids)))
    ]


def _window(scheme, p, ids, documents, dead) -> list[int]:
    """Return the numbers that the n-grams at ``p`` read, newest first."""
    hashes_negative = getattr(scheme, "hash_negative", False)
    fill = {
        Engram: lambda: int(scheme.canonical[scheme.pad]),
        QwenNgram: lambda: scheme.eos,
    }
    fill = fill.get(type(scheme), lambda: 0)()
    window, is_open = [], True
    for s in range(scheme.history_length + 1):
        at = p - s
        token = ids[at] if at >= 0 else None
        if token is not None and dead is not None and dead[at]:
            token = None
        if token is not None and token < 0 and not hashes_negative:
            token = None
        if isinstance(scheme, QwenNgram) and token is None:
            token = scheme.eos
        is_open = is_open and token is not None
        if s and is_open:
            crosses = documents is not None and documents[at] != documents[p]
            is_open = not crosses and token != getattr(scheme, "eos", None)
        if is_open and isinstance(scheme, Engram) and token is not None and token >= 0:
            token = int(scheme.canonical[token])
        window.append(token if is_open else fill)
    return window


def _row(scheme, layout, c: int, window: list[int]) -> int:
    """Return the row of a column: a sum or a xor of products, modulo a size."""
    if isinstance(scheme, Engram | QwenNgram):
        mix = 0
        for s in range(c // scheme.heads + 2):
            mix ^= window[s] * layout.multipliers[s]
    else:
        pairs = zip(window, layout.multipliers[c], strict=True)
        mix = (sum(a * b for a, b in pairs) + 2**63) % 2**64 - 2**63
    return mix % layout.sizes[c] + layout.offsets[c]
