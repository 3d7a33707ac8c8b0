# A gradient is None before there is one; here there always is.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
import copy
import io
import pickle
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import firstlayer.numpy.token
from firstlayer.embeddings.token import clip_norms
from firstlayer.torch._table import grad_hooks, lookup
from firstlayer.torch.frozen import PartlyFrozenEmbedding
from firstlayer.torch.functional import embedding
from firstlayer.torch.token import Embedding
from tests.support.gradients import central_difference
from tests.support.torch_lives import converted, forget_graphs, graphs

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
# Inductor and forward-mode derivatives make torch script some of its own functions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ids_of(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def bits(x):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(kind)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


# Lookup


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_lookup_returns_the_rows_to_the_bit(dtype, shape):
    layer = Embedding(9, 5, dtype=dtype)
    ids = torch.randint(0, 9, shape)
    assert same_bits(layer(ids), layer.weight[ids])
    with torch.no_grad():
        assert same_bits(layer(ids), layer.weight[ids])


@given(
    dtype=st.sampled_from(INTEGERS),
    table=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
def test_ids_of_any_integer_dtype_and_shape(dtype, table, shape, seed):
    layer = Embedding(100, 3, padding_idx=4, dtype=table)
    numbers = np.random.default_rng(seed).integers(0, 100, shape)
    ids = torch.from_numpy(numbers.astype(dtype))
    assert same_bits(layer(ids), layer.weight[torch.from_numpy(numbers)])
    assert same_bits(embedding(ids, layer.weight), layer(ids))


def test_ids_may_be_strided():
    layer, ids = Embedding(10, 3, dtype=torch.bfloat16), torch.arange(10).reshape(2, 5)
    for some in (ids.t(), ids[:, ::2], ids[:1].expand(3, 5)):
        layer.zero_grad()
        layer(some).sum().backward()
        want = torch.zeros(10).index_add_(0, some.reshape(-1), torch.ones(some.numel()))
        assert torch.equal(
            layer.weight.grad.clone(), want.bfloat16()[:, None].expand(10, 3)
        )


def test_numpy_and_torch_faces_agree():
    weight = torch.randn(50, 7)
    ids = torch.randint(0, 50, (4, 30))
    dy = torch.randn(4, 30, 7)
    cases: list[dict[str, Any]] = [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}]
    cases.append({"max_norm": 2.0})
    for options in cases:
        ours = Embedding(50, 7, _weight=weight.clone(), sparse=True, **options)
        theirs = firstlayer.numpy.token.Embedding(
            50, 7, weight=weight.numpy().copy(), **options
        )
        want, pull = theirs.vjp(ids.numpy())
        got = ours(ids)
        got.backward(dy)
        rows = pull(dy.numpy())["weight"]
        np.testing.assert_allclose(got.detach().numpy(), want, atol=1e-6)
        np.testing.assert_array_equal(ours.weight.grad.indices()[0].numpy(), rows.ids)
        np.testing.assert_array_equal(ours.weight.grad.values().numpy(), rows.values)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([[0, 1], [2, 9]]), r"ids\[1, 1\] is 9, but num_embeddings is 5"),
        (torch.tensor([3, -1]), r"ids\[1\] is -1, but num_embeddings is 5"),
        (torch.tensor(7), "ids is 7, but num_embeddings is 5"),
        (torch.tensor([200], dtype=torch.uint8), r"ids\[0\] is 200, but"),
        (torch.tensor([-3], dtype=torch.int8), r"ids\[0\] is -3, but"),
        (torch.tensor([2**63 + 5], dtype=torch.uint64), r"ids\[0\] is 9223372036854775813"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dtype": torch.float16}])
def test_an_id_out_of_range_is_named(ids, message, options):
    layer = Embedding(5, 2, padding_idx=0, **options)
    for wanted in (IndexError, RuntimeError):
        with pytest.raises(wanted, match=message):
            layer(ids)


@pytest.mark.rejects
@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dtype": torch.float16}])
def test_a_table_without_rows_has_no_row_for_any_id(options):
    layer = Embedding(0, 2, **options)
    assert layer(torch.zeros((3, 0), dtype=torch.int64)).shape == (3, 0, 2)
    with pytest.raises(IndexError, match=r"ids\[0, 0\] is 3, but num_embeddings is 0"):
        layer(torch.tensor([[3, 0]]))
    with pytest.raises(ValueError, match="padding_idx must be in"):
        embedding(torch.empty(0, dtype=torch.int64), layer.weight, 0, sparse=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_grad_by_freq": True},
        {"sparse": True},
        {"dtype": torch.bfloat16},
        {"max_norm": 1.0, "padding_idx": 3},
    ],
)
def test_ragged_ids_give_ragged_rows_and_the_gradients_of_their_ids(options):
    layer = Embedding(9, 4, **options)
    ids = torch.tensor([1, 2, 3, 1, 1])
    ragged: Any = torch.nested.nested_tensor([ids[:2], ids[2:]], layout=torch.jagged)
    got, want = layer(ragged), layer(ids)
    assert torch.equal(got.offsets(), ragged.offsets())
    assert torch.equal(got.values(), want)
    dy = torch.arange(20.0, dtype=want.dtype).reshape(5, 4)
    found = [
        torch.autograd.grad((rows * dy).sum(), layer.weight)[0].to_dense()
        for rows in (got.values(), want)
    ]
    assert torch.equal(*found) and found[0].any()


