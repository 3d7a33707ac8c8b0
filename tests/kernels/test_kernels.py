"""Each kernel equals plain NumPy, for several numbers of threads."""

import ast
import ctypes
import inspect

import ml_dtypes
import numpy as np
import pytest

from firstlayer import kernels
from firstlayer.embeddings.layer_gradients import layer_gradients
from firstlayer.kernels.runtime import lanes
from firstlayer.kernels.runtime.aligned import aligned_empty
from firstlayer.kernels.runtime.compile import bits_of, downcast, kernel, upcast
from firstlayer.positions.rotary import Layout, rotate

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
HALF_DTYPES = [np.float16, ml_dtypes.bfloat16]
LAYOUTS: dict[Layout, dict[str, bool]] = {
    "half": {"read_half": True, "write_half": True},
    "interleaved": {"read_half": False, "write_half": False},
    "interleaved_to_half": {"read_half": False, "write_half": True},
}
rng = np.random.default_rng(0)


def test_every_lazy_name_is_declared_for_type_checkers():
    declared = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(inspect.getsource(kernels)))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if alias.asname
    }
    assert declared == kernels._HOME
    assert all(hasattr(kernels, name) for name in kernels.__all__)


@kernel()
def _upcast_all(bits, out):
    for i in range(bits.size):
        out[i] = upcast(bits[i])


@kernel()
def _downcast_all(numbers, out):
    for i in range(numbers.size):
        out[i] = downcast(numbers[i], out[i])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_upcast_of_every_half_precision_number_is_exact(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    out = np.empty(every.size, np.float32)
    _upcast_all(bits_of(every), out)
    np.testing.assert_array_equal(out, every.astype(np.float32))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_downcast_rounds_to_nearest_even(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    finite = every[np.isfinite(every)]
    ties = (np.sort(finite)[1:].astype(float) + np.sort(finite)[:-1]) / 2
    random = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([every, ties.astype(np.float32), random])
    out = np.empty(numbers.size, dtype)
    _downcast_all(numbers, bits_of(out))
    with np.errstate(over="ignore", invalid="ignore"):
        expected, is_nan = numbers.astype(dtype), np.isnan(numbers)
    np.testing.assert_array_equal(
        out.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan]
    )
    assert np.isnan(out[is_nan].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 3, 300, 4000])
def test_gather_equals_indexing(dtype, count, threads):
    ids = rng.integers(0, 100, count)
    # Rows of 704 numbers are copied by whole cache lines.
    for width in (700, 704):
        table = rng.standard_normal((100, width)).astype(dtype)
        got = kernels.gather_rows(table, ids)
        assert got is not None and got.dtype == table.dtype
        assert got.tobytes() == table[ids].tobytes()
        out = np.ones_like(got)
        assert kernels.gather_rows(table, ids, out=out) is not None
        assert out.tobytes() == table[ids].tobytes()
        got = kernels.gather_rows(table, ids, order=rng.permutation(count))
        assert got is not None and got.tobytes() == table[ids].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 16, 48])
def test_gather_with_streaming_stores_copies_every_bit(dtype, offset, threads, monkeypatch):
    monkeypatch.setattr(lanes, "STREAMING_BYTES", 0)
    table = rng.integers(0, 256, (100, 1024), np.uint8).view(dtype)
    ids = rng.integers(0, 100, 9000)
    # Whole cache lines, or parts of them.
    memory = aligned_empty((ids.size * 1024 + offset,), np.uint8)
    out = memory[offset:].view(dtype).reshape(ids.size, -1)
    assert lanes.is_streamed(out, has_rest=False)
    assert kernels.gather_rows(table, ids, out=out) is not None
    assert out.tobytes() == table[ids].tobytes()


@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("offset", [0, 8, 16])
@pytest.mark.parametrize("width", [64, 80, 100, 3])
def test_rows_are_streamed_in_whole_lines(width, offset, has_rest):
    # A line of which the last entries go through the caches would be written in two ways.
    memory = aligned_empty((30 * width * 4 + offset,), np.uint8)
    out = memory[offset:].view(np.float32).reshape(30, width)
    fits = offset in ((0,) if has_rest else (0, 16)) and width in (64, 80)
    assert lanes.is_streamed(out, 1, has_rest=has_rest) == fits
    assert not lanes.is_streamed(out, out.nbytes + 1, has_rest=has_rest)


def test_gather_takes_tables_with_strides_and_of_any_alignment(monkeypatch):
    monkeypatch.setattr(lanes, "STREAMING_BYTES", 0)
    big = rng.standard_normal((16, 72)).astype(np.float32)
    ids = np.zeros(9000, np.int64)
    # As in a mapped file, 2 bytes off the alignment of float32.
    odd = np.arange(2 * 64 + 1, dtype=np.uint16)[1:].view(ml_dtypes.bfloat16).reshape(2, 64)
    for table in (big[::8][:1], rng.standard_normal((3, 128))[:, :64], odd):
        got = kernels.gather_rows(table, ids)
        assert got is not None and got.tobytes() == table[ids].tobytes()


