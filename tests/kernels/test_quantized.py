"""Kernels for quantized rows equal the definitions of the formats, bit for bit."""

import numpy as np
import pytest

from firstlayer import kernels
from firstlayer.kernels import quantized
from firstlayer.kernels.runtime import lanes
from firstlayer.stores.formats._quantized import QuantizedFormat
from tests.support.quantized import QUANTIZED, random_table, widths_of
from tests.support.run_alone import run_alone

rng = np.random.default_rng(0)
TABLES = [(name, width) for name in QUANTIZED for width in widths_of(name)]


def rows_of(name, rows, width):
    """Return a random table as the kernels take it."""
    format_, parts = random_table(name, rows, width, rng)
    assert isinstance(format_, QuantizedFormat)
    return format_.rows_of(parts, width)


def assert_same_bits(got, want):
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("name, width", TABLES)
def test_gather_equals_the_definition(name, width):
    rows, ids = rows_of(name, 50, width), rng.integers(0, 50, 600)
    out = np.full((600, width), 7, np.float32)
    assert kernels.gather_quantized(rows, ids, out) is True
    assert_same_bits(out, rows.take(ids))


@pytest.mark.parametrize("name", QUANTIZED)
def test_gather_with_streaming_stores_on_threads(name, threads, monkeypatch):
    monkeypatch.setattr(lanes, "STREAMING_BYTES", 0)
    monkeypatch.setattr(quantized, "GRAIN", 1)
    rows, ids = rows_of(name, 50, 256), rng.integers(0, 50, 3000)
    out = np.empty((3000, 256), np.float32)
    assert kernels.gather_quantized(rows, ids, out)
    assert_same_bits(out, rows.take(ids))


@pytest.mark.parametrize("name, width", TABLES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_bags_equal_sums_of_decoded_rows(name, width, weighted, mean):
    rows, ids = rows_of(name, 50, width), rng.integers(0, 50, 70)
    bounds = np.array([0, 5, 5, 40, 70])
    weights = rng.standard_normal(70).astype(np.float32) if weighted else None
    divisors = np.array([3.0, np.inf, 0.5, 7.0], np.float32) if mean else None
    got = kernels.sum_quantized_bags(rows, ids, bounds, weights=weights, divisors=divisors)
    want = kernels.sum_bags(
        rows.take(ids), np.arange(70), bounds, weights=weights, divisors=divisors
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_bags_have_the_same_bits_on_any_number_of_threads(name, threads, monkeypatch):
    rows, ids = rows_of(name, 50, 300), rng.integers(0, 50, 900)
    bounds = np.sort(np.r_[0, rng.integers(0, 900, 98), 900])
    want = kernels.sum_bags(rows.take(ids), np.arange(900), bounds)
    monkeypatch.setattr(quantized, "BAG_GRAIN", 1)
    np.testing.assert_array_equal(kernels.sum_quantized_bags(rows, ids, bounds), want)


@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**63)])
@pytest.mark.parametrize("width", [7, 64])
def test_an_id_out_of_range_is_reported(bad, width):
    rows, ids = rows_of("int8", 50, width), rng.integers(0, 50, 700)
    ids[333] = bad
    out = np.empty((700, width), np.float32)
    assert kernels.gather_quantized(rows, ids, out) is False
    assert kernels.sum_quantized_bags(rows, ids, np.array([0, 200, 700])) is None


def test_nothing_to_read():
    none = np.zeros(0, np.int64)
    for width in (0, 7, 64):
        rows = rows_of("int8", 5, width)
        out = np.empty((0, width), np.float32)
        assert kernels.gather_quantized(rows, none, out)
        sums = kernels.sum_quantized_bags(rows, none, np.array([0, 0]))
        np.testing.assert_array_equal(sums, np.zeros((1, width), np.float32))
    for name in QUANTIZED:
        assert rows_of(name, 5, 256).take(none).shape == (0, 256)


def test_kernels_read_nothing_past_the_last_row():
    """The table ends at a page that cannot be read."""
    run_alone("""
        import ctypes, mmap
        import numpy as np
        from firstlayer import kernels
        from tests.support.quantized import QUANTIZED, random_table, widths_of

        pages = mmap.mmap(-1, 1 << 18)
        memory = np.frombuffer(pages, np.uint8)
        end = memory.size - mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(memory.ctypes.data + end)
        assert libc.mprotect(address, mmap.PAGESIZE, 0) == 0
        rng = np.random.default_rng(0)
        for name in QUANTIZED:
            for width in widths_of(name):
                format_, parts = random_table(name, 3, width, rng)
                encoded = format_.join(parts)
                table = memory[end - encoded.size : end].reshape(encoded.shape)
                table[:] = encoded
                parts.update(format_.split(table, width))
                rows, ids = format_.rows_of(parts, width), np.array([2, 0])
                out = np.empty((2, width), np.float32)
                assert kernels.gather_quantized(rows, ids, out)
                np.testing.assert_array_equal(out, rows.take(ids))
                assert kernels.sum_quantized_bags(rows, ids, np.array([0, 2])) is not None
    """)
