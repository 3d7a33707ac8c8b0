import copy
import json
import pickle
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlayer._check import float_dtype
from firstlayer.embeddings.init import initial_table, normal, uniform
from firstlayer.embeddings.resize import resize_table
from firstlayer.embeddings.token import clip_norms
from firstlayer.numpy.token import Embedding
from firstlayer.optim import RowAdamW
from tests.support.gradients import central_difference

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
rng = np.random.default_rng(0)


# Lookup


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 256, 257, 5000])
def test_lookup_returns_exact_rows(dtype, count):
    layer = Embedding(300, 7, dtype=dtype, rng=1)
    ids = rng.integers(0, 300, count)
    got = layer(ids)
    assert got.dtype == layer.weight.dtype
    assert got.tobytes() == layer.weight[ids].tobytes()


def test_lookup_on_several_threads_returns_exact_rows():
    layer = Embedding(1000, 1024, rng=2)
    ids = rng.integers(0, 1000, (40, 128))
    assert layer(ids).nbytes > 12 << 20
    np.testing.assert_array_equal(layer(ids), layer.weight[ids])


@given(
    dtype=st.sampled_from(INTEGERS),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
def test_ids_may_have_any_integer_dtype_and_shape(dtype, shape, seed):
    layer = Embedding(100, 3, rng=0)
    ids = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    np.testing.assert_array_equal(layer(ids), layer.weight[ids.astype(int)])


def test_ids_may_be_lists_scalars_or_strided():
    layer = Embedding(10, 3, rng=0)
    np.testing.assert_array_equal(layer([[1, 2], [3, 4]]), layer.weight[[[1, 2], [3, 4]]])
    np.testing.assert_array_equal(layer(7), layer.weight[7])
    np.testing.assert_array_equal(layer(np.uint8(7)), layer.weight[7])
    assert layer([]).shape == (0, 3)
    ids = np.arange(10)[::-2]
    np.testing.assert_array_equal(layer(ids), layer.weight[ids])
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(layer(fortran), layer.weight[fortran])


def test_lookup_is_a_copy():
    layer = Embedding(4, 2, rng=0)
    before = layer.weight.copy()
    layer([1])[...] = 7
    np.testing.assert_array_equal(layer.weight, before)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 10], r"^ids\[1\] is 10, but num_embeddings is 10$"),
        (np.array([[0, 1], [-1, 12]]), r"^ids\[1, 0\] is -1, but num_embeddings is 10$"),
        (np.int8(-128), r"^ids is -128, but num_embeddings is 10$"),
        (np.array([2**63], np.uint64), r"^ids\[0\] is 9223372036854775808, but num_"),
        (np.array([2**32 + 1]), r"^ids\[0\] is 4294967297, but num_embeddings is 10$"),
        (np.r_[np.zeros(999, int), -1], r"^ids\[999\] is -1, but num_embeddings is 10$"),
        (np.r_[np.zeros(999, int), 10], r"^ids\[999\] is 10, but num_embeddings is 10$"),
    ],
)
def test_out_of_range_error_names_index_id_and_bound(ids, message):
    layer = Embedding(10, 4)
    for call in (layer, layer.vjp):
        with pytest.raises(IndexError, match=message):
            call(ids)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("ids", "name"),
    [([1.0], "float64"), ([True], "bool"), (np.float16(1), "float16"), (["a"], "str")],
)
def test_ids_must_be_integers(ids, name):
    with pytest.raises(TypeError, match=f"^ids must be integers, got {name}"):
        Embedding(10, 4)(ids)


@pytest.mark.rejects
def test_an_empty_float_array_is_rejected():
    with pytest.raises(TypeError, match="ids must be integers, got float64"):
        Embedding(10, 4)(np.array([]))


@pytest.mark.rejects
def test_an_empty_table_has_no_valid_id():
    with pytest.raises(IndexError, match=r"ids\[0\] is 0, but num_embeddings is 0"):
        Embedding(0, 4)([0])
    assert Embedding(0, 4)([]).shape == (0, 4)
    assert Embedding(3, 0)([1, 2]).shape == (2, 0)


# Initial values


