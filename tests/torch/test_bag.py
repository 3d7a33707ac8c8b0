"""Bags on torch: values, gradients of every order, compiled and exported."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

import firstlayer.numpy.bag
from firstlayer.torch._bags import pooling, torch_operator
from firstlayer.torch.bag import EmbeddingBag
from firstlayer.torch.functional import embedding_bag
from tests.support.gradients import central_difference
from tests.support.torch_round_trips import forget_graphs, graphs

MODES = ["sum", "mean", "max"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Inductor and forward-mode AD use torch.jit.script, which torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def reference(table, bags, mode):
    """Pool each bag of (id, weight) pairs in float64, one number at a time."""
    out = np.zeros((len(bags), table.shape[1]))
    for row, bag in zip(out, bags, strict=True):
        terms = [weight * table[i] for i, weight in bag]
        if not terms:
            continue
        total = sum(weight for _, weight in bag)
        if mode == "max":
            row[:] = np.max(terms, axis=0)
        elif mode == "sum" or total != 0:
            row[:] = np.sum(terms, axis=0) / (1 if mode == "sum" else total)
    return out


def split(ids, offsets, weights, *, end=None, padding_idx=None):
    """Return the bags of a call as lists of (id, weight) pairs."""
    bounds = [*offsets, len(ids)] if end is None else [*offsets, end]
    pairs = [
        (int(i), 1.0 if weights is None else float(weights[at])) for at, i in enumerate(ids)
    ]
    return [
        [pair for pair in pairs[lo:hi] if pair[0] != padding_idx]
        for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)
    ]


@st.composite
def calls(draw):
    size = draw(st.integers(0, 12))
    ids = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    cuts = draw(st.lists(st.integers(0, size), max_size=4))
    offsets = [0, *sorted(cuts)]
    end = draw(st.none() | st.integers(offsets[-1], size))
    weights = draw(
        st.none()
        | st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=size, max_size=size)
    )
    padding_idx = draw(st.none() | st.integers(-7, 6))
    return ids, offsets, end, weights, padding_idx


def by_operators(*args, **options):
    # Kernels do not run under forward-mode AD.
    with forward_ad.dual_level():
        return embedding_bag(*args, **options)


@settings(max_examples=60)
@given(call=calls(), mode=st.sampled_from(MODES), dtype=st.sampled_from(DTYPES[:2]))
def test_bags_equal_their_definition(call, mode, dtype):
    ids, offsets, end, weights, padding_idx = call
    table = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    skip = None if padding_idx is None else padding_idx % 7
    bags = split(ids, offsets, weights, end=end, padding_idx=skip)
    want = reference(table.double().numpy(), bags, mode)
    bounds = offsets if end is None else [*offsets, end]
    for function in (embedding_bag, by_operators):
        got = function(
            torch.tensor(ids, dtype=torch.int64),
            table,
            torch.tensor(bounds),
            mode=mode,
            per_sample_weights=None
            if weights is None
            else torch.tensor(weights, dtype=dtype),
            include_last_offset=end is not None,
            padding_idx=padding_idx,
        )
        np.testing.assert_allclose(got.double().numpy(), want, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("shape", [(4, 6), (64, 300), (0, 5), (3, 0)])
def test_rows_of_ids_are_bags(mode, padding_idx, shape):
    table, ids = torch.randn(50, 8), torch.randint(0, 50, shape)
    flat = ids.reshape(-1).tolist()
    offsets = [row * shape[1] for row in range(shape[0])]
    bags = split(flat, offsets, None, padding_idx=padding_idx)
    want = reference(table.double().numpy(), bags, mode)
    for function in (embedding_bag, by_operators):
        got = function(ids, table, mode=mode, padding_idx=padding_idx)
        np.testing.assert_allclose(got.numpy(), want, atol=2e-4 if mode == "sum" else 2e-6)


def test_numpy_and_torch_agree():
    weight, ids = torch.randn(40, 5), torch.randint(0, 40, (30,))
    offsets, weights = torch.tensor([0, 4, 4, 17]), torch.rand(30)
    dy = torch.randn(4, 5)
    for mode, padding_idx, freq, max_norm in product(
        MODES, [None, 7], [False, True], [None, 1.0]
    ):
        options: Any = {
            "mode": mode,
            "padding_idx": padding_idx,
            "scale_grad_by_freq": freq,
            "max_norm": max_norm,
        }
        ours = EmbeddingBag(40, 5, _weight=weight.clone(), sparse=True, **options)
        theirs = firstlayer.numpy.bag.EmbeddingBag(
            40, 5, weight=weight.numpy().copy(), **options
        )
        given = weights.clone().requires_grad_()
        got = ours(ids, offsets, given)
        got.backward(dy)
        want, pull = theirs.vjp(ids.numpy(), offsets.numpy(), weights.numpy())
        grads = pull(dy.numpy())
        np.testing.assert_allclose(got.detach().numpy(), want, atol=1e-6)
        dense = grads["weight"].dense(40)
        np.testing.assert_allclose(ours.weight.grad.to_dense().numpy(), dense, atol=5e-6)
        np.testing.assert_allclose(
            given.grad.numpy(), grads["per_sample_weights"], atol=5e-6
        )


@pytest.mark.parametrize("dtype", DTYPES[2:])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_half_precision_is_rounded_once(dtype, mode, weighted):
    table, ids = torch.randn(30, 64).to(dtype), torch.randint(1, 30, (50, 40))
    weights = torch.rand(50, 40).to(dtype) if weighted else None
    got = embedding_bag(ids, table, mode=mode, padding_idx=0, per_sample_weights=weights)
    terms = table.float()[ids] * (1 if weights is None else weights.float()[..., None])
    # In the order of the kernel's float32 sums.
    sums = torch.zeros(50, 64)
    for step in range(40):
        sums = sums + terms[:, step]
    by = (
        torch.full((50, 1), 40.0)
        if weights is None
        else weights.double().sum(1, keepdim=True)
    )
    want = {"sum": sums, "mean": sums / by.float(), "max": terms.amax(1)}[mode].to(dtype)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES[2:])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_gradients_are_summed_in_float32(dtype, mode, sparse):
    layer = EmbeddingBag(3, 2, mode=mode, sparse=sparse, dtype=dtype)
    layer(torch.ones(3000, 1, dtype=torch.int64)).sum().backward()
    assert torch.equal(layer.weight.grad.to_dense()[1], torch.full((2,), 3000.0).to(dtype))
    leaf = layer.weight.detach().t().contiguous().t().requires_grad_()
    embedding_bag(torch.ones(3000, 1, dtype=torch.int64), leaf, mode=mode).sum().backward()
    assert torch.equal(leaf.grad[1], torch.full((2,), 3000.0).to(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_first_of_equal_maxima_gets_the_gradient_and_nan_is_largest(mode):
    table = torch.tensor([[1.0, 2.0], [1.0, float("nan")], [0.0, 5.0]])
    ids = torch.tensor([2, 0, 1, 0])
    for function, offsets in product((embedding_bag, by_operators), (None, ids[1:2])):
        leaf = table.clone().requires_grad_()
        y = function(ids[None] if offsets is None else ids, leaf, offsets, mode=mode)
        if mode != "max":
            assert y[0, 1].isnan()
            continue
        assert y[0, 0] == 1 and y[0, 1].isnan()
        y.sum().backward()
        assert leaf.grad.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_maximum_of_minus_infinity():
    table = torch.tensor([[1.0], [-float("inf")]])
    for function in (embedding_bag, by_operators):
        ids, offsets = torch.tensor([0, 1, 0]), torch.tensor([0, 2])
        y = function(ids, table, offsets, mode="max", padding_idx=0)
        assert y.tolist() == [[-float("inf")], [0]]


def test_mean_with_weights_that_sum_to_zero_is_zero_without_gradient():
    weights = torch.tensor([[1.0, -1.0], [1.0, 1.0]], requires_grad=True)
    for function in (embedding_bag, by_operators):
        table = torch.tensor([[3.0], [5.0]], requires_grad=True)
        y = function(torch.tensor([[0, 1], [0, 1]]), table, per_sample_weights=weights)
        assert y.tolist() == [[0], [4]]
        got = torch.autograd.grad(y.sum(), (table, weights), create_graph=True)
        assert got[0].tolist() == [[0.5], [0.5]]
        assert got[1].tolist() == [[0, 0], [-0.5, 0.5]]


# Gradients


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 5}, {"include_last_offset": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_first_and_second_derivatives_in_both_modes(mode, options, weighted):
    table = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, dtype=torch.float64, requires_grad=True) if weighted else None
    ids, offsets = torch.tensor([1, 2, 1, 5, 0, 5]), torch.tensor([0, 2, 2, 5])

    def bags(w, p=None):
        return embedding_bag(ids, w, offsets, mode=mode, per_sample_weights=p, **options)

    inputs = (table,) if weights is None else (table, weights)
    assert gradcheck(bags, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(bags, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_derivatives_of_rows_of_ids(mode, padding_idx):
    table = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 2, 1], [5, 0, 5]])

    def bags(w):
        return embedding_bag(ids, w, mode=mode, padding_idx=padding_idx)

    assert gradcheck(bags, table, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(bags, table, check_fwd_over_rev=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_equals_finite_differences(mode, sparse):
    table = np.random.default_rng(0).standard_normal((7, 3))
    weights = np.random.default_rng(1).uniform(0.5, 2, (2, 4))
    ids = np.array([[1, 6, 1, 3], [0, 3, 3, 3]])
    layer = EmbeddingBag(
        7,
        3,
        mode=mode,
        sparse=sparse,
        padding_idx=6,
        _weight=torch.from_numpy(table.copy()),
    )
    given = torch.from_numpy(weights.copy()).requires_grad_()
    (layer(torch.from_numpy(ids), per_sample_weights=given) ** 3).sum().backward()

    def loss():
        flat = split(ids.reshape(-1), [0, 4], weights.reshape(-1), padding_idx=6)
        return float((reference(table, flat, mode) ** 3).sum())

    got = layer.weight.grad
    assert got.is_sparse == sparse
    np.testing.assert_allclose(
        got.to_dense().numpy(), central_difference(loss, table), atol=1e-6
    )
    np.testing.assert_allclose(
        given.grad.numpy(), central_difference(loss, weights), atol=1e-6
    )
    if sparse:
        assert got.is_coalesced() and got.indices().tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_scale_grad_by_freq_divides_by_the_counted_occurrences(mode, weighted):
    table = torch.randn(6, 3, dtype=torch.float64)
    ids, offsets = torch.tensor([1, 1, 2, 1, 4, 4]), torch.tensor([0, 2, 5])
    counts = torch.tensor([1, 3, 1, 1, 1, 1], dtype=torch.float64)
    weights = torch.rand(6, dtype=torch.float64) if weighted else None
    options: Any = {
        "mode": mode,
        "include_last_offset": True,
        "per_sample_weights": weights,
    }
    for function in (embedding_bag, by_operators):
        grads = []
        for freq in (False, True):
            leaf = table.clone().requires_grad_()
            y = function(ids, leaf, offsets, scale_grad_by_freq=freq, **options)
            y.backward(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
            grads.append(leaf.grad)
        torch.testing.assert_close(grads[1], grads[0] / counts[:, None])


def test_ids_modified_before_backward_raise():
    layer, ids = EmbeddingBag(5, 2, mode="max"), torch.tensor([[1, 2]])
    y = layer(ids)
    ids[0, 0] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_table_may_change_between_forward_and_backward():
    for mode in MODES:
        layer = EmbeddingBag(5, 2, mode=mode)
        y = layer(torch.tensor([[1, 2]]))
        with torch.no_grad():
            layer.weight.add_(1.0)
        y.sum().backward()
        assert layer.weight.grad.sum() == pytest.approx(4 if mode == "sum" else 2)


# Ids, padding, max_norm, compiled and exported


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"]
)
def test_ids_and_offsets_of_any_integer_dtype(dtype):
    layer = EmbeddingBag(9, 3, padding_idx=1)
    ids, offsets = torch.tensor([1, 8, 3, 3]), torch.tensor([0, 3])
    integer = getattr(torch, dtype)
    want = layer(ids, offsets)
    assert torch.equal(layer(ids.to(integer), offsets.to(integer)), want)
    with forward_ad.dual_level():
        torch.testing.assert_close(layer(ids.to(integer), offsets.to(integer)), want)


def test_nested_ids_are_bags():
    layer = EmbeddingBag(9, 3, mode="mean")
    ids = [torch.tensor([1, 2, 2]), torch.tensor([8])]
    weights = [torch.tensor([1.0, 2, 3]), torch.tensor([5.0])]
    nested, by = (
        torch.nested.nested_tensor(x, layout=torch.jagged) for x in (ids, weights)
    )
    offsets = torch.tensor([0, 3])
    assert torch.equal(layer(nested), layer(torch.cat(ids), offsets))
    want = layer(torch.cat(ids), offsets, torch.cat(weights))
    assert torch.equal(layer(nested, per_sample_weights=by), want)


def test_padding_row_is_excluded_and_keeps_its_value():
    layer = EmbeddingBag(5, 2, padding_idx=-2, mode="sum")
    assert layer.padding_idx == 3 and layer.weight[3].tolist() == [0, 0]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer):
        nn.init.ones_(other.weight)
        other.set_padding(4.0)
        assert other(torch.tensor([[3, 1]])).tolist() == [[1, 1]]
        assert other.state_dict()["weight"][3].tolist() == [4, 4]
        assert list(other.state_dict()) == ["weight"] and not list(other.buffers())
    layer(torch.tensor([[3, 1]])).sum().backward()
    assert layer.weight.grad[3].tolist() == [0, 0]
    layer.resize(7)
    assert layer.logits(torch.ones(2)).tolist()[3] == 8


@pytest.mark.parametrize("mode", MODES)
def test_max_norm_scales_rows_before_pooling(mode):
    table = torch.randn(6, 3, dtype=torch.float64) * 3
    layer = EmbeddingBag(6, 3, mode=mode, max_norm=1.0, _weight=table.clone())
    ids, weights = (
        torch.tensor([[1, 2, 1], [5, 0, 5]]),
        torch.rand(2, 3, dtype=torch.float64),
    )
    short = table / table.norm(dim=1, keepdim=True).clamp(min=1)
    short.requires_grad_()
    want = embedding_bag(ids, short, mode=mode, per_sample_weights=weights)
    got = layer(ids, per_sample_weights=weights)
    torch.testing.assert_close(got, want)
    assert torch.equal(layer.weight, table)
    (got**2).sum().backward()
    (want**2).sum().backward()
    torch.testing.assert_close(layer.weight.grad, short.grad)
    # Rows in no bag, and rows that are never the maximum, get no gradient.
    trained = (short.grad != 0).any(dim=1, keepdim=True)
    assert not trained[3:5].any()
    stored = torch.where(trained, short.detach(), table)
    torch.testing.assert_close(layer.weight.detach(), stored)


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_torchs_operator_and_the_kernels_agree(mode, padding_idx, monkeypatch):
    layer, ids = (
        EmbeddingBag(9, 4, mode=mode, padding_idx=padding_idx),
        torch.randint(0, 9, (5, 6)),
    )
    results = []
    for few in (1 << 15, -1):
        monkeypatch.setattr(torch_operator, "SMALL_BAGS", few)
        monkeypatch.setattr(pooling, "is_stock", lambda *a, few=few, **k: few > 0)
        layer.zero_grad()
        y = layer(ids)
        (y**2).sum().backward()
        results.append((y.detach(), layer.weight.grad.clone()))
        assert y.grad_fn.name() == (
            "_TorchBagsBackward" if few > 0 else "_KernelBagsBackward"
        )
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_compiled_bags_are_one_graph_for_all_lengths():
    options = {"padding_idx": 3, "mode": "mean"}
    # One graph for both, because Inductor takes seconds to compile.
    bags = [EmbeddingBag(20, 6, **options, sparse=rows) for rows in (False, True)]
    forget_graphs()

    def run(*args):
        return torch.cat([bag(*args) for bag in bags])

    def gradients(y):
        for bag in bags:
            bag.zero_grad()
        (y**2).sum().backward()
        return [bag.weight.grad.to_dense() for bag in bags]

    compiled, offsets = torch.compile(run, fullgraph=True, dynamic=True), [0, 2, 2, 5]
    for size in (7, 8, 11, 13, 17):
        ids, weights = torch.randint(0, 20, (size,)), torch.rand(size)
        got, want = (f(ids, torch.tensor(offsets), weights) for f in (compiled, run))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients(got), gradients(want))
    assert bags[1].weight.grad.is_sparse and graphs() == 1


@pytest.mark.parametrize("mode", MODES)
def test_bags_of_a_table_without_columns(mode):
    layer, ids = EmbeddingBag(5, 0, mode=mode), torch.tensor([[1, 4]])
    layer(ids).sum().backward()
    assert layer(ids).shape == (1, 0) and layer.weight.grad.shape == (5, 0)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_rows_of_ids(mode):
    layer = EmbeddingBag(20, 6, padding_idx=3, mode=mode)
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (3, 4, 6, 9, 11):
        ids = torch.randint(0, 20, (2, length))
        torch.testing.assert_close(compiled(ids), layer(ids))
    assert graphs() == 1


@pytest.mark.parametrize("mode", MODES)
def test_exported_and_vmapped_bags_agree_with_eager(mode):
    layer = EmbeddingBag(20, 6, padding_idx=3, mode=mode, max_norm=2.0)
    ids, offsets = torch.randint(0, 20, (9,)), torch.tensor([0, 2, 2, 5])
    weights = torch.rand(9)
    program = torch.export.export(layer, (ids, offsets, weights))
    torch.testing.assert_close(
        program.module()(ids, offsets, weights), layer(ids, offsets, weights)
    )
    targets = {
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    }
    assert all(target.startswith("aten.") for target in targets)
    many = torch.randint(0, 20, (4, 2, 5))
    got = torch.vmap(layer)(many)
    torch.testing.assert_close(got, torch.stack([layer(ids) for ids in many]))
    got = torch.vmap(lambda i: layer(i, offsets, weights[:8]))(many.reshape(5, 8))
    want = torch.stack([layer(i, offsets, weights[:8]) for i in many.reshape(5, 8)])
    torch.testing.assert_close(got, want)


def test_torch_func_agrees_with_autograd():
    layer, ids = (
        EmbeddingBag(6, 3, mode="mean", dtype=torch.float64),
        torch.tensor([[1, 2, 1]]),
    )

    def loss(weight):
        return (torch.func.functional_call(layer, {"weight": weight}, (ids,)) ** 2).sum()

    weight = layer.weight.detach().clone()
    layer(ids).square().sum().backward()
    torch.testing.assert_close(torch.func.grad(loss)(weight), layer.weight.grad)
    hessian = torch.func.hessian(loss)(weight)
    assert hessian[1, 0, 1, 0].item() == pytest.approx(2 * (2 / 3) ** 2)


# Errors


@pytest.mark.rejects
@pytest.mark.parametrize(
    "ids, offsets, options, error, message",
    [
        ([[1, 9]], None, {}, IndexError, r"ids\[0, 1\] is 9, but num_embeddings is 5"),
        ([[1, 9]], None, {"mode": "max"}, RuntimeError, r"ids\[0, 1\] is 9, but"),
        ([1, -2], [0], {}, RuntimeError, r"ids\[1\] is -2, but num_embeddings is 5"),
        ([1, 2], None, {}, ValueError, "offsets must be given for ids of 1 axis, got None"),
        ([[1, 2]], [0], {}, ValueError, "offsets must be None for ids of 2 axes"),
        ([[[1]]], None, {}, ValueError, "ids must have 1 or 2 axes"),
        ([1, 2], [1], {}, RuntimeError, "offsets must begin with 0, got 1"),
        ([1, 2], [0, 2, 1], {}, RuntimeError, "offsets must not decrease, got 1 after 2"),
        ([1, 2], [0, 3], {}, RuntimeError, "offsets must be at most 2"),
        ([1.0, 2.0], [0], {}, TypeError, "ids must be integers, got float32"),
        ([1.0, 2.0], [0], {}, RuntimeError, "ids must be integers, got float32"),
        ([1, 2], [0.0], {}, TypeError, "offsets must be integers, got float32"),
        ([[1]], None, {"mode": "min"}, ValueError, "mode must be 'sum', .* got 'min'"),
        ([[1]], None, {"padding_idx": 5}, RuntimeError, "padding_idx must be in .* got 5"),
        ([[1]], None, {"max_norm": -1.0}, ValueError, "max_norm must be positive, got -1"),
        (
            [[1]],
            None,
            {"per_sample_weights": torch.ones(1)},
            ValueError,
            r"per_sample_weights must have the shape \(1, 1\) of ids, got \(1,\)",
        ),
        (
            [[1]],
            None,
            {"per_sample_weights": torch.tensor([[True]])},
            TypeError,
            "per_sample_weights must be integers or reals, got bool",
        ),
    ],
)
def test_errors_name_the_argument(ids, offsets, options, error, message):
    given = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(error, match=message):
        embedding_bag(torch.tensor(ids), torch.ones(5, 2), given, **options)


@pytest.mark.rejects
def test_invalid_mode_weight_and_nested_weights_raise():
    with pytest.raises(ValueError, match="mode must be 'sum', 'mean' or 'max', got 'avg'"):
        EmbeddingBag(5, 2, mode="avg")
    with pytest.raises(ValueError, match=r"weight must have 2 axes, got shape \(5,\)"):
        embedding_bag(torch.tensor([[1]]), torch.ones(5))
    nested = torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged)
    with pytest.raises(
        ValueError, match="per_sample_weights must be nested for nested ids"
    ):
        embedding_bag(nested, torch.ones(5, 2), per_sample_weights=torch.ones(1))
    # Its values are not the bags one after the other.
    with_gaps: Any = torch.nested.nested_tensor_from_jagged(
        torch.tensor([1, 4, 2]), torch.tensor([0, 2, 3]), torch.tensor([1, 1])
    )
    with pytest.raises(ValueError, match="nested ids must be contiguous and jagged"):
        embedding_bag(with_gaps, torch.ones(5, 2))
    with pytest.raises(ValueError, match="nested per_sample_weights must be contiguous"):
        embedding_bag(nested, torch.ones(5, 2), per_sample_weights=with_gaps)
    with pytest.raises(ValueError, match="offsets must be None for ids of 2 axes"):
        torch.func.grad(
            lambda w: embedding_bag(torch.tensor([[1]]), w, torch.tensor([0])).sum()
        )(torch.ones(5, 2))


def test_half_precision_mean_is_more_accurate_than_torchs():
    # The reason why half precision does not use torch's operator.
    table, ids = torch.randn(1000, 64).bfloat16(), torch.randint(0, 1000, (50, 200))
    exact = table.double()[ids].mean(1)
    ours = (embedding_bag(ids, table).double() - exact).abs().mean()
    assert ours < (F.embedding_bag(ids, table).double() - exact).abs().mean()
