"""Ctrl-C leaves every table as it was before the interrupted call, or as it is after it."""

import importlib
import pkgutil
import re
import signal
import threading

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from firstlayer import kernels
from firstlayer._interrupts import held_interrupts
from firstlayer.embeddings.id_map import IdMap
from firstlayer.kernels import row_copies
from firstlayer.kernels.ngram import ngram_rows
from firstlayer.numpy import EmbeddingLayer
from firstlayer.optim import (
    AveragedRows,
    RowAdagrad,
    RowAdamW,
    RowLion,
    RowRMSprop,
    RowSGD,
    RowWiseAdagrad,
    RowWiseRMSprop,
)
from firstlayer.stores import MemoryStore
from tests.support.run_alone import run_alone, start_python


@pytest.mark.parametrize("name", ["numpy-adamw", "numpy-sgd", "torch-adamw"])
def test_interrupted_calls_are_done_completely_or_not_at_all(name):
    # In another process, because signals reach every thread and plugin of this one.
    output = run_alone(
        f"""
        from tests.support.reliability_interrupts import check_interrupts
        results = check_interrupts({name!r}, count=500)
        assert sum(results.values()) == 500 and min(results.values()) > 0, results
        print("checked")
        """
    )
    assert output.split() == ["checked"]


@pytest.fixture
def received():
    """Handler of SIGINT that appends to a list, for the duration of a test."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_raised_after_the_block():
    # The block would change nothing on another thread.
    assert threading.current_thread() is threading.main_thread()
    done = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupts():
            interrupt()
            done.append(1)
        done.append(2)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_is_called_once_after_the_outermost_block(received):
    handler = signal.getsignal(signal.SIGINT)
    with held_interrupts():
        with held_interrupts():
            interrupt()
            interrupt()
        assert received == []
        with held_interrupts():
            pass
        assert received == []
    assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_in_the_block_is_the_context_of_the_interrupt():
    with pytest.raises(KeyboardInterrupt) as caught, held_interrupts():
        interrupt()
        raise ValueError("in the block")
    assert str(caught.value.__context__) == "in the block"


def test_an_error_without_an_interrupt_is_raised(received):
    with pytest.raises(ValueError, match="in the block"), held_interrupts():
        raise ValueError("in the block")
    assert received == []


def test_a_handler_that_is_installed_in_the_block_stays(received):
    def other(number, frame):
        received.append("other")

    with held_interrupts():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other
    interrupt()
    assert received == ["other"]


def test_other_threads_change_no_handler(received):
    handler, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with held_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_an_ignored_signal_stays_ignored(received):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
    assert received == [] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_default_action_ends_the_process():
    done = start_python(
        "import signal\n"
        "from firstlayer._interrupts import held_interrupts\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "with held_interrupts():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('not reached')\n"
    )
    assert done.returncode == -signal.SIGINT and not done.stdout


def test_a_block_that_another_signal_ended_leaves_no_handler(received):
    handler = signal.getsignal(signal.SIGINT)
    # As if the handler of another signal had raised before __exit__ did anything.
    block = held_interrupts()
    block.__enter__()
    del block
    interrupt()
    assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler
    block = held_interrupts()
    block.__enter__()
    del block
    with held_interrupts():
        interrupt()
        assert len(received) == 1
    assert len(received) == 2 and signal.getsignal(signal.SIGINT) is handler


def test_sigterm_is_held_back_if_it_has_a_handler(received):
    order = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: order.append("term"))
    assert callable(before) is False
    signal.signal(signal.SIGINT, lambda number, frame: order.append("int"))
    try:
        with held_interrupts():
            interrupt()
            signal.raise_signal(signal.SIGTERM)
            order.append("block")
        assert order == ["block", "term", "int"]
    finally:
        signal.signal(signal.SIGTERM, before)
    with held_interrupts():
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_program_that_exits_on_sigterm_leaves_a_complete_step():
    done = start_python(
        "import signal, sys\n"
        "from firstlayer._interrupts import held_interrupts\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))\n"
        "with held_interrupts():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('complete')\n"
        "print('not reached')\n"
    )
    assert done.returncode == 7 and done.stdout.split() == ["complete"]


@pytest.mark.parametrize("forks", ["main thread", "another thread"])
def test_a_process_forked_during_a_block_can_be_interrupted(forks):
    call = "fork()" if forks == "main thread" else "run(fork)"
    done = start_python(
        "import os, signal, threading, warnings\n"
        "from firstlayer._interrupts import held_interrupts\n"
        "warnings.simplefilter('ignore')\n"
        "def run(target):\n"
        "    thread = threading.Thread(target=target)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "def use():\n"
        "    try:\n"
        "        with held_interrupts():\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "            print('held', flush=True)\n"
        "    except KeyboardInterrupt:\n"
        "        print('raised', flush=True)\n"
        "    else:\n"
        "        print('pending', flush=True)\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        os.waitpid(child, 0)\n"
        "        return\n"
        "    use()\n"
        "    if threading.main_thread() is not main:\n"
        "        try:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            print('raised', flush=True)\n"
        "        os._exit(0)\n"
        "main = threading.main_thread()\n"
        "pid = os.getpid()\n"
        "try:\n"
        "    with held_interrupts():\n"
        f"        {call}\n"
        "except KeyboardInterrupt:\n"
        "    print('raised', flush=True)\n"
        "print('parent' if os.getpid() == pid else 'child', flush=True)\n"
    )
    words = done.stdout.split()
    if forks == "main thread":
        # The block of the child ends in the child.
        assert words == ["held", "pending", "raised", "child", "parent"], done
    else:
        assert words == ["held", "raised", "raised", "parent"], done


def run_every_kernel() -> None:
    """Call functions that run each kernel at least once."""
    optimizers = [
        (RowAdamW, {}),
        (RowSGD, {"momentum": 0.9}),
        (RowLion, {}),
        (RowRMSprop, {"momentum": 0.9}),
        (RowAdagrad, {}),
        (RowWiseAdagrad, {}),
        (RowWiseRMSprop, {}),
    ]
    for optimizer_class, options in optimizers:
        dtype = "bfloat16" if optimizer_class is RowAdamW else "float32"
        layer = EmbeddingLayer(
            300, 4, max_positions=40, layer_norm=True, dtype=dtype, rng=0
        )
        options["stochastic_rounding"] = dtype == "bfloat16"
        optimizer = optimizer_class(layer, **options)
        averaged = AveragedRows(optimizer)
        # Enough tokens for several blocks.
        for ids in (np.arange(40) % 7, np.arange(3)):
            y, pull = layer.vjp(ids)
            optimizer.step(pull(y))
            averaged.update_parameters()
        optimizer.flush()
    table, ids = np.ones((40_000, 128), np.float32), np.arange(40_000)
    for count in (3, 300, 40_000):
        rows = kernels.gather_rows(table, ids[:count])
        assert rows is not None and rows.shape == (count, 128)
    # Rows that are not whole cache lines.
    assert kernels.gather_rows(table[:, :3].copy(), ids) is not None
    for width in (128, 2):
        kernels.sum_bags(table[:, :width].copy(), ids[:5], np.array([0, 5]))
    kernels.group_by_id(ids[:5] << 58)
    order, bounds, _ = kernels.group_by_id(ids[:5])
    kernels.sum_groups(table, order, bounds[:-1], bounds[1:])
    kernels.max_bags(table, ids[:5], np.array([0, 5]))
    kernels.dot_bags(table, ids[:5], np.array([0, 5]), others=table[:1])
    # Programs of XLA call these.
    row_copies.read_rows_function()
    row_copies.write_rows_function()
    row_copies.sum_rows_function()
    options = {"num_tokens": 3, "skip": None, "shared_rows": 2}
    kernels.plan_backward(np.array([7, 3, 7]), None, tokens=ids[:3], **options)
    kernels.store_rows(np.ones((2, 4), "f4"), np.ones((9, 4), "f4"), ids[:2], noise=None)
    assert kernels.ascends(ids)
    phases = np.ones((1, 16), np.float32)
    for read in (True, False):
        for write in (True, False):
            options = {"which": ids[:1], "read_half": read, "write_half": write}
            kernels.rotate_pairs(np.ones((3, 16), np.float32), phases, **options)
    tables = np.ones((2, 3, 256, 4), np.float32)
    kernels.digit_phases(ids[:5], tables)
    for interleaved in (True, False):
        options = {"width": 8, "interleaved": interleaved, "cos_first": True}
        kernels.sinusoid_features(ids[:5], tables, **options)
    options = {"fill": 0, "stop": None, "negative": "dead", "no_id": -1}
    for multipliers in (np.array([3, 5]), np.array([[3, 5]])):
        ngram_rows(
            np.array([[-1, 3, 4]]),
            None,
            None,
            multipliers=multipliers,
            sizes=np.array([7]),
            offsets=np.array([0]),
            **options,
        )
    _run_kernels_of_stores()
    _run_kernels_of_vectors()


def _run_kernels_of_vectors() -> None:
    id_map = IdMap(2)
    for new in (np.array([5, 7]), np.array([7, 9])):
        id_map.assign(new)
    assert id_map.restored(id_map.state()).find(np.array([9, 7, 5])).tolist() == [1, 2, 0]
    assert kernels.sum_words(np.ones((2, 3), np.uint64)).tolist() == [3, 3]
    counts, values = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    kernels.nearest_in(np.ones((3, 5), np.float32), 0, ids=counts, values=values)
    graph = np.array([0, 1, 2]), np.array([1, 0], np.int32), np.ones(2, np.float32)
    points = np.ones((2, 2), np.float32)
    options = {"rate": 0.1, "negatives": 2, "repulsion": 1.0, "key": 3}
    kernels.move_points(points, graph, out=points.copy(), **options)
    _train_word_vectors()
    line = np.frombuffer(b"a 1.5 2", np.uint8)
    kernels.parse_text_rows(
        line, np.array([0, 7]), np.zeros((1, 2), np.float32), np.zeros(1, np.int64)
    )
    kernels.mean_subword_rows(
        np.frombuffer(b"<a>", np.uint8),
        np.array([0, 3]),
        np.array([-1]),
        np.ones((4, 2), np.float32),
        buckets=4,
        lengths=(2, 3),
        out=np.zeros((1, 2), np.float32),
        counts=np.zeros(1, np.int64),
    )


def _train_word_vectors() -> None:
    stream, documents = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    text, bounds = np.frombuffer(b"<a>" * 8, np.uint8), np.arange(0, 27, 3)
    rows = kernels.subword_rows(text, bounds, buckets=4, lengths=(2, 3))
    for buckets, word_rows in ((0, None), (4, rows)):
        kernels.word2vec_step(
            np.ones((8 + buckets, 4), np.float32),
            np.ones((8, 4), np.float32),
            *(stream, documents, range(8)),
            noise=kernels.noise_table(np.ones(8)),
            key=1,
            lr=0.1,
            workspace=kernels.word2vec_workspace(
                8,
                num_embeddings=8,
                embedding_dim=4,
                window=2,
                negatives=3,
                buckets=buckets,
            ),
            word_rows=word_rows,
        )


def _run_kernels_of_stores() -> None:
    table = np.ones((40, 32), np.float32)
    store = MemoryStore(table, format="int8")
    store.read(np.arange(9))
    store.sum_bags(np.arange(9), np.array([0, 4, 9]))
    start, none = table.ctypes.data, np.empty(0, np.int64)
    bases, starts = np.array([start, table.nbytes]), np.array([0, 40, 40])
    for offsets in (none, np.arange(0, 40 * 128, 128)):
        addresses = kernels.locate_rows(np.arange(5), starts, bases, 128, offsets)
        assert addresses is not None
        rows = np.empty((5, 32), np.float32)
        kernels.copy_rows_at(addresses, rows)
        # Few rows are requested without asking.
        kernels.rows_missing(np.tile(addresses, 100), 128)
        for wait in (False, True):
            kernels.request_rows(addresses, 128, wait=wait)


def all_kernels() -> dict[str, Dispatcher]:
    """Return every kernel, by the name of its function."""
    found = {}
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        values = list(vars(module).values())
        for value in list(values):
            if isinstance(value, dict):
                values.extend(value.values())
        for value in values:
            # Only kernels release the GIL; other functions are compiled into kernels.
            if isinstance(value, Dispatcher) and value.targetoptions.get("nogil"):
                function = value.py_func
                found[f"{function.__module__}.{function.__qualname__}.{id(value)}"] = value
    return found


def test_no_kernel_returns_an_array():
    # If Numba creates an array while an interrupt is pending, it raises a SystemError.
    run_every_kernel()
    found = all_kernels()
    assert len(found) > 35
    # Helper threads call their functions themselves, if there are any.
    not_called = [
        name
        for name, kernel in found.items()
        if not kernel.nopython_signatures and not re.search("help_forever|_wake", name)
    ]
    assert not_called == []
    allowed = numba.types.Number, numba.types.Boolean, numba.types.NoneType
    for name, kernel in found.items():
        for signature in kernel.nopython_signatures:
            assert isinstance(signature.return_type, allowed), f"{name} returns {signature}"
