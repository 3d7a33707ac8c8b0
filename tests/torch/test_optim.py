"""Row optimizers for torch equal torch's own on dense gradients, at every step."""

import copy
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn.functional import cross_entropy

import firstlayer.torch.optim
from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer, PartlyFrozenEmbedding
from firstlayer.torch._tensors.row_parameter import without_catch_up
from firstlayer.torch.optim import (
    AveragedRows,
    RowAdam,
    RowAdamW,
    RowLion,
    RowSGD,
    clip_grad_norm_,
)
from tests.support.optim_cases import (
    OPTIONS,
    ROWS,
    SCHEDULES,
    WIDTH,
    assert_close,
    dense,
    draw_ids,
    scheduler,
)

ONE_OF_EACH = [(name, options[-1]) for name, options in OPTIONS.items()]


def grad_of(parameter) -> Any:
    return parameter.grad


def ids_of(*ids):
    return torch.tensor(ids)


def loss_of(y, goal, sign=1):
    return sign * 0.5 * (y - goal).square().sum()


class Pair:
    """A model with a table under a row optimizer, and a twin with dense gradients."""

    def __init__(
        self, name, options, *, model=None, ours=None, schedule="constant", steps=1
    ):
        torch.manual_seed(0)
        if model is None:
            model = Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.model: Any = model
        self.twin: Any = copy.deepcopy(model)
        for module in self.twin.modules():
            if hasattr(module, "sparse"):
                module.sparse = False  # pyright: ignore
        make = getattr(firstlayer.torch.optim, f"Row{name}")
        self.ours = make(ours or model.parameters(), **options)
        self.theirs = dense(name, self.twin.parameters(), **options)
        both = (self.ours, self.theirs)
        self.schedulers = [scheduler(schedule, optimizer, steps) for optimizer in both]
        self.sign = -1 if options.get("maximize") else 1

    def forward(self, *args, **kwargs):
        """Return the outputs of both models."""
        return self.model(*args, **kwargs), self.twin(*args, **kwargs)

    def step(self, *args, tolerance=1e-9, **kwargs):
        """Take a step with both towards a random goal; compare the outputs before it."""
        got, want = self.forward(*args, **kwargs)
        assert_close(got.detach(), want.detach(), tolerance)
        goal = torch.randn_like(want)
        self.backward(loss_of(got, goal, self.sign), loss_of(want, goal, self.sign))
        return got

    def backward(self, ours, theirs):
        for optimizer, loss in ((self.ours, ours), (self.theirs, theirs)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for each in self.schedulers:
            each.step()

    def finish(self, tolerance=1e-9):
        """Compare the state dicts."""
        ours, theirs = self.model.state_dict(), self.twin.state_dict()
        for name, want in theirs.items():
            assert_close(ours[name], want, tolerance, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adamw_equals_torch_adamw_at_every_step(schedule):
    number = SCHEDULES.index(schedule)
    steps = 600 if schedule == "one-cycle" else 250
    pair = Pair("AdamW", OPTIONS["AdamW"][number % 2], schedule=schedule, steps=steps)
    draw = draw_ids("zipf", np.random.default_rng(1))
    for _ in range(steps):
        pair.step(torch.from_numpy(draw()), tolerance=1e-6)
    pair.finish(1e-6)


@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_every_optimizer_equals_the_dense_one_under_one_cycle(name, options):
    pair = Pair(name, options, schedule="one-cycle", steps=150)
    draw = draw_ids("uniform", np.random.default_rng(2))
    for _ in range(150):
        pair.step(torch.from_numpy(draw()), tolerance=1e-6)
    pair.finish(1e-6)


def test_float32_error_is_comparable_to_that_of_the_dense_optimizer():
    options, runs = OPTIONS["AdamW"][0], []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        start = torch.randn(ROWS, WIDTH).to(dtype)
        layer = Embedding(ROWS, WIDTH, sparse=True, _weight=start)
        pair, rng = Pair("AdamW", options, model=layer), np.random.default_rng(3)
        draw = draw_ids("zipf", rng)
        for _ in range(300):
            ids = torch.from_numpy(draw())
            got, want = pair.forward(ids)
            goal = torch.from_numpy(rng.standard_normal(got.shape)).to(dtype)
            pair.backward(loss_of(got, goal), loss_of(want, goal))
        runs.append((pair.model.state_dict()["weight"], pair.twin.weight.detach()))
    (_, truth), (ours, theirs) = runs
    rounding = float((theirs - truth).abs().max())
    assert 1e-8 < rounding < 1e-4
    assert_close(ours, truth, 3 * rounding)


def two_layers(table):
    return nn.Sequential(table, nn.Tanh(), nn.Linear(WIDTH, 2, dtype=torch.float64))


# Row-wise rules use torch's optimizer for parameters that are not tables.
@pytest.mark.parametrize(
    "name, options", [case for case in ONE_OF_EACH if "Wise" not in case[0]]
)
def test_tables_and_dense_parameters_share_an_optimizer(name, options):
    model = two_layers(Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))
    pair = Pair(name, options, model=model)
    for _ in range(40):
        pair.step(torch.randint(0, ROWS, (4,)), tolerance=1e-6)
    pair.finish(1e-6)


def test_parameter_groups_have_their_own_options():
    model = two_layers(Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))

    def groups(model):
        return [
            {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.3},
            {"params": model[2].parameters(), "betas": (0.5, 0.9)},
        ]

    options = {"lr": 0.01, "fused": True}
    pair = Pair("AdamW", options, model=model, ours=groups(model))
    pair.theirs = torch.optim.AdamW(groups(pair.twin), **options)
    pair.schedulers = []
    for _ in range(40):
        pair.step(torch.randint(0, ROWS, (4,)))
    pair.finish()


