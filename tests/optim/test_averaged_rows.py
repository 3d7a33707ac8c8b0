"""Averages of rows equal averages of whole tables that are updated in every step."""

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import firstlayer.torch.optim
from firstlayer import RowGradient
from firstlayer.numpy import Embedding, EmbeddingLayer
from firstlayer.optim import AveragedRows, RowAdam, RowAdamW, RowSGD, missed_steps
from firstlayer.optim import row_average as row_average_module
from firstlayer.torch import Embedding as TorchEmbedding
from firstlayer.torch._tensors.row_parameter import without_catch_up
from firstlayer.torch.optim import AveragedRows as TorchAveragedRows
from firstlayer.torch.optim import RowAdamW as TorchRowAdamW
from firstlayer.torch.optim import operator_state, row_optimizer, stale_tensors
from tests.support.optim_cases import (
    OPTIONS,
    ROWS,
    WIDTH,
    assert_close,
    copy_options,
    dense,
    draw_ids,
    scheduler,
)

CASES = [
    (name, options, (1, 3)[index % 2])
    for index, (name, options) in enumerate(
        (name, options) for name, choices in OPTIONS.items() for options in choices
    )
]

CHOICES = {True: lambda parameter: True, False: lambda parameter: False}


class TorchPair:
    """A table and a head under a row optimizer, and the same densely, both averaged."""

    def __init__(self, name, options, *, steps=300):
        torch.manual_seed(0)
        self.name, self.options = name, options
        self.table = TorchEmbedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.optimizer: Any = getattr(firstlayer.torch.optim, f"Row{name}")(
            self.table, **options
        )
        self.averaged = TorchAveragedRows(self.optimizer, decay=0.9)
        start = self.table.weight.detach().clone()
        self.twin: Any = torch.nn.Embedding.from_pretrained(start, freeze=False)
        self.theirs = dense(name, self.twin.parameters(), **options)
        self.scheduler = scheduler("one-cycle", self.theirs, steps)
        self.decay = 0.9

        def average_all(averages, weights, _):
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, 1 - self.decay)

        self.reference: Any = AveragedModel(
            self.twin, multi_avg_fn=torch.no_grad()(average_all)
        )
        self.rng = np.random.default_rng(0)
        self.draw = draw_ids("zipf", self.rng)
        self.sign = -1 if options.get("maximize") else 1

    def step(self):
        ids, goal = torch.from_numpy(self.draw()), self.rng.standard_normal(WIDTH)
        for group in self.optimizer.param_groups:
            copy_options(self.theirs, group)
        for layer, optimizer in ((self.table, self.optimizer), (self.twin, self.theirs)):
            optimizer.zero_grad()
            distance = layer(ids) - torch.from_numpy(goal)
            (self.sign * 0.5 * distance.square().sum()).backward()
            optimizer.step()
        self.scheduler.step()

    def update(self, decay=0.9):
        self.averaged.decay = self.decay = decay
        self.averaged.update_parameters()
        self.reference.update_parameters(self.twin)

    def check(self, tolerance, label=""):
        want = self.reference.module.weight.detach()
        got = self.averaged.lookup(self.table.weight, torch.arange(ROWS))
        assert_close(got, want, tolerance, label)

    def take(self, steps, every, tolerance):
        """Take steps and update the averages, and compare them along the way."""
        for step in range(steps):
            self.step()
            if step % every == every - 1:
                self.update(decay=0.9 + 0.09 * np.sin(step / 40))
            if step % 25 == 24:
                self.check(tolerance, f"step {step}")
            if step == steps // 2:
                self.resume()

    def resume(self):
        """Continue with new objects that load the states of the old ones."""
        saved = copy.deepcopy([
            self.table.state_dict(),
            self.optimizer.state_dict(),
            self.averaged.state_dict(),
        ])
        self.table = TorchEmbedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.optimizer = type(self.optimizer)(self.table, **self.options)
        self.averaged = TorchAveragedRows(self.optimizer, decay=0.5)
        owners = self.table, self.optimizer, self.averaged
        for owner, state in zip(owners, saved, strict=True):
            owner.load_state_dict(state)


