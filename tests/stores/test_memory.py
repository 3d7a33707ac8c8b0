"""Tables in memory: every format reads and writes rows as its definition says."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.stores import MemoryStore, RowStore

rng = np.random.default_rng(0)


def random(shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_are_the_array_itself(dtype):
    table = random((6, 5)).astype(dtype)
    store = MemoryStore(table)
    assert isinstance(store, RowStore) and store.dtype == dtype and len(store) == 6
    rows = store.read([[5, 0], [1, 1]])
    np.testing.assert_array_equal(rows, table[[[5, 0], [1, 1]]])
    rows[:] = 0
    store.write([1, 1], [[0] * 5, [1, 2, 3, 4, 5]])
    assert table[1].tolist() == [1, 2, 3, 4, 5] and store.parts["weight"] is table


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp8_block"])
def test_quantized_rows_are_near_the_numbers(format):
    table = random((40, 64))
    store = MemoryStore(table, format=format)
    ids = rng.integers(0, 40, (3, 7))
    limit = {"int8": 0.02, "int4": 0.3, "fp8": 0.15, "fp8_block": 0.15}[format]
    assert abs(store.read(ids) - table[ids]).max() < limit
    assert store.nbytes < table.nbytes / 3
    new = random((2, 64)) / 4
    store.write([3, 39], new)
    assert abs(store.read([3, 39]) - new).max() < limit
    np.testing.assert_array_equal(store.read(0), MemoryStore(table, format=format).read(0))


@given(
    ids=st.lists(st.integers(0, 8), max_size=12),
    values=st.lists(st.integers(-9, 9), min_size=12, max_size=12),
)
def test_the_last_of_repeated_rows_stays(ids, values):
    table = np.zeros((9, 2), np.float32)
    store = MemoryStore(table.copy())
    for i, value in zip(ids, values, strict=False):
        table[i] = value
    store.write(ids, np.repeat(np.array(values[: len(ids)]), 2).reshape(-1, 2))
    np.testing.assert_array_equal(store.read(np.arange(9)), table)


@pytest.mark.parametrize("format", [None, "int8", "fp8"])
def test_copies_have_rows_of_their_own(format):
    store = MemoryStore(random((4, 32)) / 4, format=format)
    before = store.read(np.arange(4))
    for other in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        other.write([2], np.zeros((1, 32)))
        assert abs(other.read(2)).max() < 1e-6
        np.testing.assert_array_equal(store.read(np.arange(4)), before)


def test_parts_make_an_equal_store():
    store = MemoryStore(random((4, 32)), format="int4")
    other = MemoryStore.from_parts(store.parts, 32, "int4", mode="r")
    np.testing.assert_array_equal(other.read([3, 0]), store.read([3, 0]))
    with pytest.raises(ValueError, match="read-only"):
        other.write([0], random((1, 32)))


@pytest.mark.rejects
def test_bad_arguments():
    with pytest.raises(ValueError, match=r"array must have 2 axes, got shape \(3,\)"):
        MemoryStore(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="array must be .* got int64"):
        MemoryStore(np.zeros((3, 3), np.int64))
    with pytest.raises(ValueError, match="mode must be"):
        MemoryStore(random((3, 3)), mode="w")
    with pytest.raises(ValueError, match="format must be .* got 'float64'"):
        MemoryStore(np.zeros((3, 3)))
    store = MemoryStore(random((3, 3)))
    with pytest.raises(IndexError, match=r"ids\[1\] is 3, but num_embeddings is 3"):
        store.read([0, 3])
    with pytest.raises(TypeError, match="rows must be real, got complex128"):
        store.write([0], np.zeros((1, 3), complex))
    store.prefetch([2])
    with store:
        pass
    with pytest.raises(ValueError, match=r"MemoryStore\(3 × 3, float32\) is closed"):
        store.read([0])
    with pytest.raises(ValueError, match="is closed"):
        pickle.dumps(store)