def test_exact_and_lazy_groups_in_one_optimizer():
    exact, lazy = (Embedding(9, 2, sparse=True) for _ in range(2))
    groups = [{"params": [exact.weight]}, {"params": [lazy.weight], "mode": "lazy"}]
    optimizer = RowAdamW(groups, lr=0.1, weight_decay=0.5)
    start = lazy.weight.detach().clone()
    for _ in range(2):
        (exact(ids_of(1)).sum() + lazy(ids_of(1)).sum()).backward()
        optimizer.step()
    assert hasattr(exact.weight, "table_state") and not hasattr(lazy.weight, "table_state")
    moved = (lazy.weight != start).any(1)
    assert moved.nonzero().flatten().tolist() == [1]


def test_lazy_adam_equals_sparse_adam():
    torch.manual_seed(0)
    ours, theirs = (nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.1}
    optimizers = [
        RowAdam(ours.parameters(), mode="lazy", **options),
        torch.optim.SparseAdam(list(theirs.parameters()), **options),
    ]
    for _ in range(100):
        ids = torch.randint(0, ROWS, (4,))
        goal = torch.randn(4, WIDTH)
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(layer(ids), goal).backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=2e-6, rtol=0)


def test_two_forwards_before_a_step_read_the_same_table():
    pair = Pair("AdamW", OPTIONS["AdamW"][0])
    for _ in range(30):
        first, second = (torch.randint(0, ROWS, (3,)) for _ in range(2))
        losses = []
        for layer in (pair.model, pair.twin):
            a, b = layer(first), layer(second)
            losses.append(loss_of(a, 1.0) + loss_of(b, a.detach()))
        assert_close(losses[0].detach(), losses[1].detach(), 1e-9)
        pair.backward(*losses)
    pair.finish()


def test_gradient_accumulation_over_several_backwards():
    pair = Pair("AdamW", OPTIONS["AdamW"][2])
    for _ in range(20):
        pair.ours.zero_grad()
        pair.theirs.zero_grad()
        for _ in range(3):
            got, want = pair.forward(torch.randint(0, ROWS, (3,)))
            assert_close(got.detach(), want.detach(), 1e-8)
            goal = torch.randn_like(want)
            loss_of(got, goal).backward()
            loss_of(want, goal).backward()
        assert grad_of(pair.model.weight).is_sparse
        pair.ours.step()
        pair.theirs.step()
    pair.finish(1e-8)


def test_step_without_a_gradient_does_not_change_a_table():
    model = nn.ModuleList([
        Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64) for _ in range(2)
    ])
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=model)
    for step in range(20):
        ids, goal = torch.randint(0, ROWS, (3,)), torch.randn(3, WIDTH)
        losses = [loss_of(m[step % 3 % 2](ids), goal) for m in (pair.model, pair.twin)]
        assert_close(losses[0].detach(), losses[1].detach(), 1e-9)
        pair.backward(*losses)
    pair.finish()