def tolerance_of(name, options):
    return 1e-6 if options.get("eps", 0) > 1e-5 and "Adam" in name else 1e-9


@pytest.fixture
def operators(monkeypatch):
    """Update every table by operators, in chunks of two rows."""
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: False)
    monkeypatch.setattr(stale_tensors, "CPU_CHUNK", 2 * WIDTH)


@pytest.mark.parametrize("name, options, every", CASES)
def test_averages_equal_those_of_averaged_model(name, options, every):
    pair, tolerance = TorchPair(name, options), tolerance_of(name, options)
    pair.take(210, every, tolerance)
    assert_close(
        pair.averaged.average(pair.table.weight),
        pair.reference.module.weight.detach(),
        tolerance,
    )
    assert pair.averaged.n_averaged == pair.reference.n_averaged == 210 // every
    assert_close(pair.table.state_dict()["weight"], pair.twin.weight.detach(), tolerance)


@pytest.mark.parametrize("reads_values", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_averages_by_operators(name, reads_values, operators, monkeypatch):
    if not reads_values:
        # As on a device whose values are not read.
        for module in (operator_state, stale_tensors):
            monkeypatch.setattr(module, "is_plain_cpu", lambda *tensors: False)
    for options in OPTIONS[name][-1:] if reads_values else OPTIONS[name][:1]:
        pair, tolerance = TorchPair(name, options), tolerance_of(name, options)
        pair.take(75, 2 if reads_values else 1, tolerance)
        state = pair.optimizer.table_state_of(pair.table.weight)
        assert isinstance(state, operator_state.OperatorState)
        before = pair.table.weight.data_ptr(), state.row_steps.clone()
        pair.check(tolerance)
        assert torch.equal(state.row_steps, before[1])
        assert_close(
            pair.averaged.average(pair.table.weight),
            pair.reference.module.weight.detach(),
            tolerance,
        )
        with pair.averaged.swapped():
            pair.check(tolerance)
            with pytest.raises(ValueError, match="a step must not be taken while averages"):
                pair.step()
        assert_close(pair.table.weight.detach(), pair.twin.weight.detach(), tolerance)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_averages_follow_a_table_to_operators_and_back(name, monkeypatch):
    pair = TorchPair(name, OPTIONS[name][-1])
    for by_kernels in (True, False, True, False):
        monkeypatch.setattr(row_optimizer, "trains_by_kernels", CHOICES[by_kernels])
        for _ in range(6):
            pair.step()
            pair.update()
            pair.check(1e-9, f"by kernels: {by_kernels}")


def test_averages_follow_steps_of_static_size(operators):
    pair = TorchPair("AdamW", {"lr": 0.1, "weight_decay": 0.3})
    step = pair.optimizer.row_step(pair.table.weight)
    for number in range(30):
        ids = torch.from_numpy(pair.draw())
        copy_options(pair.theirs, pair.optimizer.param_groups[0])
        pair.theirs.zero_grad()
        pair.twin(ids).square().sum().backward()
        pair.theirs.step()
        step(ids, 2 * step.lookup(ids))
        if number % 3 == 0:
            pair.update()
        pair.check(1e-9, f"step {number}")


@pytest.mark.parametrize("by_kernels", [True, False])
def test_rows_that_are_written_keep_the_averages_of_the_old_values(by_kernels, monkeypatch):
    """SGD leaves no weight stale, but averages of rows are pending."""
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", CHOICES[by_kernels])
    pair = TorchPair("SGD", {"lr": 0.1})
    for number in range(12):
        pair.step()
        pair.update()
        with torch.no_grad():
            for layer in (pair.table, pair.twin):
                layer.weight[number] = 0.1 * number
    pair.check(1e-12)


def test_written_rows_of_numpy_layers_keep_their_averages():
    layer, rng = (
        Embedding(9, 3, dtype="float64", max_norm=1.0, rng=0),
        np.random.default_rng(0),
    )
    optimizer = RowSGD(layer, lr=0.1)
    averaged, want = AveragedRows(optimizer, decay=0.8), None
    for number in range(8):
        trained(layer, optimizer, rng, averaged)
        want = layer.weight.copy() if want is None else 0.8 * want + 0.2 * layer.weight
        layer.project([number])
    assert_close(averaged.lookup("weight", np.arange(9)), want, 1e-12)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_averages_stay_exact_when_the_history_is_full(name, monkeypatch):
    monkeypatch.setattr(missed_steps, "MAX_STEPS", 21)
    monkeypatch.setattr(row_average_module, "MAX_STEPS", 21)
    pair = TorchPair(name, OPTIONS[name][-2])
    for step in range(80):
        pair.step()
        pair.update()
        pair.check(1e-9, f"step {step}")


def trained(layer, optimizer, rng, *averages):
    """Take a step and update the averages."""
    y, pull = layer.vjp(rng.integers(0, layer.num_embeddings, 3))
    optimizer.step(pull(y - rng.standard_normal(y.shape).astype(y.dtype)))
    for average in averages:
        average.update_parameters()


@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_two_averages_of_one_table_equal_averages_of_the_flushed_table(mode):
    layer, rng = Embedding(20, 3, dtype="float64", rng=0), np.random.default_rng(0)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.3, mode=mode)
    fast, slow = AveragedRows(optimizer, decay=0.5), AveragedRows(optimizer, decay=0.99)
    want: list[Any] = [None, None]
    for step in range(60):
        trained(layer, optimizer, rng, fast, *([slow] if step % 2 else []))
        # The same rows, out of place.
        weight = optimizer.table_states["weight"].caught_up_rows(np.arange(20))
        for i, decay in enumerate((0.5, 0.99)):
            if i == 0 or step % 2:
                old = want[i]
                want[i] = weight if old is None else decay * old + (1 - decay) * weight
    for average, expected in zip((fast, slow), want, strict=True):
        assert_close(average.lookup("weight", np.arange(20)), expected, 1e-10)
        assert_close(average.average("weight"), expected, 1e-10)


