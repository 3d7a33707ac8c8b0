"""Gradients of lookups: sums in float32, coalesced sparse gradients, derivatives."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from firstlayer.torch._table import lookup
from firstlayer.torch.functional import embedding
from firstlayer.torch.token import Embedding
from tests.support.gradients import central_difference
from tests.support.torch_tables import HALVES, ids_of, same_bits

# Inductor and forward-mode AD use torch.jit.script, which torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def reference_gradient(ids, dy, rows, *, skip=None, mean=False):
    """Sum in float32, in order, and round once."""
    out = np.zeros((rows, dy.shape[-1]), np.float32)
    upcast = dy.float().reshape(-1, dy.shape[-1]).numpy()
    for place, row in enumerate(ids.reshape(-1).tolist()):
        if row != skip:
            out[row] += upcast[place]
    counts = np.bincount(ids.reshape(-1).numpy(), minlength=rows)
    out = out / np.maximum(counts, 1).astype(np.float32)[:, None] if mean else out
    return torch.from_numpy(out).to(dy.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_half_precision_gradients_are_summed_in_float32(
    dtype, sparse, options, small, monkeypatch
):
    monkeypatch.setattr(lookup, "SMALL_TABLE", small)
    layer = Embedding(6, 4, sparse=sparse, dtype=dtype, **options)
    ids = torch.randint(0, 6, (30, 100))
    dy = torch.randn(30, 100, 4).to(dtype)
    layer(ids).backward(dy)
    got = layer.weight.grad.to_dense()
    want = reference_gradient(
        ids,
        dy,
        6,
        skip=options.get("padding_idx"),
        mean=options.get("scale_grad_by_freq", False),
    )
    assert same_bits(got, want)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_of_a_frequent_id_does_not_saturate(dtype, sparse):
    layer = Embedding(3, 2, sparse=sparse, dtype=dtype)
    layer(torch.ones(3000, dtype=torch.int64)).sum().backward()
    assert torch.equal(layer.weight.grad.to_dense()[1], torch.full((2,), 3000.0).to(dtype))
    stock = nn.Embedding(3, 2, dtype=dtype)
    stock(torch.ones(3000, dtype=torch.int64)).sum().backward()
    assert stock.weight.grad[1, 0] < 2100


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_gradients_without_kernels_do_not_saturate(dtype):
    weight, ids = torch.randn(3, 2).to(dtype), torch.ones(3000, dtype=torch.int64)
    want = torch.full((2,), 3000.0).to(dtype)
    got = torch.func.grad(lambda w: embedding(ids, w).sum())(weight)
    assert torch.equal(got[1], want)
    leaf = weight.t().contiguous().t().requires_grad_()
    embedding(ids, leaf).sum().backward()
    assert torch.equal(leaf.grad[1], want)
    compiled = torch.compile(embedding, fullgraph=True, backend="eager")
    leaf = weight.clone().requires_grad_()
    compiled(ids, leaf).sum().backward()
    assert torch.equal(leaf.grad[1], want)
    scaled = torch.func.grad(lambda w: embedding(ids, w, scale_grad_by_freq=True).sum())
    assert torch.equal(scaled(weight)[1], torch.ones(2).to(dtype))


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"padding_idx": 4}])
def test_gradient_equals_finite_differences(options):
    weight = np.random.default_rng(0).standard_normal((6, 3))
    ids = ids_of(1, 5, 1, 0, 1)
    layer = Embedding(6, 3, _weight=torch.from_numpy(weight.copy()), **options)
    (layer(ids) ** 3).sum().backward()
    want = central_difference(lambda: float((weight[ids.numpy()] ** 3).sum()), weight)
    np.testing.assert_allclose(layer.weight.grad.to_dense().numpy(), want, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"max_norm": 50.0}])
def test_first_and_second_derivatives_in_both_modes(options):
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def cubes(w):
        return embedding(ids_of(1, 5, 1, 0, 1), w, **options) ** 3

    if "sparse" not in options:
        assert gradcheck(cubes, weight, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(cubes, weight, check_fwd_over_rev=True)
    (once,) = torch.autograd.grad(cubes(weight).sum(), weight, create_graph=True)
    (twice,) = torch.autograd.grad(once.to_dense().sum(), weight)
    counts = torch.tensor([1.0, 3, 0, 0, 0, 1], dtype=torch.float64)
    torch.testing.assert_close(twice.to_dense(), 6 * weight.detach() * counts[:, None])


@pytest.mark.parametrize("sparse", [False, True])
def test_scale_grad_by_freq_has_the_right_second_derivative(sparse):
    ids = ids_of(1, 5, 1, 0, 1)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def gradient(dy):
        y = embedding(ids, weight, scale_grad_by_freq=True, sparse=sparse)
        return torch.autograd.grad(y, weight, dy, create_graph=True)[0].to_dense()

    assert gradcheck(gradient, dy)
    want = torch.zeros(6, 3, dtype=torch.float64).index_add(0, ids, dy)
    want = want / torch.tensor([1, 3, 1, 1, 1, 1])[:, None]
    torch.testing.assert_close(gradient(dy), want)


def test_transforms_of_torch_func_agree_with_autograd():
    layer, ids = Embedding(6, 3, padding_idx=2, dtype=torch.float64), ids_of(1, 2, 1, 5)

    def loss(weight):
        return (torch.func.functional_call(layer, {"weight": weight}, (ids,)) ** 3).sum()

    weight = layer.weight.detach().clone()
    leaf = weight.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(weight), want)
    tangent = torch.randn_like(weight)
    along = torch.func.jvp(loss, (weight,), (tangent,))[1]
    torch.testing.assert_close(along, (want * tangent).sum())
    hessian = torch.func.hessian(loss)(weight).reshape(18, 18)
    counts = torch.tensor([0.0, 2, 0, 0, 0, 1], dtype=torch.float64)[:, None]
    torch.testing.assert_close(hessian, torch.diag((6 * weight * counts).reshape(-1)))
    batch = torch.randint(0, 6, (4, 3))
    assert torch.equal(torch.vmap(layer)(batch), layer(batch))
    many = torch.stack([weight, 2 * weight])
    call = torch.vmap(lambda w: torch.func.functional_call(layer, {"weight": w}, (ids,)))
    rows = many[:, ids]
    rows[:, 1] = 0
    assert torch.equal(call(many), rows)


def test_sparse_gradients_are_coalesced_and_accumulate():
    weight = torch.randn(6, 3, requires_grad=True)
    rows = embedding(ids_of(5, 1, 5), weight, sparse=True)
    (grad,) = torch.autograd.grad(rows.sum(), weight)
    assert grad.is_coalesced() and grad.indices().tolist() == [[1, 5]]
    layer = Embedding(1000, 4, sparse=True, padding_idx=7)
    for count, ids in enumerate([ids_of(5, 900, 5, 7), ids_of(900, 3)], 1):
        layer(ids).sum().backward()
        assert layer.weight.grad.is_sparse and layer.weight.grad.is_coalesced()
        assert layer.weight.grad._nnz() == (2 if count == 1 else 3)
    assert layer.weight.grad.indices().tolist() == [[3, 5, 900]]
    assert layer.weight.grad.values()[:, 0].tolist() == [1, 2, 2]
    torch.optim.SparseAdam([layer.weight]).step()
    again = copy.deepcopy(layer)
    again.zero_grad()
    again(ids_of(9, 9)).sum().backward()
    assert again.weight.grad.is_coalesced() and again.weight.grad.indices().tolist() == [
        [9]
    ]


@pytest.mark.parametrize("dtype", HALVES)
def test_sparse_gradients_of_torch_lookups_are_summed_in_float32(dtype):
    layer, ids = Embedding(3, 2, sparse=True, dtype=dtype), torch.full((3072,), 1)
    F.embedding(ids, layer.weight, sparse=True).sum().backward()
    assert layer.weight.grad.is_coalesced()
    assert layer.weight.grad.values().tolist() == [[3072.0] * 2]


def test_hook_is_installed_when_a_frozen_table_is_trained():
    layer = Embedding.from_pretrained(torch.full((4, 2), 3.0), max_norm=1.0, sparse=True)
    layer.weight.requires_grad_(True)
    layer(ids_of(1)).sum().backward()
    assert layer.weight.grad.is_coalesced()
    norms = layer.weight.detach().norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([18.0**0.5, 1, 18.0**0.5, 18.0**0.5]))


def test_kernels_use_as_many_threads_as_torch(monkeypatch):
    from firstlayer.kernels import row_sums
    from firstlayer.kernels.runtime import threads

    seen, run = [], row_sums.run

    def run_spy(*args, **options):
        seen.append(threads._here.size)
        return run(*args, **options)

    monkeypatch.setattr(row_sums, "run", run_spy)
    layer, before = Embedding(9, 4, sparse=True), torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            layer(ids_of(1, 2)).sum().backward()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 3] and threads._here.size is None


def test_compiled_sparse_gradients_of_half_precision_do_not_saturate():
    layer = Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(3000, dtype=torch.int64)).sum().backward()
    grad = layer.weight.grad
    assert grad is not None and grad.to_dense()[1].tolist() == [3008, 3008]


def test_torch_rounds_to_bfloat16_as_ml_dtypes_does():
    x = torch.tensor([3000.0])
    assert x.bfloat16().float().numpy() == np.float32(3000).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("sparse", [False, True])
def test_lookups_by_kernels_have_the_bits_of_small_ones(sparse):
    # 600 × 256 entries are gathered by kernels, 60 × 256 by torch.
    layer = Embedding(50, 256, padding_idx=7, sparse=sparse)
    ids, dy = torch.randint(0, 50, (10, 60)), torch.randn(10, 60, 256)
    y = layer(ids)
    assert torch.equal(y, torch.stack([layer(row) for row in ids]))
    y.backward(dy)
    want = reference_gradient(ids, dy, 50, skip=7)
    assert torch.equal(layer.weight.grad.to_dense(), want)
    ids[3, 5] = -1
    with pytest.raises(IndexError, match=r"ids\[3, 5\] is -1, but num_embeddings is 50"):
        layer(ids)
