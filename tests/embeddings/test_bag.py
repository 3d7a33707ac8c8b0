import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlayer.embeddings.bag import MODES, divide_or_zero, pool
from firstlayer.embeddings.ragged import bag_bounds, bag_indices, flatten_bags
from firstlayer.kernels import bags as kernels
from firstlayer.kernels import get_num_threads, set_num_threads
from firstlayer.numpy.bag import EmbeddingBag
from firstlayer.numpy.token import Embedding
from tests.support.gradients import central_difference

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
rng = np.random.default_rng(0)


def pool_in_python(table, bags, *, mode, weights=None, padding_idx=None):
    """Pool lists of ids with Python loops, in the compute dtype."""
    compute = np.float64 if table.dtype == np.float64 else np.float32
    out = np.zeros((len(bags), table.shape[1]), table.dtype)
    for b, ids in enumerate(bags):
        kept = [i for i, id_ in enumerate(ids) if id_ != padding_idx]
        w = [compute(1 if weights is None else weights[b][i]) for i in kept]
        terms = [table[ids[i]].astype(compute) * by for i, by in zip(kept, w, strict=True)]
        if mode == "max" and terms:
            out[b] = np.max(terms, axis=0).astype(table.dtype)
        elif terms:
            total = sum(terms[1:], terms[0])
            divisor = compute(sum(map(float, w))) if mode == "mean" else compute(1)
            out[b] = (total / divisor).astype(table.dtype) if divisor else 0
    return out


def as_arguments(form, bags):
    """Return lists of ids as the ids and offsets of a call."""
    if form == "2-D":
        return np.array(bags), None
    flat = list(itertools.chain.from_iterable(bags))
    ends = np.cumsum([0, *map(len, bags)])
    if form == "offsets":
        return np.array(flat, int), ends[:-1]
    return np.array([*flat, 1, 1], int), ends


def weights_like(ids, seed=3):
    return np.random.default_rng(seed).uniform(-1.0, 2.0, ids.shape)


def layer_for(form, dim=3, **options):
    last = form == "last"
    return EmbeddingBag(7, dim, include_last_offset=last, dtype="float64", rng=1, **options)


# Output


