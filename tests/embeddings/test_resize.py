"""New rows of ``init="gaussian"``: distribution, cost, seeds."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from firstlayer.embeddings import resize
from firstlayer.embeddings.resize import resize_table


def table_of(rows, width, *, rank=None, seed=0):
    """Return a table whose rows have a mean and correlated columns."""
    rng = np.random.default_rng(seed)
    rank = width if rank is None else rank
    mixed = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, width))
    return (mixed + 5 * rng.standard_normal(width)).astype(np.float32)


def drawn(weight, count, *, rng=3, **options):
    table, _ = resize_table(
        weight, len(weight) + count, init="gaussian", rng=rng, **options
    )
    return table[len(weight) :].astype(np.float64)


@pytest.mark.parametrize("rows", [3, 40, 700])
@pytest.mark.parametrize("rank", [2, 5])
def test_drawn_rows_have_the_mean_and_the_covariance_of_the_table(rows, rank, monkeypatch):
    monkeypatch.setattr(resize, "CHUNK", 64)
    weight = table_of(rows, 5, rank=rank)
    new = drawn(weight, 40_000)
    covariance = np.cov(weight.astype(np.float64).T, bias=True)
    size = np.abs(covariance).max()
    np.testing.assert_allclose(
        new.mean(0), weight.mean(0, dtype=np.float64), atol=0.03 * size**0.5
    )
    np.testing.assert_allclose(np.cov(new.T), covariance, atol=0.03 * size)
    # A normal distribution has kurtosis 3 in every direction.
    along = (new - new.mean(0)) @ np.random.default_rng(1).standard_normal(5)
    assert np.mean(along**4) / np.mean(along**2) ** 2 == pytest.approx(3, abs=0.15)


def test_drawn_rows_stay_in_the_span_of_a_rank_deficient_table():
    weight = table_of(300, 8, rank=3)
    away = weight.mean(0, dtype=np.float64)
    basis = np.linalg.svd(weight - away)[2]
    new = drawn(weight, 50) - away
    assert np.abs(new @ basis[3:].T).max() < 1e-5 * np.abs(new @ basis[:3].T).max()


def test_tables_of_one_row_or_equal_rows_draw_that_row():
    one = table_of(1, 4)
    np.testing.assert_array_equal(drawn(one, 3), np.repeat(one, 3, axis=0))
    equal = np.repeat(one, 20, axis=0)
    np.testing.assert_allclose(drawn(equal, 3), np.repeat(one, 3, axis=0), rtol=1e-6)


def test_padding_row_does_not_count():
    weight = table_of(50, 4)
    with_padding = np.insert(weight, 7, 1e6, axis=0)
    np.testing.assert_array_equal(drawn(with_padding, 9, padding_idx=7), drawn(weight, 9))


def test_a_seed_draws_the_same_rows_for_any_number_of_new_rows():
    weight = table_of(100, 6)
    few, many = drawn(weight, 5), drawn(weight, 500)
    np.testing.assert_allclose(few, many[:5], rtol=1e-6)
    assert np.abs(drawn(weight, 5, rng=4) - few).min() > 0


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_round_the_same_rows(dtype):
    weight = table_of(90, 4).astype(dtype)
    want = drawn(weight.astype(np.float64), 30)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(drawn(weight, 30), want, rtol=2 * eps, atol=1e-7)


def test_memory_follows_the_new_rows():
    weight = table_of(60_000, 32)
    tracemalloc.start()
    try:
        resize_table(weight, 68_000, init="gaussian", rng=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result, new_in_float64 = 68_000 * 32 * 4, 8_000 * 32 * 8
    assert peak < result + 5 * new_in_float64