def test_catching_up_between_steps_and_updates_changes_no_average():
    layers = [Embedding(20, 3, dtype="float64", rng=0) for _ in range(2)]
    optimizers = [RowAdamW(layer, lr=0.1, weight_decay=0.3) for layer in layers]
    averages = [AveragedRows(optimizer, decay=0.9) for optimizer in optimizers]
    order = np.random.default_rng(1)
    for step in range(40):
        for i, (layer, optimizer) in enumerate(zip(layers, optimizers, strict=True)):
            rng = np.random.default_rng(step)
            trained(layer, optimizer, rng, averages[i])
        calls = optimizers[1].flush, averages[1].state_dict
        calls = *calls, lambda: layers[1]([1, 2])
        for number in order.permutation(3):
            calls[number]()
        if step % 7 == 0:
            for average in averages:
                average.update_parameters()
        one, two = (average.lookup("weight", np.arange(20)) for average in averages)
        assert_close(two, one, 1e-9, f"step {step}")


def test_all_parameters_of_a_layer_are_averaged():
    layer = EmbeddingLayer(20, 4, max_positions=9, layer_norm=True, dtype="float64", rng=0)
    optimizer, rng = RowAdam(layer, lr=0.05), np.random.default_rng(0)
    averaged, want = AveragedRows(optimizer, decay=0.8), {}
    for _ in range(30):
        y, pull = layer.vjp(rng.integers(0, 20, (2, 3)), offset=int(rng.integers(0, 6)))
        optimizer.step(pull(y - rng.standard_normal(y.shape)))
        averaged.update_parameters()
        for name, value in copy.deepcopy(layer).parameters().items():
            want[name] = 0.8 * want.get(name, value) + 0.2 * value
    for name, value in want.items():
        assert averaged.average(name).shape == value.shape
        assert_close(averaged.average(name), value, 1e-10, name)