@given(
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from([1, 5, 32, 64, 71, 130, 200]),
    bags=st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=6),
    padding_idx=st.sampled_from([None, 0]),
    weighted=st.booleans(),
    last=st.booleans(),
)
def test_ragged_bags_equal_a_python_loop_exactly(
    mode, dtype, width, bags, padding_idx, weighted, last
):
    options = {"mode": mode, "padding_idx": padding_idx}
    layer = EmbeddingBag(
        10, width, dtype=dtype, rng=width, include_last_offset=last, **options
    )
    ids, offsets = as_arguments("last" if last else "offsets", bags)
    weights = ragged = None
    if weighted:
        weights = weights_like(ids)
        ragged = np.split(weights, np.cumsum([len(bag) for bag in bags]))
    want = pool_in_python(layer.weight, bags, weights=ragged, **options)
    got = layer(ids, offsets, weights)
    assert got.dtype == layer.weight.dtype
    # Zeros compare equal regardless of sign.
    np.testing.assert_array_equal(got.astype(float), want.astype(float))


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_two_dimensional_ids_are_bags(mode):
    layer = EmbeddingBag(50, 12, mode=mode, rng=0)
    ids = rng.integers(0, 50, (6, 4))
    flat = layer(ids.ravel(), offsets=np.arange(0, 24, 4))
    np.testing.assert_array_equal(layer(ids), flat)
    np.testing.assert_array_equal(layer(np.asfortranarray(ids)), flat)
    np.testing.assert_array_equal(
        layer(np.repeat(ids.ravel(), 2)[::2], list(range(0, 24, 4))), flat
    )
    np.testing.assert_array_equal(
        layer(ids.tolist()), pool_in_python(layer.weight, ids, mode=mode)
    )


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_and_offsets_may_have_any_integer_dtype(dtype):
    layer = EmbeddingBag(100, 3, rng=0)
    ids, offsets = np.array([99, 0, 7], dtype), np.array([0, 2], dtype)
    want = pool_in_python(layer.weight, [[99, 0], [7]], mode="mean")
    np.testing.assert_array_equal(layer(ids, offsets), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_empty_bags_and_bags_of_padding_give_zeros(mode, weighted):
    layer = EmbeddingBag(9, 5, mode=mode, padding_idx=-1, init=ones_init, rng=0)
    ids = np.array([8, 8, 3, 8])
    weights = np.full(4, 2.0) if weighted else None
    y, pull = layer.vjp(ids, [0, 0, 2, 4, 4], weights)
    assert not y[[0, 1, 3, 4]].any() and y[2].all()
    assert pull(np.ones_like(y))["weight"].ids.tolist() == [3]
    assert layer([], []).shape == (0, 5)
    assert not layer([], [0, 0]).any()
    np.testing.assert_array_equal(layer(np.zeros((2, 0), int)), np.zeros((2, 5)))
    assert layer(np.zeros((0, 3), int)).shape == (0, 5)


def ones_init(shape, rng):
    return np.ones(shape)


def test_padding_is_left_out_of_mean_and_maximum():
    table = np.array([[9.0], [2.0], [4.0], [-3.0]])
    for mode, want in zip(MODES, [6.0, 3.0, 4.0], strict=True):
        layer = EmbeddingBag(4, 1, mode=mode, padding_idx=0, weight=table)
        assert layer([[1, 0, 2, 0]]).item() == want
        assert layer([[0, 3]]).item() == -3.0


def test_written_padding_row_is_kept_and_left_out_of_bags():
    layer = EmbeddingBag(4, 2, padding_idx=1, rng=0)
    assert (layer.weight[1] == 0).all()
    layer.weight[...] = 5
    layer.set_padding(9.0)
    assert (layer([[0, 1]]) == 5).all() and (layer.weight[1] == 9).all()
    y, pull = layer.vjp([[0, 1]])
    assert pull(np.ones_like(y))["weight"].ids.tolist() == [0]


def test_weights_mean_the_same_in_every_mode():
    table = np.array([[2.0, -2.0], [3.0, -3.0], [5.0, 5.0]])
    ids, weights = [[0, 1]], [[3, 1]]
    for mode, want in zip(MODES, [[9, -9], [2.25, -2.25], [6, -3]], strict=True):
        layer = EmbeddingBag(3, 2, mode=mode, weight=table)
        assert layer(ids, per_sample_weights=weights).tolist() == [want]


def test_mean_with_zero_total_weight_is_zero_and_passes_no_gradient():
    layer = EmbeddingBag(5, 3, mode="mean", dtype="float64", rng=0)
    ids, weights = np.array([[1, 2], [3, 4]]), np.array([[0.5, -0.5], [1.0, 3.0]])
    y, pull = layer.vjp(ids, None, weights)
    assert not y[0].any() and y[1].all()
    grads = pull(np.ones_like(y))
    assert not grads["weight"].dense(5)[[1, 2]].any()
    assert not grads["per_sample_weights"][0].any() and grads["per_sample_weights"][1].all()


def test_first_of_equal_maxima_gets_the_gradient():
    table = np.array([[1.0, -0.0], [1.0, 0.0], [0.0, 0.0]])
    y, pull = EmbeddingBag(3, 2, mode="max", weight=table).vjp([[2, 1, 0]])
    assert pull(np.array([[3.0, 5.0]]))["weight"].dense(3).tolist() == [
        [0, 0],
        [3, 0],
        [0, 5],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_propagate(dtype):
    inf, nan = np.inf, np.nan
    table = np.array([[nan, 1.0], [2.0, -inf], [3.0, -inf], [nan, -inf]]).astype(dtype)
    for width in (1, 40):
        repeated = np.repeat(table, width, axis=1)
        largest = EmbeddingBag(4, 2 * width, mode="max", weight=repeated)
        y, pull = largest.vjp([[1, 0, 2], [2, 3, 0], [2, 1, 1]])
        want = np.array([[nan, 1.0], [nan, 1.0], [3.0, -inf]]).repeat(width, axis=1)
        np.testing.assert_array_equal(y.astype(float), want)
        # The index is that of the first NaN, not the last.
        won = pull(np.ones(y.shape))["weight"].dense(4)[:, 0]
        assert won.tolist() == [1, 0, 1, 1]
        total = EmbeddingBag(4, 2 * width, mode="sum", weight=repeated)
        np.testing.assert_array_equal(
            total([[1, 0]]).astype(float), [[nan] * width + [-inf] * width]
        )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("width", [3, 64])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype, width):
    layer = EmbeddingBag(2, width, mode="sum", dtype=dtype, init=ones_init)
    ids = np.zeros((1, 3001), int)
    assert (layer(ids) == np.float32(3001).astype(dtype)).all()
    y, pull = layer.vjp(ids.T, None, np.ones((3001, 1), dtype))
    grads = pull(np.ones_like(y))
    assert grads["weight"].values.dtype == np.float32
    assert grads["weight"].values.tolist() == [[3001.0] * width]
    assert grads["per_sample_weights"].dtype == dtype
    assert (grads["per_sample_weights"] == width).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_rows_clipped_to_max_norm_are_rounded_once(dtype):
    layer = EmbeddingBag(20, 9, mode="mean", max_norm=1.5, dtype=dtype, rng=5)
    ids = rng.integers(0, 20, (4, 6))
    rows = layer.weight.astype(np.float32)
    rows *= np.minimum(1, 1.5 / np.linalg.norm(rows, axis=1, keepdims=True))
    want = rows[ids].astype(np.float64).mean(axis=1).astype(np.float32).astype(dtype)
    one_ulp = np.abs(want.astype(float)) * float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(layer(ids).astype(float) - want.astype(float)) <= one_ulp).all()
    assert (layer(ids) == want).mean() > 0.9


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(kernels, "GRAIN", 1)
    before, ends = get_num_threads(), np.sort(rng.integers(0, 400, 50))
    ids, offsets = rng.integers(0, 60, 400), np.r_[0, ends]
    results = []
    for mode, width, threads in itertools.product(MODES, [20, 100], [1, 2, 5]):
        set_num_threads(threads)
        y, pull = EmbeddingBag(60, width, mode=mode, rng=2).vjp(
            ids, offsets, weights_like(ids)
        )
        grads = pull(np.cos(np.arange(y.size)).reshape(y.shape))
        arrays = y, grads["weight"].values, grads["per_sample_weights"]
        results.append([mode, width, *(a.tobytes() for a in arrays)])
    set_num_threads(before)
    assert results[0::3] == results[1::3] == results[2::3]