def test_closure_runs_with_gradients_enabled():
    layer = Embedding(9, 2, sparse=True)
    optimizer = RowSGD(layer.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = layer(ids_of(3)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_clip_grad_norm_equals_torch_for_sparse_and_dense_gradients():
    for norm_type in (2.0, 1.0, math.inf):
        model = two_layers(nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))
        pair = Pair("AdamW", {"lr": 0.1}, model=model, ours=model)
        for _ in range(10):
            ids = torch.tensor([1, 1, 2, 3])
            got, want = pair.forward(ids)
            for optimizer, y in ((pair.ours, got), (pair.theirs, want)):
                optimizer.zero_grad()
                (10 * loss_of(y, 1.0)).backward()
            ours = clip_grad_norm_(pair.model.parameters(), 0.5, norm_type)
            theirs = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.5, norm_type)
            assert_close(ours, theirs, 1e-9)
            for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
                assert_close(grad_of(p).to_dense(), q.grad, 1e-9)
            pair.ours.step()
            pair.theirs.step()
        pair.finish()
    assert clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("norm_type", [1.5, math.inf])
def test_clip_grad_norm_of_complex_gradients_equals_torch(norm_type):
    pairs = [nn.Parameter(torch.zeros(3, dtype=torch.complex64)) for _ in range(2)]
    for parameter in pairs:
        parameter.grad = torch.tensor([3 + 4j, -2j, 1.0])
    ours = clip_grad_norm_(pairs[0], 0.5, norm_type)
    assert_close(ours, nn.utils.clip_grad_norm_(pairs[1], 0.5, norm_type), 1e-6)
    assert_close(pairs[0].grad, pairs[1].grad, 1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW", "RMSprop"])
def test_complex_parameters_continue_from_saved_states_and_are_averaged(name):
    options: Any = OPTIONS[name][-1]
    model = nn.ParameterList([torch.tensor([3 + 4j, -2j, 1.0], dtype=torch.complex128)])
    pair = Pair(name, options, model=model)
    averaged = AveragedRows(pair.ours, decay=0.75)
    for number in range(6):
        losses = [(each[0] - 1 - 1j).abs().sum() for each in (pair.model, pair.twin)]
        pair.backward(*losses)
        averaged.update_parameters()
        twin = pair.twin[0].detach()
        mean = 0.75 * mean + 0.25 * twin if number else twin.clone()
        if number == 2:
            pair.ours.load_state_dict(copy.deepcopy(pair.ours.state_dict()))
    pair.finish()
    assert_close(averaged.average(pair.model[0]), mean, 1e-9)
    copied = copy.deepcopy(pair.ours).param_groups[0]["params"][0]
    assert_close(copied.detach(), twin, 1e-9)


@pytest.mark.rejects
def test_a_parameter_group_that_is_refused_is_not_added():
    optimizer = RowAdamW(Embedding(5, 2, sparse=True), lr=0.1)
    group = {"params": nn.Linear(2, 3).parameters(), "stochastic_rounding": True}
    with pytest.raises(ValueError, match=r"needs a table in bfloat16, got \['float32'\]"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_clip_grad_norm_sums_repeated_ids_first():
    layer = nn.Embedding(5, 1, sparse=True)
    layer(ids_of(2, 2, 2, 4, 4, 4, 4)).sum().backward()
    assert clip_grad_norm_(layer.weight, 10.0) == 5.0
    assert grad_of(layer.weight).is_coalesced()
    clip_grad_norm_(layer.weight, 1.0)
    want = torch.tensor([[0.0], [0], [0.6], [0], [0.8]])
    torch.testing.assert_close(grad_of(layer.weight).to_dense(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_clip_grad_norm_of_a_gradient_without_rows(norm_type):
    layer = nn.Embedding(5, 1, sparse=True, padding_idx=0)
    layer(ids_of(0)).sum().backward()
    assert clip_grad_norm_(layer.weight, 1.0, norm_type) == 0
    # Another gradient can still be accumulated into it.
    layer(ids_of(2, 2)).sum().backward()
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    other.grad = torch.zeros_like(other)
    total = clip_grad_norm_([layer.weight, other], 1.0, norm_type)
    assert total == 2 and total.dtype == torch.float64


def test_clip_grad_norm_does_not_round_the_factor_to_half_precision():
    weight = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    weight.grad = torch.arange(1.0, 65, dtype=torch.bfloat16)
    norm = weight.grad.double().norm()
    want = (weight.grad.double() * (1.003 / (norm + 1e-6))).bfloat16()
    clip_grad_norm_(weight, 1.003)
    assert torch.equal(weight.grad, want)


def test_nn_embedding_is_exact_when_the_model_is_given():
    model = two_layers(nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=model, ours=model)
    for _ in range(60):
        pair.step(torch.randint(0, ROWS, (4,)))
    pair.finish()


def test_nn_embedding_bag_and_max_norm_are_exact_when_the_model_is_given():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"sparse": True, "dtype": torch.float64}
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **options)
            self.short = nn.Embedding(ROWS, WIDTH, max_norm=1.5, **options)

        def forward(self, ids):
            return self.bag(input=ids[None], offsets=None) + self.short(ids).sum(0)

    model = Model()
    pair = Pair("SGD", OPTIONS["SGD"][3], model=model, ours=model)
    for _ in range(60):
        pair.step(torch.randint(0, ROWS, (4,)))
    pair.finish()


def test_max_norm_equals_torch():
    torch.manual_seed(0)
    ours = Embedding(ROWS, WIDTH, max_norm=1.0, sparse=True, dtype=torch.float64)
    theirs = nn.Embedding(ROWS, WIDTH, max_norm=1.0, _weight=ours.weight.detach().clone())
    pair = Pair("AdamW", {"lr": 0.3, "weight_decay": 0.1}, model=ours)
    pair.twin = theirs
    pair.theirs = torch.optim.AdamW(theirs.parameters(), lr=0.3, weight_decay=0.1)
    pair.schedulers = []
    for _ in range(60):
        # torch adds 1e-7 to the norm.
        pair.step(torch.randint(0, ROWS, (4,)), tolerance=1e-5)


def test_embedding_bag_and_embedding_layer():
    torch.manual_seed(0)
    bag = EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True, padding_idx=1)
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=bag.double())
    for _ in range(40):
        pair.step(torch.randint(0, ROWS, (2, 3)))
    pair.finish()
    layer = EmbeddingLayer(
        ROWS, 4, max_positions=6, segments=2, layer_norm=True, sparse=True,
        dtype=torch.float64,
    )  # fmt: skip
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=layer)
    for _ in range(40):
        segments = torch.randint(0, 2, (2, 3))
        pair.step(torch.randint(0, ROWS, (2, 3)), segments=segments)
    pair.finish()


