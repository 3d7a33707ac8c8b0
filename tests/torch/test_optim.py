"""Row optimizers on torch equal torch's own on dense gradients, at every step."""

import copy
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
from firstlayer.torch.optim import RowAdam, RowAdamW, RowLion, RowSGD, clip_grad_norm_
from tests.support.optim_cases import (
    OPTIONS,
    ROWS,
    SCHEDULES,
    WIDTH,
    close,
    dense,
    scheduler,
    touches,
)

FIRST = [(name, options[-1]) for name, options in OPTIONS.items()]


def grad_of(parameter) -> Any:
    return parameter.grad


def ids_of(*ids):
    return torch.tensor(ids)


def loss_of(y, goal, sign=1):
    return sign * 0.5 * (y - goal).square().sum()


class Race:
    """A model with a table under a row optimizer, and its dense twin."""

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
        """Return what both make of the arguments, which must agree."""
        return self.model(*args, **kwargs), self.twin(*args, **kwargs)

    def step(self, *args, tolerance=1e-9, **kwargs):
        """Take a step with both, towards goals drawn anew."""
        got, want = self.forward(*args, **kwargs)
        close(got.detach(), want.detach(), tolerance)
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
        """Compare everything that is saved."""
        ours, theirs = self.model.state_dict(), self.twin.state_dict()
        for name, want in theirs.items():
            close(ours[name], want, tolerance, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adamw_equals_torchs_at_every_step(schedule):
    number = SCHEDULES.index(schedule)
    steps = 600 if schedule == "one-cycle" else 250
    race = Race("AdamW", OPTIONS["AdamW"][number % 2], schedule=schedule, steps=steps)
    draw = touches("zipf", np.random.default_rng(1))
    for _ in range(steps):
        race.step(torch.from_numpy(draw()), tolerance=1e-6)
    race.finish(1e-6)


@pytest.mark.parametrize("name, options", FIRST)
def test_every_optimizer_equals_the_dense_one_under_torchs_schedulers(name, options):
    race = Race(name, options, schedule="one-cycle", steps=150)
    draw = touches("uniform", np.random.default_rng(2))
    for _ in range(150):
        race.step(torch.from_numpy(draw()), tolerance=1e-6)
    race.finish(1e-6)


def test_float32_is_off_by_no_more_than_the_dense_run_itself():
    options, runs = OPTIONS["AdamW"][0], []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        start = torch.randn(ROWS, WIDTH).to(dtype)
        layer = Embedding(ROWS, WIDTH, sparse=True, _weight=start)
        race, rng = Race("AdamW", options, model=layer), np.random.default_rng(3)
        draw = touches("zipf", rng)
        for _ in range(300):
            ids = torch.from_numpy(draw())
            got, want = race.forward(ids)
            goal = torch.from_numpy(rng.standard_normal(got.shape)).to(dtype)
            race.backward(loss_of(got, goal), loss_of(want, goal))
        runs.append((race.model.state_dict()["weight"], race.twin.weight.detach()))
    (_, truth), (ours, theirs) = runs
    rounding = float((theirs - truth).abs().max())
    assert 1e-8 < rounding < 1e-4
    close(ours, truth, 3 * rounding)


def two_layers(table):
    return nn.Sequential(table, nn.Tanh(), nn.Linear(WIDTH, 2, dtype=torch.float64))


# Without the row-wise one: what is no table gets torch's own Adagrad there.
@pytest.mark.parametrize("name, options", FIRST[:-1])
def test_tables_and_dense_parameters_share_an_optimizer(name, options):
    model = two_layers(Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))
    race = Race(name, options, model=model)
    for _ in range(40):
        race.step(torch.randint(0, ROWS, (4,)), tolerance=1e-6)
    race.finish(1e-6)


def test_groups_have_options_of_their_own():
    model = two_layers(Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))

    def groups(model):
        return [
            {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.3},
            {"params": model[2].parameters(), "betas": (0.5, 0.9)},
        ]

    options = {"lr": 0.01, "fused": True}
    race = Race("AdamW", options, model=model, ours=groups(model))
    race.theirs = torch.optim.AdamW(groups(race.twin), **options)
    race.schedulers = []
    for _ in range(40):
        race.step(torch.randint(0, ROWS, (4,)))
    race.finish()


def test_one_optimizer_trains_tables_of_both_modes():
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


def test_lazy_adam_is_sparse_adam():
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


def test_two_forwards_in_a_step_see_one_table():
    race = Race("AdamW", OPTIONS["AdamW"][0])
    for _ in range(30):
        first, second = (torch.randint(0, ROWS, (3,)) for _ in range(2))
        losses = []
        for layer in (race.model, race.twin):
            a, b = layer(first), layer(second)
            losses.append(loss_of(a, 1.0) + loss_of(b, a.detach()))
        close(losses[0].detach(), losses[1].detach(), 1e-9)
        race.backward(*losses)
    race.finish()


