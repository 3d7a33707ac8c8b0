"""Lookups, and their gradients summed by id."""

from collections.abc import Iterator

import numpy as np

from firstlayer.embeddings.row_gradient import sum_by_id
from firstlayer.numpy import Embedding

from .ids import DISTRIBUTIONS, batches
from .timing import Case

SIZES = ((50_000, 512), (250_000, 1024), (1_000_000, 64))


def cases() -> Iterator[Case]:
    """Yield lookups of 32 × 128 and of 16 ids, and gradients of the former."""
    for rows, width in SIZES:
        table = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
        for distribution in DISTRIBUTIONS:
            yield _lookup(table, distribution, (32, 128), bar=1.0)
        if rows == 50_000:
            yield _lookup(table, "uniform", (16,), bar=2.0, repeat=200)
    for distribution in DISTRIBUTIONS:
        yield _gradient(250_000, 512, distribution)


def _lookup(
    table: np.ndarray,
    distribution: str,
    shape: tuple[int, ...],
    *,
    bar: float,
    repeat: int = 1,
) -> Case:
    rows, width = table.shape
    layer, ids = Embedding(rows, width, weight=table), batches(distribution, rows, shape)
    peers = {"np.take": lambda batch: np.take(table, ids[batch], axis=0)}
    bars = {} if repeat > 1 else {"np.take": bar}
    missing: tuple[str, ...] = ()
    try:
        import torch

        theirs = torch.nn.Embedding.from_pretrained(torch.from_numpy(table))
        tensors = [torch.from_numpy(batch) for batch in ids]
        peers["torch"] = lambda batch: theirs(tensors[batch])
        bars["torch"] = bar
    except ImportError:
        missing = ("torch",)
    sizes = " × ".join(map(str, shape))
    return Case(
        f"lookup {rows:,} × {width}, {sizes} ids, {distribution}",
        lambda batch: layer(ids[batch]),
        peers,
        bars,
        missing,
        repeat=repeat,
    )


def _gradient(rows: int, width: int, distribution: str) -> Case:
    ids = [batch.reshape(-1) for batch in batches(distribution, rows, (32, 128))]
    dy = np.random.default_rng(1).standard_normal((32 * 128, width), dtype=np.float32)
    name = f"gradient by row {rows:,} × {width}, 32 × 128 ids, {distribution}"

    def ours(batch: int) -> np.ndarray:
        return sum_by_id(ids[batch], dy).values

    try:
        import torch
    except ImportError:
        return Case(name, ours, {}, missing=("torch",), tolerance=1e-4)
    weight = torch.zeros(rows, width, requires_grad=True)
    gradient = torch.from_numpy(dy)
    # The forwards run before timing: only backward and coalesce are measured.
    outputs = [
        torch.nn.functional.embedding(torch.from_numpy(batch), weight, sparse=True)
        for batch in ids
    ]

    def theirs(batch: int) -> np.ndarray:
        (sparse,) = torch.autograd.grad(outputs[batch], weight, gradient, retain_graph=True)
        return sparse.coalesce().values().numpy()

    peers = {"torch sparse + coalesce": theirs}
    return Case(name, ours, peers, {"torch sparse + coalesce": 1.5}, tolerance=1e-4)
