"""Timing lookups: everybody does the same work, and the arithmetic on times is right."""

import sys
import time

import numpy as np
import pytest

import firstlayer
from firstlayer.analysis import lookup
from firstlayer.analysis.lookup import Lookups, Reading, bandwidth, contestants, measure

LIBRARIES = ["firstlayer", "numpy", "firstlayer.torch", "torch"]


def table_and_ids(rows=50, width=6, shape=(3, 4)):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, width), dtype=np.float32)
    return table, [rng.integers(0, rows, shape) for _ in range(lookup.BATCHES_OF_IDS)]


def test_every_library_looks_up_every_batch():
    table, ids = table_and_ids()
    lookups, missing = contestants(table, ids)
    assert list(lookups) == LIBRARIES and missing == ()
    for look in lookups.values():
        for number, batch in enumerate(ids):
            np.testing.assert_array_equal(np.asarray(look(number)), table[batch])


def test_measure_reads_every_size_once_for_each_library():
    told = []
    found = measure(
        [7, 11, 7],
        batches=[2, 1],
        width=3,
        length=5,
        rounds=1,
        progress=lambda *step: told.append(step),
    )
    assert [(r.rows, r.batch, r.library) for r in found.readings] == [
        (rows, batch, library)
        for rows in (7, 11)
        for batch in (2, 1)
        for library in LIBRARIES
    ]
    assert {(r.width, r.length) for r in found.readings} == {(3, 5)}
    assert all(0 < r.seconds < 0.1 for r in found.readings)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert found.threads == firstlayer.get_num_threads()


def test_the_ids_follow_the_seed(monkeypatch):
    seen = []

    def watched(table, ids):
        seen.append((table.copy(), np.stack(ids)))
        return {"firstlayer": lambda batch: table[ids[batch]]}, ()

    monkeypatch.setattr(lookup, "contestants", watched)
    for seed in (1, 1, 2):
        measure([100], batches=[4], width=2, length=8, rounds=1, seed=seed)
    np.testing.assert_array_equal(seen[0][1], seen[1][1])
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert (seen[0][1] != seen[2][1]).any()
    assert seen[0][1].shape == (lookup.BATCHES_OF_IDS, 4, 8)
    # Every batch is another one, and the whole table takes part.
    assert len({batch.tobytes() for batch in seen[0][1]}) == lookup.BATCHES_OF_IDS
    assert len(np.unique(seen[0][1])) > 85


def test_speeds_follow_from_the_time():
    reading = Reading("firstlayer", 1000, 64, 16, 128, seconds=1e-3)
    assert reading.tokens_per_second == pytest.approx(2_048_000)
    # Each id: eight bytes, and a row of 64 float32 read and written.
    assert reading.bytes_per_second == pytest.approx(2_048_000 * (8 + 2 * 256))
    found = Lookups(2, 1e10, (), (reading,))
    assert found.fraction(reading) == pytest.approx(2_048_000 * 520 / 1e10)
    plain = found.as_dict()
    assert plain["readings"][0]["bandwidth_fraction"] == found.fraction(reading)
    assert plain["readings"][0]["tokens_per_second"] == reading.tokens_per_second
    assert plain["bandwidth"] == 1e10


def test_the_median_of_a_slow_lookup_is_its_time():
    slow = {"firstlayer": lambda batch: time.sleep(0.002), "numpy": lambda batch: None}
    times = lookup._medians(slow, rounds=1)
    assert 0.002 <= times["firstlayer"] < 0.006 and times["numpy"] < 1e-4


def test_all_batches_take_part_in_a_turn():
    seen = []
    lookup._readings(lambda batch: (seen.append(batch), time.sleep(0.001)))
    assert sorted(seen[1:]) == list(range(lookup.BATCHES_OF_IDS))


def test_the_bandwidth_is_a_memory_s():
    assert 1e9 < bandwidth(size=32 << 20, readings=3) < 1e12


def test_what_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    lookups, missing = contestants(*table_and_ids())
    assert list(lookups) == ["firstlayer", "numpy"] and missing == (
        "firstlayer.torch",
        "torch",
    )


@pytest.mark.rejects
def test_a_library_that_looks_up_other_rows_is_not_timed(monkeypatch):
    table, ids = table_and_ids()
    wrong = {
        "firstlayer": lambda b: table[ids[b]],
        "numpy": lambda b: table[ids[b]] + (b == 7),
    }
    monkeypatch.setattr(lookup, "contestants", lambda table, ids: (wrong, ()))
    with pytest.raises(ValueError, match="numpy looked up other rows than firstlayer"):
        measure([50], batches=[1], rounds=1)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rows": [0]}, "rows must be positive, got 0"),
        ({"batches": [-1]}, "batch must be positive, got -1"),
        ({"width": 0}, "width must be positive, got 0"),
        ({"length": 0}, "length must be positive, got 0"),
        ({"rounds": 0}, "rounds must be positive, got 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        measure(**wrong)
