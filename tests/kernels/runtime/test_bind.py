"""A bound kernel gets the arguments that Numba's dispatcher would pass."""

import numpy as np
import pytest

from firstlayer.kernels.runtime.bind import FLAG, bind
from firstlayer.kernels.runtime.compile import kernel
from firstlayer.kernels.runtime.pool import pieces, ticket_for, whole_range
from firstlayer.kernels.runtime.threads import on_threads


@kernel()
def record(ticket, table, nothing, ids, is_set, small, large, count, out, flag):
    """Write what the arguments are to each row of ``out``."""
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            if ids[i] < 0:
                flag[0] = ids[i] == -1
                continue
            row = out[i]
            row[0], row[1] = table[ids[i] // 3, ids[i] % 3], nothing is None
            row[2], row[3], row[4] = is_set, small, large
            row[5], row[6], row[7] = count, ids.size, out.size
            row[8], row[9] = table.size, out.shape[0]


@kernel()
def fail(ticket, out):
    if out[0] == 1:
        raise ValueError("the first number must not be 1")
    out[0] = 7


def arguments(table, **others):
    return {
        "table": table,
        "nothing": None,
        "ids": np.empty(1, np.int64),
        "is_set": True,
        "small": np.float32(1.25),
        "large": -2.5,
        "count": -9,
        "out": np.empty((1, 10)),
        "flag": FLAG,
        **others,
    }


def call(bound, ids, *, threads=1):
    out = np.full((len(ids), 10), np.nan)
    with on_threads(threads):
        ticket = ticket_for(len(ids), 1)
    flag = bound(*ticket, ids.ctypes.data, len(ids), out.ctypes.data, len(ids))
    return flag, out


def test_arguments_that_stay_and_arguments_that_vary():
    tables = np.arange(6.0).reshape(2, 3), np.arange(6.0, 12.0).reshape(2, 3)
    bounds = [
        bind(record, varying=["ids", "out"], **arguments(tables[0])),
        bind(record, varying=["ids", "out"], **arguments(tables[1], is_set=False)),
    ]
    for ids in (np.array([4]), np.array([5, 0, 3])):
        for bound, table in zip(bounds, tables, strict=True):
            flag, out = call(bound, ids)
            want = np.zeros((len(ids), 10), np.float64)
            options = arguments(table, ids=ids, out=want, flag=np.zeros(1, np.int64))
            options["is_set"] = table is tables[0]
            record(whole_range(len(ids)), *options.values())
            assert flag == 0 and np.array_equal(out, want)
            assert out[:, 0].tolist() == table.ravel()[ids].tolist()
            assert out[0, 1:6].tolist() == [1, table is tables[0], 1.25, -2.5, -9]
            assert out[0, 6:].tolist() == [len(ids), 10 * len(ids), 6, len(ids)]


def test_the_flag_is_returned_and_starts_at_zero():
    table = np.ones((2, 3))
    bound = bind(record, varying=["ids", "out"], **arguments(table))
    assert call(bound, np.array([0, -1]))[0] == 1
    assert call(bound, np.array([-2]))[0] == 0


def test_a_ticket_shares_the_range_between_threads():
    table = np.arange(6.0).reshape(2, 3)
    bound = bind(record, varying=["ids", "out"], **arguments(table))
    ids = np.arange(6).repeat(1000)
    for threads in (1, 3):
        flag, out = call(bound, ids, threads=threads)
        assert flag == 0 and np.array_equal(out[:, 0], ids)


def test_a_kernel_that_raises_returns_minus_one():
    numbers = np.array([1.0])
    bound = bind(fail, out=numbers)
    assert bound(*whole_range(1)) == -1 and numbers[0] == 1
    numbers[0] = 2
    assert bound(*whole_range(1)) == 0 and numbers[0] == 7


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"arguments must be \['out'\], got \['x'\]"):
        bind(fail, x=np.ones(1))
    with pytest.raises(ValueError, match=r"out must be contiguous, got strides \(16,\)"):
        bind(fail, out=np.ones(4)[::2])
