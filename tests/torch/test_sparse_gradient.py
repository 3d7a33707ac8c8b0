"""Sparse gradients that torch's gradient clipping accepts."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer, PartlyFrozenEmbedding
from firstlayer.torch._tensors.memory import tensor_of
from firstlayer.torch.optim import RowAdamW, RowSGD
from firstlayer.torch.optim.sparse_gradient import RowGradientTensor, rows_of
from tests.support.run_alone import run_alone
from tests.support.torch_tables import DTYPES, ids_of

Model = tuple[Any, Any]


def twins(dtype=torch.float32, seed=0) -> tuple[Model, Model]:
    """Return two tables with equal rows and equal heads: row gradients, dense gradients."""
    torch.manual_seed(seed)
    rows = Embedding(12, 3, sparse=True, dtype=dtype)
    dense = nn.Embedding(12, 3, _weight=rows.weight.detach().clone())
    head = nn.Linear(3, 2, dtype=dtype)
    return (rows, head), (dense, copy.deepcopy(head))


def backward(model: Model, *batches):
    table, head = model
    for ids in batches:
        (5 * head(table(ids))).square().sum().backward()


def parameters(model: Model):
    return [p for part in model for p in part.parameters()]


def assert_equal_gradients(rows: Model, dense: Model):
    for got, want in zip(parameters(rows), parameters(dense), strict=True):
        torch.testing.assert_close(got.grad.to_dense(), want.grad)
    assert type(rows[0].weight.grad) is RowGradientTensor


@given(
    batches=st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=1, max_size=3),
    norm_type=st.sampled_from([2.0, 1.0, 3.5, 0.5, math.inf, -math.inf, 0.0]),
    foreach=st.sampled_from([None, True, False]),
    dtype=st.sampled_from(DTYPES),
    max_norm=st.sampled_from([0.1, 2.0, 1e9]),
)
def test_clipping_by_norm_equals_that_of_dense_gradients(
    batches, norm_type, foreach, dtype, max_norm
):
    if dtype == torch.float16:
        # Torch does not add sparse tensors in float16 on the CPU.
        batches = batches[:1]
    models = twins(dtype)
    norms = []
    for model in models:
        backward(model, *(torch.tensor(ids, dtype=torch.int64) for ids in batches))
        norms.append(
            clip_grad_norm_(parameters(model), max_norm, norm_type, foreach=foreach)
        )
    half = dtype.itemsize == 2
    torch.testing.assert_close(
        *norms, rtol=2e-2 if half else None, atol=0 if half else None
    )
    for got, want in zip(*map(parameters, models), strict=True):
        # A norm that overflows is inf, and the clipped gradients are zero or NaN.
        scale = float(want.grad.float().nan_to_num().abs().max())
        torch.testing.assert_close(
            got.grad.to_dense(),
            want.grad,
            rtol=3e-2 if half else None,
            atol=2e-2 * scale if half else None,
            equal_nan=True,
        )


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value_equals_that_of_dense_gradients(foreach):
    rows, dense = twins()
    for model in (rows, dense):
        backward(model, ids_of(1, 2, 1, 7), ids_of(7, 11))
        clip_grad_value_(parameters(model), 0.5, foreach=foreach)
    assert rows[0].weight.grad.to_dense().abs().max() == 0.5
    assert_equal_gradients(rows, dense)


def test_the_norm_is_that_of_the_sum_over_repeated_ids():
    layer = Embedding(9, 1, sparse=True)
    layer(ids_of(4, 7, 4, 7, 4, 7, 4)).sum().backward()
    assert clip_grad_norm_(layer.parameters(), 1.0) == 5
    torch.testing.assert_close(
        layer.weight.grad.values(), torch.tensor([[0.8], [0.6]]), rtol=1e-5, atol=0
    )
    # In-place sums of sparse tensors are not coalesced.
    grad: Any = layer.weight.grad
    grad.copy_(2 * grad).add_(grad.clone())
    ids, values = torch.tensor([[7, 7]]), torch.tensor([[1.0], [2.0]])
    grad.add_(torch.sparse_coo_tensor(ids, values, (9, 1), check_invariants=True))
    assert not grad.is_coalesced()
    want = torch.tensor([3.2, 5.4])
    torch.testing.assert_close(get_total_norm([grad]), want.norm())
    torch.testing.assert_close(get_total_norm([grad], 1.0, foreach=True), want.norm(1))
    assert torch.isfinite(grad).all() and torch.isfinite(grad).shape == (9, 1)
    clip_grad_value_(layer.parameters(), 4.0)
    torch.testing.assert_close(
        layer.weight.grad.to_dense()[[4, 7], 0], torch.tensor([3.2, 4.0])
    )


def test_gradients_without_rows_and_accumulation_after_clipping():
    rows, dense = twins()
    for model in (rows, dense):
        backward(model, ids_of())
        assert clip_grad_norm_(parameters(model), 1.0, math.inf) == 0
        backward(model, ids_of(3, 3))
        clip_grad_norm_(parameters(model), 0.1)
        backward(model, ids_of(5, 3))
        clip_grad_norm_(parameters(model), 0.1)
        for part in model:
            part.zero_grad(set_to_none=False)
        assert clip_grad_norm_(parameters(model), 0.1) == 0
        backward(model, ids_of(6, 3, 6))
        clip_grad_norm_(parameters(model), 0.1)
    assert_equal_gradients(rows, dense)
    assert rows[0].weight.grad.is_coalesced()


@pytest.mark.parametrize(
    ("layer", "ids"),
    [
        (EmbeddingBag(9, 2, sparse=True), torch.tensor([[1, 4], [4, 4]])),
        (PartlyFrozenEmbedding(9, 2, frozen=[0], sparse=True), torch.tensor([1, 4, 4])),
        (EmbeddingLayer(9, 2, position=None, sparse=True), torch.tensor([[1, 4, 4]])),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_layer_with_a_table_has_gradients_that_torch_clips(layer, ids):
    layer(ids).sum().backward()
    (parameter,) = layer.parameters()
    want = parameter.grad.to_dense().norm()
    assert parameter.grad.is_sparse and want > 1
    assert clip_grad_norm_(layer.parameters(), 1.0) == want
    torch.testing.assert_close(parameter.grad.to_dense().norm(), torch.tensor(1.0))


@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=3),
            st.sampled_from(["kept", "zeroed", "dropped"]),
        ),
        min_size=2,
        max_size=6,
    ),
    make=st.sampled_from([Embedding, EmbeddingBag, nn.Embedding, nn.EmbeddingBag]),
)
def test_gradients_accumulate_after_steps_with_and_without_rows(batches, make):
    is_bag = issubclass(make, nn.EmbeddingBag)
    options: dict[str, Any] = {"padding_idx": 0}
    options |= {"dtype": torch.float64} | ({"mode": "sum"} if is_bag else {})
    offsets = [ids_of(0)] if is_bag else []
    rows = make(3, 2, sparse=True, **options)
    theirs = nn.EmbeddingBag if is_bag else nn.Embedding
    dense = theirs(3, 2, _weight=rows.weight.detach().clone(), **options)
    settings: Any = {"lr": 0.3, "momentum": 0.5, "dampening": 0.2}
    models = (
        (rows, RowSGD(rows, **settings)),
        (dense, torch.optim.SGD(dense.parameters(), **settings)),
    )
    for ids, grads in batches:
        for layer, optimizer in models:
            layer(ids_of(*ids), *offsets).sum().backward()
            optimizer.step()
            if grads != "kept":
                optimizer.zero_grad(set_to_none=grads == "dropped")
    torch.testing.assert_close(rows.weight.detach(), dense.weight.detach())


def test_gradients_of_torch_layers_given_to_a_row_optimizer_are_clipped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 3))
    dense = copy.deepcopy(model)
    dense[0].sparse = False  # pyright: ignore
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    optimizers = (
        RowAdamW(model, **options),
        torch.optim.AdamW(dense.parameters(), **options),
    )
    for ids in (ids_of(1, 2, 1), ids_of(4, 1), ids_of(8, 8, 8)):
        norms = []
        for one, optimizer in zip((model, dense), optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(2):
                one(ids).square().sum().backward()
            norms.append(clip_grad_norm_(one.parameters(), 0.1))
            optimizer.step()
        assert norms[0] > 0.1
        torch.testing.assert_close(*norms)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, dense.state_dict()[name], msg=name)


# Adagrad creates a sparse tensor without saying whether to check it.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True, maximize=True),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, foreach=False),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, foreach=True),
        lambda ps: torch.optim.SparseAdam(list(ps), lr=0.1),
    ],
)
def test_optimizers_of_torch_accept_row_gradients_as_sparse_tensors(make):
    (rows, _), (plain, _) = twins()
    plain.sparse = True
    for one in (rows, plain):
        optimizer = make(one.parameters())
        for ids in (ids_of(1, 2, 1), ids_of(4, 1, 7)):
            optimizer.zero_grad(set_to_none=False)
            one(ids).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(rows.weight, plain.weight)


def test_a_row_gradient_is_a_sparse_tensor_otherwise():
    (layer, _), (dense, _) = twins()
    for one in (layer, dense):
        one(ids_of(1, 2, 1)).square().sum().backward()
    grad, want = layer.weight.grad, dense.weight.grad
    assert isinstance(grad, torch.Tensor) and grad.is_sparse and grad.is_coalesced()
    assert type(grad._values()) is type(grad.to_dense()) is torch.Tensor
    assert type(grad.shape) is torch.Size and grad.layout is torch.sparse_coo
    for same in (grad.clone(), grad.data, copy.deepcopy(grad), grad.coalesce()):
        assert type(same) is RowGradientTensor and torch.equal(same.to_dense(), want)
    copied = copy.deepcopy([grad, grad])
    assert copied[0] is copied[1] and copied[0] is not grad
    saved = io.BytesIO()
    torch.save(grad, saved)
    saved.seek(0)
    for plain in (pickle.loads(pickle.dumps(grad)), torch.load(saved, weights_only=True)):
        assert type(plain) is torch.Tensor and torch.equal(plain.to_dense(), want)
    torch.testing.assert_close((3 * grad).to_dense(), 3 * want)
    for scaled in (grad.clone().mul_(torch.tensor(3.0)), grad.clone().div_(1 / 3)):
        assert scaled.is_coalesced()
        torch.testing.assert_close(scaled.to_dense(), 3 * want)
    tripled = grad.clone()
    tripled *= 3
    tripled /= 2
    torch.testing.assert_close(tripled.to_dense(), 1.5 * want)
    by_entry = torch.randn(12, 3)
    torch.testing.assert_close(grad.clone().mul_(by_entry).to_dense(), by_entry * want)
    torch.testing.assert_close((want + grad), 2 * want)
    torch.testing.assert_close(want.clone().add_(grad, alpha=-2), -want)
    torch.testing.assert_close(grad.norm(), want.norm())
    assert not torch.isnan(grad).any()
    grad._values()[0, 0] = math.inf
    finite = torch.isfinite(grad)
    assert finite.dtype == torch.bool and (~finite).nonzero().tolist() == [[1, 0]]
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        torch.linalg.vector_norm(grad, dim=1)
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        # A minimum above zero would change rows that are not stored.
        grad.clamp_(min=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_row_gradients_are_rounded_and_upcast_as_torch_does(dtype):
    values = torch.randn(300, 128) * torch.logspace(-30, 30, 300)[:, None]
    values[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    rounded = tensor_of(values.numpy(), dtype=dtype)
    torch.testing.assert_close(rounded, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    grad = torch.sparse_coo_tensor(
        torch.arange(300)[None],
        rounded,
        (400, 128),
        check_invariants=False,
        is_coalesced=True,
    )
    got, want = rows_of(grad), values.to(dtype)
    assert got.ids.tolist() == list(range(300))
    # Equal bits of half precision: the kernels upcast them.
    torch.testing.assert_close(tensor_of(got.values), want, rtol=0, atol=0, equal_nan=True)


def test_gradient_scaler_of_mixed_precision():
    for scale, expect_step in ((1024.0, True), (math.inf, False)):
        rows, dense = twins()
        for model in (rows, dense):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            optimizer = (RowAdamW if model is rows else torch.optim.AdamW)(
                parameters(model), lr=0.1
            )
            before = model[0].weight.detach().clone()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model[1](model[0](ids_of(1, 2, 1))).float().square().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters(model), 0.1)
            scaler.step(optimizer)
            scaler.update()
            moved = not torch.equal(before, model[0].weight)
            assert moved == expect_step
        rows[0].eval()
        torch.testing.assert_close(rows[0].weight, dense[0].weight)


def test_compiled_forwards_have_gradients_that_torch_clips():
    rows, dense = twins()
    table = torch.compile(rows[0], backend="aot_eager")
    for ids in (ids_of(1, 2, 1), ids_of(4, 5, 4), ids_of(2, 9, 1)):
        # The gradient of the step before is still there when the forward is compiled.
        backward((table, rows[1]), ids)
        backward(dense, ids)
        clip_grad_norm_(parameters(rows), 0.1)
        clip_grad_norm_(parameters(dense), 0.1)
        assert_equal_gradients(rows, dense)


TWO_PROCESSES = """
    import os, sys
    rank = 0 if (child := os.fork()) else 1
    import torch
    torch.set_num_threads(1)
    from torch import nn
    from torch.distributed import init_process_group, destroy_process_group
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.utils import clip_grad_norm_
    from firstlayer.torch import Embedding, FrozenRowsEmbedding
    from firstlayer.torch.optim import RowAdamW, RowSGD

    init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
