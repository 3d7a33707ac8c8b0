"""Row optimizers by torch operators, as on accelerators, run on the CPU."""

import copy
import itertools
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import firstlayer.optim.missed_steps
import firstlayer.torch.optim
from firstlayer.torch import Embedding
from firstlayer.torch.optim import (
    RowAdagrad,
    RowAdamW,
    RowRMSprop,
    RowSGD,
    operator_state,
    row_optimizer,
    stale_tensors,
)
from firstlayer.torch.optim.operator_state import OperatorState
from firstlayer.torch.optim.parameter_state import ParameterState
from firstlayer.torch.optim.row_operators import (
    round_to_bfloat16,
    sum_by_id,
    sum_by_id_static,
    write_rows,
)
from firstlayer.torch.optim.static_step import (
    begin_step,
    end_step,
    new_step_tensors,
    static_step,
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

EVERY_CASE = [(name, each) for name, options in OPTIONS.items() for each in options]
ONE_OF_EACH = [(name, options[-1]) for name, options in OPTIONS.items()]


@pytest.fixture
def operators(monkeypatch):
    """Update every table by operators, in chunks of two rows."""
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: False)
    monkeypatch.setattr(stale_tensors, "CPU_CHUNK", 2 * WIDTH)


@pytest.fixture
def accelerator(operators, monkeypatch):
    """Do what is done on a device whose values are not read."""
    for module in (operator_state, stale_tensors):
        monkeypatch.setattr(module, "is_plain_cpu", lambda *tensors: False)


def new_layer(**arguments) -> Any:
    torch.manual_seed(0)
    return Embedding(ROWS, WIDTH, sparse=True, **{"dtype": torch.float64, **arguments})


def make(name, layer, **options) -> Any:
    return getattr(firstlayer.torch.optim, f"Row{name}")(layer.parameters(), **options)


def state_of(optimizer, parameter) -> Any:
    return optimizer._table_states[parameter]


class Run:
    """A table under a row optimizer, and a twin under the dense optimizer."""

    def __init__(self, name, options, *, layer=None, schedule="constant", steps=1):
        self.layer = new_layer() if layer is None else layer
        self.twin = nn.Parameter(self.layer.weight.detach().clone().double())
        self.ours = make(name, self.layer, **options)
        self.theirs = dense(name, [self.twin], **options)
        both = self.ours, self.theirs
        self.schedulers = [scheduler(schedule, each, steps) for each in both]
        self.sign = -1 if options.get("maximize") else 1

    def goal(self, ids):
        return torch.randn(*ids.shape, WIDTH, dtype=torch.float64)

    def step(self, ids, tolerance=1e-6):
        """Take a step towards a random goal; compare the rows before it."""
        goal, want = self.goal(ids), self.twin[ids]
        got = self.layer(ids)
        assert_close(got.detach(), want.detach(), tolerance)
        for optimizer, y in ((self.ours, got), (self.theirs, want)):
            optimizer.zero_grad()
            (self.sign * 0.5 * (y - goal).square().sum()).backward()
            optimizer.step()
        for each in self.schedulers:
            each.step()

    def finish(self, tolerance=1e-6):
        assert_close(self.layer.weight.detach(), self.twin.detach(), tolerance)
        saved = self.theirs.state[self.twin]
        for name, got in self.ours.state_dict()["state"][0].items():
            if isinstance(saved.get(name), torch.Tensor) and name != "exp_avg":
                assert_close(got, saved[name], tolerance, name)


@pytest.mark.parametrize("number, case", list(enumerate(EVERY_CASE)))
def test_operators_equal_the_dense_optimizer_at_every_step(number, case, operators):
    run = Run(*case, schedule=SCHEDULES[number % len(SCHEDULES)], steps=50)
    draw = draw_ids("zipf" if number % 2 else "uniform", np.random.default_rng(number))
    for _ in range(50):
        run.step(torch.from_numpy(draw()))
    assert isinstance(state_of(run.ours, run.layer.weight), OperatorState)
    run.finish()