def test_gradients_accumulate_over_several_backwards():
    race = Race("AdamW", OPTIONS["AdamW"][2])
    for _ in range(20):
        race.ours.zero_grad()
        race.theirs.zero_grad()
        for _ in range(3):
            got, want = race.forward(torch.randint(0, ROWS, (3,)))
            close(got.detach(), want.detach(), 1e-8)
            goal = torch.randn_like(want)
            loss_of(got, goal).backward()
            loss_of(want, goal).backward()
        assert grad_of(race.model.weight).is_sparse
        race.ours.step()
        race.theirs.step()
    race.finish(1e-8)


def test_a_step_that_a_table_has_no_gradient_in_leaves_it_alone():
    model = nn.ModuleList([
        Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64) for _ in range(2)
    ])
    race = Race("AdamW", OPTIONS["AdamW"][0], model=model)
    for step in range(20):
        ids, goal = torch.randint(0, ROWS, (3,)), torch.randn(3, WIDTH)
        losses = [loss_of(m[step % 3 % 2](ids), goal) for m in (race.model, race.twin)]
        close(losses[0].detach(), losses[1].detach(), 1e-9)
        race.backward(*losses)
    race.finish()


def test_a_closure_is_called_with_gradients_on():
    layer = Embedding(9, 2, sparse=True)
    optimizer = RowSGD(layer.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = layer(ids_of(3)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_clipping_is_exact_over_tables_and_dense_parameters_together():
    for norm_type in (2.0, 1.0, float("inf")):
        model = two_layers(nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))
        race = Race("AdamW", {"lr": 0.1}, model=model, ours=model)
        for _ in range(10):
            ids = torch.tensor([1, 1, 2, 3])
            got, want = race.forward(ids)
            for optimizer, y in ((race.ours, got), (race.theirs, want)):
                optimizer.zero_grad()
                (10 * loss_of(y, 1.0)).backward()
            ours = clip_grad_norm_(race.model.parameters(), 0.5, norm_type)
            theirs = nn.utils.clip_grad_norm_(race.twin.parameters(), 0.5, norm_type)
            close(ours, theirs, 1e-9)
            for p, q in zip(race.model.parameters(), race.twin.parameters(), strict=True):
                close(grad_of(p).to_dense(), q.grad, 1e-9)
            race.ours.step()
            race.theirs.step()
        race.finish()
    assert clip_grad_norm_([], 1.0) == 0


def test_clipping_sums_an_id_that_occurs_twice_before_it_takes_the_norm():
    layer = nn.Embedding(5, 1, sparse=True)
    layer(ids_of(2, 2, 2, 4, 4, 4, 4)).sum().backward()
    assert clip_grad_norm_(layer.weight, 10.0) == 5.0
    assert grad_of(layer.weight).is_coalesced()
    clip_grad_norm_(layer.weight, 1.0)
    want = torch.tensor([[0.0], [0], [0.6], [0], [0.8]])
    torch.testing.assert_close(grad_of(layer.weight).to_dense(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_clipping_of_a_gradient_without_rows(norm_type):
    layer = nn.Embedding(5, 1, sparse=True, padding_idx=0)
    layer(ids_of(0)).sum().backward()
    assert clip_grad_norm_(layer.weight, 1.0, norm_type) == 0
    # Its memory can grow.
    layer(ids_of(2, 2)).sum().backward()
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    other.grad = torch.zeros_like(other)
    total = clip_grad_norm_([layer.weight, other], 1.0, norm_type)
    assert total == 2 and total.dtype == torch.float64


def test_half_gradients_are_clipped_by_a_factor_that_is_not_rounded():
    weight = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    weight.grad = torch.arange(1.0, 65, dtype=torch.bfloat16)
    norm = weight.grad.double().norm()
    want = (weight.grad.double() * (1.003 / (norm + 1e-6))).bfloat16()
    clip_grad_norm_(weight, 1.003)
    assert torch.equal(weight.grad, want)


def test_torchs_own_embedding_is_exact_when_the_model_is_given():
    model = two_layers(nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64))
    race = Race("AdamW", OPTIONS["AdamW"][0], model=model, ours=model)
    for _ in range(60):
        race.step(torch.randint(0, ROWS, (4,)))
    race.finish()


def test_torchs_own_bags_and_max_norm_are_exact_when_the_model_is_given():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            kind = {"sparse": True, "dtype": torch.float64}
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **kind)
            self.short = nn.Embedding(ROWS, WIDTH, max_norm=1.5, **kind)

        def forward(self, ids):
            return self.bag(input=ids[None], offsets=None) + self.short(ids).sum(0)

    model = Model()
    race = Race("SGD", OPTIONS["SGD"][3], model=model, ours=model)
    for _ in range(60):
        race.step(torch.randint(0, ROWS, (4,)))
    race.finish()


def test_max_norm_goes_the_way_of_torchs():
    torch.manual_seed(0)
    ours = Embedding(ROWS, WIDTH, max_norm=1.0, sparse=True, dtype=torch.float64)
    theirs = nn.Embedding(ROWS, WIDTH, max_norm=1.0, _weight=ours.weight.detach().clone())
    race = Race("AdamW", {"lr": 0.3, "weight_decay": 0.1}, model=ours)
    race.twin = theirs
    race.theirs = torch.optim.AdamW(theirs.parameters(), lr=0.3, weight_decay=0.1)
    race.schedulers = []
    for _ in range(60):
        # torch divides by the norm and 1e-7.
        race.step(torch.randint(0, ROWS, (4,)), tolerance=1e-5)


def test_bags_and_the_complete_layer():
    torch.manual_seed(0)
    bag = EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True, padding_idx=1)
    race = Race("AdamW", OPTIONS["AdamW"][0], model=bag.double())
    for _ in range(40):
        race.step(torch.randint(0, ROWS, (2, 3)))
    race.finish()
    layer = EmbeddingLayer(
        ROWS, 4, max_positions=6, segments=2, layer_norm=True, sparse=True,
        dtype=torch.float64,
    )  # fmt: skip
    race = Race("AdamW", OPTIONS["AdamW"][0], model=layer)
    for _ in range(40):
        segments = torch.randint(0, 2, (2, 3))
        race.step(torch.randint(0, ROWS, (2, 3)), segments=segments)
    race.finish()