@pytest.mark.rejects
def test_ragged_ids_of_another_order_are_left_to_torch():
    parts = [torch.arange(6).reshape(3, 2), torch.arange(8).reshape(4, 2)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="expected indices to be a contiguous jagged"):
        Embedding(9, 4, sparse=True)(ragged)


@pytest.mark.rejects
def test_where_ids_cannot_be_read_torch_says_it_itself():
    with pytest.raises(IndexError, match="index out of range in self"):
        torch.vmap(Embedding(5, 2))(torch.tensor([[1], [5]]))


@pytest.mark.rejects
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float32, torch.bfloat16, torch.complex64]
)
def test_ids_that_are_no_integers_are_refused(dtype):
    name = str(dtype).removeprefix("torch.")
    for wanted in (TypeError, RuntimeError):
        with pytest.raises(wanted, match=f"ids must be integers, got {name}"):
            Embedding(5, 2)(torch.ones(3).to(dtype))
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        Embedding(5, 2)([1, 2])


@pytest.mark.rejects
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"padding_idx": 5},
            AssertionError,
            r"padding_idx must be in \[-5, 5\) for .* got 5",
        ),
        ({"padding_idx": -6}, ValueError, "got -6"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be positive, got 0.0"),
        ({"max_norm": 1.0, "norm_type": -2.0}, ValueError, "norm_type .* got -2.0"),
        ({"_weight": torch.ones(5, 3)}, AssertionError, r"shape \(5, 2\), got \(5, 3\)"),
        ({"_weight": torch.ones(5, 3)}, ValueError, r"shape \(5, 2\), got \(5, 3\)"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Embedding(5, 2, **arguments)


@pytest.mark.rejects
def test_sizes_and_functional_arguments_are_checked():
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="num_embeddings must be at least 0, got -1"):
            Embedding(-1, 2)
    with pytest.raises(TypeError, match="embedding_dim must be an integer, got float"):
        Embedding(5, 2.0)  # pyright: ignore
    table = torch.ones(5, 2)
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="padding_idx must be in .* got 5"):
            embedding(ids_of(1), table, padding_idx=5)
    with pytest.raises(ValueError, match="max_norm must be positive, got -1.0"):
        embedding(ids_of(1), table, max_norm=-1.0)


# Gradients


def reference_gradient(ids, dy, rows, *, skip=None, mean=False):
    """Sum in float32, in order, and round once."""
    out = np.zeros((rows, dy.shape[-1]), np.float32)
    wide = dy.float().reshape(-1, dy.shape[-1]).numpy()
    for place, row in enumerate(ids.reshape(-1).tolist()):
        if row != skip:
            out[row] += wide[place]
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
    monkeypatch.setattr(lookup, "SMALL", small)
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
def test_a_frequent_id_does_not_saturate(dtype, sparse):
    layer = Embedding(3, 2, sparse=sparse, dtype=dtype)
    layer(torch.ones(3000, dtype=torch.int64)).sum().backward()
    assert torch.equal(layer.weight.grad.to_dense()[1], torch.full((2,), 3000.0).to(dtype))
    stock = nn.Embedding(3, 2, dtype=dtype)
    stock(torch.ones(3000, dtype=torch.int64)).sum().backward()
    assert stock.weight.grad[1, 0] < 2100


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_gradients_are_right_off_the_kernels_too(dtype):
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
def test_gradient_is_that_of_finite_differences(options):
    weight = np.random.default_rng(0).standard_normal((6, 3))
    ids = ids_of(1, 5, 1, 0, 1)
    layer = Embedding(6, 3, _weight=torch.from_numpy(weight.copy()), **options)
    (layer(ids) ** 3).sum().backward()
    want = central_difference(lambda: float((weight[ids.numpy()] ** 3).sum()), weight)
    np.testing.assert_allclose(layer.weight.grad.to_dense().numpy(), want, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"max_norm": 50.0}])
def test_derivatives_of_every_kind(options):
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
def test_scaled_gradient_has_the_right_derivative(sparse):
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


def test_row_gradients_are_coalesced_and_accumulate():
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
def test_row_gradients_that_torch_made_are_summed_in_float32_too(dtype):
    layer, ids = Embedding(3, 2, sparse=True, dtype=dtype), torch.full((3072,), 1)
    F.embedding(ids, layer.weight, sparse=True).sum().backward()
    assert layer.weight.grad.is_coalesced()
    assert layer.weight.grad.values().tolist() == [[3072.0] * 2]


def test_a_table_that_was_frozen_gets_its_hook_when_it_is_trained():
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

    def watched(*args, **options):
        seen.append(threads._here.size)
        return run(*args, **options)

    monkeypatch.setattr(row_sums, "run", watched)
    layer, before = Embedding(9, 4, sparse=True), torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            layer(ids_of(1, 2)).sum().backward()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 3] and threads._here.size is None