@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_devices_that_are_not_waited_for_equal_the_dense_optimizer(
    name, options, accelerator
):
    run = Run(name, options, schedule="one-cycle", steps=50)
    draw = draw_ids("uniform", np.random.default_rng(3))
    for _ in range(50):
        run.step(torch.from_numpy(draw()))
    run.finish()


@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_operators_equal_the_kernels_at_every_step(name, options, monkeypatch):
    layers = [new_layer(dtype=torch.float32) for _ in range(2)]
    optimizers = [make(name, layer, **options) for layer in layers]
    draw, rng = draw_ids("zipf", np.random.default_rng(4)), np.random.default_rng(5)
    for _ in range(50):
        ids = torch.from_numpy(draw())
        goal = torch.from_numpy(rng.standard_normal((ids.numel(), WIDTH))).float()
        outputs = []
        for number, (layer, optimizer) in enumerate(zip(layers, optimizers, strict=True)):
            monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda p, n=number: n)
            optimizer.zero_grad()
            outputs.append(layer(ids))
            (0.5 * (outputs[-1] - goal).square().sum()).backward()
            optimizer.step()
        assert_close(outputs[0].detach(), outputs[1].detach(), 2e-5)
    kinds = [type(state_of(o, p.weight)) for o, p in zip(optimizers, layers, strict=True)]
    assert kinds == [OperatorState, ParameterState]
    ours, theirs = (each.state_dict()["state"][0] for each in optimizers)
    assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"] == 50
    for key, want in theirs.items():
        assert_close(ours[key], want, 2e-5, key)


@pytest.mark.parametrize("layout", ["transposed", "columns of a wider table"])
def test_tables_that_are_not_contiguous_are_trained(layout):
    layer = new_layer()
    wide = torch.zeros(ROWS, WIDTH + 2, dtype=torch.float64)
    table = wide[:, 1:-1] if layout != "transposed" else torch.zeros_like(wide.T)[1:-1].T
    table.copy_(layer.weight.detach())
    assert not table.is_contiguous()
    layer.weight = nn.Parameter(table)
    run = Run("AdamW", OPTIONS["AdamW"][0], layer=layer)
    draw = draw_ids("uniform", np.random.default_rng(6))
    for _ in range(50):
        run.step(torch.from_numpy(draw()))
    assert layer.weight.data_ptr() == table.data_ptr()
    run.finish()
    assert not wide[:, [0, -1]].any()


@pytest.mark.parametrize("name, options", [(n, OPTIONS[n][-1]) for n in ("AdamW", "SGD")])
def test_the_state_follows_a_table_to_another_layout(name, options):
    run, kinds = Run(name, options), []
    draw = draw_ids("uniform", np.random.default_rng(7))
    for layout in ("contiguous", "transposed", "contiguous"):
        weight = run.layer.weight
        # As .to() of a module moves its parameters.
        table = weight.data
        weight.data = (
            table.T.contiguous().T if layout == "transposed" else table.contiguous()
        )
        for _ in range(20):
            run.step(torch.from_numpy(draw()))
        kinds.append(type(state_of(run.ours, weight)))
    assert kinds == [ParameterState, OperatorState, ParameterState]
    run.finish()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_states_are_interchangeable_with_kernels_and_torch(name, monkeypatch):
    options = OPTIONS[name][-1]
    run = Run(name, options)
    run.schedulers = []
    draw = draw_ids("uniform", np.random.default_rng(8))
    for owner in ("operators", "kernels", "torch", "operators"):
        saved = run.ours.state_dict()
        if owner == "torch":
            saved = copy.deepcopy(run.theirs.state_dict())
        by_kernels = owner == "kernels"
        monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda p, k=by_kernels: k)
        weight = run.layer.weight.detach().clone()
        run.layer = Embedding.from_pretrained(weight, freeze=False, sparse=True)
        run.ours = make(name, run.layer, **options)
        run.ours.load_state_dict(saved)
        for _ in range(15):
            run.step(torch.from_numpy(draw()))
    run.finish()


