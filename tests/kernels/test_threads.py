"""One layer under eight threads, after a fork and in a pool of processes.

Each scenario runs in a process of its own: what goes wrong here goes wrong by an abort or a
deadlock, and must not take the other tests with it.
"""

import pytest

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

    def same(got):
        return all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))
"""

EIGHT_THREADS = """
    from concurrent.futures import ThreadPoolExecutor

    want = work()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(work) for _ in range(24)]
        assert all(same(future.result()) for future in futures)
"""

FIRST_CALL_IN_EIGHT_THREADS = """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(work) for _ in range(8)]]
    want = results[0]
    assert all(map(same, results))
"""

# After the eight threads, in their process.
RESIZED_MEANWHILE = """
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(12)]
        while not all(future.done() for future in futures):
            for n in (1, 3, 2, 4):
                firstlayer.set_num_threads(n)
        assert all(same(future.result()) for future in futures)
"""

FORKED = """
    import os

    want = work()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if same(work()) and same(work()) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(work())
"""

POOL_OF_PROCESSES = """
    import multiprocessing

    want = work()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for got in pool.starmap(work, [()] * 4):
            assert same(got)
"""


# After the pool was resized.
EVERY_NUMBER_OF_THREADS = """
    for n in (1, 2, 3, 7):
        firstlayer.set_num_threads(n)
        assert same(work()), n
"""

# Numba then finds no place for its cache, which cache=True alone refuses.
NO_FOLDER_FOR_THE_CACHE = """
    import numba.core.caching as caching

    caching.CacheImpl._locator_classes = []
    from firstlayer.numpy.token import Embedding

    assert Embedding(5, 3)([1, 2]).shape == (2, 3)
"""

# As where there are no POSIX threads; with no cache, which holds loops made for them.
WITHOUT_THREADS = """
    import os, sys
    import numba.core.caching as caching

    caching.CacheImpl._locator_classes = []
    name, platform = os.name, sys.platform
    os.name = sys.platform = "other"
    from firstlayer.kernels.runtime import system

    os.name, sys.platform = name, platform
    import numpy as np
    import firstlayer
    from firstlayer.numpy.token import Embedding

    firstlayer.set_num_threads(4)
    layer = Embedding(1000, 512, rng=0)
    ids = np.random.default_rng(0).integers(0, 1000, 4000)
    assert not system.HAS_THREADS
    assert np.array_equal(layer(ids), layer.weight[ids])
"""


@pytest.mark.parametrize(
    "scenarios",
    [
        [EIGHT_THREADS, RESIZED_MEANWHILE, EVERY_NUMBER_OF_THREADS],
        [FIRST_CALL_IN_EIGHT_THREADS],
        [FORKED],
        [POOL_OF_PROCESSES],
    ],
    ids=["eight threads, resized", "first call", "forked", "pool of processes"],
)
def test_numbers_are_the_same_and_nothing_aborts_or_hangs(scenarios):
    run_alone(SETUP, *scenarios)


def test_a_folder_that_cannot_be_written_costs_time_and_not_the_import():
    run_alone(NO_FOLDER_FOR_THE_CACHE)


def test_the_caller_works_alone_where_the_system_has_no_threads():
    run_alone(WITHOUT_THREADS)
