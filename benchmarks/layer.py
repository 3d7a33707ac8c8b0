"""The complete layer: token + learned position + LayerNorm."""

from collections.abc import Iterator

import numpy as np

from inlay.numpy import EmbeddingLayer

from .ids import KINDS, batches
from .timing import Case


def cases() -> Iterator[Case]:
    """Yield the layer at two sizes, on 32 × 128 ids."""
    for rows, width in ((50_000, 512), (30_000, 768)):
        for kind in KINDS:
            yield _layer(rows, width, kind)


def _layer(rows: int, width: int, kind: str) -> Case:
    layer = EmbeddingLayer(rows, width, max_positions=512, layer_norm=True, rng=0)
    ids = batches(kind, rows, (32, 128))
    name = f"layer {rows:,} × {width}, token + position + norm, {kind}"
    peers, bars = _torch_peers(layer, ids)
    missing = () if peers else ("torch",)
    return Case(name, lambda batch: layer(ids[batch]), peers, bars, missing, tolerance=1e-5)


def _torch_peers(layer: EmbeddingLayer, ids: list[np.ndarray]):
    try:
        import torch
    except ImportError:
        return {}, {}
    state = {name: torch.from_numpy(value) for name, value in layer.state_dict().items()}
    tensors = [torch.from_numpy(batch) for batch in ids]

    @torch.no_grad()
    def eager(batch):
        token = torch.nn.functional.embedding(batch, state["token.weight"])
        position = state["position.weight"][: batch.shape[1]]
        return torch.nn.functional.layer_norm(
            token + position, token.shape[-1:], state["norm.weight"], state["norm.bias"]
        )

    compiled = torch.compile(eager)
    peers = {
        "torch": lambda batch: eager(tensors[batch]),
        "torch.compile": lambda batch: compiled(tensors[batch]),
    }
    return peers, {"torch": 2.0, "torch.compile": 1.5}
