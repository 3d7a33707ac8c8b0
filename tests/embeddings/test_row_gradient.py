"""Row gradients: sums by id, addition, conversion to dense."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.embeddings.row_gradient import IdGroups, RowGradient, sum_by_id
from firstlayer.kernels import group_by_id

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
rng = np.random.default_rng(0)


@given(
    ids=st.lists(st.integers(0, 6), max_size=30),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(0, 5),
)
def test_sums_equal_a_plain_loop_over_the_ids(ids, dtype, width):
    shape = len(ids), width
    values = np.random.default_rng(len(ids)).standard_normal(shape).astype(dtype)
    expected = np.zeros((7, width), np.float64 if dtype == np.float64 else np.float32)
    for row, value in zip(ids, values, strict=True):
        expected[row] += value.astype(expected.dtype)
    got = sum_by_id(np.array(ids, np.int64), values)
    assert got.ids.tolist() == sorted(set(ids))
    assert got.values.dtype == expected.dtype
    np.testing.assert_array_equal(got.dense(7), expected)


def test_values_of_an_id_are_added_in_order():
    # In float32 1e8 + 1 is 1e8, so another order gives another sum.
    values = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    assert sum_by_id(np.zeros(4, int), values).values.item() == 1.0
    assert sum_by_id(np.zeros(4, int), values[[0, 2, 1, 3]]).values.item() == 2.0


def test_skip_leaves_an_id_out_and_mean_divides_by_its_count():
    ids, values = np.array([[3, 1], [3, 2]]), np.arange(8.0).reshape(2, 2, 2)
    got = sum_by_id(ids, values, skip=1, mean=True)
    assert got.ids.tolist() == [2, 3]
    np.testing.assert_array_equal(got.values, [[6, 7], [2, 3]])


def test_gradients_of_two_batches_add():
    a = sum_by_id(np.array([4, 1]), np.ones((2, 3), np.float32))
    b = sum_by_id(np.array([4, 0]), np.full((2, 3), 2, np.float32))
    total = a + b
    assert total.ids.tolist() == [0, 1, 4]
    np.testing.assert_array_equal(total.dense(5), a.dense(5) + b.dense(5))


@pytest.mark.parametrize("largest", [0, 9, 2**40 - 1, 2**55 - 1, 2**62 - 1, 2**63 - 1])
def test_grouping_is_stable_for_ids_of_any_size(largest):
    ids = rng.choice([largest, largest // 2, min(largest, 3)], 50)
    order, bounds, unique = group_by_id(ids)
    assert unique.tolist() == sorted(set(ids.tolist()))
    assert bounds[0] == 0 and bounds[-1] == 50
    for group, id_ in enumerate(unique):
        members = order[bounds[group] : bounds[group + 1]]
        np.testing.assert_array_equal(members, np.flatnonzero(ids == id_))


@pytest.mark.parametrize("num_ids", [1, 200, 26 * 10**6, 2**40, 2**50, 2**63 - 1])
def test_ids_and_labels_are_grouped_as_by_a_stable_sort(num_ids):
    ids, labels = rng.integers(0, num_ids, 5000), rng.integers(0, 10**5, 5000)
    ids[::2] = ids[1::2]
    order = np.argsort(ids, kind="stable")
    unique, starts = np.unique(ids[order], return_index=True)
    for own, want in ((None, order), (labels, labels[order])):
        found, bounds, found_ids = group_by_id(ids, own)
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(bounds, np.append(starts, ids.size))
        np.testing.assert_array_equal(found_ids, unique)


@pytest.mark.rejects
@pytest.mark.parametrize("bad", [-1, -(2**63)])
def test_negative_ids_are_refused(bad):
    with pytest.raises(IndexError, match=f"ids must not be negative, got {bad}"):
        sum_by_id(np.array([2047, bad, 3]), np.ones((3, 2), np.float32))


def test_no_ids_give_an_empty_gradient():
    got = sum_by_id(np.zeros((0,), int), np.zeros((0, 3), np.float32))
    assert got.ids.shape == (0,) and got.values.shape == (0, 3)
    np.testing.assert_array_equal(got.dense(2), np.zeros((2, 3)))


def test_dense_keeps_the_dtype_of_the_values():
    dense = RowGradient(np.array([2]), np.ones((1, 2))).dense(4)
    assert dense.dtype == np.float64
    np.testing.assert_array_equal(dense, [[0, 0], [0, 0], [1, 1], [0, 0]])


def test_groups_sum_several_values_of_one_batch():
    ids = np.array([[7, 3], [7, 5]], np.int32)
    groups = IdGroups.of(ids)
    assert groups.unique.tolist() == [3, 5, 7] and groups.order.tolist() == [1, 3, 0, 2]
    for values in rng.standard_normal((2, 2, 2, 3)).astype(np.float32):
        sevens = values[0, 0] + values[1, 0]
        cases: list[tuple[dict[str, Any], list[int], list[np.ndarray]]] = [
            ({}, [3, 5, 7], [values[0, 1], values[1, 1], sevens]),
            ({"skip": 5}, [3, 7], [values[0, 1], sevens]),
            ({"mean": True}, [3, 5, 7], [values[0, 1], values[1, 1], sevens / 2]),
        ]
        for options, ids_, rows in cases:
            got = groups.sum(values, **options)
            assert got.ids.tolist() == ids_
            np.testing.assert_array_equal(got.values, rows)
    with pytest.raises(IndexError, match="ids must not be negative, got -2"):
        IdGroups.of(np.array([1, -2]))