def test_averages_of_half_precision_tables_are_float32():
    layer = Embedding(9, 4, dtype=ml_dtypes.bfloat16, rng=0)
    optimizer, rng = RowSGD(layer, lr=0.1), np.random.default_rng(0)
    averaged, want = AveragedRows(optimizer, decay=0.99), None
    for _ in range(40):
        grad = rng.standard_normal((2, 4)).astype(np.float32)
        optimizer.step({"weight": RowGradient(np.array([1, 4]), grad)})
        averaged.update_parameters()
        weight = layer.weight.astype(np.float64)
        want = weight if want is None else 0.99 * want + 0.01 * weight
    assert averaged.average("weight").dtype == np.float32
    assert_close(averaged.average("weight"), want, 1e-5)


def test_lookup_of_averages_writes_nothing():
    layer, rng = Embedding(20, 3, rng=0), np.random.default_rng(0)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.3)
    averaged = AveragedRows(optimizer, decay=0.9)
    for _ in range(10):
        trained(layer, optimizer, rng, averaged)
    state = optimizer.table_states["weight"]
    before = copy.deepcopy((layer.weight, state.state, state.row_steps))
    rows = averaged.lookup("weight", np.array([[3, 0], [3, 19]]))
    np.testing.assert_equal((layer.weight, state.state, state.row_steps), before)
    whole = averaged.average("weight")
    np.testing.assert_allclose(rows, whole[[[3, 0], [3, 19]]], rtol=1e-6)


def test_swapped_averages_are_read_by_layers_and_weights_are_restored():
    layer, rng = Embedding(20, 3, rng=0), np.random.default_rng(0)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.3)
    averaged = AveragedRows(optimizer, decay=0.9)
    for _ in range(10):
        trained(layer, optimizer, rng, averaged)
    want, weight = averaged.average("weight"), layer.state_dict()["weight"]
    with averaged.swapped():
        assert layer(np.arange(20)).tobytes() == want.tobytes()
        grad = {"weight": RowGradient(np.array([1]), np.ones((1, 3), np.float32))}
        with pytest.raises(ValueError, match="a step must not be taken while averages"):
            optimizer.step(grad)
        with pytest.raises(ValueError, match="must not be changed while averages replace"):
            averaged.update_parameters()
    assert layer.weight.tobytes() == weight.tobytes()
    optimizer.step(grad)


def test_swapped_averages_in_torch():
    table, head = TorchEmbedding(9, 3, sparse=True), torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(table, head)
    optimizer = TorchRowAdamW(model, lr=0.1, weight_decay=0.3)
    averaged = TorchAveragedRows(optimizer, decay=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.tensor([step, 2])).square().sum().backward()
        optimizer.step()
        averaged.update_parameters()
    ids = torch.arange(9)
    averages = [averaged.average(p) for p in model.parameters()]
    before = model(ids)
    with averaged.swapped():
        torch.testing.assert_close(table(ids), averages[0], rtol=0, atol=0)
        want = torch.nn.functional.linear(averages[0], averages[1], averages[2])
        torch.testing.assert_close(model(ids), want, rtol=0, atol=0)
    torch.testing.assert_close(model(ids), before, rtol=0, atol=0)