"""

END = """
    destroy_process_group()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        os._exit(0)
"""


def test_two_processes_clip_and_train_as_with_dense_gradients(tmp_path):
    run_alone(
        TWO_PROCESSES.replace("sys.argv[1]", repr(str(tmp_path / "store"))),
        """
    def train(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(Embedding(30, 4, sparse=sparse), nn.Linear(4, 4))
        ddp = nn.parallel.DistributedDataParallel(model)
        make = RowAdamW if sparse else torch.optim.AdamW
        optimizer = make(model.parameters(), lr=0.05, weight_decay=0.2)
        norms = []
        for step in range(6):
            random = torch.Generator().manual_seed(10 * step + rank)
            ids = torch.randint(0, 30, (8,), generator=random)
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(ids[:4]).square().sum().backward()
            ddp(ids[4:]).square().sum().backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.5))
            assert model[0].weight.grad.is_sparse == sparse
            optimizer.step()
        return {**model.state_dict(), "norms": torch.stack(norms)}

    got, want = train(True), train(False)
    assert got["norms"].min() > 0.5
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
    both = [torch.empty_like(got["0.weight"]) for _ in range(2)]
    torch.distributed.all_gather(both, got["0.weight"])
    assert torch.equal(*both)

    layer = Embedding(30, 4, sparse=True)
    optimizer = ZeroRedundancyOptimizer(
        layer.parameters(), optimizer_class=RowAdamW, lr=0.1
    )
    before = layer.weight.detach().clone()
    layer(torch.arange(4)).sum().backward()
    try:
        optimizer.step()
    except TypeError as error:
        assert str(error).startswith(
            "RowAdamW cannot be sharded by ZeroRedundancyOptimizer, whose other ranks "
            "would read stale rows"
        ), error
    else:
        raise AssertionError("a sharded row optimizer took a step")
    assert torch.equal(layer.weight, before)

    # Frozen rows stay the same on every rank, also with sharded optimizer states.
    torch.manual_seed(0)
    frozen = FrozenRowsEmbedding(30, 4, frozen=range(20))
    ddp = nn.parallel.DistributedDataParallel(frozen)
    before = frozen.weight.detach().clone()
    optimizer = ZeroRedundancyOptimizer(
        frozen.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1, weight_decay=0.5
    )
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.arange(rank, 30)).square().sum().backward()
        optimizer.step()
    moved = (frozen.weight != before).all(dim=1)
    assert moved.tolist() == [False] * 20 + [True] * 10
    """,
        END,
    )
