"""Each kernel equals its obvious NumPy counterpart, for any number of threads."""

import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from numba.core.runtime import _nrt_python as memory  # pyright: ignore
from numba.core.runtime.nrt import rtsys

from firstlayer import kernels
from firstlayer.embeddings.layer_gradients import layer_gradients
from firstlayer.kernels.runtime import lanes
from firstlayer.kernels.runtime.compile import bits_of, kernel, narrow, widen
from firstlayer.kernels.runtime.pool import run
from firstlayer.kernels.runtime.share import pieces
from firstlayer.positions.rotary import Layout, rotate

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
HALVES = [np.float16, ml_dtypes.bfloat16]
LAYOUTS: dict[Layout, dict[str, bool]] = {
    "half": {"read_half": True, "write_half": True},
    "interleaved": {"read_half": False, "write_half": False},
    "interleaved_to_half": {"read_half": False, "write_half": True},
}
rng = np.random.default_rng(0)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


@kernel()
def _widen_all(lo, hi, bits, out):
    for i in range(lo, hi):
        out[i] = widen(bits[i])


@kernel()
def _narrow_all(lo, hi, numbers, out):
    for i in range(lo, hi):
        out[i] = narrow(numbers[i], out[i])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_is_widened_to_the_bit(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    out = np.empty(every.size, np.float32)
    _widen_all(0, every.size, bits_of(every), out)
    np.testing.assert_array_equal(out, every.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_to_half_precision_is_to_the_nearest_even_to_the_bit(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    finite = every[np.isfinite(every)]
    ties = (np.sort(finite)[1:].astype(float) + np.sort(finite)[:-1]) / 2
    random = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([every, ties.astype(np.float32), random])
    out = np.empty(numbers.size, dtype)
    _narrow_all(0, numbers.size, numbers, bits_of(out))
    with np.errstate(over="ignore", invalid="ignore"):
        want, real = numbers.astype(dtype), ~np.isnan(numbers)
    np.testing.assert_array_equal(out.view(np.uint16)[real], want.view(np.uint16)[real])
    assert np.isnan(out[~real].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 3, 300, 9000])
def test_gather_equals_indexing(dtype, count, threads):
    table = rng.standard_normal((100, 700)).astype(dtype)
    ids = rng.integers(0, 100, count)
    got = kernels.gather_rows(table, ids)
    assert got is not None and got.dtype == table.dtype
    assert got.tobytes() == table[ids].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_past_the_caches_copies_every_bit(dtype, threads, monkeypatch):
    monkeypatch.setattr(lanes, "LARGE", 0)
    table = rng.integers(0, 256, (100, 1024), np.uint8).view(dtype)
    ids = rng.integers(0, 100, 9000)
    got = kernels.gather_rows(table, ids)
    assert got is not None and got.tobytes() == table[ids].tobytes()


def test_gather_looks_at_rows_and_not_at_their_strides(monkeypatch):
    monkeypatch.setattr(lanes, "LARGE", 0)
    big = rng.standard_normal((16, 72)).astype(np.float32)
    ids = np.zeros(9000, np.int64)
    for table in (big[::8][:1], rng.standard_normal((3, 128))[:, :64]):
        got = kernels.gather_rows(table, ids)
        assert got is not None
        np.testing.assert_array_equal(got, table[ids])


@pytest.mark.parametrize("bad", [-1, 100, -(2**63)])
@pytest.mark.parametrize("count", [3, 300])
def test_gather_notices_an_id_out_of_range(bad, count):
    ids = np.zeros(count, np.int64)
    ids[-1] = bad
    assert kernels.gather_rows(np.ones((100, 4)), ids) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_groups_equal_additions_in_order(dtype, threads):
    values = rng.standard_normal((3000, 130)).astype(dtype)
    order = rng.permutation(3000)
    bounds = np.unique(np.r_[0, rng.integers(1, 3000, 1500), 3000])
    want = []
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        wide = values[order[lo:hi]].astype(
            np.float64 if dtype == np.float64 else np.float32
        )
        total = wide[0]
        for row in wide[1:]:
            total = total + row
        want.append(total)
    np.testing.assert_array_equal(
        kernels.sum_groups(values, order, bounds[:-1], bounds[1:]), want
    )


def defined(x, norm, *, eps):
    """Return the LayerNorm of rows in float64."""
    centred = x - x.mean(-1, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return x * norm[0].astype(float) + norm[1].astype(float)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("normed", [False, True])
def test_layer_equals_its_definition_in_float64(dtype, parts, normed, threads):
    n, width = 600, 300
    tables = [rng.standard_normal((50, width)).astype(dtype) for _ in range(3)]
    rows = [rng.integers(0, 50, n) for _ in range(3)]
    norm = (rng.standard_normal((2, width)).astype(dtype), 1e-3) if normed else None
    out = np.empty((n, width), dtype)
    kernels.layer_forward(
        (tables[0], rows[0]),
        position=(tables[1], rows[1]) if parts > 0 else None,
        segment=(tables[2], rows[2]) if parts > 1 else None,
        scale=3.0,
        norm=None if norm is None else (norm[0][0], norm[0][1], norm[1]),
        out=out,
    )
    want = tables[0].astype(float)[rows[0]] * 3
    for part in range(1, 1 + parts):
        want = want + tables[part].astype(float)[rows[part]]
    if norm is not None:
        want = defined(want, norm[0], eps=norm[1])
    step = {np.float64: 1e-14, np.float32: 1e-6, np.float16: 2**-11}.get(dtype, 2**-8)
    np.testing.assert_allclose(out.astype(float), want, rtol=1.01 * step, atol=20 * 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_repeats_short_rows_and_writes_past_the_caches(dtype, threads, monkeypatch):
    n, width = 600, 320
    tables = [rng.standard_normal((50, width)).astype(dtype) for _ in range(3)]
    ids, few, one = rng.integers(0, 50, n), rng.integers(0, 50, 24), np.array([7])
    norm = (*rng.standard_normal((2, width)).astype(dtype), 1e-3)

    def made(second, third):
        out = np.empty((n, width), dtype)
        kernels.layer_forward(
            (tables[0], ids),
            position=(tables[1], second),
            segment=(tables[2], third),
            scale=3.0,
            norm=norm,
            out=out,
        )
        return out

    all_rows = np.tile(few, n // 24), np.full(n, 7)
    wide = [table.astype(float) for table in tables]
    sums = 3 * wide[0][ids] + wide[1][all_rows[0]] + wide[2][all_rows[1]]
    want, got = defined(sums, norm[:2], eps=norm[2]), made(*all_rows)
    step = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 2**-9}.get(dtype, 2**-6)
    np.testing.assert_allclose(got.astype(float), want, rtol=step, atol=step)
    np.testing.assert_array_equal(made(few, one), got)
    monkeypatch.setattr(lanes, "LARGE", 0)
    np.testing.assert_array_equal(made(few, one), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [1, 16, 21, 32])
def test_rotate_is_the_same_in_lanes_past_the_caches_and_in_the_core(
    dtype, pairs, threads, monkeypatch
):
    work = np.float64 if dtype == np.float64 else np.float32
    x = rng.standard_normal((6000, 80)).astype(dtype)
    turn = rng.standard_normal((7, 2 * pairs)).astype(work)
    which = rng.integers(0, 7, 12)
    cos, sin = np.split(turn[np.tile(which, 500)], 2, axis=1)
    for layout, halves in LAYOUTS.items():
        want = rotate(x.astype(work), cos, sin, layout=layout).astype(dtype)
        for large in (1 << 60, 0):
            monkeypatch.setattr(lanes, "LARGE", large)
            got = kernels.rotate_pairs(x, turn, which=which, **halves)
            assert got.tobytes() == want.tobytes()


def way_through(seconds, *, ids=None, mask=None, skip=None, shared=2):
    size = 400 if mask is None else mask.size
    return kernels.plan_backward(
        rng.integers(0, 300, size) if ids is None else ids,
        seconds,
        places=np.arange(size) if mask is None else np.flatnonzero(mask),
        size=size,
        skip=skip,
        shared=shared,
    )


@pytest.mark.parametrize("seconds", [None, np.arange(40), np.zeros(1, np.int64)])
def test_single_ids_have_rows_first_and_others_one_for_each_block_after(seconds):
    ids = rng.integers(0, 200, 400)
    mask = rng.random(400) < 0.9
    skip = ids[mask][0]
    route = way_through(seconds, ids=ids, mask=mask, skip=skip)
    counted = mask & (ids != skip)
    unique, counts = np.unique(ids[counted], return_counts=True)
    np.testing.assert_array_equal(route.ids, unique)
    np.testing.assert_array_equal(route.several, np.flatnonzero(counts > 1))
    assert route.starts[0] == unique.size and (route.slots[~counted] == -1).all()
    written, blocks = set(), np.split(route.order, route.bounds[1:-1])
    for block in blocks:
        seen = {}
        for place in block[counted[block]]:
            row, first = route.slots[place], ids[place] not in seen
            assert (row >= 0) == first
            assert seen.setdefault(ids[place], row) == (row if first else -2 - row)
        assert not written & set(seen.values())
        written |= set(seen.values())
        for id_, row in seen.items():
            own = np.searchsorted(unique, id_)
            if counts[own] == 1:
                assert row == own
            else:
                group = np.searchsorted(route.several, own)
                assert route.starts[group] <= row < route.starts[group + 1]
    # Every row is written, but those that sums go to.
    assert written == set(range(route.starts[-1])) - set(route.several)
    assert any(slot < -1 for slot in route.slots)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "seconds", ["positions", "many", "one is frequent", "few", "all differ"]
)
def test_places_of_a_second_row_are_in_one_block_unless_some_are_frequent(seconds, masked):
    n = 400
    given = {
        "positions": np.arange(5, 45),
        "many": rng.integers(0, 60, n),
        "one is frequent": np.where(rng.random(n) < 0.5, 3, rng.integers(0, 300, n)),
        "few": rng.integers(0, 3, n),
        "all differ": rng.permutation(n),
    }[seconds]
    mask = rng.random(n) < (0.7 if masked else 2.0)
    each = np.resize(given, n)
    route = way_through(given, mask=mask)
    np.testing.assert_array_equal(route.rows, np.unique(each[mask]))
    np.testing.assert_array_equal(np.sort(route.order), np.flatnonzero(mask))
    np.testing.assert_array_equal(route.rows[route.sums[mask]], each[mask])
    assert route.bounds[0] == 0 and route.bounds[-1] == mask.sum()
    assert route.is_split == (seconds == "few")
    blocks = [
        route.order[lo:hi]
        for lo, hi in zip(route.bounds[:-1], route.bounds[1:], strict=True)
    ]
    # In the order of memory, and several of them, so that threads can share.
    assert all(block.size and (np.diff(block) > 0).all() for block in blocks)
    assert len(blocks) >= 8
    if not route.is_split:
        found = [set(each[block]) for block in blocks]
        assert sum(map(len, found)) == len(set().union(*found))


def test_there_is_a_block_even_without_places():
    route = way_through(np.arange(10), mask=np.zeros(400, bool))
    assert route.bounds.tolist() == [0, 0] and route.rows.size == route.ids.size == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 5, 64, 150])
def test_sums_of_runs_go_to_rows_of_their_own(dtype, width, threads):
    values = rng.standard_normal((3000, width)).astype(dtype)
    starts = 800 + np.sort(rng.permutation(2199)[:700])
    into = rng.permutation(800)[: starts.size - 1]
    want = values.copy()
    for group, row in enumerate(into):
        total = np.zeros(width, dtype)
        for one in values[starts[group] : starts[group + 1]]:
            total = total + one
        want[row] = total
    kernels.sum_runs(values, starts, into=into)
    np.testing.assert_array_equal(values, want)


def test_ids_ascend_if_each_is_larger_than_the_one_before():
    for ids, ascends in (([], True), ([4], True), ([1, 2, 7], True), ([1, 2, 2], False)):
        assert kernels.ascends(np.array(ids, np.int64)) is ascends


@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**63)])
def test_layer_tells_of_an_id_out_of_range_and_writes_all_other_rows(bad, threads):
    table = rng.standard_normal((50, 70)).astype(np.float32)
    ids = rng.integers(0, 50, 5000)
    out = np.zeros((5000, 70), np.float32)
    how = {"scale": 1.0, "norm": None, "out": out}
    assert kernels.layer_forward((table, ids), **how) is True
    np.testing.assert_array_equal(out, table[ids])
    ids[4321] = bad
    out[:] = 0
    assert kernels.layer_forward((table, ids), **how) is False
    assert not out[4321].any()
    np.testing.assert_array_equal(np.delete(out, 4321, 0), table[np.delete(ids, 4321)])