@pytest.mark.parametrize("bad", [-1, 100, -(2**63)])
@pytest.mark.parametrize("count", [3, 300])
def test_gather_returns_none_if_an_id_is_out_of_range(bad, count):
    ids = np.zeros(count, np.int64)
    ids[-1] = bad
    for width in (4, 8):
        assert kernels.gather_rows(np.ones((100, width)), ids) is None
        order = np.arange(count)[::-1].copy()
        assert kernels.gather_rows(np.ones((100, width)), ids, order=order) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_are_summed_in_order(dtype, threads):
    values = rng.standard_normal((3000, 130)).astype(dtype)
    order = rng.permutation(3000)
    bounds = np.unique(np.r_[0, rng.integers(1, 3000, 1500), 3000])
    compute_dtype = np.float64 if dtype == np.float64 else np.float32
    expected = []
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        rows = values[order[lo:hi]].astype(compute_dtype)
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        expected.append(total)
    np.testing.assert_array_equal(
        kernels.sum_groups(values, order, bounds[:-1], bounds[1:]), expected
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 5, 64, 150])
def test_runs_are_summed_into_the_given_rows(dtype, width, threads):
    values = rng.standard_normal((3000, width)).astype(dtype)
    starts = 800 + np.sort(rng.permutation(2199)[:700])
    into = rng.permutation(800)[: starts.size - 1]
    expected = values.copy()
    for run, row in enumerate(into):
        total = np.zeros(width, dtype)
        for value in values[starts[run] : starts[run + 1]]:
            total = total + value
        expected[row] = total
    kernels.sum_runs(values, starts, into=into)
    np.testing.assert_array_equal(values, expected)


def test_ids_ascend_if_each_is_larger_than_the_one_before():
    for ids, ascends in (([], True), ([4], True), ([1, 2, 7], True), ([1, 2, 2], False)):
        assert kernels.ascends(np.array(ids, np.int64)) is ascends
    # Every other row of a larger array.
    assert kernels.ascends(np.array([1, 9, 2, 0, 3])[::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_that_are_not_aligned_to_cache_lines_give_the_same_bits(dtype):
    # Large arrays of NumPy begin 16 bytes after a page: their rows end in one line more.
    rows, width = 60, 256
    table = rng.standard_normal((rows, width)).astype(dtype)
    ids, bounds = rng.integers(0, rows, 500), np.arange(0, 501, 20)
    found = []
    for offset in (0, 16, 56):
        memory = aligned_empty((table.nbytes + 64,), np.uint8)
        moved = np.ndarray(table.shape, table.dtype, memory, offset)
        moved[...] = table
        out = np.empty((500, width), table.dtype)
        assert kernels.layer_forward((moved, ids), scale=1.5, norm=None, out=out)
        found.append((
            kernels.gather_rows(moved, ids),
            kernels.sum_bags(moved, ids, bounds),
            out,
        ))
    gathered, sums, out = found[0]
    np.testing.assert_array_equal(gathered, table[ids])
    rows = table[ids].astype(np.float64)
    rtol = 4 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), 1.5 * rows, rtol=rtol)
    want = rows.reshape(25, 20, width).sum(axis=1)
    np.testing.assert_allclose(sums.astype(np.float64), want, rtol=rtol, atol=10 * rtol)
    for arrays in found[1:]:
        for got, want in zip(arrays, found[0], strict=True):
            np.testing.assert_array_equal(got, want)


def layer_norm(x, norm):
    """Return the LayerNorm of rows in float64."""
    weight, bias, eps = norm
    centered = x - x.mean(-1, keepdims=True)
    x = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
    return x * weight.astype(float) + bias.astype(float)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added_tables", [0, 1, 2])
