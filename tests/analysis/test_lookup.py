"""Timing lookups: equal work for every library, and correct speeds."""

import sys

import numpy as np
import pytest

import firstlayer
from firstlayer.analysis import lookup
from firstlayer.analysis.lookup import (
    Lookups,
    Reading,
    bandwidth,
    library_lookups,
    measure,
)

LIBRARIES = ["firstlayer", "numpy", "firstlayer.torch", "torch"]


def table_and_ids(rows=50, width=6, shape=(3, 4)):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, width), dtype=np.float32)
    return table, [rng.integers(0, rows, shape) for _ in range(lookup.BATCHES_OF_IDS)]


def test_every_library_looks_up_every_batch():
    table, ids = table_and_ids()
    lookups, missing = library_lookups(table, ids)
    assert list(lookups) == LIBRARIES and missing == ()
    for run in lookups.values():
        for number, batch in enumerate(ids):
            np.testing.assert_array_equal(np.asarray(run(number)), table[batch])


def test_measure_returns_a_reading_per_size_and_library():
    calls = []
    found = measure(
        [7, 11, 9, 7],
        batches=[2, 1],
        widths=[3, 6, 4],
        length=5,
        rounds=1,
        progress=lambda *step: calls.append(step),
    )
    # One size varies; the others have their middle values 9, 4 and 2.
    sizes = [(7, 4, 2), (9, 3, 2), (9, 4, 1), (9, 4, 2), (9, 6, 2), (11, 4, 2)]
    assert [(r.rows, r.width, r.batch, r.library) for r in found.readings] == [
        (*size, library) for size in sizes for library in LIBRARIES
    ]
    assert {r.length for r in found.readings} == {5}
    assert all(0 < r.seconds < 0.1 for r in found.readings)
    assert calls == [(done, 6) for done in range(1, 7)]
    assert found.threads == firstlayer.get_num_threads()


def test_tables_and_ids_depend_on_the_seed(monkeypatch):
    seen = []

    def recorded(table, ids):
        seen.append((table.copy(), np.stack(ids)))
        return {"firstlayer": lambda batch: table[ids[batch]]}, ()

    monkeypatch.setattr(lookup, "library_lookups", recorded)
    for seed in (1, 1, 2):
        measure([100], batches=[4], widths=[2], length=8, rounds=1, seed=seed)
    np.testing.assert_array_equal(seen[0][1], seen[1][1])
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert (seen[0][1] != seen[2][1]).any()
    assert seen[0][1].shape == (lookup.BATCHES_OF_IDS, 4, 8)
    # All batches differ, and they cover most of the table.
    assert len({batch.tobytes() for batch in seen[0][1]}) == lookup.BATCHES_OF_IDS
    assert len(np.unique(seen[0][1])) > 85


def test_speeds_are_computed_from_the_time():
    reading = Reading("firstlayer", 1000, 64, 16, 128, seconds=1e-3)
    assert reading.tokens_per_second == pytest.approx(2_048_000)
    # Per id: eight bytes, and 64 float32 read and written.
    assert reading.bytes_per_second == pytest.approx(2_048_000 * (8 + 2 * 256))
    found = Lookups(2, 1e10, (), (reading,))
    assert found.fraction(reading) == pytest.approx(2_048_000 * 520 / 1e10)
    plain = found.as_dict()
    assert plain["readings"][0]["bandwidth_fraction"] == found.fraction(reading)
    assert plain["readings"][0]["tokens_per_second"] == reading.tokens_per_second
    assert plain["bandwidth"] == 1e10


def test_the_bandwidth_is_plausible():
    assert 1e9 < bandwidth(size=32 << 20, readings=3) < 1e12


def test_a_library_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    lookups, missing = library_lookups(*table_and_ids())
    assert list(lookups) == ["firstlayer", "numpy"] and missing == (
        "firstlayer.torch",
        "torch",
    )


@pytest.mark.rejects
def test_a_library_that_returns_other_rows_is_an_error(monkeypatch):
    table, ids = table_and_ids()
    wrong = {
        "firstlayer": lambda b: table[ids[b]],
        "numpy": lambda b: table[ids[b]] + (b == 7),
    }
    monkeypatch.setattr(lookup, "library_lookups", lambda table, ids: (wrong, ()))
    with pytest.raises(ValueError, match="numpy returned other rows than firstlayer"):
        measure([50], batches=[1], widths=[6], rounds=1)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rows": [0]}, "rows must be positive, got 0"),
        ({"batches": [-1]}, "batch must be positive, got -1"),
        ({"widths": [0]}, "width must be positive, got 0"),
        ({"length": 0}, "length must be positive, got 0"),
        ({"rounds": 0}, "rounds must be positive, got 0"),
    ],
)
def test_invalid_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        measure(**wrong)
