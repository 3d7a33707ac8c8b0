"""Layers called from eight threads, after a fork and in a pool of processes.

Each scenario runs in its own process, because a failure is an abort or a deadlock.
"""

import pytest

import firstlayer
from tests.support.run_alone import run_alone

SETUP = """
    import numpy as np
    import firstlayer
    from firstlayer.numpy.bag import EmbeddingBag
    from firstlayer.numpy.layer import EmbeddingLayer
    from firstlayer.numpy.rotary import RotaryPositions

    firstlayer.set_num_threads(4)
    rng = np.random.default_rng(0)
    layer = EmbeddingLayer(2000, 512, max_positions=300, layer_norm=True, rng=0)
    bag = EmbeddingBag(2000, 512, rng=0)
    rotary = RotaryPositions(64)
    ids = rng.integers(0, 2000, (16, 300))
    x = rng.standard_normal((4, 8, 300, 64), dtype=np.float32)

    def work():
        y, pull = layer.vjp(ids)
        grad = pull(np.ones_like(y) + y)["token.weight"].values
        return [layer(ids), grad, bag(ids), rotary(x)]

    def is_expected(got):
        return all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))
"""

EIGHT_THREADS = """
    from concurrent.futures import ThreadPoolExecutor

    expected = work()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(work) for _ in range(24)]
        assert all(is_expected(future.result()) for future in futures)
"""

FIRST_CALL_IN_EIGHT_THREADS = """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(work) for _ in range(8)]]
    expected = results[0]
    assert all(map(is_expected, results))
"""

# Follows EIGHT_THREADS.
RESIZED = """
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(12)]
        while not all(future.done() for future in futures):
            for n in (1, 3, 2, 4):
                firstlayer.set_num_threads(n)
        assert all(is_expected(future.result()) for future in futures)
"""

FORKED = """
    import os

    expected = work()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if is_expected(work()) and is_expected(work()) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_expected(work())
"""

POOL_OF_PROCESSES = """
    import multiprocessing

    expected = work()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for got in pool.starmap(work, [()] * 4):
            assert is_expected(got)
"""


# Follows RESIZED.
SEVERAL_NUMBERS_OF_THREADS = """
    for n in (1, 2, 3, 7):
        firstlayer.set_num_threads(n)
        assert is_expected(work()), n
"""

# Numba finds no folder for its cache; with ``cache=True`` alone it would raise.
NO_CACHE_FOLDER = """
    import numba.core.caching as caching

    caching.CacheImpl._locator_classes = []
    from firstlayer.numpy.token import Embedding

    assert Embedding(5, 3)([1, 2]).shape == (2, 3)
"""


@pytest.mark.parametrize(
    "scenarios",
    [
        [EIGHT_THREADS, RESIZED, SEVERAL_NUMBERS_OF_THREADS],
        [FIRST_CALL_IN_EIGHT_THREADS],
        [FORKED],
        [POOL_OF_PROCESSES],
    ],
    ids=["eight threads, resized", "first call", "forked", "pool of processes"],
)
def test_concurrent_callers_get_the_same_results_without_abort_or_hang(scenarios):
    run_alone(SETUP, *scenarios)


def test_kernels_compile_without_a_cache_folder():
    run_alone(NO_CACHE_FOLDER)


@pytest.mark.rejects
@pytest.mark.parametrize("n, error", [(1.5, TypeError), ("2", TypeError), (0, ValueError)])
def test_the_number_of_threads_must_be_a_positive_integer(n, error):
    before = firstlayer.get_num_threads()
    with pytest.raises(error, match="^n must be"):
        firstlayer.set_num_threads(n)
    assert firstlayer.get_num_threads() == before
