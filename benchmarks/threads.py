"""The thread pool against a ThreadPoolExecutor, both running the kernel of the lookup."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from firstlayer.kernels import get_num_threads
from firstlayer.kernels.gather import AHEAD_BYTES, GRAIN, _copy_rows
from firstlayer.kernels.runtime.pool import grain_for, run, whole_range

from .ids import batches
from .timing import Case

ROWS, WIDTH = 50_000, 512


def cases() -> Iterator[Case]:
    """Yield lookups of 512 ids, the fewest worth a second thread, and of 7,680."""
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    yield _lookup(table, 512, repeat=20)
    yield _lookup(table, 7680)


def _lookup(table: np.ndarray, count: int, *, repeat: int = 1) -> Case:
    ids, threads = batches("uniform", ROWS, (count,)), get_num_threads()
    row_bytes = WIDTH * table.itemsize
    ahead, grain = 1 + AHEAD_BYTES // row_bytes, grain_for(GRAIN, row_bytes)
    bounds = [count * k // threads for k in range(threads + 1)]
    executor = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def pool(batch: int) -> np.ndarray:
        out, has_bad_id = np.empty((count, WIDTH), np.float32), np.zeros(1, np.int64)
        run(_copy_rows, count, table, ids[batch], ahead, out, has_bad_id, grain=grain)
        return out

    def thread_pool_executor(batch: int) -> np.ndarray:
        out, has_bad_id = np.empty((count, WIDTH), np.float32), np.zeros(1, np.int64)

        def copy(lo: int, hi: int) -> None:
            part = ids[batch][lo:hi]
            _copy_rows(whole_range(hi - lo), table, part, ahead, out[lo:hi], has_bad_id)

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