def test_tied_head_updates_every_row_by_operators(operators):
    run = Run("AdamW", OPTIONS["AdamW"][2])
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    for number in range(20):
        ids = torch.randint(0, ROWS, (4,))
        if number % 3:
            run.step(ids)
            continue
        for optimizer, weight in ((run.ours, run.layer.weight), (run.theirs, run.twin)):
            optimizer.zero_grad()
            (x @ weight.T).square().sum().backward()
        if number == 0:
            run.layer.weight.grad = run.layer.weight.grad.to_sparse(1)
        with pytest.warns(UserWarning) if number == 3 else nullcontext():
            run.ours.step()
        run.theirs.step()
    run.finish()


LOOKUPS = ("once", "twice", "with padding", "without a step", "state is reset")


@pytest.mark.parametrize("lookups", LOOKUPS)
def test_state_that_lookups_leave_to_the_step_is_written(lookups, operators):
    run = Run("AdamW", OPTIONS["AdamW"][0])
    state = None
    for number in range(20):
        # None of the rows is in the batch before.
        ids = (torch.tensor([5, 1, 8, 3, 0, 7]) + 9 * number) % ROWS
        if state is not None:
            run.layer(ids)
            # Most rows are stale, and their state is in memory of its own.
            assert state._deferred is not None
            if lookups in ("twice", "with padding"):
                # Rows that get no gradient, and for "twice" some that do.
                run.layer(ids[4:] if lookups == "twice" else (ids + 1) % ROWS)
            elif lookups == "without a step" and number % 3 == 0:
                run.layer((ids + 3) % ROWS)
                assert_close(run.layer.weight.detach(), run.twin.detach(), 1e-6)
                assert state._deferred is None
            elif lookups == "state is reset" and number == 10:
                for key in ("exp_avg", "exp_avg_sq"):
                    run.ours.state[run.layer.weight][key][ids] = 0.0
                    run.theirs.state[run.twin][key][ids] = 0.0
        run.step(ids)
        state = state_of(run.ours, run.layer.weight)
        assert state._deferred is None
    run.finish()


@pytest.mark.parametrize("name, options", ONE_OF_EACH)
@pytest.mark.parametrize("num_fresh", [0, 1, 5, 18])
def test_lookups_of_stale_and_fresh_rows_equal_the_dense_optimizer(
    num_fresh, name, options, operators
):
    run = Run(name, options)
    for start in (0, 20 - num_fresh, 7, 1):
        run.step(torch.arange(start, start + 20))
    run.finish()