# Gradients


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["2-D", "offsets", "last"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("max_norm", [None, 1.2])
def test_gradients_equal_finite_differences(mode, form, weighted, padding_idx, max_norm):
    options = {"mode": mode, "padding_idx": padding_idx}
    layer = layer_for(form, max_norm=max_norm, **options)
    bags = [[2, 4, 2], [4, 4, 4], [0, 6, 1]]
    ids, offsets = as_arguments(form, bags if form == "2-D" else [*bags, [], [5, 5]])
    weights = weights_like(ids) if weighted else None
    y, pull = layer.vjp(ids, offsets, weights)
    dy = rng.standard_normal(y.shape)
    grads = pull(dy)
    # With max_norm the gradient is that of the clipped rows.
    used = layer_for(form, weight=Embedding.__call__(layer, np.arange(7)), **options)

    def loss():
        return float((used(ids, offsets, weights) * dy).sum())

    np.testing.assert_array_equal(used(ids, offsets, weights), y)
    want = central_difference(loss, used.weight)
    np.testing.assert_allclose(grads["weight"].dense(7), want, atol=1e-8)
    assert grads.keys() == {"weight", "per_sample_weights"} if weighted else {"weight"}
    if weights is not None:
        want = central_difference(loss, weights)
        np.testing.assert_allclose(grads["per_sample_weights"], want, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_scale_grad_by_freq_divides_by_the_count_of_each_id(mode, weighted):
    ids = np.array([[1, 2, 0], [1, 1, 1], [0, 0, 5]])
    weights = weights_like(ids) if weighted else None
    plain, scaled = (
        EmbeddingBag(6, 4, mode=mode, padding_idx=0, scale_grad_by_freq=by, rng=3)
        for by in (False, True)
    )
    (y, pull), (_, pull_scaled) = (a.vjp(ids, None, weights) for a in (plain, scaled))
    want, got = pull(y), pull_scaled(y)
    assert got["weight"].ids.tolist() == want["weight"].ids.tolist() == [1, 2, 5]
    counts = np.array([[4], [1], [1]], np.float32)
    np.testing.assert_array_equal(got["weight"].values, want["weight"].values / counts)
    if weighted:
        np.testing.assert_array_equal(got["per_sample_weights"], want["per_sample_weights"])


def test_pullback_uses_the_arrays_of_its_call():
    layer = EmbeddingBag(9, 4, mode="mean", dtype="float64", rng=0)
    ids, offsets = np.array([1, 2, 3, 3]), np.array([0, 3])
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    y, pull = layer.vjp(ids, offsets, weights)
    before = pull(y)
    layer([[5]])
    for array in (ids, offsets, weights, layer.weight):
        array[...] = 0
    after = pull(y)
    np.testing.assert_array_equal(before["weight"].dense(9), after["weight"].dense(9))
    np.testing.assert_array_equal(before["per_sample_weights"], after["per_sample_weights"])


def test_gradient_of_weights_has_their_shape_and_dtype():
    layer = EmbeddingBag(9, 4, mode="sum", padding_idx=0, include_last_offset=True, rng=0)
    ids, dy = [0, 1, 2, 3, 4], np.ones((1, 4))
    want = np.r_[0, layer.weight[1:3].sum(axis=1), 0, 0]
    for weights, dtype in [
        (np.ones(5), np.float64),
        (np.ones(5, np.float16), np.float16),
        (np.ones(5, int), np.float32),
        ([1, 1, 1, 1, 1], np.float32),
    ]:
        got = layer.vjp(ids, [0, 3], weights)[1](dy)["per_sample_weights"]
        assert got.dtype == dtype and got.shape == (5,)
        np.testing.assert_allclose(got, want, atol=1e-2 if dtype == np.float16 else 1e-6)


# Agreement with torch 2.13.0


def torch_bag(layer, ids, offsets, weights=None):
    """Return torch's output and the gradients of the sum of its squares."""
    table = torch.tensor(layer.weight, requires_grad=True)
    psw = None if weights is None else torch.tensor(weights, requires_grad=True)
    y = torch.nn.functional.embedding_bag(
        torch.tensor(ids),
        table,
        None if offsets is None else torch.tensor(offsets),
        mode=layer.mode,
        per_sample_weights=psw,
        include_last_offset=layer.include_last_offset,
        padding_idx=layer.padding_idx,
    )
    y.square().sum().backward()
    grads = [t.grad.numpy() for t in (table, psw) if t is not None and t.grad is not None]
    return y.detach().numpy(), grads


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["2-D", "offsets", "last"])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("dim", [5, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_and_gradients_agree_with_torch(mode, form, padding_idx, dim, weighted):
    layer = layer_for(form, dim, mode=mode, padding_idx=padding_idx)
    bags = rng.integers(0, 7, (5, 6)).tolist()
    if form != "2-D":
        bags = [[], *(bag[:n] for n, bag in enumerate(bags)), [3, 3]]
    ids, offsets = as_arguments(form, bags)
    if form == "last":
        # torch includes the ids after the last offset in the last bag.
        ids = ids[:-2]
    # torch takes weights for sums only.
    weights = weights_like(ids) if weighted and mode == "sum" else None
    y, pull = layer.vjp(ids, offsets, weights)
    want, grads = torch_bag(layer, ids, offsets, weights)
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)
    got = pull(2 * y)
    np.testing.assert_allclose(got["weight"].dense(7), grads[0], rtol=1e-12, atol=1e-12)
    if weights is not None:
        np.testing.assert_allclose(got["per_sample_weights"], grads[1], rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_scale_grad_by_freq_agrees_with_torch_lookups(mode):
    # torch's bags are no reference: they divide every id by the count of one of them.
    layer = layer_for("2-D", mode=mode, scale_grad_by_freq=True)
    ids = np.array([[1, 1, 2], [6, 1, 2]])
    y, pull = layer.vjp(ids)
    table = torch.tensor(layer.weight, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor(ids), table, scale_grad_by_freq=True)
    reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.max}[mode]
    reduced = reduce(rows, dim=1)
    (reduced.values if mode == "max" else reduced).square().sum().backward()
    assert table.grad is not None
    want = table.grad.numpy()
    np.testing.assert_allclose(pull(2 * y)["weight"].dense(7), want, rtol=1e-12)


# Pooling with array operations


def as_numpy(x):
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_pool_agrees_with_the_layer_in_every_library(mode, weighted):
    layer = EmbeddingBag(8, 5, mode=mode, padding_idx=0, rng=4)
    # Repeated ids, so that there are equal maxima.
    ids = np.array([[1, 2, 1, 2], [0, 3, 3, 0], [0, 0, 0, 0], [7, 7, 0, 6]])
    weights = np.array([[1.0, 2, 1, 2], [3, 1, 1, 1], [1, 1, 1, 1], [2, -2, 5, 0]])
    weights = weights.astype("float32") if weighted else None
    y, pull = layer.vjp(ids, None, weights)
    dy = rng.standard_normal(y.shape).astype("float32")
    grads = pull(dy)
    rows, counted, steps = layer.weight[ids], ids != 0, np.arange(4)

    def check(got, drows, dweights):
        np.testing.assert_allclose(as_numpy(got), y, atol=1e-6)
        dense = np.zeros((8, 5))
        np.add.at(dense, ids, as_numpy(drows))
        np.testing.assert_allclose(dense, grads["weight"].dense(8), atol=1e-5)
        if weighted:
            want = grads["per_sample_weights"]
            np.testing.assert_allclose(as_numpy(dweights), want, atol=1e-5)

    np.testing.assert_allclose(
        pool(rows, counted, steps=steps, weights=weights, mode=mode), y
    )

    leaves = [torch.tensor(a, requires_grad=True) for a in (rows, weights) if a is not None]
    fixed = {"counted": torch.tensor(counted), "steps": torch.tensor(steps)}
    for run in (pool, torch.compile(pool, fullgraph=True, backend="eager")):
        got = run(leaves[0], **fixed, weights=leaves[1] if weighted else None, mode=mode)
        check(got, *torch.autograd.grad(got, leaves, torch.tensor(dy)), *[None][weighted:])

    def of_arrays(rows, weights):
        return pool(rows, counted, steps=jnp.asarray(steps), weights=weights, mode=mode)

    given_ = jnp.asarray(rows), None if weights is None else jnp.asarray(weights)
    got, back = jax.vjp(jax.jit(of_arrays), *given_)
    check(got, *back(jnp.asarray(dy)))


def test_pool_of_length_zero_is_zero_and_keeps_infinity():
    for mode in MODES:
        nothing = np.zeros((2, 0, 3)), np.zeros((2, 0), bool)
        got = pool(*nothing, steps=np.arange(0), mode=mode)
        np.testing.assert_array_equal(got, np.zeros((2, 3)))
    rows = np.array([[5.0], [-np.inf], [-np.inf]])
    counted = np.array([False, True, True])
    assert pool(rows, counted, steps=np.arange(3), mode="max").tolist() == [-np.inf]


def test_bag_indices_and_divide_or_zero_agree_in_every_library():
    bounds, steps = np.array([0, 0, 2, 2, 5]), np.arange(5)
    for make in (np.asarray, torch.tensor, jnp.asarray):
        assert as_numpy(bag_indices(make(bounds), make(steps))).tolist() == [1, 1, 3, 3, 3]
        by = make(np.array([2.0, 0.0], "float32"))
        got = divide_or_zero(make(np.array([3.0, 3.0], "float32")), by)
        assert as_numpy(got).tolist() == [1.5, 0.0] and "float32" in str(got.dtype)


# Errors


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([[1, 2]], [0], r"^offsets must be None for ids of 2 axes, got shape \(1,\)$"),
        ([1, 2], None, "^offsets must be given for ids of 1 axis, got None$"),
        (3, None, r"^ids must have 1 or 2 axes, got shape \(\)$"),
        ([[[1]]], None, r"^ids must have 1 or 2 axes, got shape \(1, 1, 1\)$"),
        ([1, 2], [1], "^offsets must begin with 0, got 1$"),
        ([1, 2], [], "^offsets must begin with 0, got none for 2 ids$"),
        ([1, 2], [[0]], r"^offsets must have 1 axis, got shape \(1, 1\)$"),
        ([1, 2, 3], [0, 2, 1], "^offsets must not decrease, got 1 after 2$"),
        (
            [1, 2],
            np.array([0, 2, 1], np.uint8),
            "^offsets must not decrease, got 1 after 2",
        ),
        ([1, 2], [0, 3], "^offsets must be at most 2, the number of ids, got 3$"),
        ([1], np.array([0, 2**63], np.uint64), "ids, got 9223372036854775808$"),
    ],
)
def test_error_names_bad_offsets(ids, offsets, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingBag(5, 2)(ids, offsets)


@pytest.mark.rejects
def test_include_last_offset_needs_an_end():
    with pytest.raises(
        ValueError, match="^offsets must have an end with include_last_offset"
    ):
        EmbeddingBag(5, 2, include_last_offset=True)([], [])
    assert bag_bounds((0,), [0], include_last_offset=True).tolist() == [0]


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[1, 2], [0, 5]], IndexError, r"^ids\[1, 1\] is 5, but num_embeddings is 5$"),
        ([[-1]], IndexError, r"^ids\[0, 0\] is -1, but num_embeddings is 5$"),
        ([[1.0]], TypeError, "^ids must be integers, got float64$"),
        ([[True]], TypeError, "^ids must be integers, got bool$"),
    ],
)
def test_error_names_bad_ids(ids, error, message):
    with pytest.raises(error, match=message):
        EmbeddingBag(5, 2)(ids)
    with pytest.raises(error, match=message):
        EmbeddingBag(5, 2).vjp(ids)