@pytest.mark.parametrize("has_norm", [False, True])
def test_layer_equals_its_formula_in_float64(dtype, added_tables, has_norm, threads):
    n, width = 600, 300
    tables = [rng.standard_normal((50, width)).astype(dtype) for _ in range(3)]
    rows = [rng.integers(0, 50, n) for _ in range(3)]
    norm = (*rng.standard_normal((2, width)).astype(dtype), 1e-3) if has_norm else None
    out = np.empty((n, width), dtype)
    kernels.layer_forward(
        (tables[0], rows[0]),
        position=(tables[1], rows[1]) if added_tables > 0 else None,
        segment=(tables[2], rows[2]) if added_tables > 1 else None,
        scale=3.0,
        norm=norm,
        out=out,
    )
    expected = tables[0].astype(float)[rows[0]] * 3
    for k in range(1, 1 + added_tables):
        expected = expected + tables[k].astype(float)[rows[k]]
    if norm is not None:
        expected = layer_norm(expected, norm)
    ulp = {np.float64: 1e-14, np.float32: 1e-6, np.float16: 2**-11}.get(dtype, 2**-8)
    np.testing.assert_allclose(out.astype(float), expected, rtol=1.01 * ulp, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_repeats_short_rows_and_streams_the_same_output(dtype, threads, monkeypatch):
    n, width = 600, 320
    tables = [rng.standard_normal((50, width)).astype(dtype) for _ in range(3)]
    ids, few, one = rng.integers(0, 50, n), rng.integers(0, 50, 24), np.array([7])
    norm = (*rng.standard_normal((2, width)).astype(dtype), 1e-3)

    def layer(position_rows, segment_rows, offset=0):
        memory = aligned_empty((n * width * np.dtype(dtype).itemsize + offset,), np.uint8)
        out = memory[offset:].view(dtype).reshape(n, width)
        kernels.layer_forward(
            (tables[0], ids),
            position=(tables[1], position_rows),
            segment=(tables[2], segment_rows),
            scale=3.0,
            norm=norm,
            out=out,
        )
        return out

    repeated = np.tile(few, n // 24), np.full(n, 7)
    floats = [table.astype(float) for table in tables]
    sums = 3 * floats[0][ids] + floats[1][repeated[0]] + floats[2][repeated[1]]
    got = layer(*repeated)
    ulp = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 2**-9}.get(dtype, 2**-6)
    np.testing.assert_allclose(
        got.astype(float), layer_norm(sums, norm), rtol=ulp, atol=ulp
    )
    np.testing.assert_array_equal(layer(few, one), got)
    monkeypatch.setattr(lanes, "STREAMING_BYTES", 0)
    # Whole cache lines are streamed, or parts of them.
    for offset in (0, 16):
        np.testing.assert_array_equal(layer(few, one, offset), got)


@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**63)])
def test_layer_reports_an_id_out_of_range_and_writes_all_other_rows(bad, threads):
    table = rng.standard_normal((50, 70)).astype(np.float32)
    ids = rng.integers(0, 50, 5000)
    out = np.zeros((5000, 70), np.float32)
    assert kernels.layer_forward((table, ids), scale=1.0, norm=None, out=out) is True
    np.testing.assert_array_equal(out, table[ids])
    ids[4321] = bad
    out[:] = 0
    assert kernels.layer_forward((table, ids), scale=1.0, norm=None, out=out) is False
    assert not out[4321].any()
    np.testing.assert_array_equal(np.delete(out, 4321, 0), table[np.delete(ids, 4321)])


def test_a_nan_in_one_row_does_not_reach_other_rows():
    table = np.ones((2, 8), np.float32)
    table[1, 3] = np.nan
    out = np.empty((3, 8), np.float32)
    norm = (np.ones(8, np.float32), np.zeros(8, np.float32), 1e-5)
    kernels.layer_forward((table, np.array([0, 1, 0])), scale=1.0, norm=norm, out=out)
    assert np.isnan(out[1]).all() and (out[[0, 2]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [1, 16, 21, 32, 64])
def test_rotate_equals_numpy_with_and_without_streaming(dtype, pairs, threads, monkeypatch):
    compute_dtype = np.float64 if dtype == np.float64 else np.float32
    x = rng.standard_normal((6000, 128)).astype(dtype)
    phases = rng.standard_normal((7, 2 * pairs)).astype(compute_dtype)
    which = rng.integers(0, 7, 12)
    cos, sin = np.split(phases[np.tile(which, 500)], 2, axis=1)
    for layout, halves in LAYOUTS.items():
        expected = rotate(x.astype(compute_dtype), cos, sin, layout=layout).astype(dtype)
        for streaming_bytes in (1 << 60, 0):
            monkeypatch.setattr(lanes, "STREAMING_BYTES", streaming_bytes)
            got = kernels.rotate_pairs(x, phases, which=which, **halves)
            assert got.tobytes() == expected.tobytes()


class HeapStatistics(ctypes.Structure):
    """Result of mallinfo2 of the C library; sizes in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
        "keepcost".split()
    ]


def allocated_bytes() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = HeapStatistics
    statistics = mallinfo2()
    return statistics.uordblks + statistics.hblkhd


def test_kernels_free_what_they_allocate(threads):
    width, num_calls = 5000, 200
    table = rng.standard_normal((50, width), dtype=np.float32)
    ids, out = rng.integers(0, 50, 40), np.empty((40, width), np.float32)
    norm, statistics = (table[0], table[1], 1e-5), np.empty((40, 2), np.float32)

    def calls():
        kernels.layer_forward(
            (table, ids),
            position=(table, ids),
            scale=2.0,
            norm=norm,
            out=out,
            statistics=statistics,
        )
        layer_gradients((table, ids), scale=2.0, norm=(table[0], statistics), dy=out)
        kernels.gather_rows(table, ids)

    calls()
    before = allocated_bytes()
    for _ in range(num_calls):
        calls()
    # A row that is not freed would be twice as much.
    assert allocated_bytes() - before < num_calls * table[0].nbytes / 2