# Padding


def by_optimizer(layer):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    layer(ids_of(0, 2)).sum().backward()
    optimizer.step()


def by_new_data(layer):
    layer.weight.data = layer.weight.data + 1


def by_hand(layer):
    with torch.no_grad():
        layer.weight[layer.padding_idx] = 7


def by_cast_data(layer):
    layer.weight.data = layer.weight.data.double().add(1)


WRITES = [
    by_optimizer,
    by_new_data,
    by_hand,
    by_cast_data,
    lambda layer: nn.init.normal_(layer.weight),
    lambda layer: layer.weight.data.normal_(),
    lambda layer: layer.weight.data.fill_(float("nan")),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("padding_idx", [2, -1])
@pytest.mark.parametrize("value", [0.0, 5.0])
def test_whatever_writes_to_padding_is_undone(write, padding_idx, value):
    layer = Embedding(4, 3, padding_idx=padding_idx)
    layer.set_padding(value)
    at = layer.padding_idx
    want = torch.full((3,), value)
    write(layer)
    assert torch.equal(layer.state_dict()["weight"][at], want.to(layer.weight.dtype))
    write(layer)
    stored = pickle.loads(pickle.dumps(layer)).weight[at]
    assert torch.equal(stored, want.to(layer.weight.dtype))
    write(layer)
    others = layer.weight.detach()[[0, 1]].clone()
    assert (
        torch.equal(layer(ids_of(at, 0, 1)).float(), torch.stack([want, *others.float()]))
        or others.isnan().all()
    )
    assert torch.equal(layer.weight[at], want.to(layer.weight.dtype))


def test_a_lookup_with_padding_is_a_plain_lookup():
    layer = Embedding(4, 3, padding_idx=2)
    assert layer(ids_of(2, 1)).grad_fn.name() == "EmbeddingBackward0"
    layer.weight.data.normal_()
    assert layer(ids_of(2, 1)).grad_fn.name() == "EmbeddingBackward0"


def test_padding_is_set_by_construction_loading_and_set_padding():
    table = torch.arange(12.0).reshape(4, 3)
    made = Embedding(4, 3, padding_idx=1)
    assert made.weight[1].tolist() == [0, 0, 0] and made.weight[0].abs().sum() > 0
    kept = Embedding.from_pretrained(table, padding_idx=1, freeze=False)
    loaded = Embedding(4, 3, padding_idx=1)
    loaded.load_state_dict({"weight": table})
    assigned = Embedding(4, 3, padding_idx=1)
    assigned.load_state_dict({"weight": table.clone()}, assign=True)
    put = Embedding(4, 3, padding_idx=1)
    put.weight = nn.Parameter(table.clone())
    assert put(ids_of(1)).tolist() == [[3, 4, 5]]
    direct = Embedding(4, 3, padding_idx=1)
    direct._parameters["weight"] = nn.Parameter(table.clone())
    assert direct(ids_of(1)).tolist() == [[3, 4, 5]]
    set_by_hand = Embedding(4, 3, padding_idx=1)
    set_by_hand.set_padding(torch.tensor([3.0, 4, 5]))
    for layer in (kept, loaded, assigned, put, direct, set_by_hand):
        nn.init.zeros_(layer.weight)
        assert layer(ids_of(1)).tolist() == [[3, 4, 5]]
        layer.reset_parameters()
        assert layer(ids_of(1)).tolist() == [[0, 0, 0]]


def test_a_state_that_does_not_fit_leaves_padding_as_it_was():
    layer = Embedding(4, 3, padding_idx=1)
    layer.set_padding(5.0)
    layer.weight.data.zero_()
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.ones(3, 3)})
    layer.load_state_dict({}, strict=False)
    assert layer(ids_of(1)).tolist() == [[5, 5, 5]]


def test_padding_gets_no_gradient_and_is_no_leak_of_memory():
    layer = Embedding(4, 3, padding_idx=1)
    layer(ids_of(1, 0, 1)).sum().backward()
    assert layer.weight.grad[:, 0].tolist() == [1, 0, 0, 0]
    old = layer.weight.data_ptr()
    layer.half()
    assert layer._place.table == layer.weight.data_ptr() != old


def test_repair_between_two_uses_of_one_graph_is_no_inplace_error():
    layer = Embedding(4, 3, padding_idx=1)
    x = torch.randn(2, 3, requires_grad=True)
    head = F.linear(x, layer.weight)
    layer.weight.data[1] = 3.0
    (layer(ids_of(1, 0)).sum() + head.sum()).backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_padding_alone_accumulates_with_others(dtype):
    layer = Embedding(20, 4, padding_idx=0, sparse=True, dtype=dtype)
    for ids in ([0], [], [1, 0, 1], [0]):
        layer(torch.tensor(ids, dtype=torch.int64)).sum().backward()
    want = torch.zeros(20, 4, dtype=dtype)
    want[1] = 2
    grad = layer.weight.grad
    assert grad is not None and torch.equal(grad.to_dense(), want)