def test_grad_scaler_skips_steps_with_infinite_gradients(operators):
    run = Run("AdamW", OPTIONS["AdamW"][0], layer=new_layer(dtype=torch.float32))
    run.twin = nn.Parameter(run.layer.weight.detach().clone())
    run.theirs = dense("AdamW", [run.twin], **OPTIONS["AdamW"][0])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for number in range(12):
        ids, goal = torch.randint(0, ROWS, (4,)), torch.randn(4, WIDTH)
        factor = math.inf if number % 4 == 2 else 1.0
        outputs = run.layer(ids), run.twin[ids]
        assert_close(outputs[0].detach(), outputs[1].detach(), 1e-5)
        both = zip(scalers, (run.ours, run.theirs), outputs, strict=True)
        for scaler, optimizer, y in both:
            optimizer.zero_grad()
            scaler.scale(factor * (y - goal).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 1.0
    assert run.ours.state_dict()["state"][0]["step"] == 9
    assert_close(run.layer.weight.detach(), run.twin.detach(), 1e-5)


@pytest.mark.parametrize("rounding", [False, True])
def test_bfloat16_tables_are_upcast_and_repeated_runs_are_equal(rounding, operators):
    options: Any = {"lr": 1e-3, "weight_decay": 0.1}
    weights = []
    for _ in range(2):
        layer = new_layer(dtype=torch.bfloat16)
        exact = nn.Parameter(layer.weight.detach().double())
        optimizer = RowAdamW(layer.parameters(), stochastic_rounding=rounding, **options)
        theirs = torch.optim.AdamW([exact], **options)
        for _ in range(300):
            layer(torch.arange(0, ROWS, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            exact.grad = torch.zeros_like(exact)
            exact.grad[::2] = 1
            theirs.step()
        weights.append(layer.weight.detach().clone())
    assert torch.equal(*weights)
    error = (weights[0].double() - exact.detach()).mean().abs()
    # Steps of 0.001 are too small for weights near 1 that are rounded to nearest.
    assert error < 5e-3 if rounding else error > 2e-2
    assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.float32


def test_stochastic_rounding_keeps_the_mean_and_special_values():
    x = torch.full((100_000,), 1 + 1 / 512)
    rounded = round_to_bfloat16(x).double()
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    assert abs(rounded.mean() - (1 + 1 / 512)) < 1e-4
    special = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, -2.0])
    special[5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    got = round_to_bfloat16(special)
    torch.testing.assert_close(got, special.bfloat16(), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=50)
@given(st.lists(st.integers(-2, 6), min_size=1, max_size=9))
def test_sums_by_id_equal_index_add(ids):
    index = torch.tensor(ids)
    values = torch.arange(3.0 * len(ids), dtype=torch.float64).view(-1, 3) ** 2
    valid = index >= 0
    want = torch.zeros(7, 3, dtype=torch.float64)
    want.index_add_(0, index[valid], values[valid])
    rows, sums = sum_by_id_static(index, values)
    assert rows.shape == index.shape
    if not valid.any():
        assert rows.tolist() == [-1] * len(ids)
        return
    assert set(rows.tolist()) == set(index[valid].tolist())
    assert torch.equal(sums, want[rows])
    rows, sums = sum_by_id(index[valid], values[valid])
    assert rows.tolist() == sorted(set(index[valid].tolist()))
    assert torch.equal(sums, want[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(max_examples=40)
@given(
    start=st.integers(0, 9),
    width=st.integers(1, 17),
    rest=st.integers(0, 9),
    is_transposed=st.booleans(),
)
def test_written_rows_equal_indexed_assignment(dtype, start, width, rest, is_transposed):
    shape = 6, start + width + rest
    wide = torch.arange(math.prod(shape)).view(shape).to(dtype)
    wide = wide.T.contiguous().T if is_transposed else wide
    want, ids = wide.clone(), torch.tensor([4, 0, 3])
    values = -torch.arange(1.0, 3 * width + 1).view(3, width)
    values[0, 0] = math.nan
    write_rows(wide[:, start : start + width], ids, values)
    want[ids, start : start + width] = values.to(dtype)
    torch.testing.assert_close(wide, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("short_history", [True, False])
@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_compiled_steps_equal_the_dense_optimizer(
    name, options, short_history, monkeypatch
):
    if short_history:
        monkeypatch.setattr(firstlayer.optim.missed_steps, "MAX_STEPS", 7)
    graphs = []
    # Functions of earlier cases are compiled from the same code.
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        # Eager execution of the traced graph.
        return graph.forward

    run = Run(name, options, schedule="one-cycle", steps=50)
    step = run.ours.row_step(run.layer.weight)

    @torch.compile(fullgraph=True, backend=backend, dynamic=False)
    def train(ids, goal, sign):
        y = step.lookup(ids)
        step(ids, sign * (y - goal) * (ids >= 0)[:, None])
        return y

    draw = draw_ids("uniform", np.random.default_rng(9))
    sign = torch.tensor(float(run.sign), dtype=torch.float64)
    for number in range(50):
        ids = torch.from_numpy(draw())
        # Batches of different lengths are padded with −1.
        ids[: number % 3] = -1
        ids = torch.full_like(ids, -1) if number == 20 else ids
        goal = run.goal(ids)
        got = train(ids, goal, sign)
        kept = ids >= 0
        want = run.twin[ids[kept]]
        assert_close(got[kept], want.detach(), 1e-6)
        run.theirs.zero_grad()
        (run.sign * 0.5 * (want - goal[kept]).square().sum()).backward()
        run.theirs.step()
        for each in run.schedulers:
            each.step()
    run.finish()
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_compiles_one_graph_without_copies_of_the_table():
    from torch._inductor.utils import run_and_get_code

    layer = Embedding(4001, 8, sparse=True)
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    step = optimizer.row_step(layer.weight)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    twin = nn.Parameter(layer.weight.detach().clone())
    theirs = torch.optim.AdamW([twin], lr=0.1)
    schedules = [schedule, torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 20)]

    @torch.compile(fullgraph=True, dynamic=False)
    def train(ids, goal):
        y = step.lookup(ids)
        step(ids, y - goal)

    codes = []
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for number in range(20):
        ids, goal = torch.randint(0, 4001, (6,)), torch.randn(6, 8)
        if number == 0:
            _, codes = run_and_get_code(train, ids, goal)
        else:
            train(ids, goal)
        theirs.zero_grad()
        (0.5 * (twin[ids] - goal).square().sum()).backward()
        theirs.step()
        for each in schedules:
            each.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert_close(layer.weight.detach(), twin.detach(), 1e-5)
    assert not any("empty_strided_cpu((4001" in code for code in codes)


def test_row_step_and_step_alternate_and_follow_a_loaded_state():
    run = Run("AdamW", OPTIONS["AdamW"][0])
    draw = draw_ids("uniform", np.random.default_rng(10))
    for _ in range(5):
        run.step(torch.from_numpy(draw()))
    assert isinstance(state_of(run.ours, run.layer.weight), ParameterState)
    step = run.ours.row_step(run.layer.weight)
    for number in range(20):
        ids = torch.from_numpy(draw())
        if number % 2:
            run.step(ids)
            continue
        if number == 10:
            run.ours.load_state_dict(copy.deepcopy(run.ours.state_dict()))
        goal = run.goal(ids)
        step(ids, step.lookup(ids) - goal)
        run.theirs.zero_grad()
        (0.5 * (run.twin[ids] - goal).square().sum()).backward()
        run.theirs.step()
    assert run.ours.row_step(run.layer.weight) is step
    run.finish()


@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_row_step_continues_from_a_table_that_was_read_whole(name, options):
    run = Run(name, options)
    draw = draw_ids("uniform", np.random.default_rng(12))
    for _ in range(5):
        run.step(torch.from_numpy(draw()))
    # Every row catches up, as in a state dict.
    assert_close(run.layer.weight.detach(), run.twin.detach(), 1e-6)
    step = run.ours.row_step(run.layer.weight)
    for _ in range(3):
        rows = step.lookup(torch.arange(ROWS))
        assert_close(rows, run.twin.detach(), 1e-6)
        ids = torch.from_numpy(draw())
        run.step(ids)
    run.finish()


def _is_dense(x):
    return isinstance(x, torch.Tensor) and not x.is_sparse


class Sizes(TorchDispatchMode):
    """Record the largest tensor that operators create, apart from views."""

    def __init__(self):
        super().__init__()
        self.largest, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = tree_leaves((args, kwargs))
        known = {x.untyped_storage().data_ptr() for x in inputs if _is_dense(x)}
        for x in tree_leaves(out):
            if _is_dense(x):
                if x.untyped_storage().data_ptr() not in known:
                    self.largest = max(self.largest, x.numel())
        self.names.add(func)
        return out


@pytest.mark.parametrize("make_optimizer", [RowAdamW, RowSGD, RowRMSprop, RowAdagrad])
def test_no_tensor_of_a_step_has_the_size_of_the_table(make_optimizer, operators):
    options: Any = {"momentum": 0.9} if make_optimizer in (RowSGD, RowRMSprop) else {}
    layer = Embedding(5000, 2, sparse=True)
    optimizer = make_optimizer(layer.parameters(), lr=0.1, **options)
    step = None
    for number in range(6):
        ids = torch.randint(0, 5000, (7,))
        if number == 4:
            step = optimizer.row_step(layer.weight)
        with Sizes() if number in (3, 5) else nullcontext() as sizes:
            if step is None:
                optimizer.zero_grad()
                layer(ids).square().sum().backward()
                optimizer.step()
            else:
                step(ids, step.lookup(ids))
        if sizes is not None:
            # The coefficients of at most 8192 missed steps are not of the table's size.
            assert 14 <= sizes.largest < 5000, sizes.largest
            assert torch.ops.aten.index_copy_.default in sizes.names


@pytest.mark.parametrize("device", ["fake", "meta"])
@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_nothing_is_read_from_the_device(name, options, device, monkeypatch):
    monkeypatch.setattr(stale_tensors, "check_class", lambda parameter: None)
    if name in ("Adam", "AdamW"):
        # The last case replays steps, and their number is read from the device.
        options = OPTIONS[name][0]
    group = make(name, new_layer(dtype=torch.float32), **options).param_groups[0]
    rule = make(name, new_layer(), **options)._new_rule(group)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if device == "fake" else nullcontext()
    device = "cpu" if device == "fake" else device
    with mode:
        table = nn.Parameter(torch.empty(50, WIDTH, device=device))
        state = OperatorState(table, rule, options=group)
        for _ in range(3):
            # Reading a value of a fake or meta tensor is an error.
            ids = torch.empty(8, dtype=torch.int64, device=device)
            state.catch_up_rows(ids)
            assert state.gather_caught_up(ids).shape == (8, WIDTH)
            assert state.first_stale(ids) is None
            state.step(ids, torch.empty(8, WIDTH, device=device), options=group)
            numbers = new_step_tensors(state)
            begin_step(state, state.row_tensors(), numbers, ids, group)
            values = torch.empty(8, WIDTH, device=device)
            static_step(state, state.row_tensors(), numbers, ids, values)
            end_step(state, group)
        assert state.step_count == 6 and state.row_steps.device.type == device


@pytest.mark.rejects
def test_a_stale_row_that_was_read_on_a_device_raises_at_the_next_flush(accelerator):
    layer = new_layer()
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    for ids in ([3, 17], [3]):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
    grad = torch.ones(2, WIDTH, dtype=torch.float64)
    layer.weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[3, 17]]), grad, layer.weight.shape, check_invariants=True
    )
    optimizer.step()
    with pytest.raises(RuntimeError, match="row 17 has a gradient, but was not up to date"):
        optimizer.flush()
    optimizer.flush()


@pytest.mark.rejects
def test_invalid_arguments_of_row_steps_raise_and_change_nothing():
    layer = Embedding(9, 2, sparse=True)
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    step = optimizer.row_step(layer.weight)
    step(torch.tensor([3]), torch.ones(1, 2))
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"values must have shape \(2, 2\), got \(2, 3\)"):
        step(torch.tensor([1, 2]), torch.ones(2, 3))
    with pytest.raises(IndexError, match=r"ids\[1\] is 9, but num_embeddings is 9"):
        step(torch.tensor([1, 9]), torch.ones(2, 2))
    with pytest.raises(IndexError, match=r"ids\[0\] is 9, but num_embeddings is 9"):
        step.lookup(torch.tensor([9, 1]))
    optimizer.param_groups[0]["eps"] = 0.5
    with pytest.raises(ValueError, match="must not change between the calls of a RowStep"):
        step(torch.tensor([1]), torch.ones(1, 2))
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.state[layer.weight]["exp_avg"] = torch.zeros(9, 2)
    with pytest.raises(
        RuntimeError, match="state of the table was replaced; call row_step"
    ):
        step(torch.tensor([1]), torch.ones(1, 2))
    with pytest.raises(
        ValueError, match="parameter must be one that this optimizer trains"
    ):
        optimizer.row_step(nn.Parameter(torch.ones(9, 2)))
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(before, layer.weight.detach())


