"""Calls so small that they take as long as the Python around them, beside torch's modules.

One token at a time, as in generation, and two bags of twenty ids, as in serving.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from firstlayer.numpy import EmbeddingLayer as NumpyLayer
from firstlayer.torch import EmbeddingBag, EmbeddingLayer, RotaryPositions

from .ids import batches
from .rotary import half_forms
from .timing import BATCHES, Case

ROWS, WIDTH, POSITIONS = 50_000, 512, 512
REPEAT = 200


def cases() -> Iterator[Case]:
    """Yield the layer in torch and NumPy, rotary and bags."""
    yield from _layers()
    yield _rotary()
    yield _bags()


class _Stock(nn.Module):
    """The same layer from torch modules."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(ROWS, WIDTH)
        self.position = nn.Embedding(POSITIONS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.token(ids) + self.position(torch.arange(ids.shape[1])))


def _layers() -> Iterator[Case]:
    options: Any = {"max_positions": POSITIONS, "layer_norm": True}
    ours, theirs = EmbeddingLayer(ROWS, WIDTH, **options), _Stock()
    theirs.load_state_dict(ours.state_dict())
    arrays = batches("uniform", ROWS, (1, 1))
    ids = [torch.from_numpy(batch) for batch in arrays]
    for gradient in (False, True):
        yield Case(
            f"small: torch layer of one token{', recording a gradient' * gradient}",
            _on(ours, ids, gradient=gradient),
            {"nn.Modules": _on(theirs, ids, gradient=gradient)},
            {"nn.Modules": 1.0},
            tolerance=1e-5,
            repeat=REPEAT,
            flatten=_plain,
        )
    layer = NumpyLayer(ROWS, WIDTH, rng=0, **options)
    layer.load_state_dict({name: _plain(x) for name, x in ours.state_dict().items()})
    yield Case(
        "small: NumPy layer of one token",
        lambda batch: layer(arrays[batch]),
        {"nn.Modules": _on(theirs, ids)},
        {"nn.Modules": 2.4},
        tolerance=1e-5,
        repeat=REPEAT,
        flatten=_plain,
    )


def _rotary() -> Case:
    layer, position = RotaryPositions(128), 700
    cos, sin = layer.phases(torch.tensor([position]))
    rng = np.random.default_rng(0)
    queries = [
        torch.from_numpy(rng.standard_normal((1, 32, 1, 128), dtype=np.float32))
        for _ in range(BATCHES)
    ]
    form = half_forms(cos, sin)["torch rotate_half"]
    return Case(
        "small: torch rotary of one token, 32 heads × 128",
        _on(lambda x: layer(x, offset=position), queries),
        {"rotate_half with cached phases": _on(form, queries)},
        {"rotate_half with cached phases": 1.0},
        tolerance=1e-5,
        repeat=REPEAT,
        flatten=_plain,
    )


def _bags() -> Case:
    theirs = nn.EmbeddingBag(ROWS, 64, mode="sum")
    ours = EmbeddingBag(ROWS, 64, mode="sum")
    ours.load_state_dict(theirs.state_dict())
    ids = [torch.from_numpy(batch) for batch in batches("uniform", ROWS, (40,))]
    offsets = torch.tensor([0, 20])
    return Case(
        "small: torch bags of 2 × 20 ids with offsets",
        _on(lambda batch: ours(batch, offsets), ids),
        {"nn.EmbeddingBag": _on(lambda batch: theirs(batch, offsets), ids)},
        {"nn.EmbeddingBag": 1 / 1.2},
        tolerance=1e-5,
        repeat=REPEAT,
        flatten=_plain,
    )


def _on(
    layer: Any, inputs: list[torch.Tensor], *, gradient: bool = False
) -> Callable[[int], Any]:
    def run(batch: int) -> Any:
        with torch.set_grad_enabled(gradient):
            return layer(inputs[batch])

    return run


def _plain(result: Any) -> np.ndarray:
    return result.detach().numpy() if isinstance(result, torch.Tensor) else result