def test_compiled_row_gradients_of_half_precision_do_not_saturate():
    layer = Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(3000, dtype=torch.int64)).sum().backward()
    grad = layer.weight.grad
    assert grad is not None and grad.to_dense()[1].tolist() == [3008, 3008]


@pytest.mark.parametrize("width", [0, 1])
def test_padding_of_narrow_tables(width):
    layer = Embedding(4, width, padding_idx=1)
    layer.weight.data.fill_(7.0)
    want = torch.full((3, width), 7.0)
    want[1] = 0
    assert torch.equal(layer(torch.tensor([0, 1, 2])), want)
    layer.set_padding(5.0)
    assert torch.equal(layer(torch.tensor([1])), torch.full((1, width), 5.0))


def test_padding_idx_may_be_changed_later():
    layer = Embedding(4, 3)
    layer.padding_idx = 2
    want = layer.weight[2].tolist()
    assert layer(ids_of(2)).tolist() == [want]
    layer.weight.data.zero_()
    assert layer(ids_of(2)).tolist() == [want]
    layer.padding_idx = 0
    assert layer(ids_of(0, 2)).tolist() == [[0, 0, 0], want]
    layer.padding_idx = 1
    layer.double()
    assert layer.padding_row is None and layer(ids_of(1)).tolist() == [[0, 0, 0]]
    layer.padding_idx = -1
    layer(ids_of(0))
    layer.weight.data.fill_(2.0)
    assert layer(ids_of(3, 2)).tolist() == [[0, 0, 0], [2, 2, 2]]
    layer.padding_idx = None
    layer.weight.data.fill_(1.0)
    assert layer(ids_of(0)).tolist() == [[1, 1, 1]]


def test_two_layers_keep_their_own_padding():
    a, b = Embedding(4, 3, padding_idx=1), Embedding(4, 3, padding_idx=2)
    a.set_padding(5.0)
    for layer in (a, b):
        nn.init.ones_(layer.weight)
    assert a(ids_of(1, 2)).tolist() == [[5, 5, 5], [1, 1, 1]]
    assert b(ids_of(1, 2)).tolist() == [[1, 1, 1], [0, 0, 0]]


def test_mask_tells_tokens_from_padding():
    layer = Embedding(300, 2, padding_idx=-1)
    ids = torch.tensor([1, 299], dtype=torch.uint16)
    assert layer.mask(ids).tolist() == [True, False]
    assert Embedding(300, 2).mask(ids).tolist() == [True, True]


TABLES = [Embedding, partial(PartlyFrozenEmbedding, frozen=[1])]


