"""The complete layer: token + position + LayerNorm."""

from collections.abc import Iterator

import numpy as np

from firstlayer.numpy import EmbeddingLayer, LearnedPositions, SinusoidalPositions

from .ids import DISTRIBUTIONS, batches
from .timing import Case, Run


def cases() -> Iterator[Case]:
    """Yield the layer at two sizes, with learned and sinusoidal positions."""
    for rows, width in ((50_000, 512), (30_000, 768)):
        for position in (LearnedPositions(512, width), SinusoidalPositions(width)):
            layer = EmbeddingLayer(rows, width, position=position, layer_norm=True, rng=0)
            for distribution in DISTRIBUTIONS:
                yield _layer(layer, distribution)


def _layer(layer: EmbeddingLayer, distribution: str) -> Case:
    rows, width = layer.token.weight.shape
    ids = batches(distribution, rows, (32, 128))
    position = type(layer.position).__name__.removesuffix("Positions").lower()
    peers, bars = _torch_peers(layer, ids)
    return Case(
        f"layer {rows:,} × {width}, token + {position} + norm, {distribution}",
        lambda batch: layer(ids[batch]),
        peers,
        bars,
        missing=() if peers else ("torch",),
        tolerance=1e-5,
    )


def _torch_peers(
    layer: EmbeddingLayer, ids: list[np.ndarray]
) -> tuple[dict[str, Run], dict[str, float]]:
    try:
        import torch
    except ImportError:
        return {}, {}
    state = {name: torch.from_numpy(value) for name, value in layer.state_dict().items()}
    # A precomputed table: the fastest form of sinusoidal positions in torch.
    table = torch.from_numpy(layer.position.encode(np.arange(512)))
    tensors = [torch.from_numpy(batch) for batch in ids]

    @torch.no_grad()
    def eager(batch):
        token = torch.nn.functional.embedding(batch, state["token.weight"])
        return torch.nn.functional.layer_norm(
            token + table[: batch.shape[1]],
            token.shape[-1:],
            state["norm.weight"],
            state["norm.bias"],
        )

    compiled = torch.compile(eager)
    peers = {
        "torch": lambda batch: eager(tensors[batch]),
        "torch.compile": lambda batch: compiled(tensors[batch]),
    }
    return peers, {"torch": 2.0, "torch.compile": 1.5}
