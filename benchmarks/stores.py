"""Lookups and bags of quantized rows in memory, and of fp8 rows as they are released.

Torch's operators quantize by row. Its 4-bit operator has one scale per row and another
result, so that 4-bit rows are compared within the error of both.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from firstlayer.numpy import Embedding, EmbeddingBag, EmbeddingLayer
from firstlayer.stores import MemoryStore

from .ids import batches
from .timing import Case

TORCH_NAMES = {"int8": "byte", "int4": "4bit"}


def cases() -> Iterator[Case]:
    """Yield lookups, bags, fp8 lookups and complete layers."""
    table = np.random.default_rng(0).standard_normal((1_000_000, 256), dtype=np.float32)
    for format_ in TORCH_NAMES:
        yield _lookup(table, format_)
    table = table[:, :128].copy()
    for format_ in TORCH_NAMES:
        yield _bag(table, format_)
    del table
    for format_ in ("fp8_block", "fp8"):
        yield _fp8(format_)
    for format_ in TORCH_NAMES:
        yield _layer(format_)
        yield from _torch_layer(format_)


def _operator(table: np.ndarray, format_: str) -> Any:
    """Return torch's quantized bags as a function of ids and offsets, or None."""
    try:
        import torch
    except ImportError:
        return None
    name = f"embedding_bag_{TORCH_NAMES[format_]}"
    packed = getattr(torch.ops.quantized, f"{name}_prepack")(torch.from_numpy(table))
    run = getattr(torch.ops.quantized, f"{name}_rowwise_offsets")
    return lambda ids, offsets: run(packed, ids, offsets, False, 0, False)


def _lookup(table: np.ndarray, format_: str) -> Case:
    name = f"{format_} lookup 1,000,000 × 256, 4096 ids"
    ids = [batch.reshape(-1) for batch in batches("uniform", len(table), (32, 128))]
    layer = Embedding.from_store(MemoryStore(table, format=format_))
    floats = Embedding(weight=table)
    # A float row differs from a quantized one by half a step.
    tolerance = {"int8": 0.025, "int4": 1.0}[format_]
    peers: dict[str, Any] = {"our float32": lambda batch: floats(ids[batch])}
    bars = {"our float32": 1.3}
    operator, missing = _operator(table, format_), ("torch",)
    if operator is not None:
        import torch

        tensors, offsets = [torch.from_numpy(batch) for batch in ids], torch.arange(4096)
        peers["torch"] = lambda batch: operator(tensors[batch], offsets)
        bars["torch"], missing = 1.0, ()
    return Case(
        name, lambda batch: layer(ids[batch]), peers, bars, missing, tolerance=tolerance
    )


def _bag(table: np.ndarray, format_: str) -> Case:
    name = f"{format_} bag sum 1,000,000 × 128, 512 bags of 20"
    ids = batches("uniform", len(table), (512, 20))
    layer = EmbeddingBag.from_store(MemoryStore(table, format=format_), mode="sum")
    operator = _operator(table, format_)
    if operator is None:
        return Case(name, lambda batch: layer(ids[batch]), {}, missing=("torch",))
    import torch

    tensors = [torch.from_numpy(batch.reshape(-1)) for batch in ids]
    offsets = torch.arange(0, 512 * 20, 20)
    return Case(
        name,
        lambda batch: layer(ids[batch]),
        {"torch": lambda batch: operator(tensors[batch], offsets)},
        {"torch": 1.0},
        tolerance={"int8": 1e-4, "int4": 5.0}[format_],
    )


def _fp8(format_: str) -> Case:
    name = f"{format_} lookup, 98,304 rows of 256 from memory"
    rng = np.random.default_rng(0)
    rows = 1_000_000
    # Codes without NaN.
    weight = rng.integers(0, 127, (rows, 256), np.uint8)
    scale = np.array([[2.0]], np.float32)
    if format_ == "fp8_block":
        scale = np.full((rows, 8), 128, np.uint8)
    store = MemoryStore.from_parts({"weight": weight, "scale": scale}, 256, format_)
    ids = batches("uniform", rows, (98_304,))
    try:
        import torch
    except ImportError:
        return Case(name, lambda batch: store.read(ids[batch]), {}, missing=("torch",))
    table, tensors = torch.from_numpy(weight), [torch.from_numpy(batch) for batch in ids]

    def theirs(batch: int) -> Any:
        codes = table[tensors[batch]].view(torch.float8_e4m3fn)
        return codes.to(torch.float32).mul_(2)

    return Case(
        name,
        lambda batch: store.read(ids[batch]),
        {"torch": theirs},
        {"torch": 3.0},
        most_rounds=4,
    )


def _layer(format_: str) -> Case:
    layer = EmbeddingLayer(50_000, 512, max_positions=512, layer_norm=True, rng=0)
    small, ids = layer.quantized(format_), batches("uniform", 50_000, (32, 128))
    return Case(
        f"{format_} layer 50,000 × 512, token + learned + norm",
        lambda batch: small(ids[batch]),
        {"our float32": lambda batch: layer(ids[batch])},
        {"our float32": 1.0},
        tolerance={"int8": 0.05, "int4": 1.0}[format_],
    )


def _torch_layer(format_: str) -> Iterator[Case]:
    try:
        import torch
    except ImportError:
        return
    from firstlayer import torch as front_end

    layer = front_end.EmbeddingLayer(50_000, 512, max_positions=512, layer_norm=True)
    small = layer.quantized(format_)
    ids = [torch.from_numpy(x) for x in batches("uniform", 50_000, (32, 128))]
    yield Case(
        f"{format_} layer on torch 50,000 × 512, token + learned + norm",
        torch.no_grad()(lambda batch: small(ids[batch])),
        {"our float32": torch.no_grad()(lambda batch: layer(ids[batch]))},
        {"our float32": 1.0},
        tolerance={"int8": 0.05, "int4": 1.0}[format_],
    )
