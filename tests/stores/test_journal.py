"""The undo journal and the store of a table trained on disk, without a front end."""

import json
import os
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.files.safetensors import write
from firstlayer.stores import MemoryStore, create_store, open_store
from tests.support.table_files import word2vec_bytes

ROWS, WIDTH = 40, 6


def values(version: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(version).normal(size=(rows, WIDTH)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    with create_store(tmp_path / "table", (ROWS, WIDTH), rows=values(0)):
        pass
    return tmp_path / "table"


def crash(store) -> None:
    """Close the files of a store without undoing or committing anything."""
    store.close()


def content(path, **options) -> np.ndarray:
    with open_store(path, mode="r+", **options) as store:
        return store.array.copy()


def test_changes_since_the_last_commit_are_undone(path):
    store = open_store(path, mode="r+")
    store.write([1, 5], values(1)[[1, 5]])
    store.commit()
    committed = store.array.copy()
    store.write([5, 7, 5], values(2)[[5, 7, 5]])
    store.write([1], values(3)[[1]])
    assert (store.array != committed).any(axis=1).nonzero()[0].tolist() == [1, 5, 7]
    crash(store)
    np.testing.assert_array_equal(content(path), committed)


def test_a_row_is_journalled_once_between_commits(path):
    with open_store(path, mode="r+") as store:
        segment = store._journal.newest
        start = segment.end
        store.before_write(np.array([3, 4]))
        first = segment.end
        store.before_write(np.array([4, 3, 3]))
        store.write([3], values(1)[[3]])
        assert start < first == segment.end
        store.commit()
        assert store._journal.newest.end == store._journal.newest.header_bytes
        store.before_write(np.array([4]))
        assert store._journal.newest.end > store._journal.newest.header_bytes


def test_all_rows_are_journalled_in_chunks(path, monkeypatch):
    monkeypatch.setattr("firstlayer.stores.training.RECORD_BYTES", 5 * (8 + 4 * WIDTH))
    store = open_store(path, mode="r+")
    store.before_write(np.array([7]))
    store.before_write()
    store.array[:] = 1.0
    crash(store)
    np.testing.assert_array_equal(content(path), values(0))


def test_store_returns_to_a_tag(path):
    store, states = open_store(path, mode="r+", keep=3), {}
    for version in range(1, 8):
        store.write([version, version + 1], values(version)[:2])
        tag = f"t{version}" if version % 2 else None
        store.commit(tag)
        states[tag] = store.array.copy()
    assert store.tags == ["t3", "t5", "t7"]
    store.write([0], values(9)[:1])
    crash(store)
    np.testing.assert_array_equal(content(path, at="t7", keep=3), states["t7"])
    np.testing.assert_array_equal(content(path, at="t5", keep=3), states["t5"])
    with open_store(path, mode="r+", keep=3) as store:
        assert store.tags == ["t3", "t5"]
        store.write([2], values(11)[:1])
        store.return_to("t3")
        np.testing.assert_array_equal(store.array, states["t3"])
        with pytest.raises(ValueError, match=r"one of \['t3'\], got 't5'"):
            store.return_to("t5")
        store.write([2], values(11)[:1])
        store.commit("t5")
        changed = store.array.copy()
    np.testing.assert_array_equal(content(path), changed)


def test_old_tags_and_untagged_commits_are_pruned(path):
    def segments():
        return len(list(path.glob("undo-*")))

    with open_store(path, mode="r+", keep=1) as store:
        for version in range(5):
            store.write([version], values(version)[:1])
            store.commit()
        assert segments() == 1
        store.commit("a")
        store.commit()
        assert segments() == 2
        store.commit("b")
        assert store.tags == ["b"] and segments() == 1
        with pytest.raises(ValueError, match="tag must be new, got 'b'"):
            store.commit("b")
    assert len(os.listdir(path)) == 4  # Lock, weight, two segments.


def test_records_of_an_overwritten_segment_are_ignored(path):
    store = open_store(path, mode="r+")
    for version in range(4):
        store.before_write(np.arange(30))
        store.array[:30] = values(version)[:30]
        store.commit()
    store.before_write(np.array([3]))
    store.array[3] = 1.0
    newest = store._journal.newest
    # Old records follow the new one.
    assert os.path.getsize(newest.path) > newest.end
    crash(store)
    np.testing.assert_array_equal(content(path)[:30], values(3)[:30])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_table_is_trained_in_place(tmp_path, dtype):
    from ml_dtypes import bfloat16

    table = values(4).astype(bfloat16 if dtype == "bfloat16" else dtype)
    file = tmp_path / "model.safetensors"
    write(file, {"a": np.ones(3), "token.weight": table}, {})
    store = open_store(file, mode="r+")
    assert store.shape == (ROWS, WIDTH) and store.dtype.name == dtype
    np.testing.assert_array_equal(store.read([[2, 3]]), table[[[2, 3]]])
    store.write([2], np.ones((1, WIDTH)))
    store.commit("one")
    store.write([2, 3], np.zeros((2, WIDTH)))
    crash(store)
    table[2] = 1
    np.testing.assert_array_equal(content(file, tensor="token.weight"), table)
    with open_store(file, mode="r+") as store:
        store.write([8], np.full((1, WIDTH), 0.5))
    from firstlayer.files.safetensors import read

    table[8] = 0.5
    np.testing.assert_array_equal(read(file)[0]["token.weight"], table)
    np.testing.assert_array_equal(read(file)[0]["a"], np.ones(3))


def test_npy_table_is_trained_in_place(tmp_path):
    np.save(tmp_path / "a.npy", values(5))
    with open_store(tmp_path / "a.npy", mode="r+") as store:
        store.write([0], np.ones((1, WIDTH)))
    expected = values(5)
    expected[0] = 1
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)
    np.save(tmp_path / "a.npy", values(5, rows=3))
    with pytest.raises(ValueError, match=r"of another table, \(40, 6\) float32 at byte"):
        open_store(tmp_path / "a.npy", mode="r+")


@pytest.mark.rejects
def test_tables_that_cannot_be_trained_are_refused(tmp_path):
    def refused(path, message, **options):
        with pytest.raises(ValueError, match=message):
            open_store(path, mode="r+", **options)
        assert not list(tmp_path.glob("*.training"))

    np.save(tmp_path / "a.npy", values(5).astype(np.float64))
    refused(tmp_path / "a.npy", "must have float32 or float16 numbers in native byte order")
    np.save(tmp_path / "b.npy", np.asfortranarray(values(5)))
    refused(tmp_path / "b.npy", "Fortran order")
    np.save(tmp_path / "c.npy", values(5))
    refused(tmp_path / "c.npy", "sync must be 'off' or 'full', got 'on'", sync="on")
    refused(tmp_path / "c.npy", 'cache_rows must be 0 with mode="r.", got 3', cache_rows=3)
    MemoryStore(values(5), format="int8").save(tmp_path / "d.safetensors")
    refused(tmp_path / "d.safetensors", r"got format int8; copy it with create_store")
    with pytest.raises(FileNotFoundError, match="no file .*/e"):
        open_store(tmp_path / "e", mode="r+")
    train_only: dict[str, Any] = {"at": "x", "sync": "full", "keep": 3}
    for name, value in train_only.items():
        with pytest.raises(ValueError, match=f'{name} must be left out unless mode is "r.'):
            open_store(tmp_path / "c.npy", **{name: value})
    with pytest.raises(ValueError, match="dtype must be one of .* got float64"):
        create_store(tmp_path / "f", (3, 2), dtype="float64")
    with pytest.raises(FileExistsError, match="must be empty, but it has a.npy"):
        create_store(tmp_path, (3, 2))
    with pytest.raises(TypeError, match="shape must be given, unless rows is a store or"):
        create_store(tmp_path / "f", rows=lambda lo, hi: values(5)[lo:hi])
    with pytest.raises(ValueError, match=r"rows must have shape \(3, 2\), got \(40, 6\)"):
        create_store(tmp_path / "f", (3, 2), rows=MemoryStore(values(5)))


def test_a_trained_table_is_not_read_between_commits(path, tmp_path):
    with pytest.raises(ValueError, match='is trained: open it with mode="r."; save'):
        open_store(path)
    file = tmp_path / "a.npy"
    np.save(file, values(0))
    with open_store(file, mode="r+") as store:
        store.write([3], values(1)[:1])
    np.testing.assert_array_equal(open_store(file).read(3), values(1)[0])
    store = open_store(file, mode="r+")
    store.write([3], values(2)[:1])
    crash(store)
    with pytest.raises(ValueError, match="rows that changed after its last commit; open"):
        open_store(file)
    open_store(file, mode="r+").close()
    np.testing.assert_array_equal(open_store(file).read(3), values(1)[0])


@pytest.mark.parametrize(
    "source", ["sharded", "row_shards", "int8", "word2vec", "training"]
)
def test_a_store_is_created_from_any_other(tmp_path, source, monkeypatch):
    # Several chunks.
    monkeypatch.setattr("firstlayer.stores.training_folder.RECORD_BYTES", 7 * 4 * WIDTH)
    table, path = values(6), tmp_path / "source"
    options: dict[str, Any] = {}
    path.mkdir()
    if source in ("sharded", "row_shards"):
        names = ["model.embed_tokens.weight", "lm.weight"]
        parts = [table, table[:3]]
        if source == "row_shards":
            names, parts = (
                [f"a.shard_{i}.weight" for i in range(3)],
                np.split(table, [9, 9]),
            )
            options = {"tensor": "a"}
        for number, (name, part) in enumerate(zip(names, parts, strict=True)):
            write(path / f"{number}.safetensors", {name: part}, {})
        files = {name: f"{number}.safetensors" for number, name in enumerate(names)}
        index = path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": files}))
    elif source == "int8":
        path /= "a.safetensors"
        MemoryStore(table, format="int8").save(path)
    elif source == "word2vec":
        path /= "a.bin"
        path.write_bytes(
            word2vec_bytes([str(i) for i in range(ROWS)], table, newline=False)
        )
    else:
        path = path / "table"
        create_store(path, rows=table).close()
        options = {"mode": "r+"}
    with open_store(path, **options) as rows:
        want = rows.read(np.arange(ROWS))
        with create_store(tmp_path / "new", rows=rows) as store:
            store.write([1], np.ones((1, WIDTH)))
    np.testing.assert_allclose(want, table, atol=0.02 if source == "int8" else 0)
    want[1] = 1
    np.testing.assert_array_equal(content(tmp_path / "new"), want)
    if source in ("row_shards", "int8", "word2vec"):
        with pytest.raises(
            ValueError, match=r"copy it with create_store\(folder, rows=open"
        ):
            open_store(path, mode="r+", **options)


def test_dtype_of_a_new_store(tmp_path):
    half = values(1).astype(np.float16)
    for number, (rows, dtype, want) in enumerate([
        (half, None, "float16"),
        (MemoryStore(half), None, "float16"),
        (values(1).astype(np.float64), None, "float32"),
        (MemoryStore(values(1), format="int8"), None, "float32"),
        (half, "bfloat16", "bfloat16"),
    ]):
        with create_store(tmp_path / str(number), rows=rows, dtype=dtype) as store:
            assert store.dtype.name == want and store.shape == (ROWS, WIDTH)


def test_a_creation_that_stops_can_be_repeated(tmp_path):
    class Stopping(MemoryStore):
        def read(self, ids):
            raise OSError("stopped")

    with pytest.raises(OSError, match="stopped"):
        create_store(tmp_path / "a", rows=Stopping(values(1)))
    with pytest.raises(FileNotFoundError, match="was not finished; create it again"):
        open_store(tmp_path / "a", mode="r+")
    with pytest.raises(ValueError, match='is trained: open it with mode="r.'):
        open_store(tmp_path / "a")
    with create_store(tmp_path / "a", rows=values(2)) as store:
        np.testing.assert_array_equal(store.array, values(2))


def test_a_second_writer_gets_an_error(path):
    with open_store(path, mode="r+") as store:
        with pytest.raises(RuntimeError, match="is open for training already"):
            open_store(path, mode="r+")
        child = os.fork()
        if child == 0:
            # The lock is held by the parent; the child can read but not write.
            try:
                open_store(path, mode="r+")
            except RuntimeError as error:
                if "already" not in str(error):
                    os._exit(2)
            try:
                store.write([1], values(1)[:1])
            except RuntimeError as error:
                is_right = "a process forked from it can only read" in str(error)
                os._exit(0 if is_right and store.read([1]).size else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(RuntimeError, match="is open for training already"):
            open_store(path, mode="r+")
    open_store(path, mode="r+").close()


def test_a_closed_store_refuses_writes(path):
    store = open_store(path, mode="r+")
    store.close()
    store.close()
    # A row written to the mapped file now would be neither committed nor undone.
    calls = store.before_write, store.commit, store.flush, lambda: store.array
    for call in calls:
        with pytest.raises(ValueError, match="is closed"):
            call()


@given(cut=st.integers(1, 2000), flip=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_an_incomplete_record_is_ignored(tmp_path_factory, cut, flip, seed):
    path = tmp_path_factory.mktemp("store") / "table"
    store = create_store(path, (ROWS, WIDTH), rows=values(0))
    store.write([1, 2], values(seed + 1)[:2])
    last_segment = store._journal.newest
    changed, complete = store.array.copy(), last_segment.end
    # Rows change only after their record is complete.
    store.before_write(np.arange(10, 30))
    size = last_segment.end
    crash(store)
    with open(last_segment.path, "r+b") as file:
        if flip:
            position = complete + cut % (size - complete)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << cut % 8)]))
        else:
            file.truncate(max(complete, size - cut))
    assert (changed != values(0)).any()
    np.testing.assert_array_equal(content(path), values(0))