def test_seed_determines_the_table():
    a, b, c = (Embedding(50, 8, rng=seed).weight for seed in (3, 3, 4))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_two_tables_from_one_generator_differ():
    generator = np.random.default_rng(0)
    a, b = (Embedding(5, 3, rng=generator).weight for _ in range(2))
    assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    "init", ["normal", "uniform", "xavier", "truncated_normal", "zeros"]
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_initial_tables_are_aligned_to_cache_lines(init, dtype):
    for shape in ((3, 5), (70_000, 16), (0, 4)):
        table = initial_table(shape, init=init, rng=0, dtype=dtype)
        assert table.shape == shape and table.dtype == float_dtype(dtype)
        assert table.ctypes.data % 64 == 0 or not table.size
        assert table.flags.c_contiguous and table.flags.writeable


def test_a_seed_draws_the_numbers_of_the_generator():
    want = np.random.default_rng(3).standard_normal((300, 7), dtype=np.float32)
    np.testing.assert_array_equal(initial_table((300, 7), rng=3), want)
    want = normal((300, 7), np.random.default_rng(3), std=0.3)
    np.testing.assert_array_equal(want, initial_table((300, 7), rng=3) * np.float32(0.3))
    assert initial_table((300, 7), rng=3, dtype="float64").dtype == np.float64


@pytest.mark.parametrize(
    ("init", "std", "limit"),
    [
        ("normal", 1.0, 6),
        ("uniform", 0.05 / 3**0.5, 0.05),
        ("xavier", (6 / (4000 + 50)) ** 0.5 / 3**0.5, (6 / (4000 + 50)) ** 0.5),
        # The standard deviation of a normal cut at two is 0.8796.
        ("truncated_normal", 0.02 * 0.8796, 0.04),
        (partial(normal, std=0.3), 0.3, 2),
        (partial(uniform, limit=2.0), 2 / 3**0.5, 2),
    ],
)
def test_initial_distribution_has_the_documented_spread(init, std, limit):
    table = initial_table((4000, 50), init=init, rng=0)
    assert abs(table.mean()) < 4 * std / table.size**0.5
    assert table.std() == pytest.approx(std, rel=0.01)
    assert np.abs(table).max() <= limit
    if init != "normal":
        assert np.abs(table).max() > 0.9 * min(limit, 4 * std)


def test_init_function_result_is_cast_to_the_dtype():
    layer = Embedding(3, 2, init=lambda shape, rng: np.full(shape, 1 / 3), dtype="bfloat16")
    assert layer.weight.dtype == ml_dtypes.bfloat16
    assert (layer.weight.astype(float) == 0.333984375).all()


def test_given_weight_is_not_copied():
    table = rng.standard_normal((5, 3))
    layer = Embedding(5, 3, weight=table)
    assert layer.weight is table or np.shares_memory(layer.weight, table)
    assert layer(4).dtype == np.float64
    assert Embedding(5, 3, weight=table, dtype="float16").weight.dtype == np.float16


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_embeddings": -1}, ValueError, "num_embeddings must be at least 0, got -1"),
        ({"embedding_dim": -2}, ValueError, "embedding_dim must be at least 0, got -2"),
        (
            {"num_embeddings": 2.0},
            TypeError,
            "num_embeddings must be an integer, got float",
        ),
        ({"padding_idx": 5}, ValueError, r"padding_idx must be in \[-5, 5\) .* got 5"),
        ({"padding_idx": -6}, ValueError, r"padding_idx must be in \[-5, 5\) .* got -6"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be positive, got 0.0"),
        ({"init": [1.0]}, TypeError, "init must be a name or a function, got list"),
        ({"norm_type": -1.0}, ValueError, "norm_type must be positive, got -1.0"),
        ({"init": "glorot"}, ValueError, "init must be 'normal', .* got 'glorot'"),
        ({"dtype": "int32"}, TypeError, "dtype must be float64, .* got int32"),
        (
            {"dtype": ml_dtypes.float8_e5m2},
            TypeError,
            "dtype must be float64, .* got float8",
        ),
        ({"weight": np.ones((5, 2))}, ValueError, r"shape \(5, 3\), got \(5, 2\)"),
        ({"weight": np.ones((5, 3), int)}, TypeError, "weight must be real, got int64"),
        (
            {"weight": np.ones((5, 3), complex), "dtype": "float32"},
            TypeError,
            "weight must be real, got complex128",
        ),
        ({"init": lambda shape, rng: np.ones(2)}, ValueError, r"\(5, 3\), got \(2,\)"),
    ],
)
def test_error_names_the_bad_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        Embedding(**{"num_embeddings": 5, "embedding_dim": 3, **arguments})


