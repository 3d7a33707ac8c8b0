"""Compilation of the kernels before they are needed, for example in a container image."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import kernels, optim
from ._check import float_dtype
from .embeddings.row_gradient import RowGradient
from .numpy import (
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    RotaryPositions,
    SinusoidalPositions,
)

#: Dtypes whose kernels can be compiled.
DTYPES = ("float32", "float16", "bfloat16", "float64")
WIDTH, ROWS = 32, 64
# More ids than a lookup copies with the loop for few.
MANY_IDS = 512
# Rules that differ in their options have kernels of their own.
RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RowAdamW", {}),
    ("RowAdam", {}),
    ("RowAdamW", {"amsgrad": True, "mode": "lazy"}),
    ("RowSGD", {}),
    ("RowSGD", {"momentum": 0.9}),
    ("RowAdagrad", {}),
    ("RowWiseAdagrad", {}),
    ("RowRMSprop", {}),
    ("RowWiseRMSprop", {}),
    ("RowLion", {}),
)


@dataclass(frozen=True)
class Warmup:
    """Result of :func:`warmup`.

    Args:
        compiled: Number of kernels that were compiled; all others were in the cache.
        seconds: Time taken.
        folder: Folder of the cache; it may contain several folders with files. None if
            there is no folder that can hold the cache.
        cache_bytes: Size of the cache.
    """

    compiled: int
    seconds: float
    folder: str | None
    cache_bytes: int


def warmup(
    dtypes: Sequence[str] = ("float32",),
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Warmup:
    """Compile the kernels of the layers and row optimizers that are not in the cache.

    Kernels are compiled when they are first called, and read from a cache on disk by later
    processes. A call of this function, for example while a container image is built, lets
    every process start with a full cache. It covers lookups, bags, complete layers, rotary
    and sinusoidal positions, their gradients, and all row optimizers. Rarely used kernels
    (quantized tables, n-grams, the training of word vectors) are compiled when they are
    first called.

    The cache is in ``NUMBA_CACHE_DIR`` if that is set, otherwise next to the installed
    package, or in the user's cache folder if the package's cannot be written. It is valid
    for one kind of processor and one version of Python, Numba and Firstlayer.

    Args:
        dtypes: Dtypes of the tables: ``"float32"``, ``"float16"``, ``"bfloat16"`` and
            ``"float64"``.
        progress: Called with the number of completed steps, the number of all steps and
            the name of the next one.

    Example:
        >>> import firstlayer
        >>> done = firstlayer.warmup()
        >>> done.cache_bytes > 0
        True
        >>> firstlayer.warmup().compiled
        0
    """
    dtypes = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {dtype!r}")
    kernels.require_compiler("warmup")
    from .kernels.runtime.cache import cache_files, counted_compilations

    start = time.perf_counter()
    steps = [step for dtype in dtypes for step in _steps(dtype)]
    with counted_compilations() as compilations:
        for done, (name, call) in enumerate(steps):
            if progress is not None:
                progress(done, len(steps), name)
            call()
    if progress is not None:
        progress(len(steps), len(steps), "")
    files = cache_files()
    return Warmup(
        compiled=compilations.count,
        seconds=time.perf_counter() - start,
        folder=os.path.commonpath([file.parent for file in files]) if files else None,
        cache_bytes=sum(file.stat().st_size for file in files),
    )


def _steps(dtype: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each group of kernels and a function that calls them."""
    yield f"{dtype} lookup", lambda: _lookup(dtype)
    for mode in ("sum", "mean", "max"):
        yield f"{dtype} bag of {mode}", lambda mode=mode: _bag(dtype, mode)
    for position in ("learned", None):
        for segments in (None, 2):
            for norm in (True, False):
                options = {"position": position, "segments": segments, "layer_norm": norm}
                parts = [name for name, option in options.items() if option]
                name = " + ".join([f"{dtype} layer", *parts])
                yield name, lambda options=options: _layer(dtype, **options)
    yield f"{dtype} positions", lambda: _positions(dtype)
    for rule, options in RULES:
        name = " ".join([dtype, rule, *options])
        yield name, lambda rule=rule, options=options: _train(dtype, rule, options)
    if dtype == "float32":
        yield "rows of tables in JAX", _copy_rows


def _ids(size: int = 8) -> np.ndarray:
    return np.arange(size) % (ROWS // 2)


def _lookup(dtype: str) -> None:
    # Rows that fill no whole cache lines have their own kernel.
    for width in (WIDTH, WIDTH + 1):
        layer = Embedding(ROWS, width, dtype=dtype, rng=0)
        for ids in (_ids(), _ids(MANY_IDS)):
            y, pull = layer.vjp(ids)
            grad = pull(y)["weight"]
            # Dense gradients in torch.
            number = np.float64 if dtype == "float64" else np.float32
            values = np.asarray(grad.values, number)
            kernels.store_rows(values, np.zeros_like(layer.weight), grad.ids, noise=None)


def _copy_rows() -> None:
    if kernels.can_bind():
        from .kernels import row_copies

        row_copies.read_rows_function()
        row_copies.write_rows_function()
        row_copies.sum_rows_function()


def _bag(dtype: str, mode: Any) -> None:
    # A bag narrower than 256 bytes of the compute dtype has its own kernel.
    for width in (2 * WIDTH, 4):
        layer = EmbeddingBag(ROWS, width, mode=mode, dtype=dtype, rng=0)
        for weights in (None, np.ones(8, np.float32)) if mode == "sum" else (None,):
            y, pull = layer.vjp(_ids(), np.array([0, 3]), weights)
            pull(y)


def _layer(dtype: str, *, position: str | None, **options: Any) -> None:
    max_positions = None if position is None else ROWS
    layer = EmbeddingLayer(
        ROWS,
        WIDTH,
        position=position,
        max_positions=max_positions,
        dtype=dtype,
        rng=0,
        **options,
    )
    # Many tokens are divided into blocks, whose sums are then added.
    for ids in (_ids()[None], np.tile(_ids(MANY_IDS // 4), (64, 1))[:, :ROWS]):
        y, pull = layer.vjp(ids)
        pull(y)


def _positions(dtype: str) -> None:
    for layout in ("half", "interleaved", "interleaved_to_half"):
        y, pull = RotaryPositions(WIDTH, layout=layout).vjp(_vectors(dtype))
        pull(y)
    for layout in ("half", "interleaved"):
        SinusoidalPositions(WIDTH, layout=layout)(_vectors(dtype))


def _vectors(dtype: str) -> np.ndarray:
    return np.ones((2, 4, 8, WIDTH), float_dtype(dtype))


def _train(dtype: str, rule: str, options: dict[str, Any]) -> None:
    # Half precision is updated in float32 if its rows are averaged.
    for is_averaged in (False,) if "mode" in options else (False, True):
        layer = Embedding(ROWS, WIDTH, dtype=dtype, rng=0)
        optimizer = getattr(optim, rule)(layer, **options)
        averages = optim.AveragedRows(optimizer) if is_averaged else None
        for first in (0, 4, 0):
            y, pull = layer.vjp(np.arange(first, first + 6))
            grad = pull(y)["weight"]
            if first:
                # Gradients in torch have the dtype of the table.
                grad = RowGradient(grad.ids, grad.values.astype(layer.weight.dtype))
            optimizer.step({"weight": grad})
            if averages is not None:
                averages.update_parameters()
        optimizer.flush()
        if averages is not None:
            averages.average("weight")