def test_layer_keeps_nan_rows_nan_and_their_neighbours_whole():
    table = np.ones((2, 8), np.float32)
    table[1, 3] = np.nan
    out = np.empty((3, 8), np.float32)
    norm = (np.ones(8, np.float32), np.zeros(8, np.float32), 1e-5)
    kernels.layer_forward((table, np.array([0, 1, 0])), scale=1.0, norm=norm, out=out)
    assert np.isnan(out[1]).all() and (out[[0, 2]] == 0).all()


@kernel()
def _mark(ticket, seen, by):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            seen[i] += by


@pytest.mark.parametrize("size", [1, 2, 63, 1000])
def test_a_range_is_covered_once_however_many_threads_there_are(threads, size):
    for _ in range(20):
        seen = np.zeros(size, np.int64)
        run(_mark, size, seen, 3, grain=7)
        assert (seen == 3).all()


def test_eight_callers_at_once_share_the_helpers(threads):
    def call(by):
        seen = np.zeros(5000, np.int64)
        for _ in range(50):
            run(_mark, 5000, seen, by, grain=7)
        return (seen == 50 * by).all()

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(call, range(8)))


@kernel()
def _sign(ticket, by, digit_phases):
    # Every thread that is here has a number of its own, at an address of its own.
    own = np.ones(1)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            for _ in range(digit_phases):
                own[0] = np.cos(own[0])
            by[i] = own.ctypes.data


