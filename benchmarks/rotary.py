"""Rotating queries, and computing the phases of many positions."""

from collections.abc import Iterator

import numpy as np

from firstlayer.numpy import RotaryPositions

from .timing import BATCHES, Case

SHAPES = ((4, 16, 512, 64), (1, 32, 2048, 128))


def cases() -> Iterator[Case]:
    """Yield rotations in both layouts at two sizes, and phases of 131,072 positions."""
    for shape in SHAPES:
        for layout in ("half", "interleaved"):
            yield _rotation(shape, layout)
    yield _phases(131_072, 64)


def _rotation(shape: tuple[int, ...], layout) -> Case:
    length, head_dim = shape[-2:]
    layer = RotaryPositions(head_dim, layout=layout)
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal(shape, dtype=np.float32) for _ in range(BATCHES)]
    name = f"rotary {layout} {shape}"
    try:
        import torch
    except ImportError:
        return Case(name, lambda batch: layer(batches[batch]), {}, missing=("torch",))
    cos, sin = (torch.from_numpy(part) for part in layer.phases(np.arange(length)))
    tensors = [torch.from_numpy(batch) for batch in batches]
    eager = half_forms(cos, sin) if layout == "half" else _interleaved_forms(cos, sin)
    peers = {form: _on(tensors, run) for form, run in eager.items()}
    bars = dict.fromkeys(peers, 3.0)
    if "torch complex" in bars:
        # It reads and writes memory once, as ours does.
        bars["torch complex"] = 1.0
    compiled = torch.compile(eager["torch cat" if layout == "half" else "torch stack"])
    peers["torch.compile"], bars["torch.compile"] = _on(tensors, compiled), 1.0
    return Case(name, lambda batch: layer(batches[batch]), peers, bars, tolerance=1e-5)


def _on(tensors, run):
    return lambda batch: run(tensors[batch])


def half_forms(cos, sin):
    """Return common torch implementations of half-layout rotary, by name."""
    import torch

    twice_cos, twice_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def cat(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def rotate_half(x):
        a, b = x.chunk(2, dim=-1)
        return x * twice_cos + torch.cat([-b, a], dim=-1) * twice_sin

    return {"torch cat": cat, "torch rotate_half": rotate_half}


def _interleaved_forms(cos, sin):
    import torch

    phases = torch.complex(cos, sin)

    def stack(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)

    def as_complex(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * phases).flatten(-2)

    return {"torch stack": stack, "torch complex": as_complex}


def _phases(count: int, pairs: int) -> Case:
    layer = RotaryPositions(2 * pairs)
    starts = [batch * 1000 for batch in range(BATCHES)]

    def ours(batch: int) -> tuple[np.ndarray, np.ndarray]:
        return layer.phases(np.arange(starts[batch], starts[batch] + count))

    name = f"phases of {count:,} positions × {pairs} pairs"
    try:
        import torch
    except ImportError:
        return Case(name, ours, {}, missing=("torch",), flatten=_stacked)
    rates = torch.from_numpy(layer.frequencies.astype(np.float32))

    def theirs(batch: int):
        angles = torch.arange(starts[batch], starts[batch] + count)[:, None] * rates
        return angles.cos(), angles.sin()

    # The peer computes angles in float32, which are off by 0.008 at position 140,000.
    return Case(
        name, ours, {"torch": theirs}, {"torch": 1.0}, tolerance=0.02, flatten=_stacked
    )


def _stacked(result) -> np.ndarray:
    return np.stack([np.asarray(part) for part in result])