def test_partly_frozen_embedding():
    layer = PartlyFrozenEmbedding(
        ROWS, WIDTH, frozen=range(20), padding_idx=30, sparse=True, dtype=torch.float64
    )
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=layer)
    for step in range(40):
        pair.step(torch.randint(0, ROWS, (4,)))
        if step % 10 == 9:
            x = torch.eye(WIDTH, dtype=torch.float64)
            assert_close(pair.model.logits(x).detach(), pair.twin.logits(x).detach(), 1e-9)
    pair.finish()


class Tied(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, table):
        super().__init__()
        self.table, self.hidden = table, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, ids):
        return self.table.logits(self.hidden(self.table(ids)).tanh())


@pytest.mark.filterwarnings("ignore:the gradient of a table:UserWarning")
def test_dense_gradient_of_a_tied_head_updates_every_row():
    table = Embedding(ROWS, 4, padding_idx=0, sparse=True, dtype=torch.float64)
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=Tied(table))
    for step in range(30):
        ids, goal = torch.randint(0, ROWS, (5,)), torch.randint(0, ROWS, (5,))
        if step % 3 == 2:
            # Without the head the gradient is sparse.
            losses = [loss_of(m.hidden(m.table(ids)), 1.0) for m in (pair.model, pair.twin)]
        else:
            losses = [cross_entropy(y, goal) for y in pair.forward(ids)]
        assert_close(losses[0].detach(), losses[1].detach(), 1e-9)
        pair.backward(*losses)
        assert grad_of(pair.model.table.weight).is_sparse == (step % 3 == 2)
    pair.finish()