@pytest.mark.rejects
def test_invalid_arguments_raise_and_change_nothing():
    layer = Embedding(5, 2, rng=0)
    optimizer = RowSGD(layer, lr=0.1)
    with pytest.raises(ValueError, match="decay must be from 0 to 1, got 1.5"):
        AveragedRows(optimizer, decay=1.5)
    with pytest.raises(TypeError, match="^optimizer must be a row opt.*, got Embedding$"):
        AveragedRows(layer)  # pyright: ignore
    with pytest.raises(TypeError, match="^optimizer must be a row optimizer, got Adam$"):
        TorchAveragedRows(torch.optim.Adam([torch.zeros(2)]))  # pyright: ignore
    averaged = AveragedRows(optimizer, decay=0.5)
    averaged.update_parameters()
    averaged.decay = -1
    with pytest.raises(ValueError, match="decay must be from 0 to 1, got -1"):
        averaged.update_parameters()
    with pytest.raises(ValueError, match=r"name must be one of \['weight'\], got 'w'"):
        averaged.average("w")
    with pytest.raises(IndexError, match=r"ids\[0\] is 5, but num_embeddings is 5"):
        averaged.lookup("weight", [5])  # pyright: ignore
    with pytest.raises(ValueError, match=r"weight must have shape \(5, 2\), got \(4, 2\)"):
        averaged.load_state_dict({"weight": np.zeros((4, 2)), "n_averaged": np.array(3)})
    with pytest.raises(TypeError, match="weight must be real, got complex128"):
        averaged.load_state_dict({
            "weight": np.zeros((5, 2), complex),
            "n_averaged": np.array(3),
        })
    with pytest.raises(ValueError, match="state must have"):
        averaged.load_state_dict({"weight": np.zeros((5, 2))})
    assert averaged.n_averaged == 1
    assert (averaged.average("weight") == layer.weight).all()
    ours = TorchAveragedRows(TorchRowAdamW(TorchEmbedding(5, 2, sparse=True)))
    with pytest.raises(ValueError, match=r"averages must have the shapes \[\(5, 2\)\]"):
        ours.load_state_dict({"n_averaged": 1, "averages": [torch.zeros(4, 2)]})
    with pytest.raises(ValueError, match="state_dict must have averages and n_averaged"):
        ours.load_state_dict({})
    with pytest.raises(ValueError, match="the parameter must be one of the optimizer's"):
        ours.average(torch.nn.Parameter(torch.zeros(5, 2)))


@pytest.mark.rejects
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("by_operators", [False, True])
def test_lookups_of_averages_and_compiled_steps_refuse_ids_that_are_no_rows(
    steps, by_operators
):
    layer = TorchEmbedding(5, 2, sparse=True)
    optimizer, weight = TorchRowAdamW(layer), layer.weight
    averaged = TorchAveragedRows(optimizer)
    lookups = [lambda ids: averaged.lookup(weight, ids)]
    if by_operators:
        step = optimizer.row_step(weight)
        lookups += [step.lookup, lambda ids: step(ids, torch.ones(*ids.shape, 2))]
    for _ in range(steps):
        layer(torch.tensor([3])).sum().backward()
        optimizer.step()
    averaged.update_parameters()
    before = layer.weight.detach().clone()
    # The numbers of a small unsigned dtype are rows, and not a mask.
    rows = averaged.lookup(weight, torch.tensor([4, 1], dtype=torch.uint8))
    assert torch.equal(rows, before[[4, 1]])
    none = torch.zeros(0, 3, dtype=torch.int64)
    assert torch.equal(averaged.lookup(weight, none), before[none])
    with pytest.raises(IndexError, match=r"ids\[1\] is -1, but num_embeddings is 5"):
        averaged.lookup(weight, torch.tensor([3, -1]))
    for ids in (torch.tensor([1.7]), torch.tensor([True, False])):
        kind = str(ids.dtype).removeprefix("torch.")
        for lookup in lookups:
            with pytest.raises(TypeError, match=f"ids must be integers, got {kind}"):
                lookup(ids)
    assert torch.equal(layer.weight, before)


def check_failed_update(averaged, lookups, *, error):
    """An update that raises an error changes no average."""
    before, count = [lookup() for lookup in lookups], averaged.n_averaged
    with pytest.raises(ValueError, match=error):
        averaged.update_parameters()
    assert averaged.n_averaged == count
    for lookup, want in zip(lookups, before, strict=True):
        assert (lookup() == want).all()


@pytest.mark.rejects
def test_an_update_that_fails_for_one_table_changes_no_average(monkeypatch):
    for module in (missed_steps, row_average_module):
        monkeypatch.setattr(module, "MAX_STEPS", 4)
    layer = EmbeddingLayer(9, 4, max_positions=5, dtype="float64", rng=0)
    optimizer, rng = RowAdamW(layer, lr=0.1, weight_decay=0.3), np.random.default_rng(0)
    averaged = AveragedRows(optimizer, decay=0.8)
    for _ in range(2):
        y, pull = layer.vjp(rng.integers(0, 9, (2, 3)))
        optimizer.step(pull(y))
        averaged.update_parameters()
    states = optimizer.table_states
    # The next update has to write to every table.
    assert len(states) == 2 and all(state.missed.is_full for state in states.values())
    lookups = [
        lambda name=name, state=state: averaged.lookup(name, np.arange(state.shape[0]))
        for name, state in states.items()
    ]
    last = list(states.values())[-1].table()
    last.flags.writeable = False
    check_failed_update(averaged, lookups, error="must be writable to be trained")
    last.flags.writeable = True
    averaged.update_parameters()
    assert [average.count for average in averaged._averages().values()] == [3, 3]


