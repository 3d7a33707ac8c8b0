"""Threads: our pool against a ThreadPoolExecutor, and each operation on one thread.

The rows ``threads: …, one thread beside N`` run the same operation on one thread and on all
of them: the ratio is what the other threads gain. An operation that moves more bytes than
it computes gains until the memory bandwidth is used up.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from firstlayer.kernels import get_num_threads
from firstlayer.kernels.gather import AHEAD_BYTES, GRAIN, _copy_rows
from firstlayer.kernels.runtime.pool import grain_for, run, whole_range
from firstlayer.kernels.runtime.threads import on_threads
from firstlayer.numpy import Embedding, EmbeddingBag, EmbeddingLayer, RotaryPositions
from firstlayer.optim import RowAdamW

from .ids import batches
from .timing import BATCHES, Case

ROWS, WIDTH, IDS = 50_000, 512, (32, 128)


def cases() -> Iterator[Case]:
    """Yield lookups by both kinds of threads, then operations on one thread and on all."""
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    # 512 ids are the fewest worth a second thread.
    yield _lookup(table, 512, repeat=20)
    yield _lookup(table, 7680)
    if get_num_threads() > 1:
        for name, operation in _operations(table).items():
            yield _scaling(name, operation)


def _lookup(table: np.ndarray, count: int, *, repeat: int = 1) -> Case:
    ids, threads = batches("uniform", ROWS, (count,)), get_num_threads()
    row_bytes = WIDTH * table.itemsize
    ahead, grain = 1 + AHEAD_BYTES // row_bytes, grain_for(GRAIN, row_bytes)
    bounds = [count * k // threads for k in range(threads + 1)]
    executor = ThreadPoolExecutor(threads - 1) if threads > 1 else None
    no_order = np.empty(0, np.int64)

    def pool(batch: int) -> np.ndarray:
        out, has_bad_id = np.empty((count, WIDTH), np.float32), np.zeros(1, np.int64)
        args = table, ids[batch], no_order, ahead, out, has_bad_id
        run(_copy_rows, count, *args, grain=grain)
        return out

    def thread_pool_executor(batch: int) -> np.ndarray:
        out, has_bad_id = np.empty((count, WIDTH), np.float32), np.zeros(1, np.int64)

        def copy(lo: int, hi: int) -> None:
            args = table, ids[batch][lo:hi], no_order, ahead, out[lo:hi], has_bad_id
            _copy_rows(whole_range(hi - lo), *args)

        # The calling thread takes the first share, as it does in our pool.
        shares = list(zip(bounds[:-1], bounds[1:], strict=True))
        futures = (
            [] if executor is None else [executor.submit(copy, *s) for s in shares[1:]]
        )
        copy(*shares[0])
        wait(futures)
        return out

    return Case(
        f"threads: lookup {ROWS:,} × {WIDTH}, {count:,} ids, {threads} threads",
        pool,
        {"ThreadPoolExecutor": thread_pool_executor},
        repeat=repeat,
    )


def _scaling(name: str, operation: Callable[[int], Any]) -> Case:
    def on_one(batch: int) -> Any:
        with on_threads(1):
            return operation(batch)

    return Case(
        f"threads: {name}, one thread beside {get_num_threads()}",
        operation,
        {"1 thread": on_one},
    )


def _operations(table: np.ndarray) -> dict[str, Callable[[int], Any]]:
    """Return operations by name, each a function of the number of a batch."""
    ids, rng = batches("uniform", ROWS, IDS), np.random.default_rng(1)
    lookup = Embedding(weight=table)
    layer = EmbeddingLayer(ROWS, WIDTH, max_positions=512, layer_norm=True, rng=0)
    dy = rng.standard_normal((*IDS, WIDTH), dtype=np.float32)
    bag = EmbeddingBag(weight=table, mode="sum")
    bags = batches("uniform", ROWS, (512, 20))
    rotary = RotaryPositions(64)
    queries = rng.standard_normal((BATCHES, 4, 16, 512, 64), dtype=np.float32)

    def gradient(batch: int) -> np.ndarray:
        return layer.vjp(ids[batch])[1](dy)["token.weight"].values

    return {
        f"lookup {ROWS:,} × {WIDTH}": lambda batch: lookup(ids[batch]),
        f"layer {ROWS:,} × {WIDTH}": lambda batch: layer(ids[batch]),
        f"layer {ROWS:,} × {WIDTH}, forward + backward": gradient,
        f"bag sum {ROWS:,} × {WIDTH}, 512 bags of 20": lambda batch: bag(bags[batch]),
        "rotary half (4, 16, 512, 64)": lambda batch: rotary(queries[batch]),
        f"RowAdamW {ROWS:,} × {WIDTH}": _training(ids, dy),
    }


def _training(ids: list[np.ndarray], dy: np.ndarray) -> Callable[[int], np.ndarray]:
    """Return a training step, whose result does not depend on earlier steps."""
    table = Embedding(ROWS, WIDTH, rng=0)
    # Without a learning rate the weights stay the same.
    optimizer = RowAdamW(table, lr=0.0)

    def step(batch: int) -> np.ndarray:
        y, pull = table.vjp(ids[batch])
        optimizer.step(pull(dy))
        return y

    return step
