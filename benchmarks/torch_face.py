"""The PyTorch face beside the layers it takes the place of, forward and backward."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from firstlayer.torch import Embedding, EmbeddingLayer, RotaryPositions

from .ids import KINDS, batches
from .rotary import half_forms
from .timing import BATCHES, Case

LAYER_SIZES = ((50_000, 512), (30_000, 768))


def cases() -> Iterator[Case]:
    """Yield lookups, the complete layer and rotation, each with and without gradients."""
    yield from _lookups()
    for rows, width in LAYER_SIZES:
        for kind in KINDS:
            yield from _layers(rows, width, kind)
    yield from _rotations()


def _lookups() -> Iterator[Case]:
    for rows, width, shape, padding, bar in (
        (50_000, 512, (16,), None, 1 / 1.2),
        (50_000, 512, (16,), 0, 1 / 1.5),
        (50_000, 512, (32, 128), None, 1.0),
        (1_000_000, 64, (32, 128), 0, 1.0),
    ):
        theirs = nn.Embedding(rows, width, padding_idx=padding)
        ours = Embedding(rows, width, padding_idx=padding)
        ours.load_state_dict(theirs.state_dict())
        ids = [torch.from_numpy(batch) for batch in batches("uniform", rows, shape)]
        sizes = " × ".join(map(str, shape))
        padded = "" if padding is None else ", padding_idx"
        yield Case(
            f"torch lookup {rows:,} × {width}, {sizes} ids{padded}",
            _on(ours, ids),
            {"nn.Embedding": _on(theirs, ids)},
            {"nn.Embedding": bar},
            repeat=200 if len(shape) == 1 else 1,
            flatten=_plain,
        )


def _layers(rows: int, width: int, kind: str) -> Iterator[Case]:
    ids = [torch.from_numpy(batch) for batch in batches(kind, rows, (32, 128))]
    name = f"torch layer {rows:,} × {width}, {kind}"
    ours, theirs = _both(rows, width, sparse=False)
    with torch.no_grad():
        dy = torch.randn(32, 128, width)
    yield Case(
        f"{name}, forward",
        _on(ours, ids),
        {"nn.Modules": _on(theirs, ids)},
        {"nn.Modules": 2.0},
        tolerance=1e-5,
        flatten=_plain,
    )
    for gradients, bar in (("row gradients", 1.5), ("dense gradients", 1.0)):
        ours, theirs = _both(rows, width, sparse=gradients.startswith("row"))
        peers = {"nn.Modules": _there_and_back(theirs, ids, dy)}
        if gradients.startswith("row"):
            # Ours are summed by id; torch leaves that to the optimizer.
            peers["nn.Modules + coalesce"] = _summed_by_id(theirs, ids, dy)
        yield Case(
            f"{name}, forward + backward, {gradients}",
            _there_and_back(ours, ids, dy),
            peers,
            {"nn.Modules": bar},
            tolerance=1e-3,
            flatten=_plain,
        )


def _rotations() -> Iterator[Case]:
    for shape in ((4, 16, 512, 64), (1, 32, 2048, 128)):
        layer = RotaryPositions(shape[-1])
        xs = [torch.randn(shape, requires_grad=True) for _ in range(BATCHES)]
        forms = half_forms(*layer.phases(torch.arange(shape[-2])))
        yield Case(
            f"torch rotary half {shape}, forward + backward",
            lambda batch, layer=layer, xs=xs: _turned(layer, xs[batch]),
            {
                form: lambda batch, run=run, xs=xs: _turned(run, xs[batch])
                for form, run in forms.items()
            },
            dict.fromkeys(forms, 1.0),
            tolerance=1e-4,
            flatten=_plain,
        )


def _both(rows: int, width: int, *, sparse: bool) -> tuple[Any, Any]:
    """Return our layer and torch's modules with the same weights."""
    ours = EmbeddingLayer(
        rows, width, max_positions=128, layer_norm=True, sparse=sparse
    ).train()
    theirs = _Stock(rows, width, sparse=sparse)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


class _Stock(nn.Module):
    """What people write: two tables, a sum and a norm."""

    def __init__(self, rows: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(rows, width, sparse=sparse)
        self.position = nn.Embedding(128, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        return self.norm(self.token(ids) + self.position(torch.arange(ids.shape[1])))


def _on(layer: Any, ids: list[Any]) -> Callable[[int], Any]:
    def run(batch: int) -> Any:
        with torch.no_grad():
            return layer(ids[batch])

    return run


def _there_and_back(layer: Any, ids: list[Any], dy: Any) -> Callable[[int], Any]:
    def run(batch: int) -> Any:
        layer.zero_grad(set_to_none=True)
        layer(ids[batch]).backward(dy)
        return layer.norm.weight.grad

    return run


def _summed_by_id(layer: Any, ids: list[Any], dy: Any) -> Callable[[int], Any]:
    forward_and_backward = _there_and_back(layer, ids, dy)

    def run(batch: int) -> Any:
        found = forward_and_backward(batch)
        layer.token.weight.grad = layer.token.weight.grad.coalesce()
        return found

    return run


def _turned(layer: Any, x: Any) -> Any:
    x.grad = None
    layer(x).square().sum().backward()
    return x.grad


def _plain(result: Any) -> np.ndarray:
    return result.detach().numpy()
