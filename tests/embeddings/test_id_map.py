"""Maps from ids to rows do what dictionaries do, at the cost of a batch."""

import copy
import pickle
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.embeddings.id_map import IdMap
from tests.support.growing import ReferenceMap
from tests.support.run_alone import run_alone

EDGES = [0, -1, 1, 2**40, -(2**63), 2**63 - 1]
ids_of_batches = st.lists(
    st.lists(st.sampled_from(EDGES) | st.integers(0, 12), max_size=8), max_size=20
)


def check(id_map: IdMap, reference: ReferenceMap, batch: list[int]) -> None:
    array = np.array(batch, np.int64)
    try:
        rows, new = reference.assign(batch)
    except ValueError:
        before = {name: x.tolist() for name, x in id_map.state().items()}
        with pytest.raises(ValueError, match=r"capacity must be at least .*, \d+, got \d"):
            id_map.assign(array)
        assert {name: x.tolist() for name, x in id_map.state().items()} == before
        return
    got = id_map.assign(array)
    assert got.rows.tolist() == rows
    assert dict(zip(got.new_ids.tolist(), got.new_rows.tolist(), strict=True)) == new
    assert id_map.size == len(reference.rows)
    assert {i: r + 1 for r, i in enumerate(id_map.ids.tolist())} == reference.rows
    every = np.array([*EDGES, *range(13)])
    assert id_map.find(every).tolist() == [reference.rows.get(i, 0) for i in every.tolist()]
    assert [id_map.state()["uses"][r] for r in reference.rows.values()] == [
        reference.uses[i] for i in reference.rows
    ]


@settings(max_examples=80, deadline=None)
@given(
    ids_of_batches,
    st.integers(1, 9),
    st.sampled_from(["lru", "lfu", None]),
    st.integers(1, 3),
    st.integers(0, 19),
)
def test_rows_are_those_of_a_dictionary_also_after_a_saved_state(
    batches, capacity, evict, min_count, saved_at
):
    options = {"evict": evict, "min_count": min_count}
    id_map, other = IdMap(capacity, **options), IdMap(capacity, **options)
    reference = ReferenceMap(capacity, **options)
    for step, batch in enumerate(batches):
        if step == saved_at:
            state = id_map.state()
            assert tuple(state) == id_map.state_names
            copies = copy.deepcopy(id_map), pickle.loads(pickle.dumps(id_map))
            id_map = (*copies, other.restored(state))[len(batches) % 3]
        check(id_map, reference, batch)
    # Another map is not changed.
    assert other.size == 0 and not other.find(np.arange(13)).any()


def test_uses_beyond_the_last_level_are_ordered_by_the_last_use(monkeypatch):
    monkeypatch.setattr("firstlayer.embeddings.id_map.MAX_LEVEL", 3)
    id_map = IdMap(3, evict="lfu")
    id_map.assign(np.array([1] * 9 + [2] * 4 + [3] * 5))
    id_map.assign(np.array([2]))
    # All have three uses or more; 1 was used first, although most often.
    assert id_map.assign(np.array([4])).rows.tolist() == [1]
    # Its single use is the fewest.
    assert id_map.assign(np.array([5])).rows.tolist() == [1]


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_many_ids_agree_with_a_dictionary(evict):
    rng = np.random.default_rng(0)
    id_map = IdMap(300, evict=evict, min_count=2)
    reference = ReferenceMap(300, evict=evict, min_count=2)
    for _ in range(60):
        batch = rng.zipf(1.2, 200) * 2**33
        rows, _ = reference.assign(batch.tolist())
        assert id_map.assign(batch).rows.tolist() == rows