CHANGES = {
    "grow": (range(ROWS), 5),
    "shrink": (range(ROWS - 7), 0),
    "prune": ([i for i in range(ROWS) if i % 3], 0),
    "reorder and add": ([9, 3, 30, 4, 11, 12, 13, 14, 15, 1, 2], 4),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name, number", [("AdamW", 2), ("SGD", 2), ("Adagrad", 1), ("RMSprop", 2)]
)
@pytest.mark.parametrize("by_kernels", [True, False])
def test_optimizer_state_follows_rows_that_are_resized(
    change, name, number, by_kernels, monkeypatch
):
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: by_kernels)
    options, (kept, new_rows) = OPTIONS[name][number], CHANGES[change]
    run = Run(name, options)
    draw = draw_ids("uniform", np.random.default_rng(11))
    for _ in range(10):
        run.step(torch.from_numpy(draw()))
    index, weight = torch.tensor(kept), run.layer.weight
    added = torch.randn(new_rows, WIDTH, dtype=torch.float64)
    with torch._C.DisableTorchFunctionSubclass():
        # Stale rows stay stale.
        weight.grad = None
        weight.data = torch.cat([weight.detach()[index], added])
    run.layer.num_embeddings = len(weight)
    run.ours.resize_rows(weight, kept, new_rows)
    saved = run.theirs.state_dict()
    for key, x in saved["state"][0].items():
        if isinstance(x, torch.Tensor) and x.dim():
            initial = options.get("initial_accumulator_value", 0.0)
            fresh = torch.full((new_rows, WIDTH), initial, dtype=x.dtype)
            saved["state"][0][key] = torch.cat([x[index], fresh])
    run.twin = nn.Parameter(torch.cat([run.twin.detach()[index], added]))
    run.theirs = dense(name, [run.twin], **options)
    run.theirs.load_state_dict(saved)
    run.schedulers = []
    for _ in range(30):
        run.step(torch.randint(0, len(weight), (4,)))
    run.finish()