@pytest.mark.rejects
@pytest.mark.parametrize("build", TABLES)
def test_set_padding_checks_what_it_gets(build):
    with pytest.raises(ValueError, match="set_padding needs a layer with padding_idx"):
        build(4, 3).set_padding(0.0)
    layer = build(4, 3, padding_idx=0)
    with pytest.raises(ValueError, match=r"a number or have shape \(3,\), got \(2,\)"):
        layer.set_padding(torch.ones(2))
    assert layer(ids_of(0)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("build", TABLES)
def test_set_padding_takes_numbers_and_no_graph(build):
    layer, value = build(4, 3, padding_idx=0), torch.ones(3, requires_grad=True)
    layer.set_padding(value * 2)
    for _ in range(2):
        layer(ids_of(0, 2)).sum().backward()
    assert layer(ids_of(0)).tolist() == [[2, 2, 2]] and value.grad is None


# The life of a model


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


LIVES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
    "to bfloat16": lambda layer: layer.to(torch.bfloat16),
    "half and back": lambda layer: layer.half().double(),
    "meta and back": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "share_memory": lambda layer: layer.share_memory(),
    "swapped": lambda layer: converted(layer, swap=True),
    "overwritten": lambda layer: converted(layer, swap=False),
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_padding_and_norm_survive_the_life_of_a_model(life):
    layer = Embedding(4, 3, padding_idx=1, max_norm=1.0, sparse=True)
    layer.set_padding(0.25)
    layer = life(layer)
    assert list(layer.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert not list(layer.buffers())
    nn.init.constant_(layer.weight, 2.0)
    layer(ids_of(1, 2)).sum().backward()
    assert layer.weight.grad.is_coalesced()
    want = torch.tensor([[2.0], [0.25], [3**-0.5], [2.0]]).expand(4, 3)
    torch.testing.assert_close(layer.weight.detach().float(), want, atol=3e-3, rtol=0)
    assert layer(ids_of(1)).tolist() == [[0.25] * 3]


def test_born_on_meta():
    with torch.device("meta"):
        layer = Embedding(4, 3, padding_idx=1)
    assert layer(torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2, 3)
    assert layer.padding_row.tolist() == [0, 0, 0]
    empty = copy.deepcopy(layer).to_empty(device="cpu")
    nn.init.normal_(empty.weight)
    assert empty(ids_of(1)).tolist() == [[0, 0, 0]]
    empty.reset_parameters()
    assert empty(ids_of(1)).tolist() == [[0, 0, 0]] and empty(ids_of(0)).abs().sum() > 0
    layer.set_padding(2.0)
    layer.to_empty(device="cpu").weight.data.zero_()
    assert layer(ids_of(1)).tolist() == [[2, 2, 2]]
    given = Embedding.from_pretrained(torch.ones(4, 3, device="meta"), padding_idx=1)
    given.load_state_dict({"weight": torch.full((4, 3), 6.0)}, assign=True)
    assert given(ids_of(1)).tolist() == [[6, 6, 6]]


def test_eight_threads_see_the_same_rows():
    from concurrent.futures import ThreadPoolExecutor

    layer = Embedding(100, 8, padding_idx=3, dtype=torch.bfloat16)
    ids = torch.randint(0, 100, (500,))
    want = layer(ids)

    def work(_):
        layer.weight.data[3] = 1.0
        return layer(ids[ids != 3])

    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(work, range(40)):
            assert torch.equal(got, want[ids != 3])


# max_norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_max_norm_shortens_the_output_and_leaves_the_table_alone(norm_type, dtype):
    layer = Embedding(8, 5, max_norm=1.5, norm_type=norm_type, dtype=dtype)
    layer.weight.data[0] *= 0.01
    before, ids = layer.weight.detach().clone(), torch.tensor([[0, 1], [7, 1]])
    wide = before[ids].double()
    norms = torch.linalg.vector_norm(wide, norm_type, dim=-1, keepdim=True)
    want = (wide * torch.clamp(1.5 / norms, max=1)).to(dtype)
    for got in (
        layer(ids),
        embedding(ids, layer.weight, max_norm=1.5, norm_type=norm_type),
    ):
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert same_bits(got[0, 0], before[0])
    assert same_bits(layer.weight, before)
    with torch.no_grad():
        assert same_bits(layer(ids), layer(ids).detach())


@pytest.mark.parametrize("sparse, decay", [(False, 0.0), (False, 0.5), (True, 0.0)])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_training_with_max_norm_goes_the_way_of_torch(sparse, decay, padding_idx):
    options = {"max_norm": 1.0, "sparse": sparse, "padding_idx": padding_idx}
    ours = Embedding(10, 4, **options)
    theirs = nn.Embedding(10, 4, **options)
    theirs.load_state_dict(ours.state_dict())
    rule = {"lr": 0.3, "weight_decay": decay}
    optimizers = [torch.optim.SGD(m.parameters(), **rule) for m in (ours, theirs)]
    target = torch.randn(6, 4)
    for step in range(8):
        # Rows that are long and not looked up decay as they are.
        ids = torch.randint(0, 10 if step % 2 else 4, (6,))
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            ((layer(ids) - target) ** 2).sum().backward()
            optimizer.step()
    everything = torch.arange(10)
    torch.testing.assert_close(ours(everything), theirs(everything), atol=2e-6, rtol=0)


def test_stored_rows_are_shortened_when_their_gradient_has_arrived():
    dense, rows = (Embedding(6, 3, max_norm=1.0, sparse=sparse) for sparse in (False, True))
    want = torch.full((6,), 27.0**0.5).index_fill(0, ids_of(1), 1.0)
    for layer in (dense, rows):
        nn.init.constant_(layer.weight, 3.0)
        layer(ids_of(1, 1)).sum().backward()
        torch.testing.assert_close(layer.weight.detach().norm(dim=1), want)


def test_copies_on_several_machines_shorten_the_same_rows(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layer = Embedding(6, 3, max_norm=1.0, sparse=True)
    nn.init.constant_(layer.weight, 3.0)
    layer(ids_of(1)).sum().backward()
    assert torch.allclose(layer.weight.norm(dim=1), torch.ones(6))
    assert grad_hooks.rows_with_gradient(layer.weight) is None


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_max_norm_with_a_tied_head_has_the_gradients_of_both_uses(head_first, padding_idx):
    layer = Embedding(5, 3, max_norm=1.0, padding_idx=padding_idx, dtype=torch.float64)
    stored = layer.weight.detach().clone().numpy()
    used = clip_norms(stored, max_norm=1.0)
    ids, h = np.array([1, 4, 4]), np.random.default_rng(1).standard_normal((2, 3))

    def loss():
        return float((used[ids] ** 3).sum() + ((h @ stored.T) ** 2).sum())

    head = layer.logits if padding_idx is not None else lambda x: F.linear(x, layer.weight)
    if head_first:
        total = (head(torch.from_numpy(h)) ** 2).sum()
        total = total + (layer(torch.from_numpy(ids)) ** 3).sum()
    else:
        total = (layer(torch.from_numpy(ids)) ** 3).sum()
        total = total + (head(torch.from_numpy(h)) ** 2).sum()
    total.backward()
    want = central_difference(loss, used) + central_difference(loss, stored)
    if padding_idx is not None:
        want[padding_idx] = 0
    np.testing.assert_allclose(layer.weight.grad.numpy(), want, atol=1e-6)
    assert layer.weight.detach().norm(dim=1).max() <= 1 + 1e-12


def test_project_shortens_what_it_is_told_to():
    layer = Embedding(5, 3, max_norm=1.0, padding_idx=3, norm_type=1.0)
    nn.init.constant_(layer.weight, 1.0)
    layer.set_padding(9.0)
    layer.project(torch.tensor([4, 4], dtype=torch.uint8))
    third = pytest.approx(1 / 3)
    assert layer.weight[:, 0].tolist() == [1, 1, 1, 9, third]
    layer.project()
    assert layer.weight[:, 0].tolist() == [third, third, third, 9, third]
    plain = Embedding(5, 3)
    before = plain.weight.detach().clone()
    plain.project()
    assert torch.equal(plain.weight, before)


@pytest.mark.rejects
@pytest.mark.parametrize("row", [-1, 5])
def test_project_refuses_ids_that_are_no_rows(row):
    layer = Embedding(5, 3, max_norm=1.0)
    with pytest.raises(IndexError, match=rf"ids\[1\] is {row}, but num_embeddings is 5"):
        layer.project(torch.tensor([0, row]))


# Compiled, exported


def test_compiled_lookup_is_one_graph_for_all_lengths():
    layer = Embedding(20, 6, padding_idx=3, max_norm=2.0)
    layer.set_padding(0.5)
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (3, 4, 6, 9, 11):
        layer.weight.data.normal_()
        ids = torch.randint(0, 20, (2, length))
        ids[0, 0] = 3
        got = compiled(ids)
        assert torch.equal(got[0, 0], torch.full((6,), 0.5))
        layer.zero_grad()
        (got**2).sum().backward()
        gradient = layer.weight.grad.clone()
        layer.weight.data.mul_(1.0)
        torch.testing.assert_close(got, layer(ids))
        layer.zero_grad()
        (layer(ids) ** 2).sum().backward()
        torch.testing.assert_close(gradient, layer.weight.grad, atol=1e-5, rtol=1e-5)
        assert layer.weight.detach()[ids].norm(dim=-1).max() <= 2.00001
    assert graphs() == 1


def test_compiled_half_precision_and_row_gradients():
    half = Embedding(4, 3, dtype=torch.bfloat16)
    torch.compile(half, fullgraph=True)(
        torch.ones(3000, dtype=torch.int64)
    ).sum().backward()
    assert half.weight.grad[1].tolist() == [3008.0] * 3
    rows = Embedding(4, 3, sparse=True)
    compiled = torch.compile(rows, fullgraph=True, backend="aot_eager")
    compiled(ids_of(1, 2, 1)).sum().backward()
    assert rows.weight.grad.is_coalesced()
    assert rows.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 1, 0]


def test_compiled_lookup_takes_the_padding_of_a_new_parameter():
    layer = Embedding(4, 3, padding_idx=1, max_norm=9.0)
    layer.weight = nn.Parameter(torch.full((4, 3), 6.0))
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    short = torch.full((2, 3), 27.0**0.5)
    torch.testing.assert_close(compiled(ids_of(1, 2)), short)
    compiled(ids_of(2)).sum().backward()
    torch.testing.assert_close(copied.weight.detach()[2], short[0])


def test_a_compiled_id_out_of_range_is_an_error():
    compiled = torch.compile(Embedding(4, 3), fullgraph=True)
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        compiled(ids_of(1, 4))


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"max_norm": 1.0}, {"dtype": torch.bfloat16}]
)
def test_exported_lookup_gives_the_same_and_knows_plain_operators_only(options):
    layer = Embedding(10, 4, **options)
    if "padding_idx" in options:
        layer.set_padding(3.0)
    layer.weight.data.mul_(3.0)
    length = torch.export.Dim("length")
    ids = torch.tensor([1, 2, 3])
    program = torch.export.export(layer, (ids,), dynamic_shapes=({0: length},))
    more = torch.tensor([5, 2, 2, 9, 1])
    assert same_bits(program.module()(more), layer(more))
    targets = {
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    }
    assert all(target.startswith("aten.") for target in targets)
    assert "aten.embedding.default" in targets and "aten.to.device" not in targets


