"""Measurements behind TinyTorch's ``analyze_`` functions.

Each function builds layers, runs them and returns rows of plain values: bytes held by
tensors, seconds per lookup, whether a longer sequence is accepted.
"""

import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from .layers import Embedding, EmbeddingLayer, PosEncoding
from .tensor import Tensor

Row = dict[str, Any]

SCENARIOS = (
    ("Small Model", 10_000, 256),
    ("Medium Model", 50_000, 512),
    ("Large Model", 100_000, 1024),
    ("GPT-3 Scale", 50_257, 12_288),
)
STRATEGIES: tuple[PosEncoding, ...] = ("learned", "sinusoidal", None)


def analyze_embedding_memory_scaling(
    scenarios: Iterable[tuple[str, int, int]] = SCENARIOS,
    *,
    embed_dim: int = 512,
    max_seq_len: int = 2048,
    largest: int = 1 << 28,
) -> dict[str, list[Row]]:
    """Return the memory of token tables and of position strategies.

    Args:
        scenarios: Name, vocab_size and embed_dim of each table.
        embed_dim: Width for the position strategies.
        max_seq_len: Length for the position strategies.
        largest: Tables of more bytes are built on the meta device, which allocates nothing;
            their ``gradient_bytes`` are None.

    Returns:
        ``"tables"``: rows of ``name, vocab_size, embed_dim, parameters, bytes,
        gradient_bytes``, the last of a batch of 128 ids. ``"positions"``: rows of ``name,
        parameters, bytes``, precomputed tables included.

    Example:
        >>> found = analyze_embedding_memory_scaling([("tiny", 10, 4)])
        >>> found["tables"][0]["bytes"], found["tables"][0]["gradient_bytes"]
        (160, 160)
    """
    tables = [_table(*scenario, largest=largest) for scenario in scenarios]
    layers = [EmbeddingLayer(1, embed_dim, max_seq_len, name) for name in STRATEGIES]
    return {"tables": tables, "positions": [_position_memory(layer) for layer in layers]}


def analyze_embedding_performance(
    vocab_sizes: Iterable[int] = (1_000, 10_000, 100_000),
    batch_sizes: Iterable[int] = (1, 16, 64, 256),
    *,
    embed_dim: int = 512,
    seq_len: int = 128,
    seconds: float = 0.05,
) -> list[Row]:
    """Return the duration of lookups.

    Args:
        vocab_sizes: Number of rows of each table.
        batch_sizes: Number of sequences per lookup.
        embed_dim: Width of the tables.
        seq_len: Ids per sequence.
        seconds: Measuring time per table and batch size.

    Returns:
        Rows of ``vocab_size, batch_size, milliseconds, tokens_per_second``, the median of
        the calls.

    Example:
        >>> rows = analyze_embedding_performance([100], [1, 4], seconds=0.01)
        >>> [row["batch_size"] for row in rows], rows[0]["milliseconds"] > 0
        ([1, 4], True)
    """
    rows, batch_sizes = [], tuple(batch_sizes)
    for vocab_size in vocab_sizes:
        embed = Embedding(vocab_size, embed_dim)
        for batch_size in batch_sizes:
            took = _seconds(embed, (batch_size, seq_len), seconds=seconds)
            rows.append({
                "vocab_size": vocab_size,
                "batch_size": batch_size,
                "milliseconds": took * 1e3,
                "tokens_per_second": batch_size * seq_len / took,
            })
    return rows


def analyze_positional_encoding_strategies(
    *, max_seq_len: int = 512, embed_dim: int = 256, beyond: int = 100
) -> list[Row]:
    """Return the memory and variance of each position strategy, and whether it extends.

    Args:
        max_seq_len: Length that the layers are built for.
        embed_dim: Width of each vector.
        beyond: Number of additional tokens in the longer sequence.

    Returns:
        One row per strategy: ``name, parameters, bytes``; ``variance`` of the added vectors
        over positions; ``extends``, whether a longer sequence is accepted and keeps the
        vectors of the shorter one; ``error``, the message if it is not accepted.

    Example:
        >>> rows = analyze_positional_encoding_strategies(max_seq_len=8, embed_dim=4)
        >>> [(row["name"], row["extends"]) for row in rows]
        [('learned', False), ('sinusoidal', True), (None, True)]
    """
    rows = []
    for name in STRATEGIES:
        layer = EmbeddingLayer(1, embed_dim, max_seq_len, name)
        layer.token_embedding.weight.data[:] = 0
        added = layer([0] * max_seq_len).data
        row = {**_position_memory(layer), "variance": float(added.var(axis=0).mean())}
        rows.append({**row, **_longer(layer, added, beyond)})
    return rows


def _table(name: str, vocab_size: int, embed_dim: int, *, largest: int) -> Row:
    shape = (vocab_size, embed_dim)
    table, gradient = torch.empty(shape, device="meta"), None
    if _bytes([table]) <= largest:
        embed = Embedding(*shape)
        embed(np.arange(128) % vocab_size).sum().backward()
        table, gradient = embed.weight, embed.weight.grad
    return {
        "name": name,
        "vocab_size": vocab_size,
        "embed_dim": embed_dim,
        "parameters": table.numel(),
        "bytes": _bytes([table]),
        "gradient_bytes": None if gradient is None else _bytes([gradient]),
    }


def _position_memory(layer: EmbeddingLayer) -> Row:
    trained = layer.parameters()[1:]
    kept = [layer.pos_encoding] if isinstance(layer.pos_encoding, torch.Tensor) else []
    return {
        "name": layer.pos_encoding_type,
        "parameters": sum(table.numel() for table in trained),
        "bytes": _bytes([*trained, *kept]),
    }


def _longer(layer: EmbeddingLayer, added: np.ndarray, beyond: int) -> Row:
    try:
        longer = layer([0] * (len(added) + beyond)).data
    except ValueError as error:
        return {"extends": False, "error": str(error)}
    return {"extends": bool((longer[: len(added)] == added).all()), "error": None}


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _seconds(embed: Embedding, shape: tuple[int, int], *, seconds: float) -> float:
    ids = np.random.default_rng(0).integers(0, embed.vocab_size, shape)
    tokens, took = Tensor(ids), []
    embed(tokens)
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        start = time.perf_counter()
        embed(tokens)
        took.append(time.perf_counter() - start)
    return statistics.median(took)