@pytest.mark.parametrize("name, number", [("AdamW", 2), ("Adagrad", 1)])
@pytest.mark.parametrize("by_kernels", [True, False])
def test_reset_rows_start_from_a_new_state_and_miss_no_steps(
    name, number, by_kernels, monkeypatch
):
    monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: by_kernels)
    options = OPTIONS[name][number]
    run = Run(name, options)
    draw = draw_ids("uniform", np.random.default_rng(11))
    for _ in range(10):
        run.step(torch.from_numpy(draw()))
    rows, weight = torch.tensor([9, 3, 30]), run.layer.weight
    values = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        # Stale rows stay stale.
        weight[rows], run.twin[rows] = values, values
    # Rows 0 to 2 were read before the reset and are updated after it.
    run.layer(torch.arange(3))
    run.ours.reset_rows(weight, rows)
    for x in run.theirs.state[run.twin].values():
        if isinstance(x, torch.Tensor) and x.dim():
            x[rows] = options.get("initial_accumulator_value", 0.0)
    run.step(torch.arange(3))
    for _ in range(20):
        run.step(torch.from_numpy(draw()))
    run.finish()
    # A state that was loaded, before the first step.
    loaded = getattr(firstlayer.torch.optim, f"Row{name}")([weight], **options)
    loaded.load_state_dict(copy.deepcopy(run.ours.state_dict()))
    loaded.reset_rows(weight, [4])
    for key, x in loaded.state_dict()["state"][0].items():
        if x.dim():
            want = run.ours.state[weight][key].clone()
            want[4] = options.get("initial_accumulator_value", 0.0)
            assert torch.equal(x, want)