def test_rows_keep_their_id_until_it_loses_them():
    id_map = IdMap(2)
    first = id_map.assign(np.array([5, 6]))
    assert id_map.keeps(first.rows, first.batch) is None
    second = id_map.assign(np.array([7]))
    assert second.evicted.tolist() == [1]
    kept = id_map.keeps(np.array([[1], [2]]), first.batch)
    assert kept is not None and kept.tolist() == [[False], [True]]
    # The row of 5 is not the one it had.
    third = id_map.assign(np.array([7, 5]))
    assert third.rows.tolist() == [1, 2]
    id_map.assign(np.array([6]))
    assert id_map.assign(np.array([5])).rows.tolist() == [2]
    assert id_map.keeps(second.rows, second.batch) is not None
    # After a state was loaded, no earlier row counts.
    last = id_map.assign(np.array([5]))
    id_map.load_state(id_map.state())
    kept = id_map.keeps(last.rows, last.batch)
    assert kept is not None and not kept.any()


def test_threads_give_each_id_one_row():
    id_map = IdMap(1000)
    batches = np.random.default_rng(0).integers(0, 900, (40, 100))

    def assign(part: np.ndarray) -> None:
        for batch in part:
            id_map.assign(batch)

    threads = [threading.Thread(target=assign, args=(batches[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = np.unique(batches)
    assert sorted(id_map.ids.tolist()) == seen.tolist()
    assert sorted(id_map.find(seen).tolist()) == list(range(1, seen.size + 1))
    assert id_map.state()["uses"].sum() == batches.size


def test_without_a_compiler_rows_are_the_same(tmp_path):
    code = """
        import numpy as np
        from firstlayer.embeddings.id_map import IdMap
        rng, found = np.random.default_rng(0), []
        for evict in ("lru", "lfu"):
            id_map = IdMap(5, evict=evict, min_count=2)
            for _ in range(20):
                batch = rng.integers(-4, 8, 3) * 2**60
                found.append(id_map.assign(batch).rows.tolist())
            restored = id_map.restored(id_map.state())
            found.append(restored.find(np.arange(-4, 8) * 2**60).tolist())
    """
    here: dict[str, Any] = {}
    exec(textwrap.dedent(code), here)
    disabled = "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n"
    printed = run_alone(disabled, code, "print(found)", folder=tmp_path)
    assert printed == f"{here['found']}\n"


@pytest.mark.rejects
def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="capacity must be positive, got 0"):
        IdMap(0)
    with pytest.raises(ValueError, match=r"capacity must be below 2\*\*31 - 1, got 2147"):
        IdMap(2**31)
    with pytest.raises(ValueError, match="evict must be 'lru', 'lfu' or None, got 'fifo'"):
        IdMap(3, evict="fifo")
    with pytest.raises(ValueError, match="min_count must be positive, got 0"):
        IdMap(3, min_count=0)


@pytest.mark.rejects
def test_damaged_states_raise_and_change_nothing():
    id_map = IdMap(3, min_count=2)
    id_map.assign(np.array([4, 4, 5, 5, 6]))
    good = id_map.state()

    def damaged(name, value):
        return {**good, name: np.array(value)}

    cases = {
        "must have 'candidate_uses'": {
            name: good[name] for name in good if name != "candidate_uses"
        },
        "ids must be 4 integers, got float64": damaged("ids", [0.0, 4, 5, 0]),
        "order must be 4 integers, got int64 of shape": damaged("order", [0, 1]),
        "order must count the rows": damaged("order", [0, 1, 1, 0]),
        "order must count the rows that": damaged("order", [0, 0, 1, 2]),
        "order must count": damaged("order", [1, 2, 0, 0]),
        "uses must be at least 1, got 0": damaged("uses", [0, 2, 0, 0]),
        "candidate_uses must be at least 0, got -1": damaged(
            "candidate_uses", [0, -1, 0, 0]
        ),
        "ids must be different, got one twice": damaged("ids", [0, 4, 4, 0]),
    }
    for message, state in cases.items():
        with pytest.raises(ValueError, match=message):
            id_map.load_state(state)
    after = id_map.state()
    assert all(np.array_equal(after[name], good[name]) for name in good)