def test_helpers_do_help(threads):
    by, signers = np.zeros(8 * threads, np.int64), 0
    # The first helper's code may have to be compiled first.
    for _ in range(200):
        run(_sign, by.size, by, 100_000, grain=1)
        signers = len(set(by.tolist()))
        if threads == 1 or signers > 1:
            break
    assert by.all() and (signers > 1) == (threads > 1)


@kernel()
def _fail(ticket, seen):
    if seen[0] == 0:
        raise ZeroDivisionError("before the first piece")
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            seen[i] += 1


def test_an_error_before_the_first_piece_is_raised_and_the_helpers_stay(threads):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="before the first piece"):
            run(_fail, 100, np.zeros(100, np.int64), grain=1)
        seen = np.ones(100, np.int64)
        run(_fail, 100, seen, grain=1)
        assert (seen == 2).all()


def test_a_call_leaves_no_reference_behind(threads):
    seen = np.zeros(5000, np.int64)
    before = sys.getrefcount(seen)
    for _ in range(50):
        run(_mark, 5000, seen, 1, grain=7)
    assert sys.getrefcount(seen) == before


def test_kernels_free_what_they_allocate(threads):
    table, width = rng.standard_normal((50, 300), dtype=np.float32), 300
    ids, out = rng.integers(0, 50, 3000), np.empty((3000, width), np.float32)
    norm = (table[0], table[1], 1e-5)

    def calls():
        kernels.layer_forward(
            (table, ids), position=(table, ids), scale=2.0, norm=norm, out=out
        )
        layer_gradients((table, ids), scale=2.0, norm=norm[1:], dy=out)
        kernels.gather_rows(table, ids)

    calls()
    memory.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        for _ in range(20):
            calls()
        after = rtsys.get_allocation_stats()
    finally:
        memory.memsys_disable_stats()
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free >= 20
    assert after.alloc - before.alloc == after.free - before.free


@pytest.mark.rejects
def test_there_is_at_least_one_thread():
    with pytest.raises(ValueError, match="n must be positive, got 0"):
        kernels.set_num_threads(0)
