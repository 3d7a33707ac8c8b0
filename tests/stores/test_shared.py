"""Shared memory: one copy, removed by the last process, whatever the others do."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch

from firstlayer.stores import MemoryStore, SharedStore, open_store
from firstlayer.stores import shared as shared_module
from tests.support.shared_stores import kill_processes, leftovers, start

rng = np.random.default_rng(0)


@pytest.fixture
def name(request):
    name = f"test-{os.getpid()}-{request.node.name[:40]}".replace("[", "-").rstrip("]")
    assert not leftovers(name)
    yield name
    assert not leftovers(name)


def random(shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("format", [None, "bfloat16", "int8", "int4", "fp8", "fp8_block"])
def test_stores_of_one_name_have_the_rows_of_the_table(format, name):
    table = random((20, 64))
    want = MemoryStore(table, format=format).read(np.arange(20))
    with SharedStore(name, table, format=format) as one, SharedStore(name) as other:
        assert one.shape == other.shape == (20, 64) and one.dtype == want.dtype
        np.testing.assert_array_equal(other.read(np.arange(20)), want)
    assert one.closed and "20 × 64" in repr(one)
    with pytest.raises(ValueError, match="is closed"):
        one.read([0])


def test_another_process_opens_the_table_by_its_name(name):
    table = random((20, 64))
    code = "import sys; from firstlayer.stores import SharedStore\n"
    code += "print(SharedStore(sys.argv[1]).read([7, 3]).astype('f8').sum())"
    with SharedStore(name, table, format="int8") as store:
        output, _ = start(code, name).communicate()
        assert float(output) == store.read([7, 3]).astype("f8").sum()


def test_the_source_is_read_by_the_first_process_only(name, tmp_path):
    table, calls = random((5, 4)), []
    np.save(tmp_path / "a.npy", table)

    def source():
        calls.append(1)
        return open_store(tmp_path / "a.npy")

    with SharedStore(name, source) as one, SharedStore(name, source) as other:
        assert calls == [1]
        np.testing.assert_array_equal(one.read([4, 0]), table[[4, 0]])
        np.testing.assert_array_equal(other.read([4, 0]), table[[4, 0]])


@pytest.mark.rejects
def test_arguments_are_checked(name):
    with pytest.raises(FileNotFoundError, match=f"no shared store '{name}'"):
        SharedStore(name)
    for bad in ("", "a/b", "../a", ".a", "a" * 101, "ä"):
        with pytest.raises(ValueError, match="name must be 1 to 100 letters"):
            SharedStore(bad)
    with pytest.raises(ValueError, match="mode must be"):
        SharedStore(name, random((2, 2)), mode="w")
    with pytest.raises(TypeError, match="q8_0 can be read but not written"):
        SharedStore(name, random((2, 32)), format="q8_0")
    with SharedStore(name, random((2, 32)), format="int8"):
        with pytest.raises(ValueError, match="rows of format int8, but format is 'int4'"):
            SharedStore(name, format="int4")


def test_a_failing_source_leaves_nothing(name):
    def source():
        raise RuntimeError("no table today")

    with pytest.raises(RuntimeError, match="no table today"):
        SharedStore(name, source)
    assert not leftovers(name)


def test_too_large_a_table_is_an_error_and_not_a_crash(name):
    class Huge(MemoryStore):
        @property
        def shape(self):
            return 1 << 50, 4

    with pytest.raises(OSError, match="no shared memory for the"):
        SharedStore(name, Huge(random((2, 4))))


def test_one_process_at_a_time_writes(name):
    with SharedStore(name, random((5, 4)), mode="r+") as writer:
        with pytest.raises(ValueError, match=f"open for writing, by process {os.getpid()}"):
            SharedStore(name, mode="r+")
        reader = SharedStore(name)
        writer.write([3], [[1, 2, 3, 4]])
        np.testing.assert_array_equal(reader.read(3), [1, 2, 3, 4])
        with pytest.raises(ValueError, match="read-only"):
            reader.write([3], [[1, 2, 3, 4]])
        with pytest.raises(ValueError, match="read-only"):
            reader.parts["weight"][0] = 1
    with SharedStore(name, mode="r+") as next_writer:
        next_writer.write([0], [[5, 5, 5, 5]])
        assert (reader.read(0) == 5).all()
    reader.close()


def test_a_shared_table_can_be_saved(name, tmp_path):
    table = random((30, 32))
    with SharedStore(name, table, format="int8") as store:
        store.save(tmp_path / "a.safetensors")
        want = store.read(np.arange(30))
    with open_store(tmp_path / "a.safetensors") as saved:
        assert saved.format.name == "int8"
        np.testing.assert_array_equal(saved.read(np.arange(30)), want)


def in_child(work):
    """Run ``work`` in a forked child that ends without cleaning up; return its code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(not work())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_keeps_the_table_after_its_parent_closed_it(name):
    table = random((5, 4))
    store = SharedStore(name, table)
    go, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(go[0], 1)
            # The table still has its name: another process can open it.
            with SharedStore(name) as other:
                same = (other.read([1]) == table[[1]]).all()
            os.write(
                done[1], b"y" if same and (store.read([2]) == table[2]).all() else b"n"
            )
            store.close()
            os.write(done[1], b"y" if not leftovers(name) else b"n")
        finally:
            os._exit(0)
    store.close()
    assert leftovers(name)
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    assert os.read(done[0], 2) == b"yy"