@pytest.mark.filterwarnings("ignore:the gradient of a table:UserWarning")
def test_linear_head_tied_to_an_nn_embedding():
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    head = nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.float64)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=model, ours=model)
    for step in range(20):
        ids, goal = torch.randint(0, ROWS, (5,)), torch.randint(0, ROWS, (5,))
        if step % 3 == 2:
            losses = [loss_of(m[0](ids), 1.0) for m in (pair.model, pair.twin)]
        else:
            losses = [cross_entropy(y, goal) for y in pair.forward(ids)]
        assert_close(losses[0].detach(), losses[1].detach(), 1e-9)
        pair.backward(*losses)
    pair.finish()


def table_with_strides(is_contiguous):
    table = Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    if not is_contiguous:
        table.weight.data = table.weight.data.t().contiguous().t()
    return table


@pytest.mark.filterwarnings("ignore:the gradient of a table:UserWarning")
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_lookups_with_dense_gradients_may_leave_rows_unread(name, options, is_contiguous):
    pair = Pair(name, options, model=table_with_strides(is_contiguous))
    for step in range(41):
        pair.model.sparse = step % 3 == 0
        pair.step(torch.randint(0, ROWS, (4,)), tolerance=1e-6)
        assert grad_of(pair.model.weight).is_sparse == pair.model.sparse
    # Sparse gradients are added to a dense one that was set to zero.
    pair.model.sparse = True
    for layer, optimizer in ((pair.model, pair.ours), (pair.twin, pair.theirs)):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            layer(ids_of(step, step + 1)).square().sum().backward()
            optimizer.step()
            assert not grad_of(layer.weight).is_sparse
    pair.finish(1e-6)


@pytest.mark.filterwarnings("ignore:the gradient of a table:UserWarning")
@pytest.mark.rejects
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_dense_gradient_of_a_stale_row_raises_and_changes_nothing(is_contiguous, dtype):
    layer = table_with_strides(is_contiguous).to(dtype)
    optimizer = RowAdamW(layer, lr=0.1)
    layer(ids_of(3, 17)).sum().backward()
    optimizer.step()
    gradient = torch.zeros(ROWS, WIDTH, dtype=dtype)
    gradient[[3, 9]] = torch.tensor([[1.0], [torch.nan]], dtype=dtype)
    layer(ids_of(3))
    layer.weight.grad = gradient
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert str(error.value) == stale_row_message(9)
    assert optimizer.state[layer.weight]["step"] == 1
    gradient[9] = 0
    optimizer.step()
    assert layer.weight.isfinite().all()


def test_stale_rows_read_by_other_processes_catch_up(monkeypatch):
    torch.manual_seed(0)
    layer = Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    pair = Pair("AdamW", OPTIONS["AdamW"][0], model=layer)
    for _ in range(3):
        pair.step(ids_of(1, 2))
    # The gradient after an all-reduce: row 9 was read by another process.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    grad = torch.randn(2, WIDTH, dtype=torch.float64)
    shape = (ROWS, WIDTH)
    pair.model.weight.grad = torch.sparse_coo_tensor(
        ids_of(1, 9)[None], grad, shape, check_invariants=True
    )
    pair.twin.weight.grad = pair.model.weight.grad.to_dense()
    pair.ours.step()
    pair.theirs.step()
    pair.finish()


def test_max_norm_applies_to_stale_rows_in_distributed_runs(monkeypatch):
    # In a distributed run every process clips all rows.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layer = Embedding(ROWS, WIDTH, sparse=True, max_norm=1.0, dtype=torch.float64)
    pair = Pair("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}, model=layer)
    for _ in range(20):
        pair.step(torch.randint(0, ROWS, (3,)))
    pair.finish()


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "step", "read", "flush", "save", "eval", "copy"]),
            st.lists(st.integers(0, 7), min_size=1, max_size=3),
        ),
        max_size=25,
    ),
    st.sampled_from(ONE_OF_EACH),
)
def test_any_order_of_steps_and_reads_equals_the_dense_optimizer(events, case):
    name, options = case
    layer = Embedding(8, 2, sparse=True, dtype=torch.float64)
    pair = Pair(name, options, model=layer)
    for event, ids in events:
        if event == "step":
            pair.step(torch.tensor(ids), tolerance=1e-6)
            continue
        if event == "read":
            got = pair.model(torch.tensor(ids))
            assert_close(got.detach(), pair.twin.weight[ids].detach(), 1e-6)
        elif event == "flush":
            pair.ours.flush()
            assert_close(pair.model.weight.detach(), pair.twin.weight.detach(), 1e-6)
        elif event == "save":
            pair.ours.load_state_dict(pair.ours.state_dict())
        elif event == "eval":
            pair.model.eval()
            assert_close(pair.model.weight.detach(), pair.twin.weight.detach(), 1e-6)
        else:
            assert_close(
                copy.deepcopy(pair.model).weight.detach(), pair.twin.weight.detach(), 1e-6
            )
    pair.finish(1e-6)