def test_partly_frozen_tables():
    layer = PartlyFrozenEmbedding(
        ROWS, WIDTH, frozen=range(20), padding_idx=30, sparse=True, dtype=torch.float64
    )
    race = Race("AdamW", OPTIONS["AdamW"][0], model=layer)
    for step in range(40):
        race.step(torch.randint(0, ROWS, (4,)))
        if step % 10 == 9:
            x = torch.eye(WIDTH, dtype=torch.float64)
            close(race.model.logits(x).detach(), race.twin.logits(x).detach(), 1e-9)
    race.finish()


class Tied(nn.Module):
    """A language model of one matrix: lookup, and logits by the same table."""

    def __init__(self, table):
        super().__init__()
        self.table, self.turn = table, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, ids):
        return self.table.logits(self.turn(self.table(ids)).tanh())


def test_a_tied_head_makes_the_gradient_dense_and_every_row_moves():
    table = Embedding(ROWS, 4, padding_idx=0, sparse=True, dtype=torch.float64)
    race = Race("AdamW", OPTIONS["AdamW"][0], model=Tied(table))
    for step in range(30):
        ids, goal = torch.randint(0, ROWS, (5,)), torch.randint(0, ROWS, (5,))
        if step % 3 == 2:
            # Now and then the head is not used, and the gradient is one of rows.
            losses = [loss_of(m.turn(m.table(ids)), 1.0) for m in (race.model, race.twin)]
        else:
            losses = [cross_entropy(y, goal) for y in race.forward(ids)]
        close(losses[0].detach(), losses[1].detach(), 1e-9)
        race.backward(*losses)
        assert grad_of(race.model.table.weight).is_sparse == (step % 3 == 2)
    race.finish()


def test_a_head_of_torchs_own_layers_is_tied_too():
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    head = nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.float64)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    race = Race("AdamW", OPTIONS["AdamW"][0], model=model, ours=model)
    for step in range(20):
        ids, goal = torch.randint(0, ROWS, (5,)), torch.randint(0, ROWS, (5,))
        if step % 3 == 2:
            losses = [loss_of(m[0](ids), 1.0) for m in (race.model, race.twin)]
        else:
            losses = [cross_entropy(y, goal) for y in race.forward(ids)]
        close(losses[0].detach(), losses[1].detach(), 1e-9)
        race.backward(*losses)
    race.finish()


def test_rows_that_other_processes_have_read_are_brought_up_to_date(monkeypatch):
    torch.manual_seed(0)
    layer = Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    race = Race("AdamW", OPTIONS["AdamW"][0], model=layer)
    for _ in range(3):
        race.step(ids_of(1, 2))
    # As all processes have it once they have shared their gradients.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    grad = torch.randn(2, WIDTH, dtype=torch.float64)
    shape = (ROWS, WIDTH)
    race.model.weight.grad = torch.sparse_coo_tensor(
        ids_of(1, 9)[None], grad, shape, check_invariants=True
    )
    race.twin.weight.grad = race.model.weight.grad.to_dense()
    race.ours.step()
    race.theirs.step()
    race.finish()


