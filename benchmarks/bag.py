"""Pooling rows over bags."""

from collections.abc import Iterator

import numpy as np

from firstlayer.embeddings.bag import MODES, Mode
from firstlayer.numpy import EmbeddingBag

from .ids import DISTRIBUTIONS, batches
from .timing import Case


def cases() -> Iterator[Case]:
    """Yield lookups of 512 bags of 20 ids in a table of a million rows."""
    table = np.random.default_rng(0).standard_normal((1_000_000, 128), dtype=np.float32)
    for distribution in DISTRIBUTIONS:
        for mode in MODES:
            yield _bag(table, distribution, mode)


def _bag(table: np.ndarray, distribution: str, mode: Mode) -> Case:
    layer = EmbeddingBag(*table.shape, mode=mode, weight=table)
    ids = batches(distribution, table.shape[0], (512, 20))
    name = f"bag {mode} 1,000,000 × 128, 512 bags of 20, {distribution}"
    try:
        import torch
    except ImportError:
        return Case(name, lambda batch: layer(ids[batch]), {}, missing=("torch",))
    theirs = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(table), mode=mode)
    tensors = [torch.from_numpy(batch) for batch in ids]
    peers = {"torch": lambda batch: theirs(tensors[batch])}
    bars = {"torch": 1.2 if mode == "sum" else 1.0}
    return Case(name, lambda batch: layer(ids[batch]), peers, bars, tolerance=1e-5)