def test_damage_is_an_error(path):
    with open_store(path, mode="r+", keep=5) as store:
        store.commit("a")
        store.write([1, 2], values(1)[:2])
        store.commit("b")
        first, last = store._journal.path_of(3), store._journal.path_of(4)
        # Space that was allocated ahead is freed when a commit is kept.
        end = store._journal.newest.commit.previous_bytes
        assert os.path.getsize(first) == end
        committed = store.array.copy()
    with open(first, "r+b") as file:
        file.seek(end - 64)
        byte = file.read(1)[0]
        file.seek(end - 64)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match="is damaged after byte .* cannot return to"):
        open_store(path, mode="r+", at="a")
    # The last commit is intact.
    np.testing.assert_array_equal(content(path), committed)
    last = max(path.glob("undo-*"))
    last.write_bytes(struct.pack("<8sIQQ", b"FLundo1\n", 0, 4, 0) + b"none")
    with pytest.raises(ValueError, match="is damaged: its header"):
        open_store(path, mode="r+")


def test_a_full_disk_leaves_the_last_commit(path):
    import resource

    store = open_store(path, mode="r+")
    store.write([1], values(1)[:1])
    store.commit("good")
    committed = store.array.copy()
    store.write([2], values(2)[:1])
    changed = store.array.copy()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store._journal.newest.end + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.write(np.arange(20), values(3)[:20])
        np.testing.assert_array_equal(store.array, changed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.write([3], values(3)[:1])
    crash(store)
    np.testing.assert_array_equal(content(path), committed)


def test_a_commit_that_fails_leaves_the_changes_uncommitted(path, monkeypatch):
    from firstlayer.stores import journal

    store = open_store(path, mode="r+")
    store.write([2], values(2)[:1])
    changed = store.array.copy()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            store.commit("x")
    assert store.tags == [] and len(list(path.glob("undo-*"))) == 1
    np.testing.assert_array_equal(store.array, changed)
    store.commit("x")
    crash(store)
    np.testing.assert_array_equal(content(path), changed)


def test_rows_are_created_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("firstlayer.stores.training_folder.RECORD_BYTES", 7 * 4 * WIDTH)
    calls = []

    def rows(lo, hi):
        calls.append(hi - lo)
        return values(3)[lo:hi]

    with create_store(tmp_path / "a", (ROWS, WIDTH), rows=rows) as store:
        np.testing.assert_array_equal(store.array, values(3))
    assert calls == [7, 7, 7, 7, 7, 5]
    with pytest.raises(ValueError, match=r"rows\(0, 7\) must have shape \(7, 6\), got"):
        create_store(tmp_path / "b", (ROWS, WIDTH), rows=lambda lo, hi: [[1.0]])
    # A creation that failed leaves a folder that can be used.
    create_store(tmp_path / "b", (ROWS, WIDTH)).close()


@pytest.mark.parametrize("rows, width", [(0, 3), (4, 0), (1, 1)])
def test_tables_without_rows_or_columns(tmp_path, rows, width):
    want = np.full((rows, width), 2.0, np.float32)
    with create_store(tmp_path / "a", (rows, width)) as store:
        store.write(np.arange(rows), want)
        store.commit("a")
        store.write(np.arange(rows), want + 1)
        # Closed without a commit: the second write is undone.
        store.close()
    with open_store(tmp_path / "a", mode="r+") as store:
        assert store.shape == (rows, width) and store.tags == ["a"]
        assert store.read(np.arange(rows)).tobytes() == want.tobytes()


def test_ids_and_rows_are_checked(path):
    with open_store(path, mode="r+") as store:
        with pytest.raises(IndexError, match=r"ids\[1\] is 40, but num_embeddings is 40"):
            store.read([0, ROWS])
        with pytest.raises(
            ValueError, match=r"rows must have shape \(2, 6\), got \(1, 6\)"
        ):
            store.write([0, 1], np.ones((1, WIDTH)))
        store.prefetch([0, 39, 3])
        assert len(store) == ROWS and repr(store) == "TrainingStore(table: 40 × 6, float32)"
