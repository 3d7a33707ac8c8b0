"""Without Numba's compiler, layers run on plain NumPy and give the same numbers."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from firstlayer import kernels
from firstlayer._array import compute_dtype
from firstlayer.embeddings.layer import empty_statistics
from firstlayer.embeddings.layer_gradients import layer_gradients
from firstlayer.embeddings.row_gradient import RowGradient
from firstlayer.kernels import plain
from firstlayer.positions.phases import LIMIT, digit_tables
from tests.support.run_alone import run_alone

ROOT = Path(__file__).parent.parent.parent
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
rng = np.random.default_rng(0)


def random(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def assert_same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    bound = TOLERANCE[got.dtype.name]
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=bound, atol=bound
    )


def names():
    return sorted(
        name
        for name, home in kernels._HOME.items()
        if not home.startswith(("runtime.", "neighbor_map", "optim.", "word2vec."))
    )


def test_every_kernel_of_the_layers_has_a_plain_version():
    for name in names():
        compiled = getattr(kernels, name)
        compiled = getattr(compiled, "py_func", compiled)
        assert list(inspect.signature(getattr(plain, name)).parameters) == list(
            inspect.signature(compiled).parameters
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype):
    table, ids = random((9, 5), dtype), rng.integers(0, 9, 40)
    np.testing.assert_array_equal(
        plain.gather_rows(table, ids), kernels.gather_rows(table, ids)
    )
    out = np.ones((40, 5), dtype)
    assert plain.gather_rows(table, ids, out=out) is out
    np.testing.assert_array_equal(out, table[ids])
    assert plain.gather_rows(table, np.array([9])) is None
    assert plain.gather_rows(table, np.array([-1])) is None
    for args in ((ids,), (ids, np.arange(40) * 3)):
        for got, want in zip(
            plain.group_by_id(*args), kernels.group_by_id(*args), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    order, bounds, unique = plain.group_by_id(ids)
    values = random((40, 5), dtype)
    groups = values, order, bounds[:-1], bounds[1:]
    assert_same(plain.sum_groups(*groups), kernels.sum_groups(*groups))
    assert plain.ascends(unique) and not plain.ascends(np.array([1, 1]))
    with pytest.raises(IndexError, match="ids must not be negative, got -2"):
        plain.group_by_id(np.array([3, -2]))
    got, want = table.copy(), table.copy()
    rows = random((3, 5), np.float32 if dtype != np.float64 else dtype)
    plain.store_rows(rows, got, np.array([4, 0, 2]), noise=None)
    kernels.store_rows(rows, want, np.array([4, 0, 2]), noise=None)
    np.testing.assert_array_equal(got, want)


def test_sums_of_words_wrap_around():
    words = rng.integers(0, 2**64, (700, 512), np.uint64)
    want = [sum(row) % 2**64 for row in words.tolist()]
    assert plain.sum_words(words).tolist() == kernels.sum_words(words).tolist() == want


def test_upcast_rows_and_sum_runs():
    table, rows = random((6, 3), ml_dtypes.bfloat16), np.array([5, 0, 5])
    np.testing.assert_array_equal(
        plain.upcast_rows(table, rows), kernels.upcast_rows(table, rows)
    )
    got = random((8, 70))
    want = got.copy()
    plain.sum_runs(got, np.array([2, 4, 8]), into=np.array([0, 1]))
    kernels.sum_runs(want, np.array([2, 4, 8]), into=np.array([0, 1]))
    assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(dtype, weighted):
    compute = np.float64 if dtype == np.float64 else np.float32
    table, ids = random((9, 5), dtype), rng.integers(0, 9, 20)
    bounds = np.array([0, 3, 3, 20])
    weights = random(20, compute) if weighted else None
    divisors = np.array([3.0, 1.0, 17.0], compute)
    options = {"weights": weights, "divisors": divisors}
    assert_same(
        plain.sum_bags(table, ids, bounds, **options),
        kernels.sum_bags(table, ids, bounds, **options),
    )
    table[ids[4], 2] = np.nan
    got = plain.max_bags(table, ids, bounds, weights=weights)
    want = kernels.max_bags(table, ids, bounds, weights=weights)
    assert got is not None and want is not None
    assert_same(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    others = random((3, 5), compute)
    assert_same(
        plain.dot_bags(table, ids, bounds, others=others),
        kernels.dot_bags(table, ids, bounds, others=others),
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_phases(dtype):
    tables = digit_tables(np.array([1.0, 0.3, 1e-3]), factor=1.5).astype(dtype)
    at = np.array([0, 1, -255, 256, -65_536, LIMIT - 1, LIMIT, -(2**63), 2**63 - 1])
    np.testing.assert_array_equal(
        plain.digit_phases(at, tables), kernels.digit_phases(at, tables)
    )
    for width in (5, 6, 7):
        for interleaved in (False, True):
            for cos_first in (False, True):
                options = {
                    "width": width,
                    "interleaved": interleaved,
                    "cos_first": cos_first,
                }
                np.testing.assert_array_equal(
                    plain.sinusoid_features(at, tables, **options),
                    kernels.sinusoid_features(at, tables, **options),
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_half", [False, True])
@pytest.mark.parametrize("write_half", [False, True])
def test_rotation(dtype, read_half, write_half):
    phases = random((3, 6), np.float64 if dtype == np.float64 else np.float32)
    options = {
        "which": np.array([2, 0]),
        "read_half": read_half,
        "write_half": write_half,
    }
    x = random((8, 7), dtype)
    assert_same(
        plain.rotate_pairs(x, phases, **options), kernels.rotate_pairs(x, phases, **options)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_the_complete_layer(dtype, norm, monkeypatch):
    tables = [random((rows, 6), dtype) for rows in (9, 4, 2)]
    rows = [rng.integers(0, 9, 12), np.arange(4), np.array([0, 1, 1])]
    token, position, segment = zip(tables, rows, strict=True)
    weight, bias = random(6, dtype), random(6, dtype)
    results, statistics = [], empty_statistics(12, compute_dtype(np.dtype(dtype)))
    for module in (kernels, plain):
        out, statistics = np.empty((12, 6), dtype), statistics.copy()
        assert module.layer_forward(
            token,
            position=position,
            segment=segment,
            scale=2.0,
            norm=(weight, bias, 1e-3) if norm else None,
            out=out,
            statistics=statistics,
        )
        results.append((out, statistics))
    for mine, other in zip(*results[::-1], strict=True):
        assert_same(mine, other)
    out = np.empty((1, 6), dtype)
    bad = tables[0], np.array([9])
    assert not plain.layer_forward(bad, scale=1.0, norm=None, out=out)
    dy = random((12, 6), np.float64 if dtype == np.float64 else np.float32)
    mask = np.arange(12) % 5 > 0

    def gradients(by_id):
        return layer_gradients(
            token,
            position=position,
            segment=segment,
            scale=2.0,
            norm=(weight, statistics) if norm else None,
            dy=dy,
            by_id=by_id,
            token_padding=int(rows[0][1]),
            position_padding=1,
            mask=mask,
        )

    want = [gradients(True), gradients(False)]
    for name in names():
        monkeypatch.setattr(kernels, name, getattr(plain, name))
    for got, expected in zip([gradients(True), gradients(False)], want, strict=True):
        for mine, other in zip(got, expected, strict=True):
            if isinstance(other, RowGradient):
                assert isinstance(mine, RowGradient)
                np.testing.assert_array_equal(mine.ids, other.ids)
                mine, other = mine.values, other.values
            assert (mine is None) == (other is None)
            if other is not None:
                assert_same(mine, other)


# ------------------------------------------------------------- with NUMBA_DISABLE_JIT=1

# Tests of layers in NumPy and torch.
SELECTED = (
    "tests/numpy/test_rotary.py",
    "tests/embeddings/test_bag.py",
    "tests/embeddings/test_layer.py",
    "tests/torch/test_lookup.py",
    "tests/torch/test_layer_arguments.py",
    "tests/torch/test_tied_head.py",
)


def test_layers_pass_their_tests_without_the_compiler():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"),
            *("-k", "not optimizer and not compile", *SELECTED),
        ],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_training_without_the_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    refusals = run_alone("""
        import numpy as np
        import torch
        import firstlayer.numpy, firstlayer.optim, firstlayer.torch, firstlayer.torch.optim
        from firstlayer.word_vectors.corpus import Corpus
        from firstlayer.word_vectors.word2vec import Word2Vec

        layer = firstlayer.torch.Embedding(9, 4, sparse=True)
        layer(torch.tensor([3, 3, 5])).sum().backward()
        assert layer.weight.grad.coalesce().indices().tolist() == [[3, 5]]
        for make in (
            lambda: firstlayer.optim.RowAdam(firstlayer.numpy.Embedding(9, 4)),
            lambda: firstlayer.torch.optim.RowSGD(layer.parameters(), lr=0.1),
            lambda: Word2Vec(None, None),
        ):
            try:
                make()
            except RuntimeError as error:
                print(error)
    """).splitlines()
    reason = "needs Numba's compiler, but NUMBA_DISABLE_JIT turns it off"
    assert refusals == [
        f"RowAdam {reason}",
        f"RowSGD {reason}",
        f"training word vectors {reason}",
    ]