def stale_row_message(row):
    return (
        f"row {row} has a gradient, but was not up to date when it was read; read it "
        "through the parameter, not through an alias from before the last step. Call "
        "flush() before a step with a gradient that is older than the last step"
    )


@pytest.mark.filterwarnings("ignore:the gradient of a table:UserWarning")
@pytest.mark.rejects
def test_reading_a_stale_row_raises_at_the_step_and_changes_nothing():
    torch.manual_seed(0)
    layer = nn.Embedding(20, 2, sparse=True)
    other = nn.Parameter(torch.ones(2))
    optimizer = RowAdamW([layer.weight, other], lr=0.1)
    layer(ids_of(3, 17)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (layer(ids_of(3)).sum() + other.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with without_catch_up():
        (layer(ids_of(3, 17)).sum() + other.sum()).backward()
        before = copy.deepcopy([
            layer.weight.detach(),
            other,
            optimizer.state[other]["exp_avg"],
        ])
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert str(error.value) == stale_row_message(17)
    with without_catch_up():
        after = layer.weight.detach(), other, optimizer.state[other]["exp_avg"]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    # The same for code that reads the whole weight; row 0 is stale.
    optimizer.zero_grad()
    with without_catch_up():
        (layer.weight @ other).sum().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert str(error.value) == stale_row_message(0)
    optimizer.flush()
    optimizer.step()


@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_change_of_the_mode_of_a_group_takes_effect(by_kernels):
    torch.manual_seed(0)
    table = torch.randn(6, 2, dtype=torch.float64)
    table = table if by_kernels else table.T.contiguous().T
    layer = Embedding.from_pretrained(table, freeze=False, sparse=True)
    twin = nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=True)
    options = {"lr": 0.1, "betas": (0.8, 0.9)}
    ours = RowAdam(layer.parameters(), **options)
    exact = torch.optim.Adam(twin.parameters(), **options)
    lazy = torch.optim.SparseAdam(twin.parameters(), **options)
    lazy.state = exact.state
    for step, ids in enumerate(([1, 2], [4], [2, 5], [0, 1], [3], [4, 0], [5], [1])):
        is_lazy = 2 <= step < 5
        ours.param_groups[0]["mode"] = "lazy" if is_lazy else "exact"
        theirs, twin.sparse = (lazy, True) if is_lazy else (exact, False)
        # The number of steps of SparseAdam is an int.
        for state in exact.state.values():
            state["step"] = (
                int(state["step"]) if is_lazy else torch.tensor(float(state["step"]))
            )
        for model, optimizer in ((layer, ours), (twin, theirs)):
            optimizer.zero_grad()
            model(ids_of(*ids)).square().sum().backward()
            optimizer.step()
        assert_close(layer.weight.detach(), twin.weight.detach(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_hooks_of_load_state_dict_change_what_is_loaded(dtype):
    torch.manual_seed(0)
    layer = Embedding(6, 2, sparse=True, dtype=dtype)
    head = nn.Linear(2, 1, dtype=dtype)
    optimizer = RowAdamW([layer.weight, *head.parameters()], lr=0.1)
    head(layer(ids_of(1, 4))).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def before(_, state_dict):
        changed = copy.deepcopy(state_dict)
        for state in changed["state"].values():
            state["exp_avg"] *= 3
        return changed

    def after(changed):
        for state in changed.state.values():
            state["exp_avg_sq"] *= 5

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    for index, parameter in enumerate((layer.weight, *head.parameters())):
        state, old = optimizer.state[parameter], saved["state"][index]
        assert torch.equal(state["exp_avg"], 3 * old["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], 5 * old["exp_avg_sq"])
    assert optimizer.state[layer.weight]["exp_avg"].dtype == max(
        (dtype, torch.float32), key=lambda each: each.itemsize
    )


@pytest.mark.rejects
@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_table_cast_to_another_compute_dtype_needs_a_new_optimizer(by_kernels):
    torch.manual_seed(0)
    table = torch.randn(6, 2) if by_kernels else torch.randn(2, 6).T
    layer = Embedding.from_pretrained(table, freeze=False, sparse=True)
    twin = nn.Embedding.from_pretrained(table.clone(), freeze=False)
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    ours: Any = RowAdamW(layer.parameters(), **options)
    theirs: Any = torch.optim.AdamW(twin.parameters(), **options)
    for ids in ([1, 2], [4], [2, 5], [0, 1], [3]):
        if ids == [2, 5]:
            layer.double()
            twin.double()
            layer(ids_of(2)).sum().backward()
            with pytest.raises(
                ValueError,
                match="the table must stay in float32 as its state is, got float64; "
                "load its state dict into a new optimizer",
            ):
                ours.step()
            saved = ours.state_dict(), theirs.state_dict()
            ours, theirs = RowAdamW(layer.parameters()), torch.optim.AdamW([twin.weight])
            for optimizer, state in zip((ours, theirs), saved, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        for model, optimizer in ((layer, ours), (twin, theirs)):
            optimizer.zero_grad()
            model(ids_of(*ids)).square().sum().backward()
            optimizer.step()
    assert_close(layer.weight.detach(), twin.weight.detach(), 1e-6)


@pytest.mark.rejects
def test_invalid_arguments_and_tables_raise():
    layer = Embedding(5, 2, sparse=True)
    parameters = list(layer.parameters())

    def check_raises(match, **options):
        make = options.pop("make", RowAdamW)
        with pytest.raises(ValueError, match=match):
            make(options.pop("params", parameters), **options)

    check_raises("mode must be 'exact' or 'lazy', got 'fast'", mode="fast")
    check_raises(
        "weight_decay must be 0 in exact updates by Adam", make=RowAdam, weight_decay=1
    )
    check_raises("differentiable must be False", differentiable=True)
    check_raises(r"bfloat16, got \['float32'\]", stochastic_rounding=True)
    groups = [{"params": parameters, "mode": "no"}]
    check_raises("mode must be 'exact' or 'lazy', got 'no'", params=groups)
    check_raises(r"betas\[0\] must be in \[0, 1\), got 1.5", make=RowLion, betas=(1.5, 0.5))
    cube = nn.Parameter(torch.ones(5, 2, 2))
    cube.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2, 2), (5, 2, 2), check_invariants=True
    )
    with pytest.raises(ValueError, match=r"real and have 2 axes, got float32 \(5, 2, 2\)"):
        RowAdamW([cube]).step()
    dotted = nn.Parameter(torch.ones(5, 2))
    dotted.grad = torch.eye(5, 2).to_sparse()
    with pytest.raises(ValueError, match="a row gradient has one sparse axis, got 2"):
        RowAdamW([dotted]).step()
    layer(ids_of(1)).sum().backward()
    grad_of(layer.weight)._values().fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients must be finite, got nan"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


@pytest.mark.rejects
@pytest.mark.parametrize("mode", ["exact", "lazy"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_backward_that_needs_rows_from_before_a_step_is_an_error(name, background, mode):
    options = OPTIONS[name][0] if mode == "exact" else {}
    layer = EmbeddingLayer(9, 8, max_positions=4, layer_norm=True, sparse=True)
    optimizer = getattr(firstlayer.torch.optim, f"Row{name}")(
        [layer.token.weight], background=background, mode=mode, **options
    )
    ids = ids_of(1, 2, 3)
    for _ in range(2):  # the first step creates the state
        first, second = layer(ids), layer(ids)
        first.square().sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.square().sum().backward()
        optimizer.zero_grad()
    # Without the norm, as without it in torch, no value of the table is needed.
    plain = EmbeddingLayer(9, 8, max_positions=4, sparse=True)
    optimizer = getattr(firstlayer.torch.optim, f"Row{name}")(
        [plain.token.weight], **options
    )
    first, second = plain(ids), plain(ids)
    first.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    second.sum().backward()
    assert (grad_of(plain.token.weight).to_dense()[1:4] == 1).all()