@pytest.mark.rejects
@pytest.mark.parametrize("by_kernels", [True, False])
def test_an_update_that_fails_for_one_parameter_changes_no_average(by_kernels, monkeypatch):
    for module in (missed_steps, row_average_module):
        monkeypatch.setattr(module, "MAX_STEPS", 4)
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", CHOICES[by_kernels])
    torch.manual_seed(0)
    tables = [TorchEmbedding(9, 3, sparse=True) for _ in range(2)]
    head = torch.nn.Linear(3, 2)
    model = torch.nn.ModuleList([*tables, head])
    optimizer = TorchRowAdamW(model, lr=0.1, weight_decay=0.3)
    averaged = TorchAveragedRows(optimizer, decay=0.8)
    for step in range(2):
        optimizer.zero_grad()
        ids = torch.tensor([step, 2])
        sum(head(table(ids)).square().sum() for table in tables).backward()  # pyright: ignore
        optimizer.step()
        averaged.update_parameters()
    last = tables[1].weight
    lookups = [
        lambda weight=table.weight: averaged.lookup(weight, torch.arange(9))
        for table in tables
    ]
    lookups += [lambda p=p: averaged._tensor(p).clone() for p in head.parameters()]
    before = [lookup() for lookup in lookups]
    # The memory of the last table is freed, as FSDP does. Every row has to catch up.
    with without_catch_up():
        memory, size = last.data.clone(), last.untyped_storage().nbytes()
        last.untyped_storage().resize_(0)
    check_failed_update(averaged, lookups[:1] + lookups[2:], error="must have its memory")
    with without_catch_up():
        last.untyped_storage().resize_(size)
        last.data.copy_(memory)
    # Another shape of the last parameter.
    bias, head.bias.data = head.bias.data, torch.zeros(5)
    error = r"a parameter must keep the shape \(2,\) of its average, got \(5,\)"
    check_failed_update(averaged, lookups, error=error)
    head.bias.data = bias
    for lookup, want in zip(lookups, before, strict=True):
        torch.testing.assert_close(lookup(), want)
    averaged.update_parameters()
    assert [averaged._of(p).count for p in model.parameters()] == [3] * 4


KEPT = [(range(9), 3), (range(5), 0), ([7, 2, 5], 2)]


def resized_mean(mean, kept, added):
    """Return averages of kept rows, and the weights of new rows."""
    return np.concatenate([mean[list(kept)], added])


@pytest.mark.parametrize("kept, new_rows", KEPT)
@pytest.mark.parametrize("mode", ["exact", "lazy"])
@pytest.mark.parametrize("is_attached", [True, False])
def test_averages_follow_rows_that_are_resized(kept, new_rows, mode, is_attached):
    rng = np.random.default_rng(0)
    layer = Embedding(9, 2, dtype="float64", rng=0)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.3, mode=mode)
    averaged, late = (AveragedRows(optimizer, decay=decay) for decay in (0.7, 0.4))
    mean, late_mean = np.zeros((9, 2)), np.zeros((0, 2))

    def step():
        nonlocal mean
        trained(layer, optimizer, rng, averaged)
        decay = 0.7 if averaged.n_averaged > 1 else 0.0
        mean = decay * mean + (1 - decay) * copy.deepcopy(layer).weight

    for _ in range(8):
        step()
    if not is_attached:
        # The state of the optimizer is new, and knows the average from its next update.
        optimizer.load_state_dict(optimizer.state_dict())
    added = rng.standard_normal((new_rows, 2))
    layer.weight = np.concatenate([layer.weight[list(kept)], added])
    optimizer.resize_rows("weight", kept, new_rows)
    mean = resized_mean(mean, kept, added)
    assert_close(averaged.average("weight"), mean, 1e-9)
    late.update_parameters()
    late_mean = layer.weight.copy()
    for _ in range(8):
        step()
    assert_close(averaged.average("weight"), mean, 1e-9)
    assert_close(late.average("weight"), late_mean, 1e-9)
    averaged.load_state_dict(averaged.state_dict())
    with averaged.swapped():
        assert_close(layer.weight, mean, 1e-9)


