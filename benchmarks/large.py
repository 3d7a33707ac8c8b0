"""Long contexts and wide models: the sizes of large language models, on one socket.

Peers and tolerances are those of :mod:`benchmarks.half_precision`.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from firstlayer.numpy import Embedding
from firstlayer.torch._tensors.memory import tensor_of

from .half_precision import (
    TOLERANCE,
    as_array,
    layer_and_peer,
    random_array,
    rotary_and_forms,
)
from .ids import batches
from .timing import Case

#: Number of different inputs of a rotation; each is larger than the caches.
INPUTS = 3


def cases() -> Iterator[Case]:
    """Yield rotary, lookups and the complete layer, in bfloat16 and float32."""
    for dtype in ("bfloat16", "float32"):
        yield _rotation((1, 32, 8192, 128), dtype)
        yield _lookup(256_000, 2048, (8, 512), dtype)
        yield _lookup(256_000, 1024, (1, 32_768), dtype)
        yield _layer(32_000, 4096, (8, 512), dtype)
        yield _layer(256_000, 1024, (1, 32_768), dtype)


def _rotation(shape: tuple[int, ...], dtype: str) -> Case:
    layer, forms = rotary_and_forms(shape, dtype)
    xs = [random_array(shape, dtype, seed=seed) for seed in range(INPUTS)]
    tensors = [tensor_of(x) for x in xs]
    return Case(
        f"large: {dtype} rotary half {shape}",
        lambda batch: layer(xs[batch % INPUTS]),
        {
            name: lambda batch, form=form: form(tensors[batch % INPUTS])
            for name, form in forms.items()
        },
        dict.fromkeys(forms, 1.0),
        tolerance=TOLERANCE[dtype],
        most_rounds=4,
        flatten=as_array,
    )


def _lookup(rows: int, width: int, shape: tuple[int, int], dtype: str) -> Case:
    table, ids = random_array((rows, width), dtype), batches("zipf", rows, shape)
    layer, weight = Embedding(weight=table), tensor_of(table)
    tensors = [torch.from_numpy(batch) for batch in ids]
    return Case(
        f"large: {dtype} lookup {rows:,} × {width}, {_sizes(shape)} ids, zipf",
        lambda batch: layer(ids[batch]),
        {"torch": lambda batch: functional.embedding(tensors[batch], weight)},
        {"torch": 1.0},
        most_rounds=4,
        flatten=as_array,
    )


def _layer(rows: int, width: int, shape: tuple[int, int], dtype: str) -> Case:
    layer, peer = layer_and_peer(rows, width, positions=shape[-1], dtype=dtype)
    ids = batches("zipf", rows, shape)
    tensors = [torch.from_numpy(batch) for batch in ids]
    return Case(
        f"large: {dtype} layer {rows:,} × {width}, {_sizes(shape)} ids, zipf",
        lambda batch: layer(ids[batch]),
        {"torch": lambda batch: peer(tensors[batch])},
        {"torch": 1.0},
        tolerance=TOLERANCE[dtype],
        most_rounds=4,
        flatten=as_array,
    )


def _sizes(shape: tuple[int, int]) -> str:
    return " × ".join(f"{size:,}" for size in shape)
