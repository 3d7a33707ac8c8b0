"""The thread pool: every item is processed once, helpers join, nothing leaks."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from firstlayer import kernels
from firstlayer.kernels.runtime.compile import kernel
from firstlayer.kernels.runtime.numba_abi import OFFER
from firstlayer.kernels.runtime.pool import grain_for, pieces, run
from firstlayer.kernels.runtime.scratch import free_row, scratch_row
from firstlayer.kernels.runtime.threads import on_threads
from tests.support.run_alone import run_alone


@kernel()
def _add(ticket, counts, amount):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            counts[i] += amount


@pytest.mark.parametrize("size", [0, 1, 2, 63, 1000])
def test_every_item_is_processed_once(threads, size):
    for _ in range(20):
        counts = np.zeros(size, np.int64)
        run(_add, size, counts, 3, grain=7)
        assert (counts == 3).all()


def test_eight_callers_at_once_get_correct_results(threads):
    def call(amount):
        counts = np.zeros(5000, np.int64)
        for _ in range(50):
            run(_add, 5000, counts, amount, grain=7)
        return (counts == 50 * amount).all()

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(call, range(8)))


@kernel()
def _write_thread(ticket, thread_of_item, is_owner, rounds):
    # Each thread allocates one number, whose address identifies it. The caller's ticket
    # offers the kernel, those of helpers do not.
    own = scratch_row(1, 1.0)
    own[0] = 1
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            for _ in range(rounds):
                own[0] = np.cos(own[0])
            thread_of_item[i] = own.ctypes.data
            is_owner[i] = ticket[OFFER]
    free_row(own)


def run_threads(size, *, rounds, grain):
    """Return a number for the thread of each item, and whether it is the caller's."""
    thread_of_item, is_owner = np.zeros((2, size), np.int64)
    run(_write_thread, size, thread_of_item, is_owner, rounds, grain=grain)
    return thread_of_item, is_owner


def test_helpers_process_items(threads):
    thread_of_item, used = np.zeros(0), 0
    # The first calls may find the helper's code still being compiled.
    for _ in range(200):
        thread_of_item, _ = run_threads(8 * threads, rounds=100_000, grain=1)
        used = len(set(thread_of_item.tolist()))
        if threads == 1 or used > 1:
            break
    assert thread_of_item.all() and (used > 1) == (threads > 1)


def test_the_caller_takes_the_beginning_and_helpers_the_end():
    is_owner = np.ones(1)
    with on_threads(2):
        for _ in range(200):
            thread_of_item, is_owner = run_threads(160, rounds=1000, grain=1)
            # Descending: ones, then zeros.
            assert (is_owner[1:] <= is_owner[:-1]).all()
            assert len(set(thread_of_item[is_owner == 1].tolist())) == 1
            if not is_owner.all():
                break
    assert not is_owner.all()


def test_a_range_shorter_than_two_grains_runs_on_one_thread():
    with on_threads(2):
        for _ in range(20):
            thread_of_item, _ = run_threads(19, rounds=10_000, grain=10)
            assert len(set(thread_of_item.tolist())) == 1


def test_grain_is_the_work_worth_a_thread_over_the_work_of_an_item():
    assert grain_for(1000, 10) == 100
    assert grain_for(1000, 400, 20) == 50
    assert grain_for(1000, 2000) == grain_for(7, 0, 0) == 1


@kernel()
def _fail(ticket, counts):
    if counts[0] == 0:
        raise ZeroDivisionError("before the first piece")
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            counts[i] += 1


def test_the_pool_works_after_an_error_before_the_first_piece(threads):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="before the first piece"):
            run(_fail, 100, np.zeros(100, np.int64), grain=1)
        counts = np.ones(100, np.int64)
        run(_fail, 100, counts, grain=1)
        assert (counts == 2).all()


def test_a_call_keeps_no_reference_to_its_arguments(threads):
    counts = np.zeros(5000, np.int64)
    before = sys.getrefcount(counts)
    for _ in range(50):
        run(_add, 5000, counts, 1, grain=7)
    assert sys.getrefcount(counts) == before


@kernel()
def _take_many(ticket, numbers):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            numbers[i][0] = i


@pytest.mark.rejects
def test_arguments_that_do_not_fit_the_shared_memory_are_refused():
    numbers = (np.zeros(1),) * 80
    with pytest.raises(Exception, match="must fit in 4096 bytes"):
        run(_take_many, 80, numbers, grain=1)


@pytest.mark.rejects
def test_there_is_at_least_one_thread():
    with pytest.raises(ValueError, match="n must be positive, got 0"):
        kernels.set_num_threads(0)


