"""Rows at addresses: the kernels equal plain NumPy, and refuse what lies outside."""

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer import kernels
from firstlayer.kernels import mapped_rows, plain

rng = np.random.default_rng(0)
NONE = np.empty(0, np.int64)


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    ids=st.lists(st.integers(-2, 40), max_size=20),
    row_bytes=st.integers(1, 9),
)
def test_rows_of_segments_are_found(sizes, ids, row_bytes):
    starts = np.cumsum([0, *sizes])
    bases = rng.integers(0, 10**9, len(sizes))
    ids = np.array(ids, np.int64)
    arguments = ids, starts, bases, row_bytes, NONE
    found = kernels.locate_rows(*arguments)
    if ids.size and (ids.min() < 0 or ids.max() >= starts[-1]):
        assert found is None and plain.locate_rows(*arguments) is None
        return
    want = [
        base + row * row_bytes
        for base, size in zip(bases, sizes, strict=True)
        for row in range(size)
    ]
    assert found is not None and found.tolist() == [want[i] for i in ids]
    np.testing.assert_array_equal(plain.locate_rows(*arguments), found)


@pytest.mark.parametrize("module", [kernels, plain])
def test_offsets_outside_of_the_file_are_refused(module):
    offsets = np.array([0, 90, 91, -1, 2**63 - 1])
    bases = np.array([1000, 100])

    def locate(*ids):
        return module.locate_rows(np.array(ids), NONE, bases, 10, offsets)

    assert locate(1, 0, 1).tolist() == [1090, 1000, 1090]
    for bad in (2, 3, 4, 5, -1):
        assert locate(0, bad) is None


@pytest.mark.parametrize("module", [kernels, plain])
@pytest.mark.parametrize("width", [1, 3, 8, 200])
def test_rows_are_copied(module, width):
    table = rng.integers(0, 255, (3000, width)).astype(np.uint8)
    ids = rng.integers(0, 3000, 20_000)
    addresses = table.ctypes.data + ids * width
    out = np.empty((ids.size, width), np.uint8)
    module.copy_rows_at(addresses, out)
    np.testing.assert_array_equal(out, table[ids])


def test_missing_pages_are_noticed_and_requested(tmp_path):
    path, page = tmp_path / "a", mapped_rows.PAGE
    path.write_bytes(bytes(1000 * page))
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = mmap.mmap(file.fileno(), 0)
        memory.madvise(mmap.MADV_RANDOM)
        start = np.frombuffer(memory, np.uint8).ctypes.data
        addresses = start + np.arange(10, 900) * page + page - 50
        assert kernels.rows_missing(addresses, 100)
        kernels.request_rows(rng.permutation(addresses), 100)
        # Reading waits for the pages, so they are in memory afterwards.
        out = np.empty((addresses.size, 100), np.uint8)
        kernels.copy_rows_at(addresses, out)
        assert not kernels.rows_missing(addresses, 100)
        # Few rows are requested right away.
        assert kernels.rows_missing(addresses[:5], 100)
        kernels.request_rows(addresses, 100, wait=True)
        untouched = start + np.arange(910, 999) * page
        many = np.concatenate([addresses, untouched, untouched])
        assert kernels.rows_missing(many, 1)
        assert not plain.rows_missing(many, 1)
        plain.request_rows(many, 1)
