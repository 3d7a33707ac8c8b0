"""bfloat16 and float16 against torch in the same dtype, and against our own float32.

Half precision moves half the bytes of float32 and computes in float32, so it must not be
slower. The tables of our float32 hold the same numbers. Lookups are compared exactly, and
results that are rounded to half precision within a few units of the last place: torch also
rounds between operations.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from firstlayer._check import float_dtype
from firstlayer.numpy import Embedding, EmbeddingBag, EmbeddingLayer, RotaryPositions
from firstlayer.torch._tensors.memory import array_of, tensor_of

from .ids import batches
from .optim import DENSE, MAX_DISTANCE, Training
from .rotary import half_forms
from .timing import BATCHES, Case

# Drawing more numbers would take longer than timing the lookups.
MAX_DRAWN = 1 << 22
DTYPES = ("bfloat16", "float16")
FLOAT32 = "our float32"
#: Largest difference between results below 8 that were rounded several times.
TOLERANCE = {"bfloat16": 0.1, "float16": 0.02, "float32": 1e-5}


def cases() -> Iterator[Case]:
    """Yield lookups, bags, the complete layer, rotary and a training step."""
    for dtype in DTYPES:
        yield _lookup(50_000, 512, dtype)
        yield _lookup(1_000_000, 64, dtype)
        yield _bag(1_000_000, 128, dtype)
        yield _layer(50_000, 512, dtype)
        for shape in ((4, 16, 512, 64), (1, 32, 2048, 128)):
            yield _rotation(shape, dtype)
        yield _training(250_000, 256, dtype)


def random_array(shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> np.ndarray:
    """Return normal numbers in a dtype; large arrays repeat the first of them."""
    count = min(math.prod(shape), MAX_DRAWN)
    numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    return np.resize(numbers.astype(float_dtype(dtype)), shape)


def as_array(result: np.ndarray | Tensor) -> np.ndarray:
    """Return an array or a tensor, of bfloat16 too, as an array."""
    return array_of(result) if isinstance(result, Tensor) else result


def layer_and_peer(
    rows: int, width: int, *, positions: int, dtype: str
) -> tuple[EmbeddingLayer, Callable[[Tensor], Tensor]]:
    """Return our layer with learned positions and a norm, and the same in torch."""
    layer = EmbeddingLayer(
        rows,
        width,
        max_positions=positions,
        layer_norm=True,
        init=lambda shape, rng: random_array(shape, dtype),
        dtype=dtype,
        rng=0,
    )
    state = {name: tensor_of(value) for name, value in layer.state_dict().items()}
    norm = state["norm.weight"], state["norm.bias"]

    def peer(ids: Tensor) -> Tensor:
        token = functional.embedding(ids, state["token.weight"])
        total = token + state["position.weight"][: ids.shape[-1]]
        return functional.layer_norm(total, (width,), *norm)

    return layer, peer


def rotary_and_forms(
    shape: tuple[int, ...], dtype: str
) -> tuple[RotaryPositions, dict[str, Callable[[Tensor], Tensor]]]:
    """Return our rotary layer and common forms in torch, which get cosines in a dtype."""
    layer = RotaryPositions(shape[-1])
    cos, sin = layer.phases(np.arange(shape[-2]))
    wanted = getattr(torch, dtype)
    forms = half_forms(*(torch.from_numpy(part).to(wanted) for part in (cos, sin)))
    return layer, {**forms, "torch.compile": torch.compile(forms["torch cat"])}


def _lookup(rows: int, width: int, dtype: str) -> Case:
    table, ids = random_array((rows, width), dtype), batches("uniform", rows, (32, 128))
    ours, float32 = (Embedding(weight=w) for w in (table, table.astype(np.float32)))
    weight, tensors = tensor_of(table), [torch.from_numpy(batch) for batch in ids]
    return Case(
        f"{dtype} lookup {rows:,} × {width}, 32 × 128 ids, uniform",
        lambda batch: ours(ids[batch]),
        {
            "torch": lambda batch: functional.embedding(tensors[batch], weight),
            FLOAT32: lambda batch: float32(ids[batch]),
        },
        {"torch": 1.0, FLOAT32: 1.0},
        flatten=as_array,
    )


def _bag(rows: int, width: int, dtype: str) -> Case:
    table, ids = random_array((rows, width), dtype), batches("uniform", rows, (512, 20))
    ours, float32 = (
        EmbeddingBag(weight=w, mode="sum") for w in (table, table.astype(np.float32))
    )
    weight, tensors = tensor_of(table), [torch.from_numpy(batch) for batch in ids]
    return Case(
        f"{dtype} bag sum {rows:,} × {width}, 512 bags of 20, uniform",
        lambda batch: ours(ids[batch]),
        {
            "torch": lambda batch: functional.embedding_bag(
                tensors[batch], weight, mode="sum"
            ),
            FLOAT32: lambda batch: float32(ids[batch]),
        },
        {"torch": 1.0, FLOAT32: 1.0},
        # Sums are up to four times as large as the numbers in the table.
        tolerance=4 * TOLERANCE[dtype],
        flatten=as_array,
    )


def _layer(rows: int, width: int, dtype: str) -> Case:
    ids = batches("uniform", rows, (32, 128))
    ours, theirs = layer_and_peer(rows, width, positions=128, dtype=dtype)
    float32, _ = layer_and_peer(rows, width, positions=128, dtype="float32")
    float32.load_state_dict(ours.state_dict())
    tensors = [torch.from_numpy(batch) for batch in ids]
    return Case(
        f"{dtype} layer {rows:,} × {width}, token + learned + norm, uniform",
        lambda batch: ours(ids[batch]),
        {
            "torch": lambda batch: theirs(tensors[batch]),
            FLOAT32: lambda batch: float32(ids[batch]),
        },
        {"torch": 2.0, FLOAT32: 1.0},
        tolerance=TOLERANCE[dtype],
        flatten=as_array,
    )


def _rotation(shape: tuple[int, ...], dtype: str) -> Case:
    layer, forms = rotary_and_forms(shape, dtype)
    xs = [random_array(shape, dtype, seed=seed) for seed in range(BATCHES)]
    exact, tensors = [x.astype(np.float32) for x in xs], [tensor_of(x) for x in xs]
    peers: dict[str, Callable[[int], Any]] = {
        name: lambda batch, form=form: form(tensors[batch]) for name, form in forms.items()
    }
    return Case(
        f"{dtype} rotary half {shape}",
        lambda batch: layer(xs[batch]),
        {**peers, FLOAT32: lambda batch: layer(exact[batch])},
        {**dict.fromkeys(forms, 1.0), FLOAT32: 1.0},
        tolerance=TOLERANCE[dtype],
        flatten=as_array,
    )


def _training(rows: int, width: int, dtype: str) -> Case:
    def training(implementation: str, dtype: str) -> Training:
        return Training(
            rows,
            width,
            "uniform",
            implementation=implementation,
            dtype=getattr(torch, dtype),
        )

    peers = {FLOAT32: training("ours", "float32")}
    if dtype == "bfloat16":
        # In float16 the squares of gradients underflow, and torch's AdamW diverges.
        peers[DENSE] = training(DENSE, dtype)
    return Case(
        f"{dtype} train {rows:,} × {width} by rows, 32 × 128 ids, uniform",
        training("ours", dtype),
        peers,
        {FLOAT32: 1.0, DENSE: 5.0} if DENSE in peers else {FLOAT32: 1.0},
        tolerance=MAX_DISTANCE + TOLERANCE[dtype],
        most_rounds=4,
        flatten=as_array,
    )
