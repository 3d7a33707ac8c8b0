"""Rows as points of the plane: exact neighbors, and maps that keep them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlayer import get_num_threads, set_num_threads
from firstlayer.analysis.plane import (
    _symmetric,
    _weights,
    nearest_rows,
    neighbor_map,
    principal_components,
)
from firstlayer.word_vectors.neighbors import units


def groups_of_rows(*, groups=6, size=40, width=24, seed=0):
    """Return rows around a few directions, and the group of each row."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((groups, width))
    group = np.repeat(np.arange(groups), size)
    noise = rng.standard_normal((groups * size, width))
    return units((centers[group] * 2 + noise).astype(np.float32)), group


def kept(points, ids):
    """Return the share of the neighbors that are also neighbors in the plane."""
    squares = ((points[:, None] - points) ** 2).sum(-1)
    np.fill_diagonal(squares, np.inf)
    near = np.argsort(squares, 1)[:, : ids.shape[1]]
    return np.mean([np.isin(a, b).mean() for a, b in zip(near, ids, strict=True)])


@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 2**32), st.data())
def test_neighbors_are_the_rows_with_the_largest_cosines(rows, width, seed, data):
    unit = units(np.random.default_rng(seed).standard_normal((rows, width), np.float32))
    count = data.draw(st.integers(1, rows - 1))
    ids, cosines = nearest_rows(unit, count)
    every = unit @ unit.T
    np.fill_diagonal(every, -np.inf)
    np.testing.assert_allclose(cosines, -np.sort(-every, 1)[:, :count], atol=1e-6)
    np.testing.assert_allclose(
        np.take_along_axis(every, ids.astype(np.int64), 1), cosines, atol=1e-6
    )
    assert all(len(set(row)) == count for row in ids.tolist())


def test_neighbors_are_found_in_every_block_and_reported():
    unit, _ = groups_of_rows(groups=7, size=90)
    shares = []
    ids, cosines = nearest_rows(unit, 5, report=shares.append)
    assert shares[-1] == 1 and len(shares) == 2 and shares == sorted(shares)
    every = unit @ unit.T
    np.fill_diagonal(every, -np.inf)
    np.testing.assert_allclose(cosines, -np.sort(-every, 1)[:, :5], atol=1e-6)


def test_components_are_those_of_the_singular_value_decomposition():
    rows = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)
    rows *= np.array([5, 3, 1, 1, 1, 1, 1, 1], np.float32)
    centered = rows - rows.mean(0)
    _, _, directions = np.linalg.svd(centered, full_matrices=False)
    found = principal_components(rows)
    np.testing.assert_allclose(
        np.abs(found), np.abs(centered @ directions[:2].T), atol=1e-4
    )
    assert principal_components(np.ones((4, 1), np.float32)).shape == (4, 2)


@pytest.mark.parametrize("count", [2, 5, 15])
def test_weights_of_a_row_have_the_same_sum_at_any_density(count):
    rng = np.random.default_rng(2)
    cosines = -np.sort(-rng.uniform(0, 1, (30, count)), 1) * rng.uniform(0.1, 1, (30, 1))
    weights = _weights(cosines.astype(np.float32))
    np.testing.assert_allclose(weights.sum(1), max(np.log2(count), 1), rtol=1e-3)
    assert (weights[:, 0] == 1).all() and (np.diff(weights, axis=1) <= 0).all()


def test_the_graph_is_the_union_of_both_directions():
    rng = np.random.default_rng(3)
    ids = np.array([rng.choice(9, 3, replace=False) for _ in range(9)], np.int32)
    weights = rng.uniform(0, 1, (9, 3)).astype(np.float32)
    dense = np.zeros((9, 9))
    np.put_along_axis(dense, ids.astype(np.int64), weights, 1)
    bounds, there, found = _symmetric(ids, weights)
    got = np.zeros((9, 9))
    for i in range(9):
        got[i, there[bounds[i] : bounds[i + 1]]] = found[bounds[i] : bounds[i + 1]]
    np.testing.assert_allclose(got, dense + dense.T - dense * dense.T, atol=1e-6)


def test_groups_stay_separate_and_neighbors_are_kept():
    unit, group = groups_of_rows()
    ids, cosines = nearest_rows(unit, 10)
    points = neighbor_map(unit, ids, cosines)
    centers = np.array([np.median(points[group == g], axis=0) for g in range(6)])
    nearest = ((points[:, None] - centers) ** 2).sum(-1).argmin(1)
    assert (nearest == group).mean() > 0.97
    assert kept(points, ids) > 1.4 * kept(principal_components(unit), ids)


def test_a_seed_gives_the_same_map_on_any_number_of_threads():
    unit, _ = groups_of_rows(size=60)
    ids, cosines = nearest_rows(unit, 8)
    before, maps = get_num_threads(), []
    for threads, seed in ((1, 4), (2, 4), (1, 5)):
        set_num_threads(threads)
        try:
            maps.append(neighbor_map(unit, ids, cosines, seed=seed))
        finally:
            set_num_threads(before)
    np.testing.assert_array_equal(maps[0], maps[1])
    assert (maps[0] != maps[2]).any()


def test_equal_rows_and_tiny_tables_have_finite_maps():
    unit = units(np.ones((12, 3), np.float32))
    ids, cosines = nearest_rows(unit, 4)
    points = neighbor_map(unit, ids, cosines)
    assert np.isfinite(points).all() and len(np.unique(points, axis=0)) == 12
    two = np.eye(2, dtype=np.float32)
    assert neighbor_map(two, *nearest_rows(two, 1)).shape == (2, 2)
