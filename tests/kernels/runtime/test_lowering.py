"""Statements of kernels: ranges, entries of arrays, operators, and types of variables."""

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.kernels.runtime.compile import internal, kernel

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float32", "float64"]
numbers = st.integers(-20, 20)


@kernel()
def _write_range(start, stop, step, out):
    count = 0
    for i in range(start, stop, step):
        out[count] = i
        count += 1
    return count


@given(numbers, numbers, numbers.filter(bool))
def test_a_range_is_pythons(start, stop, step):
    out = np.empty(50, np.int64)
    count = _write_range(start, stop, step, out)
    assert out[:count].tolist() == list(range(start, stop, step))


@internal
def _yield_pairs(count):
    for i in range(count):
        for j in range(i, -1, -2):
            yield i, j


@kernel()
def _write_pairs(count, out):
    place = 0
    for i, j in _yield_pairs(count):
        for k in range(3):
            out[place, k] = 100 * i + 10 * j + k
        place += 1
    return place


def test_a_generator_continues_its_ranges():
    out = np.empty((20, 3), np.int64)
    places = _write_pairs(5, out)
    pairs = [(i, j) for i in range(5) for j in range(i, -1, -2)]
    assert out[:places].tolist() == [
        [100 * i + 10 * j + k for k in range(3)] for i, j in pairs
    ]


@kernel()
def _copy_1d(x, indices, out):
    for k in range(indices.size):
        out[k] = x[indices[k]]


@kernel()
def _copy_3d(x, out):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            for k in range(x.shape[2]):
                out[i, j, k] = x[i, j, k]


@pytest.mark.parametrize("index", ["uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_numpys(dtype, index):
    x = np.random.default_rng(0).integers(0, 100, 250).astype(dtype)
    indices = np.array([0, 249, 200, 7, 7], index)
    for source in (x, np.repeat(x, 2)[::2]):
        out = np.zeros(5, dtype)
        _copy_1d(source, indices, out)
        assert np.array_equal(out, x[indices])


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float64"])
def test_entries_of_views_are_numpys(dtype, axes):
    x = np.arange(2 * 3 * 5).reshape(2, 3, 5).astype(dtype).transpose(axes)[:, ::-1]
    into = np.zeros((*x.shape[:2], 2 * x.shape[2]), dtype)[:, :, ::2]
    _copy_3d(x, into)
    assert np.array_equal(into, x)


@kernel()
def _last(x, out):
    out[0] = x[-1]


def test_a_constant_index_counts_from_the_end():
    out = np.zeros(1)
    _last(np.array([3.0, 5.0, 7.0]), out)
    assert out[0] == 7


def _binary(symbol):
    @kernel()
    def loop(x, y, out):
        for i in range(x.size):
            out[i] = symbol(x[i], y[i])

    return loop


NUMBERS = [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod,
    operator.truediv, operator.lt, operator.le, operator.eq, operator.ne,
]  # fmt: skip
BITS = [operator.and_, operator.or_, operator.xor, operator.rshift, operator.lshift]


CASES = [
    *((dtype, symbol) for dtype in ("int64", "float32", "float64") for symbol in NUMBERS),
    *(("int64", symbol) for symbol in BITS),
]


@pytest.mark.parametrize("dtype, symbol", CASES)
def test_operators_are_numpys(dtype, symbol):
    x, y = np.array([[7, -7, 3, 0, 60, -5], [2, 2, 5, 9, 3, 1]]).astype(dtype)
    want = symbol(x, y)
    out = np.empty_like(want)
    _binary(symbol)(x, y, out)
    assert out.tolist() == want.tolist()


@kernel()
def _in_place(x, out):
    total, product = x.dtype.type(0), x.dtype.type(1)
    for i in range(x.size):
        total += x[i]
        product *= x[i]
        out[2] -= x[i]
    out[0], out[1] = total, product


@pytest.mark.parametrize("dtype", ["uint64", "int64", "float32"])
def test_assignments_with_operators(dtype):
    x, out = np.array([2, 3, 4], dtype), np.array([0, 0, 20], dtype)
    _in_place(x, out)
    assert out.tolist() == [9, 24, 11]


def test_a_variable_of_two_types_is_refused():
    @kernel()
    def widened(x, out):
        total = 0
        for i in range(x.size):
            total = total + x[i]
        out[0] = total

    with pytest.raises(Exception, match="must have one type, got int64 and float64"):
        widened(np.ones(3), np.zeros(1))