def test_compiled_logits_and_lookup_of_a_dirty_table():
    layer = Embedding(6, 3, padding_idx=1)
    layer.set_padding(2.0)
    layer.weight.data.normal_()
    x = torch.randn(4, 3)
    compiled = torch.compile(layer.logits, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    torch.testing.assert_close(got[:, 1], 2 * x.sum(-1))
    got.sum().backward()
    assert layer.weight.grad[1].tolist() == [0, 0, 0]
    torch.testing.assert_close(got, layer.logits(x))


# The tied head


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_logits_are_products_with_every_row(padding_idx):
    layer = Embedding(5, 3, padding_idx=padding_idx, dtype=torch.float64)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().clone().numpy()
    xs = x.detach().numpy().copy()
    got = layer.logits(x)
    np.testing.assert_allclose(got.detach().numpy(), xs @ weight.T, atol=1e-12)
    (got**2).sum().backward()
    want = central_difference(lambda: float(((xs @ weight.T) ** 2).sum()), weight)
    if padding_idx is not None:
        want[padding_idx] = 0
    np.testing.assert_allclose(layer.weight.grad.numpy(), want, atol=1e-6)
    want = central_difference(lambda: float(((xs @ weight.T) ** 2).sum()), xs)
    np.testing.assert_allclose(x.grad.numpy(), want, atol=1e-6)


def test_logits_repair_padding_and_mix_dtypes():
    layer = Embedding(5, 3, padding_idx=1, dtype=torch.bfloat16)
    layer.weight.data.fill_(1.0)
    got = layer.logits(torch.ones(3))
    assert got.dtype == torch.float32 and got.tolist() == [3, 0, 3, 3, 3]
    got = Embedding(5, 3).logits(torch.ones(3, dtype=torch.float16))
    assert got.dtype == torch.float16


@pytest.mark.rejects
def test_logits_refuse_another_width():
    with pytest.raises(
        ValueError, match=r"x must end in embedding_dim 3, got shape \(2, 4\)"
    ):
        Embedding(5, 3).logits(torch.ones(2, 4))


def test_autocast_leaves_lookups_alone_and_multiplies_in_half_precision():
    layer = Embedding(5, 3, padding_idx=1)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(ids_of(1, 2)).dtype == torch.float32
        got = layer.logits(x)
    want = F.linear(x.bfloat16(), layer.weight.bfloat16()).float()
    assert got.dtype == torch.float32 and torch.equal(got, want)


# resize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resize_keeps_rows_padding_and_the_parameter(dtype):
    layer = Embedding(4, 3, padding_idx=1, dtype=dtype)
    layer.set_padding(7.0)
    weight, before = layer.weight, layer.weight.detach().clone()
    layer(ids_of(0)).sum().backward()
    what = layer.resize(6)
    assert (what.kept, what.added, what.dropped) == (range(4), range(4, 6), range(6, 4))
    assert (
        layer.weight is weight and layer.num_embeddings == 6 and layer.weight.grad is None
    )
    assert torch.equal(weight[:4], before)
    mean = before[[0, 2, 3]].double().mean(0).to(dtype)
    assert torch.equal(weight[4:].detach(), mean.expand(2, 3))
    weight.data.zero_()
    assert layer(ids_of(1, 5)).tolist() == [[7] * 3, [0] * 3]
    layer(ids_of(5, 1)).sum().backward()
    assert weight.grad.shape == (6, 3)
    layer.resize(2)
    assert layer(ids_of(1)).tolist() == [[7] * 3]


def test_resize_follows_seeds():
    def grown(**options):
        layer = Embedding(4, 3, _weight=torch.randn(4, 3))
        layer.resize(6, init="gaussian", **options)
        return layer.weight.detach()

    torch.manual_seed(3)
    a = grown()
    torch.manual_seed(3)
    assert torch.equal(a, grown())
    assert not torch.equal(a[4:], grown(rng=5)[4:])
    layer = Embedding(2, 3)
    layer.resize(4, init=torch.full((2, 3), 9.0))
    assert layer.weight[2:].tolist() == [[9] * 3] * 2


@pytest.mark.rejects
def test_resize_refuses_to_drop_padding():
    layer = Embedding(4, 3, padding_idx=3)
    with pytest.raises(ValueError, match="must leave the padding row 3 in place, got 2"):
        layer.resize(2)
    assert layer.num_embeddings == 4


# Partly frozen


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("frozen", [range(3), [5, 1], torch.tensor([0, 7]), [], range(8)])
@pytest.mark.parametrize("padding_idx", [None, -2])
def test_partly_frozen_looks_up_like_a_whole_table(sparse, frozen, padding_idx):
    table = torch.randn(8, 3)
    layer = PartlyFrozenEmbedding.from_pretrained(
        table, frozen=frozen, padding_idx=padding_idx, sparse=sparse
    )
    ids = torch.tensor([[0, 7, 6], [5, 5, 1]], dtype=torch.int16)
    assert torch.equal(layer(ids), table[ids.long()])
    assert torch.equal(layer.weight, table)
    assert list(layer.state_dict()) == ["weight"]
    assert torch.equal(layer.state_dict()["weight"], table)
    assert layer.mask(ids).all() == (padding_idx is None)
    kept = {int(i) for i in frozen} | ({6} if padding_idx is not None else set())
    if len(kept) == 8:
        return
    (layer(ids) ** 2).sum().backward()
    want = torch.zeros(8, 3).index_add(
        0, ids.long().reshape(-1), 2 * table[ids.long()].reshape(-1, 3)
    )
    trained = [i for i in range(8) if i not in kept]
    grad = layer.trained_rows.grad
    torch.testing.assert_close(grad.to_dense(), want[trained])
    if sparse:
        used = sorted({0, 7, 6, 5, 1} - kept)
        assert grad.is_coalesced() and [trained[i] for i in grad.indices()[0]] == used


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_no_optimizer_moves_what_is_frozen(make):
    layer = PartlyFrozenEmbedding(6, 3, frozen=[0, 4], padding_idx=2)
    before = layer.weight.detach().clone()
    assert before[2].tolist() == [0, 0, 0]
    optimizer = make(layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ((layer(torch.arange(6)) - 1) ** 2).sum().backward()
        (layer.logits(torch.ones(2, 3)) ** 2).sum().backward()
        optimizer.step()
    moved = (layer.weight != before).all(dim=1)
    assert moved.tolist() == [False, True, False, True, False, True]


def test_partly_frozen_gradient_and_frequencies():
    table = np.random.default_rng(0).standard_normal((6, 3))
    layer = PartlyFrozenEmbedding.from_pretrained(
        torch.from_numpy(table.copy()), frozen=[1, 3]
    )
    ids = ids_of(5, 1, 5, 0)
    (layer(ids) ** 3).sum().backward()
    want = central_difference(lambda: float((table[ids.numpy()] ** 3).sum()), table)
    np.testing.assert_allclose(
        layer.trained_rows.grad.numpy(), want[[0, 2, 4, 5]], atol=1e-7
    )
    scaled = PartlyFrozenEmbedding(6, 3, frozen=[1, 3], scale_grad_by_freq=True)
    scaled(ids_of(5, 1, 1, 5, 0)).sum().backward()
    assert scaled.trained_rows.grad[:, 0].tolist() == [1, 0, 0, 1]
    half = scaled.bfloat16()
    half.zero_grad()
    half(torch.full((3000,), 5)).sum().backward()
    assert half.trained_rows.grad[:, 0].tolist() == [0, 0, 0, 1]


def test_partly_frozen_lives():
    layer = PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4)
    ids = torch.tensor([4, 1, 0, 5])
    want = layer(ids)
    whole = layer.state_dict()
    fresh = PartlyFrozenEmbedding(6, 3, frozen=[0, 3])
    fresh.load_state_dict(whole)
    assert torch.equal(fresh(ids), want)
    with torch.device("meta"):
        born_meta = PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4)
    assigned = copy.deepcopy(born_meta)
    assigned.load_state_dict(whole, assign=True)
    assert torch.equal(assigned(ids), want)
    emptied = copy.deepcopy(born_meta).to_empty(device="cpu")
    emptied.reset_parameters()
    assert emptied(ids_of(4)).tolist() == [[0, 0, 0]] and emptied(ids_of(1)).abs().sum() > 0
    emptied.load_state_dict(whole)
    plain = Embedding(6, 3)
    plain.load_state_dict(whole)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        emptied,
        plain,
        born_meta.to_empty(device="cpu"),
    ):
        other.load_state_dict(whole)
        assert torch.equal(other(ids), want)
    halved = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(halved(ids), want.bfloat16())
    layer.set_padding(3.0)
    assert layer(ids_of(4, 1)).tolist() == [[3] * 3, want[1].tolist()]
    what = layer.resize(8)
    assert what.added == range(6, 8) and layer.trained_rows.shape == (5, 3)
    assert torch.equal(layer(ids)[1:], want[1:]) and layer(ids_of(7)).shape == (1, 3)
    assert "6, 3, frozen=3 rows, padding_idx=4" in repr(
        PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4)
    )