# Padding


@pytest.mark.parametrize("padding_idx", [2, -8])
def test_a_drawn_table_has_a_zero_padding_row(padding_idx):
    layer = Embedding(10, 3, padding_idx=padding_idx, init="uniform", rng=0)
    assert layer.padding_idx == 2
    assert (layer.weight[2] == 0).all() and layer.weight[[1, 3]].all()


def test_lookups_read_the_value_written_to_the_padding_row():
    layer = Embedding(10, 3, padding_idx=2, rng=0)
    layer.weight[...] = 5
    assert (layer([2, 2]) == 5).all() and layer.logits(np.ones(3))[2] == 15
    assert (layer.state_dict()["weight"][2] == 5).all()
    layer.weight = np.full((10, 3), 7, np.float32)
    assert (layer(2) == 7).all() and (copy.deepcopy(layer)(2) == 7).all()
    layer.set_padding([3.0, 4.0, 6.0])
    np.testing.assert_array_equal(layer([2, 3]), [[3, 4, 6], [7, 7, 7]])


def test_a_given_or_loaded_padding_row_is_kept():
    table = np.full((4, 2), 7.0)
    given = Embedding(4, 2, padding_idx=1, weight=table)
    assert given.weight is table and (given(1) == 7).all()
    given.load_state_dict({"weight": np.full((4, 2), 9.0)})
    assert (given(1) == 9).all()


def test_row_optimizer_treats_the_padding_row_as_torch_does():
    # A lookup passes it no gradient, and AdamW decays it as every other row.
    table = rng.standard_normal((5, 3)).astype(np.float32)
    layer = Embedding(5, 3, padding_idx=2, weight=table.copy())
    torch_layer = torch.nn.Embedding(
        5, 3, padding_idx=2, _weight=torch.from_numpy(table.copy())
    )
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3}
    optimizer = RowAdamW(layer, **options)
    dense = torch.optim.AdamW(torch_layer.parameters(), **options)
    for ids in ([2, 0, 2], [1, 2, 4], [3, 3, 2]):
        y, pull = layer.vjp(ids)
        optimizer.step(pull(2 * y))
        dense.zero_grad()
        torch_layer(torch.tensor(ids)).square().sum().backward()
        dense.step()
    want = torch_layer.weight.detach().numpy()
    assert (want[2] != table[2]).all()
    np.testing.assert_allclose(layer(np.arange(5)), want, rtol=1e-5)


def test_set_padding_is_not_changed_by_a_later_catch_up():
    layer = Embedding(5, 3, padding_idx=2, rng=0)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.3)
    y, pull = layer.vjp([1])
    optimizer.step(pull(y))
    layer.set_padding(4.0)
    assert (layer.parameters()["weight"][2] == 4).all()


def test_two_layers_have_their_own_padding():
    a, b = Embedding(4, 2, padding_idx=0), Embedding(4, 2, padding_idx=1)
    a.set_padding(5.0)
    assert (a(0) == 5).all() and (b(1) == 0).all() and (b(0) != 5).all()


def test_read_only_table_can_be_read():
    table = rng.standard_normal((4, 2))
    table.flags.writeable = False
    layer = Embedding(4, 2, padding_idx=1, weight=table)
    np.testing.assert_array_equal(layer([1, 3]), table[[1, 3]])


def test_mask_is_true_at_tokens():
    layer = Embedding(4, 2, padding_idx=3)
    np.testing.assert_array_equal(
        layer.mask([[0, 3], [3, 1]]), [[True, False], [False, True]]
    )
    assert Embedding(4, 2).mask([0, 3]).all()


@pytest.mark.rejects
def test_set_padding_needs_padding_idx():
    with pytest.raises(ValueError, match="needs a layer with padding_idx"):
        Embedding(4, 2).set_padding(0.0)


# Gradients


@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_lookup_gradient_equals_finite_differences(padding_idx, shape):
    layer = Embedding(5, 3, dtype="float64", padding_idx=padding_idx, rng=0)
    ids = rng.integers(0, 5, shape)
    dy = rng.standard_normal((*shape, 3))
    _, pull = layer.vjp(ids)
    want = central_difference(lambda: float((layer.weight[ids] * dy).sum()), layer.weight)
    if padding_idx is not None:
        want[padding_idx] = 0
    np.testing.assert_allclose(pull(dy)["weight"].dense(5), want, atol=1e-8)


