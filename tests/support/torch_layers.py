"""Small complete layers of torch, and helpers to compare them."""

import itertools
from typing import Any
from unittest import mock

import torch
from torch import nn

from firstlayer import kernels
from firstlayer.numpy.layer import EmbeddingLayer as NumpyLayer
from firstlayer.torch.layer import EmbeddingLayer

IDS = torch.tensor([[1, 4, 1, 0], [6, 2, 0, 0]])
POSITIONS = torch.tensor([[3, 0, 1, 8], [2, 2, 5, 0]])
SEGMENTS = torch.tensor([[0, 2, 1, 1], [2, 0, 0, 0]])


def build(*, position: Any = "learned", seed: int = 3, **options: Any) -> EmbeddingLayer:
    """Return a small layer with random parameters, none of them zero or one."""
    torch.manual_seed(seed)
    options = {"padding_idx": 0, "dtype": torch.float64, **options}
    if position == "learned":
        options["max_positions"] = 9
    layer = EmbeddingLayer(7, 6, position=position, **options)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if not name.startswith("token"):
                value.normal_()
    return layer


def twin(layer: EmbeddingLayer) -> NumpyLayer:
    """Return the NumPy layer with the same parameters."""
    config = layer.config()
    del config["sparse"]
    layer_of_numpy = NumpyLayer(**config)
    state = {name: value.double().numpy() for name, value in layer.state_dict().items()}
    layer_of_numpy.load_state_dict(state)
    return layer_of_numpy


def arguments(layer: EmbeddingLayer) -> dict[str, Any]:
    """Return positions and segments for a layer that has them."""
    segments = None if layer.segment is None else SEGMENTS
    positions = None if layer.position is None else POSITIONS
    return {"segments": segments, "positions": positions}


def numpy_arguments(layer: EmbeddingLayer) -> dict[str, Any]:
    return {k: None if v is None else v.numpy() for k, v in arguments(layer).items()}


def gradients(layer: nn.Module, y: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    layer.zero_grad()
    y.backward(dy)
    grads: dict[str, Any] = {n: p.grad for n, p in layer.named_parameters()}
    return {name: grad.to_dense() for name, grad in grads.items()}


def is_fused(layer: EmbeddingLayer, *args: Any, **options: Any) -> bool:
    """Return whether a call runs on the kernels."""
    with mock.patch.object(kernels, "layer_forward", wraps=kernels.layer_forward) as spy:
        layer(*args, **options)
    return spy.called


OPTIONS = ("position", "scale", "segments", "layer_norm", "zero_padding")
CONFIGURATIONS = [
    dict(zip(OPTIONS, values, strict=True))
    for values in itertools.product(
        ("learned", "sinusoidal", None),
        (False, True),
        (None, 3),
        (False, True),
        (False, True),
    )
]
