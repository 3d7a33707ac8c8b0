"""PyTorch layers against the torch modules that they replace, forward and backward."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from firstlayer.torch import Embedding, EmbeddingLayer, RotaryPositions

from .ids import DISTRIBUTIONS, batches
from .rotary import half_forms
from .timing import BATCHES, Case

LAYER_SIZES = ((50_000, 512), (30_000, 768))


def cases() -> Iterator[Case]:
    """Yield lookups, the complete layer and rotary, with and without gradients."""
    yield from _lookups()
    for rows, width in LAYER_SIZES:
        for distribution in DISTRIBUTIONS:
            yield from _layers(rows, width, distribution)
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


def _layers(rows: int, width: int, distribution: str) -> Iterator[Case]:
    ids = [torch.from_numpy(batch) for batch in batches(distribution, rows, (32, 128))]
    name = f"torch layer {rows:,} × {width}, {distribution}"
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
        peers = {"nn.Modules": _forward_backward(theirs, ids, dy)}
        bars = {"nn.Modules": bar}
        if gradients.startswith("row"):
            # Our row gradients are coalesced; torch leaves that to the optimizer.
            peers["nn.Modules + coalesce"] = _with_coalesce(theirs, ids, dy)
            bars["nn.Modules + coalesce"] = 2.0
        yield Case(
            f"{name}, forward + backward, {gradients}",
            _forward_backward(ours, ids, dy),
            peers,
            bars,
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
            lambda batch, layer=layer, xs=xs: _rotary_gradient(layer, xs[batch]),
            {
                form: lambda batch, run=run, xs=xs: _rotary_gradient(run, xs[batch])
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
    """The same layer from torch modules: two tables, a sum and a norm."""

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


def _forward_backward(layer: Any, ids: list[Any], dy: Any) -> Callable[[int], Any]:
    def run(batch: int) -> Any:
        layer.zero_grad(set_to_none=True)
        layer(ids[batch]).backward(dy)
        return layer.norm.weight.grad

    return run


def _with_coalesce(layer: Any, ids: list[Any], dy: Any) -> Callable[[int], Any]:
    run_layer = _forward_backward(layer, ids, dy)

    def run(batch: int) -> Any:
        norm_gradient = run_layer(batch)
        layer.token.weight.grad = layer.token.weight.grad.coalesce()
        return norm_gradient

    return run


def _rotary_gradient(layer: Any, x: Any) -> Any:
    x.grad = None
    layer(x).square().sum().backward()
    return x.grad


def _plain(result: Any) -> np.ndarray:
    return result.detach().numpy()