def test_rows_left_behind_are_shortened_as_what_they_would_be(monkeypatch):
    # Where several processes must shorten the same rows, which is all of them.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layer = Embedding(ROWS, WIDTH, sparse=True, max_norm=1.0, dtype=torch.float64)
    race = Race("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}, model=layer)
    for _ in range(20):
        race.step(torch.randint(0, ROWS, (3,)))
    race.finish()


def test_padding_stays_under_decay_and_momentum():
    torch.manual_seed(0)
    for make in (RowAdamW, RowLion):
        layer = Embedding(9, 2, padding_idx=0, sparse=True)
        layer.set_padding(3.0)
        optimizer = make(layer.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            layer(ids_of(0, 4)).sum().backward()
            optimizer.step()
            assert (layer(ids_of(0)) == 3.0).all()
        assert (layer.state_dict()["weight"][0] == 3.0).all()


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "step", "read", "flush", "save", "eval", "copy"]),
            st.lists(st.integers(0, 7), min_size=1, max_size=3),
        ),
        max_size=25,
    ),
    st.sampled_from(FIRST),
)
def test_whatever_happens_between_steps_the_numbers_are_the_dense_ones(events, case):
    name, options = case
    layer = Embedding(8, 2, sparse=True, dtype=torch.float64)
    race = Race(name, options, model=layer)
    for event, ids in events:
        if event == "step":
            race.step(torch.tensor(ids), tolerance=1e-6)
            continue
        if event == "read":
            got = race.model(torch.tensor(ids))
            close(got.detach(), race.twin.weight[ids].detach(), 1e-6)
        elif event == "flush":
            race.ours.flush()
            close(race.model.weight.detach(), race.twin.weight.detach(), 1e-6)
        elif event == "save":
            race.ours.load_state_dict(race.ours.state_dict())
        elif event == "eval":
            race.model.eval()
            close(race.model.weight.detach(), race.twin.weight.detach(), 1e-6)
        else:
            close(
                copy.deepcopy(race.model).weight.detach(), race.twin.weight.detach(), 1e-6
            )
    race.finish(1e-6)


def message(row):
    return (
        f"row {row} was read before it was brought up to date; look it up through "
        'firstlayer.torch.Embedding, pass the model, or use mode="lazy"'
    )


@pytest.mark.rejects
def test_a_row_that_was_read_too_early_is_named_and_nothing_is_changed():
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
    (layer(ids_of(3, 17)).sum() + other.sum()).backward()
    before = copy.deepcopy([
        layer.weight.detach(),
        other,
        optimizer.state[other]["exp_avg"],
    ])
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert str(error.value) == message(17)
    after = layer.weight.detach(), other, optimizer.state[other]["exp_avg"]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    # The same through a head that reads the table itself: its first row was behind.
    optimizer.zero_grad()
    (layer.weight @ other).sum().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert str(error.value) == message(0)
    optimizer.flush()
    optimizer.step()


@pytest.mark.rejects
def test_what_cannot_be_is_refused():
    layer = Embedding(5, 2, sparse=True)
    parameters = list(layer.parameters())

    def refuse(match, **options):
        make = options.pop("make", RowAdamW)
        with pytest.raises(ValueError, match=match):
            make(options.pop("params", parameters), **options)

    refuse("mode must be 'exact' or 'lazy', got 'fast'", mode="fast")
    refuse(r"weight_decay must be 0 in mode=.exact. for Adam", make=RowAdam, weight_decay=1)
    refuse("differentiable must be False", differentiable=True)
    refuse(r"bfloat16, got \['float32'\]", stochastic_rounding=True)
    groups = [{"params": parameters, "mode": "no"}]
    refuse("mode must be 'exact' or 'lazy', got 'no'", params=groups)
    refuse(r"betas\[0\] must be in \[0, 1\), got 1.5", make=RowLion, betas=(1.5, 0.5))
    cube = nn.Parameter(torch.ones(5, 2, 2))
    cube.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2, 2), (5, 2, 2), check_invariants=True
    )
    with pytest.raises(ValueError, match=r"real and have 2 axes, got float32 \(5, 2, 2\)"):
        RowAdamW([cube]).step()
    across = nn.Parameter(torch.ones(2, 5).T)
    across.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2), (5, 2), check_invariants=True
    )
    with pytest.raises(ValueError, match=r"on the CPU and contiguous, got one on cpu"):
        RowAdamW([across]).step()
    dotted = nn.Parameter(torch.ones(5, 2))
    dotted.grad = torch.eye(5, 2).to_sparse()
    with pytest.raises(ValueError, match="a row gradient has one sparse axis, got 2"):
        RowAdamW([dotted]).step()
    layer(ids_of(1)).sum().backward()
    grad_of(layer.weight)._values().fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients must be finite, got nan"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