@pytest.mark.rejects
def test_ids_after_the_last_bag_are_checked():
    layer = EmbeddingBag(5, 2, include_last_offset=True)
    with pytest.raises(IndexError, match=r"^ids\[2\] is 9, but num_embeddings is 5$"):
        layer([1, 2, 9], [0, 2])


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0], ValueError, r"must have the shape \(1, 2\) of ids, got \(1,\)$"),
        ([[True, False]], TypeError, "weights must be integers or reals, got bool$"),
        ([["a", "b"]], TypeError, "weights must be integers or reals, got str"),
    ],
)
def test_error_names_bad_weights(weights, error, message):
    with pytest.raises(error, match="^per_sample_" + ".*" + message):
        EmbeddingBag(5, 2)([[1, 2]], None, weights)


@pytest.mark.rejects
def test_offsets_mode_and_dy_are_checked():
    with pytest.raises(TypeError, match="^offsets must be integers, got float64$"):
        EmbeddingBag(5, 2)([1], [0.0])
    with pytest.raises(
        ValueError, match="^mode must be 'sum', 'mean' or 'max', got 'avg'$"
    ):
        EmbeddingBag(5, 2, mode="avg")  # pyright: ignore[reportArgumentType]
    _, pull = EmbeddingBag(5, 2).vjp([[1], [2]])
    with pytest.raises(ValueError, match=r"^dy must have shape \(2, 2\), got \(2,\)$"):
        pull(np.ones(2))