@pytest.mark.rejects
def test_resetting_rows_that_a_table_does_not_have_raises():
    layer = Embedding(9, 2, sparse=True)
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    with pytest.raises(IndexError, match=r"rows\[1\] is 9, but num_embeddings is 9"):
        optimizer.reset_rows(layer.weight, [0, 9])
    with pytest.raises(TypeError, match="rows must be integers, got bool"):
        optimizer.reset_rows(layer.weight, torch.ones(9, dtype=torch.bool))
    with pytest.raises(TypeError, match="rows must be integers, got float32"):
        optimizer.reset_rows(layer.weight, torch.tensor([1.5]))


def test_resized_layers_state_follows_in_compiled_steps_and_loaded_states():
    layer = new_layer()
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    step = optimizer.row_step(layer.weight)
    step(torch.tensor([5]), torch.ones(1, WIDTH, dtype=torch.float64))
    mean = optimizer.state_dict()["state"][0]["exp_avg"][5].clone()
    changes = layer.resize(ROWS + 3)
    optimizer.resize_rows(layer.weight, changes.kept, len(changes.added))
    step(torch.tensor([ROWS]), torch.ones(1, WIDTH, dtype=torch.float64))
    saved = optimizer.state_dict()["state"][0]
    assert saved["exp_avg"].shape == (ROWS + 3, WIDTH) and saved["step"] == 2
    assert_close(saved["exp_avg"][5], 0.9 * mean, 1e-12)
    # A state that was loaded, before the first step.
    other = new_layer()
    loaded = RowAdamW(other.parameters())
    loaded.load_state_dict({**optimizer.state_dict(), "state": {}})
    full = copy.deepcopy(optimizer.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        full["state"][0][key] = full["state"][0][key][:ROWS]
    loaded.load_state_dict(full)
    other.resize(2)
    loaded.resize_rows(other.weight, [5], 1)
    got = loaded.state_dict()["state"][0]["exp_avg"]
    assert_close(got, torch.stack([0.9 * mean, 0 * mean]), 1e-12)


def test_a_table_pruned_before_the_first_step_may_keep_any_row():
    layer = Embedding.from_pretrained(torch.ones(9, 2), freeze=False, sparse=True)
    optimizer = RowAdamW(layer.parameters(), lr=0.5, weight_decay=0.0)
    layer.resize(2)
    optimizer.resize_rows(layer.weight, [5, 8])
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert_close(layer.weight.detach(), [[1.0, 1.0], [0.5, 0.5]], 1e-6)


@pytest.mark.rejects
def test_invalid_arguments_of_resize_rows_raise():
    layer = Embedding(9, 2, sparse=True)
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    layer(torch.tensor([3])).sum().backward()
    optimizer.step()
    layer.resize(4)
    with pytest.raises(ValueError, match=r"must add up to the 4 rows .* got 4 \+ 1"):
        optimizer.resize_rows(layer.weight, range(4), 1)
    with pytest.raises(IndexError, match=r"kept_ids\[2\] is 9, but the number of rows"):
        optimizer.resize_rows(layer.weight, [0, 1, 9, 2])
    with pytest.raises(TypeError, match="kept_ids must be integers, got bool"):
        optimizer.resize_rows(layer.weight, torch.tensor([True, True, False, True]))
    with pytest.raises(ValueError, match="new_rows must be at least 0, got -1"):
        optimizer.resize_rows(layer.weight, [0, 1, 2, 3, 4], -1)
    other = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(
        ValueError, match="parameter must be one that this optimizer trains"
    ):
        optimizer.resize_rows(other, range(4))


def test_two_tables_have_states_of_their_own(operators):
    layers = [new_layer(), new_layer()]
    parameters = list(itertools.chain(*(layer.parameters() for layer in layers)))
    optimizer = RowAdamW(parameters, lr=0.1)
    steps = [optimizer.row_step(p) for p in parameters]
    one = torch.ones(1, WIDTH, dtype=torch.float64)
    for number in range(3):
        steps[0](torch.tensor([1]), one)
        if number == 0:
            steps[1](torch.tensor([1]), one)
    counts = [state_of(optimizer, p).step_count for p in parameters]
    assert counts == [3, 1]
    assert not torch.equal(parameters[0].detach(), parameters[1].detach())