def test_partly_frozen_compiles_and_exports():
    layer, ids = (
        PartlyFrozenEmbedding(6, 3, frozen=[1, 3], padding_idx=4),
        ids_of(4, 1, 0, 5),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), layer(ids))
    compiled(ids).sum().backward()
    assert layer.trained_rows.grad[:, 0].tolist() == [1, 0, 1]
    assert torch.equal(torch.export.export(layer, (ids,)).module()(ids), layer(ids))


@pytest.mark.rejects
def test_partly_frozen_refuses_what_is_wrong():
    with pytest.raises(IndexError, match=r"frozen\[1\] is 9, but num_embeddings is 6"):
        PartlyFrozenEmbedding(6, 3, frozen=[1, 9])
    layer = PartlyFrozenEmbedding(6, 3, frozen=[1])
    with pytest.raises(IndexError, match=r"ids\[0\] is -1, but num_embeddings is 6"):
        layer(ids_of(-1))
    with pytest.raises(ValueError, match="set_padding needs a layer with padding_idx"):
        layer.set_padding(0.0)
    with pytest.raises(
        RuntimeError, match=r"weight must have shape \(6, 3\), got \(5, 3\)"
    ):
        layer.load_state_dict({"weight": torch.ones(5, 3)})
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        layer.load_state_dict({})


# Without torch


@pytest.mark.rejects
def test_without_torch_the_error_says_what_to_install():
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import firstlayer.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "ImportError: firstlayer.torch needs PyTorch: pip install firstlayer[torch]"
        in done.stderr
    )


def test_half_precision_reference_is_what_ml_dtypes_rounds_to():
    x = torch.tensor([3000.0])
    assert x.bfloat16().float().numpy() == np.float32(3000).astype(ml_dtypes.bfloat16)