def test_a_forked_child_does_not_remove_the_table_of_its_parent(name):
    with SharedStore(name, random((5, 4))) as store:
        assert in_child(lambda: store.close() or leftovers(name)) == 0
        assert in_child(lambda: True) == 0
        with SharedStore(name) as other:
            assert (other.read([1]) == store.read([1])).all()


def test_a_forked_child_of_the_writer_reads_only(name):
    with SharedStore(name, random((5, 4)), mode="r+") as store:

        def work():
            try:
                store.write([0], np.ones((1, 4)))
            except ValueError:
                try:
                    SharedStore(name, mode="r+")
                except ValueError as error:
                    return "open for writing" in str(error) and store.mode == "r"

        assert in_child(work) == 0
        store.write([0], np.ones((1, 4)))


def test_locks_of_many_forks_do_not_pile_up(name):
    with SharedStore(name, random((5, 4))):
        # Files of other tests that nothing has closed yet.
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert in_child(lambda: len(os.listdir("/proc/self/fd")) <= before) == 0
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_next_process_removes_what_a_killed_one_left(name):
    code = "import sys, numpy as np; from firstlayer.stores import SharedStore\n"
    code += "store = SharedStore(sys.argv[1], np.ones((5, 4), 'f4'), mode='r+')\n"
    code += "print('ready', flush=True); sys.stdin.read()"
    process = start(code, name)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(leftovers(name)) == 3
    # Opening any other table removes it.
    with SharedStore(f"{name}-b", random((5, 4))):
        assert all("-b" in file for file in leftovers(name))


def test_a_table_that_was_not_complete_is_never_used(name):
    def source():
        os._exit(7)

    assert in_child(lambda: SharedStore(name, source)) == 7
    with pytest.raises(FileNotFoundError):
        SharedStore(name)

    def die_after_creating_the_segment():
        shared_module.encoded_chunks = lambda *arguments: os._exit(7)
        SharedStore(name, random((5, 4)))

    assert in_child(die_after_creating_the_segment) == 7
    assert len(leftovers(name)) == 2
    table = random((5, 4))
    with SharedStore(name, table) as store:
        np.testing.assert_array_equal(store.read([4]), table[[4]])


def test_others_wait_until_the_table_is_filled(name):
    table, started, go = random((5, 4)), threading.Event(), threading.Event()
    rows = []

    def source():
        started.set()
        assert go.wait(20)
        return table

    def first():
        with SharedStore(name, source) as store:
            second_done.wait(20)
            rows.append(store.read([1]))

    def second():
        with SharedStore(name) as store:
            rows.append(store.read([1]))
        second_done.set()

    second_done = threading.Event()
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert started.wait(20)
    threads[1].start()
    assert not second_done.wait(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert len(rows) == 2 and all((found == table[[1]]).all() for found in rows)


def test_killed_processes_leave_complete_tables_or_none(name):
    counts = kill_processes(name, 60)
    assert counts["killed while in use"] > 10


def test_a_process_that_ends_removes_its_table_without_a_warning(name):
    code = "import sys, numpy as np; from firstlayer.stores import SharedStore\n"
    code += "store = SharedStore(sys.argv[1], np.ones((5, 4), 'f4')); print(store)"
    process = start(code, name)
    output, _ = process.communicate()
    assert "5 × 4" in output and process.returncode == 0
    assert not leftovers(name)


def _rows_of(store, ids):
    return store.read(ids), store.mode


def test_a_pickled_store_uses_the_same_memory(name):
    with SharedStore(name, random((5, 4)), mode="r+") as store:
        twin = pickle.loads(pickle.dumps(store))
        duplicate = copy.deepcopy(store)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            store.write([2], [[1, 2, 3, 4]])
            rows, mode = pool.apply(_rows_of, (store, [2]))
        assert mode == "r" and rows.tolist() == [[1, 2, 3, 4]]
        assert (twin.read(2) == [1, 2, 3, 4]).all() and (
            duplicate.read(2) == twin.read(2)
        ).all()
        twin.close()
        duplicate.close()


class Rows(torch.utils.data.Dataset):
    """A dataset whose items are rows of a store."""

    def __init__(self, store):
        self.store = store

    def __len__(self):
        return len(self.store)

    def __getitem__(self, index):
        return self.store.read(index)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_share_the_table(context, name):
    table = random((12, 4))
    with SharedStore(name, table) as store:
        loader = torch.utils.data.DataLoader(
            Rows(store),
            batch_size=4,
            num_workers=2 if context == "fork" else 1,
            multiprocessing_context=context,
        )
        batches = torch.cat(list(loader))
        np.testing.assert_array_equal(batches.numpy(), table)
        assert leftovers(name)


def test_files_of_another_user_are_refused(name, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        SharedStore(name, random((2, 2)))
    os.unlink(shared_module._lock(name))