@pytest.mark.parametrize("kept, new_rows", KEPT)
@pytest.mark.parametrize("kind", ["kernels", "operators", "dense"])
def test_averages_follow_parameters_that_are_resized(kept, new_rows, kind, monkeypatch):
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", CHOICES[kind == "kernels"])
    torch.manual_seed(0)
    table = TorchEmbedding(9, 2, sparse=kind != "dense", dtype=torch.float64)
    weight = table.weight
    optimizer = TorchRowAdamW(table.parameters(), lr=0.1, weight_decay=0.3)
    averaged = TorchAveragedRows(optimizer, decay=0.7)
    mean = np.zeros((9, 2))

    def step():
        nonlocal mean
        optimizer.zero_grad()
        table(torch.randint(0, table.num_embeddings, (3,))).square().sum().backward()
        optimizer.step()
        averaged.update_parameters()
        decay = 0.7 if averaged.n_averaged > 1 else 0.0
        mean = decay * mean + (1 - decay) * copy.deepcopy(table).weight.detach().numpy()

    for _ in range(8):
        step()
    added = torch.randn(new_rows, 2, dtype=torch.float64)
    weight.grad = None
    weight.data = torch.cat([weight.data[list(kept)], added])
    table.num_embeddings = len(weight)
    optimizer.resize_rows(weight, kept, new_rows)
    mean = resized_mean(mean, kept, added)
    assert_close(averaged.average(weight), mean, 1e-9)
    for _ in range(8):
        step()
    assert_close(averaged.average(weight), mean, 1e-9)
    with averaged.swapped():
        assert_close(weight.detach(), mean, 1e-9)


@pytest.mark.rejects
def test_a_table_is_not_resized_while_averages_replace_its_weights():
    layer, table = Embedding(5, 2, rng=0), TorchEmbedding(5, 2, sparse=True)
    optimizer, theirs = RowAdamW(layer), TorchRowAdamW(table)
    table(torch.tensor([1])).sum().backward()
    theirs.step()
    averages = AveragedRows(optimizer), TorchAveragedRows(theirs)
    for each, averaged in zip((layer, table), averages, strict=True):
        before = each(np.arange(5) if each is layer else torch.arange(5))
        averaged.update_parameters()
        with averaged.swapped():
            message = "a table must not be resized while averages replace the weights"
            with pytest.raises(ValueError, match=message):
                each.resize(7)
        after = each(np.arange(5) if each is layer else torch.arange(5))
        assert (before == after).all()
        changes = each.resize(7)
        assert changes.added == range(5, 7)
    optimizer.resize_rows("weight", range(5), 2)
    theirs.resize_rows(table.weight, range(5), 2)
    assert averages[0].average("weight").shape == (7, 2)
    assert averages[1].average(table.weight).shape == (7, 2)


@pytest.mark.rejects
@pytest.mark.parametrize("steps", [0, 1])
def test_rows_are_not_reset_while_averages_replace_their_weights(steps):
    table = TorchEmbedding(5, 2, sparse=True)
    optimizer = TorchRowAdamW(table)
    for _ in range(steps):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    averaged = TorchAveragedRows(optimizer)
    averaged.update_parameters()
    message = "rows must not be reset while averages replace the weights"
    with averaged.swapped(), pytest.raises(ValueError, match=message):
        optimizer.reset_rows(table.weight, [1])
    optimizer.reset_rows(table.weight, [1])