# Several layers, copies and configs


def test_layers_with_different_options_are_independent():
    table = rng.standard_normal((6, 3))
    ids = [[1, 2, 2], [5, 5, 0]]
    layers = {
        options: EmbeddingBag(6, 3, weight=table, **dict(options))
        for options in [
            (("mode", "sum"),),
            (("mode", "mean"),),
            (("mode", "max"),),
            (("mode", "sum"), ("padding_idx", 5)),
            (("mode", "sum"), ("max_norm", 0.5)),
            (("mode", "sum"), ("max_norm", 0.5), ("norm_type", 1.0)),
        ]
    }
    outputs = [layer(ids).tobytes() for layer in layers.values()]
    assert len(set(outputs)) == len(layers)
    assert outputs == [layer(ids).tobytes() for layer in layers.values()]
    shortened = layers[("mode", "sum"), ("max_norm", 0.5), ("norm_type", 1.0)]
    short = table * np.minimum(1, 0.5 / np.abs(table).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(shortened(ids), short[ids].sum(axis=1))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_configs_give_equal_layers(again):
    layer = EmbeddingBag(
        9,
        4,
        mode="max",
        padding_idx=-2,
        max_norm=1.5,
        norm_type=1.0,
        scale_grad_by_freq=True,
        include_last_offset=True,
        dtype="bfloat16",
        rng=0,
    )
    built = EmbeddingBag(**layer.config())
    built.load_state_dict(layer.state_dict())
    for other in (again(layer), built):
        args = [1, 7, 3, 2], [0, 3, 4]
        assert other(*args).tobytes() == layer(*args).tobytes()
        assert other.config() == layer.config()
    assert "mode='max'" in repr(layer) and "include_last_offset=True" in repr(layer)


def test_read_only_and_resized_tables_are_pooled():
    table = np.arange(8.0).reshape(4, 2)
    table.flags.writeable = False
    layer = EmbeddingBag(4, 2, mode="sum", weight=table)
    assert layer([[1, 3]]).tolist() == [[8.0, 10.0]]
    layer.resize(6, init=np.ones((2, 2)))
    assert layer([[1, 5]]).tolist() == [[3.0, 4.0]]


def test_flatten_bags_drops_padding():
    ids, weights = [0, 3, 0, 2, 1], [1, 2, 3, 4, 5]
    bags = flatten_bags(ids, [0, 1, 4], num_embeddings=4, weights=weights, padding_idx=0)
    assert bags.ids.tolist() == [3, 2, 1] and bags.bounds.tolist() == [0, 0, 2, 3]
    assert bags.weights is not None and bags.weights.tolist() == [2, 4, 5]
    assert bags.kept is not None and bags.kept.tolist() == [1, 3, 4]
    assert flatten_bags([[1, 2]], num_embeddings=4).kept is None