def test_scale_grad_by_freq_agrees_with_torch():
    ids = rng.integers(0, 6, (4, 5))
    dy = rng.standard_normal((4, 5, 3))
    layer = Embedding(6, 3, dtype="float64", padding_idx=2, scale_grad_by_freq=True)
    torch_layer = torch.nn.Embedding(
        6, 3, padding_idx=2, scale_grad_by_freq=True, dtype=torch.float64
    )
    torch_layer(torch.from_numpy(ids)).backward(torch.from_numpy(dy))
    _, pull = layer.vjp(ids)
    assert torch_layer.weight.grad is not None
    np.testing.assert_allclose(
        pull(dy)["weight"].dense(6), torch_layer.weight.grad.numpy(), atol=1e-12
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradient_of_repeated_ids_is_summed_in_float32(dtype):
    layer = Embedding(5, 2, dtype=dtype)
    y, pull = layer.vjp(np.full(3000, 3))
    grad = pull(np.ones_like(y))["weight"]
    assert grad.values.dtype == np.float32
    assert grad.ids.tolist() == [3] and (grad.values == 3000).all()


def test_pullback_uses_the_ids_of_its_call():
    layer, ids = Embedding(5, 2), np.array([1, 1])
    _, pull = layer.vjp(ids)
    ids[...] = 4
    assert pull(np.ones((2, 2)))["weight"].ids.tolist() == [1]


@pytest.mark.rejects
def test_pullback_checks_the_shape_of_dy():
    _, pull = Embedding(5, 2).vjp([1, 2, 3])
    with pytest.raises(ValueError, match=r"dy must have shape \(3, 2\), got \(2, 3\)"):
        pull(np.ones((2, 3)))


# max_norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_max_norm_clips_the_output_and_not_the_table(norm_type):
    layer = Embedding(50, 6, max_norm=2.0, norm_type=norm_type, dtype="float64", rng=0)
    before = layer.weight.copy()
    got = layer(np.arange(50))
    norms = np.linalg.norm(before, ord=norm_type, axis=-1)
    assert (norms > 2).any() and (norms < 2).any()
    np.testing.assert_array_equal(layer.weight, before)
    np.testing.assert_allclose(got, before * np.minimum(1, 2 / norms)[:, None], rtol=1e-12)
    np.testing.assert_array_equal(got[norms < 2], before[norms < 2])


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_clip_norms_is_the_same_on_torch(norm_type):
    rows = rng.standard_normal((9, 4)).astype(np.float32)
    want = clip_norms(rows, max_norm=1.5, norm_type=norm_type)
    got = clip_norms(torch.from_numpy(rows), max_norm=1.5, norm_type=norm_type)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


def test_max_norm_keeps_zero_and_nan_rows():
    layer = Embedding(2, 2, max_norm=1.0, weight=np.array([[0, 0], [np.nan, 1.0]]))
    assert (layer(0) == 0).all() and np.isnan(layer(1)).all()


def test_max_norm_gradient_ignores_the_clipping():
    layer = Embedding(3, 2, max_norm=0.1, rng=0)
    y, pull = layer.vjp([1])
    np.testing.assert_array_equal(pull(np.ones_like(y))["weight"].values, [[1, 1]])


def test_project_clips_the_stored_rows_of_the_given_ids():
    layer = Embedding(6, 4, max_norm=0.5, padding_idx=0, rng=0)
    want, before = layer(np.arange(6)), layer.weight.copy()
    layer.project([1, 2, 1])
    np.testing.assert_array_equal(layer.weight[1:3], want[1:3])
    np.testing.assert_array_equal(layer.weight[3:], before[3:])
    layer.project()
    np.testing.assert_array_equal(layer.weight, want)


def test_max_norm_output_agrees_with_torch():
    table = rng.standard_normal((20, 5)).astype(np.float32)
    torch_layer = torch.nn.Embedding(20, 5, max_norm=1.0, norm_type=3.0)
    with torch.no_grad():
        torch_layer.weight.copy_(torch.from_numpy(table))
    ids = rng.integers(0, 20, 30)
    got = Embedding(20, 5, max_norm=1.0, norm_type=3.0, weight=table)(ids)
    np.testing.assert_allclose(
        got, torch_layer(torch.from_numpy(ids)).detach().numpy(), rtol=2e-6
    )


# The tied head


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_products_with_every_row(dtype, monkeypatch):
    monkeypatch.setattr("firstlayer.numpy.token.CHUNK", 40)
    layer = Embedding(11, 4, dtype=dtype, rng=0)
    x = rng.standard_normal((2, 3, 4)).astype(dtype)
    want = x.astype(float) @ layer.weight.astype(float).T
    got = layer.logits(x)
    assert got.dtype == x.dtype
    tolerance = {8: 1e-15, 4: 1e-6, 2: 2**-8}[got.dtype.itemsize]
    np.testing.assert_allclose(got.astype(float), want, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_gradients_of_the_tied_head_equal_finite_differences(padding_idx):
    layer = Embedding(5, 3, dtype="float64", padding_idx=padding_idx, rng=0)
    x, d = rng.standard_normal((2, 2, 3)), rng.standard_normal((2, 2, 5))
    _, pull = layer.logits_vjp(x)
    got = pull(d)
    dx = central_difference(lambda: float((layer.logits(x) * d).sum()), x)
    np.testing.assert_allclose(got["x"], dx, atol=1e-8)
    dweight = central_difference(lambda: float((layer.logits(x) * d).sum()), layer.weight)
    assert dweight.all()
    np.testing.assert_allclose(got["weight"], dweight, atol=1e-8)


@pytest.mark.rejects
def test_logits_check_their_arguments():
    with pytest.raises(ValueError, match=r"embedding_dim 4, got shape \(2, 3\)"):
        Embedding(5, 4).logits(np.ones((2, 3)))
    y, pull = Embedding(5, 4).logits_vjp(np.ones((2, 4), np.float16))
    assert pull(y)["x"].dtype == np.float16
    with pytest.raises(ValueError, match=r"dlogits must have shape \(2, 5\), got \(1, 2"):
        pull(y[None])
    for whole in ([1, 0, 0, 0], np.ones(4, bool)):
        with pytest.raises(TypeError, match="x must be real, got (int64|bool)"):
            Embedding(5, 4).logits(whole)


# Resizing


def test_growing_keeps_rows_and_adds_the_mean_of_the_tokens():
    layer = Embedding(5, 3, padding_idx=-1, rng=0)
    layer.set_padding(100.0)
    before = layer.weight.copy()
    changes = layer.resize(8)
    assert (changes.kept, changes.added, changes.dropped) == (
        range(5),
        range(5, 8),
        range(8, 5),
    )
    assert layer.num_embeddings == 8 and layer.padding_idx == 4
    np.testing.assert_array_equal(layer.weight[:5], before)
    np.testing.assert_allclose(
        layer.weight[5:], np.tile(before[:4].mean(0, dtype=float), (3, 1)), rtol=1e-6
    )
    assert layer.logits(np.ones(3)).shape == (8,) and (layer(4) == 100).all()


def test_shrinking_drops_the_last_rows():
    layer = Embedding(6, 2, padding_idx=0, rng=0)
    before = layer.weight.copy()
    changes = layer.resize(4)
    assert (list(changes.kept), list(changes.added), list(changes.dropped)) == (
        [0, 1, 2, 3],
        [],
        [4, 5],
    )
    np.testing.assert_array_equal(layer.weight, before[:4])
    with pytest.raises(IndexError, match="is 4, but num_embeddings is 4"):
        layer([4])


def test_gaussian_rows_have_the_mean_and_covariance_of_the_old_rows():
    old = rng.standard_normal((200, 3)) @ np.diag([1.0, 2.0, 0.1]) + [5.0, 0.0, -1.0]
    table, _ = resize_table(old, 40_200, init="gaussian", rng=0)
    np.testing.assert_allclose(table[200:].mean(0), old.mean(0), atol=0.05)
    np.testing.assert_allclose(np.cov(table[200:].T), np.cov(old.T, ddof=0), atol=0.1)


@pytest.mark.parametrize("init", ["zeros", "normal", np.full((2, 3), 4.0)])
def test_new_rows_may_be_drawn_or_given(init):
    layer = Embedding(3, 3, rng=0)
    layer.resize(5, init=init, rng=7)
    want = init if isinstance(init, np.ndarray) else initial_table((2, 3), init=init, rng=7)
    np.testing.assert_array_equal(layer.weight[3:], want)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("n", "init", "message"),
    [
        (-1, "mean", "num_embeddings must be at least 0, got -1"),
        (2, "mean", "must leave the padding row 2 in place, got 2"),
        (9, "avg", "init must be 'normal', .* got 'avg'"),
        (9, np.ones((2, 2)), r"init must have shape \(4, 3\), got \(2, 2\)"),
    ],
)
def test_failed_resize_changes_nothing(n, init, message):
    layer = Embedding(5, 3, padding_idx=2, rng=0)
    before = layer.weight.copy()
    with pytest.raises(ValueError, match=message):
        layer.resize(n, init=init)
    assert layer.num_embeddings == 5
    np.testing.assert_array_equal(layer.weight, before)


# Copies, configs and states


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_complete_and_independent(again):
    layer = Embedding(5, 3, padding_idx=1, dtype="bfloat16", rng=0)
    other = again(layer)
    np.testing.assert_array_equal(other(np.arange(5)), layer(np.arange(5)))
    other.set_padding(1.0)
    other.weight[0] = 3
    assert (layer(1) == 0).all() and not (layer(0) == 3).all()


@pytest.mark.rejects  # the annotations name plain numbers
def test_config_of_numpy_scalars_is_json():
    options: dict[str, Any] = {"padding_idx": np.int16(-2), "max_norm": np.float32(1.5)}
    options |= {"norm_type": np.float16(1), "scale_grad_by_freq": np.bool_(True)}
    rows: Any = np.int64(5)
    layer = Embedding(rows, 3, **options)
    layer.resize(rows + 1)
    want = {"num_embeddings": 6, "embedding_dim": 3, "padding_idx": 3, "max_norm": 1.5}
    want |= {"norm_type": 1.0, "scale_grad_by_freq": True, "dtype": "float32"}
    assert json.loads(json.dumps(layer.config())) == want


def test_subclass_has_the_config_of_its_base():
    class Noisy(Embedding):
        def __init__(self, *args, noise=0.1, **options):
            super().__init__(*args, **options)

    layer = Noisy(5, 3, padding_idx=1)
    assert layer.config() == Embedding(5, 3, padding_idx=1).config()
    assert repr(layer).startswith("Noisy(num_embeddings=5, embedding_dim=3, padding_idx=1")


def test_config_and_state_rebuild_an_equal_layer():
    layer = Embedding(
        5,
        3,
        padding_idx=-2,
        max_norm=1.5,
        norm_type=1.0,
        scale_grad_by_freq=True,
        dtype="f8",
    )
    layer.set_padding(0.5)
    other = Embedding(**layer.config())
    other.load_state_dict(layer.state_dict())
    assert other.config() == layer.config()
    np.testing.assert_array_equal(other(np.arange(5)), layer(np.arange(5)))
    assert repr(other) == repr(layer) and "max_norm=1.5" in repr(layer)


def test_arrays_of_foreign_byte_order_are_converted():
    weight = np.random.default_rng(0).standard_normal((5, 3))
    layer, other = (
        Embedding(5, 3, weight=weight),
        Embedding(5, 3, weight=weight.astype(">f8")),
    )
    ids = np.array([4, 0, 4], ">i4")
    np.testing.assert_array_equal(other(ids), layer([4, 0, 4]))
    got, want = (one.vjp(ids)[1](weight[:3].astype(">f8")) for one in (other, layer))
    np.testing.assert_array_equal(got["weight"].values, want["weight"].values)
    assert Embedding(2, 2, dtype=">f4").weight.dtype == np.float32


@pytest.mark.rejects
def test_failed_load_state_dict_changes_nothing():
    layer = Embedding(5, 3, rng=0)
    before = layer.weight.copy()
    with pytest.raises(ValueError, match=r"missing \['weight'\], unknown \['w'\]"):
        layer.load_state_dict({"w": np.ones((5, 3))})
    with pytest.raises(ValueError, match=r"\['weight'\]|must have shape \(5, 3\)"):
        layer.load_state_dict({"weight": np.ones((5, 4))})
    with pytest.raises(TypeError, match=r"state\['weight'\] must be real, got complex128"):
        layer.load_state_dict({"weight": np.ones((5, 3), complex)})
    np.testing.assert_array_equal(layer.weight, before)