def test_an_interrupt_never_leaves_the_pool_claimed():
    script = """
        import os, signal, threading, time
        import numpy as np
        from firstlayer.kernels.runtime import pool
        from firstlayer.kernels.runtime.numba_abi import BUSY
        from firstlayer.kernels.runtime.threads import on_threads
        from tests.kernels.runtime.test_pool import _add
        import ctypes

        counts = np.zeros(20_000, np.int64)
        with on_threads(2):
            pool.run(_add, counts.size, counts, 1, grain=7)
        interrupts, armed = 0, False

        def handle(number, frame):
            # One exception for each run: a second one could be raised while the first is
            # handled, or at the end of the process.
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        def interrupt():
            while interrupts < 2000:
                time.sleep(0.0002)
                os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, handle)
        thread = threading.Thread(target=interrupt)
        thread.start()
        while interrupts < 2000:
            try:
                armed = True
                with on_threads(2):
                    while True:
                        pool.run(_add, counts.size, counts, 1, grain=7)
            except KeyboardInterrupt:
                interrupts += 1
        thread.join()
        busy = ctypes.c_int64.from_address(pool._pool.block + BUSY).value
        assert busy == 0, busy
        # Every call was complete, interrupted after it or before it.
        assert (counts == counts[0]).all()
    """
    run_alone(script)


def test_without_new_threads_kernels_run_on_one_thread():
    script = """
        import threading, warnings
        import numpy as np
        from firstlayer.kernels.runtime import pool
        from firstlayer.kernels.runtime.threads import on_threads
        from tests.kernels.runtime.test_pool import _add

        def cannot_start(self):
            raise RuntimeError("can't start new thread")

        start, threading.Thread.start = threading.Thread.start, cannot_start
        counts = np.zeros(20_000, np.int64)
        with warnings.catch_warnings(record=True) as caught, on_threads(3):
            warnings.simplefilter("always")
            for _ in range(3):
                pool.run(_add, counts.size, counts, 1, grain=7)
        assert (counts == 3).all()
        (warning,) = caught
        assert "run on one thread: a thread could not be started" in str(warning.message)
    """
    run_alone(script)


def test_a_child_forked_while_the_pool_is_busy_shares_its_work():
    output = run_alone(
        """
        import os, threading, warnings
        import numpy as np
        from firstlayer.kernels.runtime.pool import run
        from firstlayer.kernels.runtime.threads import on_threads
        from tests.kernels.runtime.test_pool import _add, run_threads

        warnings.simplefilter("ignore")
        counts, stop = np.zeros(200_000, np.int64), threading.Event()
        # Compiled first: a fork during a compilation copies the compiler's lock.
        run(_add, counts.size, counts, 0, grain=7)
        run_threads(1, rounds=1, grain=1)

        def work():
            with on_threads(2):
                while not stop.is_set():
                    run(_add, counts.size, counts, 1, grain=7)

        thread = threading.Thread(target=work)
        thread.start()
        results = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                with on_threads(2):
                    for _ in range(200):
                        items, _ = run_threads(16, rounds=100_000, grain=1)
                        if len(set(items.tolist())) == 2:
                            os._exit(0)
                os._exit(1)
            results.append(os.waitpid(child, 0)[1])
        stop.set()
        thread.join()
        print(sum(results), len(set(counts.tolist())))
        """
    )
    assert output.split() == ["0", "1"]


def test_a_forked_child_has_no_helpers_in_the_block_of_its_parent():
    output = run_alone(
        """
        import ctypes, os, warnings
        import numpy as np
        from firstlayer.kernels.runtime import pool
        from firstlayer.kernels.runtime.threads import on_threads
        from tests.kernels.runtime.test_pool import _add

        def helpers(block):
            return ctypes.c_int64.from_address(block + pool.STARTED).value

        warnings.simplefilter("ignore")
        counts = np.zeros(20_000, np.int64)
        with on_threads(3):
            pool.run(_add, counts.size, counts, 1, grain=7)
        block = pool._pool.block
        child = os.fork()
        if child == 0:
            os._exit(10 * helpers(block) + helpers(pool._pool.block))
        print(helpers(block), os.waitpid(child, 0)[1])
        """
    )
    assert output.split() == ["2", "0"]


def test_threads_that_start_helpers_at_once_start_each_once():
    output = run_alone(
        """
        import ctypes, threading
        from concurrent.futures import ThreadPoolExecutor
        from firstlayer.kernels.runtime import pool

        write = pool._pool._write
        started = threading.Barrier(4)

        def slow_write(offset, number):
            threading.Event().wait(0.01)
            write(offset, number)

        pool._pool._write = slow_write

        def start(count):
            started.wait()
            return pool._pool.start_helpers(count)

        with ThreadPoolExecutor(4) as callers:
            counts = list(callers.map(start, (1, 2, 3, 3)))
        helpers = [one for one in threading.enumerate() if one.name == "firstlayer"]
        slots = (ctypes.c_int64 * 4).from_address(pool._pool.block + pool.THREADS)
        assert list(slots) == [*(one.native_id for one in helpers), 0], list(slots)
        print(*counts, len(helpers))
        """
    )
    assert output.split() == ["1", "2", "3", "3", "3"]
