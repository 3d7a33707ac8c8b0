"""Row optimizers on NumPy layers equal dense optimizers at every step and on every row."""

import copy
import pickle
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import firstlayer.optim
from firstlayer import RowGradient, kernels
from firstlayer.numpy import (
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    EngramGate,
    LearnedPositions,
    load,
    save,
)
from firstlayer.optim import (
    AveragedRows,
    RowAdagrad,
    RowAdam,
    RowAdamW,
    RowLion,
    RowRMSprop,
    RowSGD,
)
from firstlayer.optim.adam import interpolation
from firstlayer.optim.table_state import TableState
from tests.support.optim_cases import (
    OPTIONS,
    ROWS,
    SCHEDULES,
    WIDTH,
    assert_close,
    copy_options,
    dense,
    draw_ids,
    scheduler,
)

ALL_OPTIONS = [(name, options) for name, choices in OPTIONS.items() for options in choices]
CASES = [
    (*case, SCHEDULES[index % 4], ("zipf", "uniform")[index % 2])
    for index, case in enumerate(ALL_OPTIONS)
]


class Pair:
    """A layer under a row optimizer and an equal table under the dense optimizer."""

    def __init__(self, name, options, *, dtype="float64", schedule="constant", steps=1):
        rng = np.random.default_rng(0)
        self.goals = rng.standard_normal((ROWS, WIDTH))
        start = rng.standard_normal((ROWS, WIDTH)).astype(dtype)
        self.layer = Embedding(ROWS, WIDTH, weight=start.copy())
        self.ours = getattr(firstlayer.optim, f"Row{name}")(self.layer, **options)
        self.weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self.theirs = dense(name, [self.weight], **options)
        self.scheduler = scheduler(schedule, self.theirs, steps)
        self.rng, self.sign = rng, -1 if options.get("maximize") else 1

    def step(self, ids):
        """Take a step with both; return the rows of both that were read before it."""
        y, pull = self.layer.vjp(ids)
        want = self.weight.detach().numpy()[ids].copy()
        goal = (self.goals[ids] + self.rng.standard_normal(y.shape)).astype(y.dtype)
        copy_options(self.theirs, self.ours.options)
        self.ours.step(pull(self.sign * (y - goal)))
        self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad.index_add_(
            0, torch.from_numpy(ids), torch.from_numpy(self.sign * (want - goal))
        )
        self.theirs.step()
        self.scheduler.step()
        return y, want


@pytest.mark.parametrize("name, options, schedule, pattern", CASES)
def test_rows_read_equal_the_dense_optimizer_at_every_step(
    name, options, schedule, pattern
):
    # Steps without a gradient are no-ops in Adagrad.
    steps = 200 if "Adagrad" in name else 600
    pair = Pair(name, options, schedule=schedule, steps=steps)
    draw = draw_ids(pattern, pair.rng)
    # Missed updates of Adam are approximated by a polynomial; all others are exact.
    tolerance = 1e-6 if options.get("eps", 0) > 1e-5 and "Adam" in name else 1e-9
    for step in range(steps):
        got, want = pair.step(draw())
        assert_close(got, want, tolerance, f"step {step}")
    pair.ours.flush()
    assert_close(pair.layer.weight, pair.weight.detach(), tolerance, "after flush()")


@pytest.mark.parametrize("name, number", [("SGD", 2), ("AdamW", 0), ("RMSprop", 1)])
def test_float32_error_is_comparable_to_that_of_the_dense_optimizer(name, number):
    options, steps = OPTIONS[name][number], 300
    exact = Pair(name, options, schedule="cosine", steps=steps)
    pair = Pair(name, options, dtype="float32", schedule="cosine", steps=steps)
    draw = draw_ids("zipf", np.random.default_rng(5))
    for _ in range(steps):
        ids = draw()
        exact.step(ids)
        pair.step(ids)
    pair.ours.flush()
    truth, dense = exact.weight.detach().numpy(), pair.weight.detach().numpy()
    rounding = np.abs(dense - truth).max()
    assert 1e-8 < rounding < 1e-4
    assert_close(pair.layer.weight, truth, 3 * rounding)


@pytest.mark.parametrize("name, number", [("SGD", 2), ("AdamW", 0)])
def test_row_that_misses_ten_thousand_steps_catches_up(name, number):
    pair = Pair(name, OPTIONS[name][number])
    for _ in range(3):
        pair.step(np.array([0, 1, 2]))
    start, lr = pair.layer([1, 2, 30]), pair.ours.lr
    grad = np.ones((1, WIDTH))
    pair.weight.grad = torch.zeros_like(pair.weight)
    for step in range(10_000):
        pair.ours.lr = pair.theirs.param_groups[0]["lr"] = (
            lr * (1 + np.cos(step / 3000)) / 2
        )
        # Row 0 has a gradient in every step, so it is never stale.
        grad[:] = pair.layer.weight[0] + np.cos(step)
        pair.ours.step({"weight": RowGradient(np.array([0]), grad)})
        pair.weight.grad[0] = torch.from_numpy(grad[0])
        pair.theirs.step()
    got, want = pair.layer([1, 2, 30]), pair.weight.detach().numpy()[[1, 2, 30]]
    assert (np.abs(want - start).max(axis=1) > 0.1).all()
    assert_close(got, want, 1e-9)


def test_reading_writes_only_stale_rows():
    pair = Pair("AdamW", OPTIONS["AdamW"][0])
    for ids in ([1, 2], [3], [4, 2]):
        pair.step(np.array(ids))
    before = pair.layer.stored_weight.copy()
    first = pair.layer([1, 7, 1])
    written = np.flatnonzero((pair.layer.stored_weight != before).any(axis=1))
    assert written.tolist() == [1, 7]
    bits = pair.layer.stored_weight.tobytes()
    assert pair.layer([7, 1]).tobytes() == first[[1, 0]].tobytes()
    assert pair.layer.stored_weight.tobytes() == bits


def test_every_way_of_reading_a_table_catches_up(tmp_path):
    pair = Pair("AdamW", OPTIONS["AdamW"][0])

    def saved_and_loaded(layer):
        save(tmp_path / "a", layer)
        return load(tmp_path / "a").weight

    ways = {
        "weight": lambda layer: layer.weight,
        "parameters": lambda layer: layer.parameters()["weight"],
        "state_dict": lambda layer: layer.state_dict()["weight"],
        "logits": lambda layer: layer.logits(np.eye(WIDTH)).T,
        "deepcopy": lambda layer: copy.deepcopy(layer).weight,
        "pickle": lambda layer: pickle.loads(pickle.dumps(layer)).weight,
        "copy": lambda layer: copy.copy(layer).weight,
        "file": saved_and_loaded,
        "resize": lambda layer: (copy.deepcopy(layer).resize(ROWS), layer.weight)[1],
    }
    for name, read in ways.items():
        pair.step(np.array([1, 2]))
        pair.step(np.array([2, 3]))
        assert_close(read(pair.layer), pair.weight.detach(), 1e-12, name)
    assert copy.deepcopy(pair.layer).table_state is None
    assert pickle.loads(pickle.dumps(pair.layer)).table_state is None
    got, want = pair.step(np.array([1, 5]))
    assert_close(got, want, 1e-12, "original after copying")


def test_missed_steps_are_not_applied_to_what_is_written_to_the_weight():
    writes = {
        "rows": lambda layer: layer.weight.__setitem__(slice(5, 9), 0.5),
        "in place": lambda layer: layer.weight.__imul__(0.5),
        "another array": lambda layer: setattr(layer, "weight", np.ones((ROWS, WIDTH))),
    }
    for name, write in writes.items():
        pair = Pair("AdamW", OPTIONS["AdamW"][0])
        pair.step(np.array([5, 20]))
        pair.step(np.array([2, 3]))
        write(pair.layer)
        with torch.no_grad():
            if name == "rows":
                pair.weight[5:9] = 0.5
            elif name == "in place":
                pair.weight.mul_(0.5)
            else:
                pair.weight.fill_(1.0)
        assert_close(pair.layer(np.arange(ROWS)), pair.weight.detach(), 1e-12, name)
        pair.step(np.array([5, 6]))
        assert_close(pair.layer.weight, pair.weight.detach(), 1e-12, name)


def test_training_after_a_deepcopy_does_not_change_the_copy():
    pair = Pair("AdamW", OPTIONS["AdamW"][0])
    for _ in range(5):
        pair.step(np.array([1, 2]))
    twin = copy.deepcopy(pair.layer)
    want = pair.weight.detach().numpy().copy()
    for _ in range(5):
        pair.step(np.array([2, 3]))
    assert_close(twin(np.arange(ROWS)), want, 1e-12)


def test_eight_threads_read_stale_rows_concurrently():
    pair = Pair("AdamW", OPTIONS["AdamW"][0])
    for _ in range(5):
        pair.step(np.array([1, 2]))
    want, wrong = pair.weight.detach().numpy(), []

    def read(seed):
        ids = np.random.default_rng(seed).permutation(ROWS)
        wrong.extend(ids[np.abs(pair.layer(ids) - want[ids]).max(axis=1) > 1e-12])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_embedding_layer_trains_all_of_its_parameters():
    layer = EmbeddingLayer(
        20, 4, max_positions=9, segments=2, layer_norm=True, dtype="float64", rng=0
    )
    theirs = {
        name: torch.nn.Parameter(torch.from_numpy(value.copy()))
        for name, value in layer.parameters().items()
    }
    options = OPTIONS["AdamW"][0]
    dense_adamw = torch.optim.AdamW(list(theirs.values()), **options)
    optimizer, rng = RowAdamW(layer, **options), np.random.default_rng(0)
    for _ in range(60):
        ids, offset = rng.integers(0, 20, (2, 3)), int(rng.integers(0, 6))
        segments = np.zeros_like(ids) if rng.random() < 0.5 else np.ones_like(ids)
        y, pull = layer.vjp(ids, offset=offset, segments=segments)
        grads = pull(y - rng.standard_normal(y.shape))
        for name, value in theirs.items():
            grad = grads[name]
            whole = grad.dense(len(value)) if isinstance(grad, RowGradient) else grad
            value.grad = torch.from_numpy(np.array(whole))
        optimizer.step(grads)
        dense_adamw.step()
    for name, value in layer.parameters().items():
        assert np.abs(value - theirs[name].detach().numpy()).max() <= 1e-10, name
    assert layer.eval().token.table_state.is_caught_up  # pyright: ignore


def test_embedding_bag_with_mean_and_padding():
    rng = np.random.default_rng(0)
    bag = EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=0, dtype="float64", rng=0)
    weight = torch.nn.Parameter(torch.from_numpy(bag.weight.copy()))
    options = OPTIONS["SGD"][3]
    ours, theirs = RowSGD(bag, **options), torch.optim.SGD([weight], **options)
    for _ in range(80):
        ids = rng.integers(0, ROWS, (2, 3))
        y, pull = bag.vjp(ids)
        want = torch.nn.functional.embedding_bag(
            torch.from_numpy(ids), weight, mode="mean", padding_idx=0
        )
        assert_close(y, want.detach(), 1e-10)
        goal = rng.standard_normal(y.shape)
        ours.step(pull(y - goal))
        theirs.zero_grad()
        (0.5 * (want - torch.from_numpy(goal)).square().sum()).backward()
        theirs.step()


@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_resumed_run_is_bitwise_equal(mode):
    options = {**OPTIONS["AdamW"][2], "mode": mode}

    def trained(layer, optimizer, rng, steps):
        for _ in range(steps):
            y, pull = layer.vjp(rng.integers(0, ROWS, 4))
            optimizer.step(pull(y - rng.standard_normal(y.shape).astype(np.float32)))

    rng = np.random.default_rng(1)
    layer = Embedding(ROWS, WIDTH, rng=0)
    optimizer = RowAdamW(layer, **options)
    trained(layer, optimizer, rng, 20)
    state, weight = optimizer.state_dict(), layer.state_dict()
    again = copy.deepcopy(rng)
    trained(layer, optimizer, rng, 20)

    other = Embedding(ROWS, WIDTH, rng=7)
    resumed = RowAdamW(other, **options)
    trained(other, resumed, np.random.default_rng(3), 3)
    resumed.load_state_dict(state)
    other.load_state_dict(weight)
    trained(other, resumed, again, 20)
    for got, want in ((other, layer), (resumed, optimizer)):
        got, want = got.state_dict(), want.state_dict()
        assert got.keys() == want.keys()
        assert all(got[name].tobytes() == want[name].tobytes() for name in want)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Lion", "WiseAdagrad"])
def test_results_are_bitwise_equal_for_any_number_of_threads(name):
    before, results = kernels.get_num_threads(), []
    options = {**OPTIONS[name][-1], "maximize": False}
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        layer, rng = Embedding(3000, 96, rng=0), np.random.default_rng(0)
        optimizer = getattr(firstlayer.optim, f"Row{name}")(layer, **options)
        for _ in range(3):
            y, pull = layer.vjp(rng.integers(0, 3000, 2500))
            optimizer.step(pull(y))
        results.append((layer.state_dict(), optimizer.state_dict()))
    kernels.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert all(one[key].tobytes() == two[key].tobytes() for key in one)


def test_eps_may_change_between_steps():
    pair = Pair("AdamW", {**OPTIONS["AdamW"][0], "eps": 1e-8})
    draw = draw_ids("zipf", pair.rng)
    for step in range(60):
        if step == 30:
            pair.ours.options["eps"] = pair.theirs.param_groups[0]["eps"] = 0.5
        got, want = pair.step(draw())
        assert_close(got, want, 1e-6, f"step {step}")


def test_dense_gradient_updates_every_row():
    pair = Pair("AdamW", OPTIONS["AdamW"][0])
    for step in range(12):
        if step % 4 == 3:
            whole = 0.1 * pair.layer.logits(np.eye(WIDTH)).T
            pair.ours.step({"weight": whole})
            pair.weight.grad = torch.from_numpy(whole)
            pair.theirs.step()
        else:
            assert_close(*pair.step(np.array([1, step])), 1e-12)
    pair.ours.flush()
    assert_close(pair.layer.weight, pair.weight.detach(), 1e-12)


def test_lazy_mode_does_not_move_rows_without_a_gradient():
    layer = Embedding(ROWS, WIDTH, rng=0)
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.5, mode="lazy")
    start = layer.weight.copy()
    for _ in range(3):
        y, pull = layer.vjp([4, 5])
        optimizer.step(pull(y))
    assert layer.table_state is None
    moved = np.flatnonzero((layer.weight != start).any(axis=1))
    assert moved.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("AdamW", {"eps": 1e-3}, np.float16),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, ml_dtypes.bfloat16),
        ("WiseRMSprop", {"alpha": 0.8}, ml_dtypes.bfloat16),
    ],
)
def test_half_precision_update_rounds_once_and_keeps_float32_state(name, options, dtype):
    rng = np.random.default_rng(0)
    half = Embedding(ROWS, WIDTH, dtype=dtype, rng=0)
    wide = Embedding(ROWS, WIDTH, weight=half.weight.astype(np.float32))
    optimizer_class = getattr(firstlayer.optim, f"Row{name}")
    ours, theirs = (optimizer_class(layer, lr=0.01, **options) for layer in (half, wide))
    for step in range(4):
        ids = np.array([[1, 2], [2, 3], [4, 4], [1, 3]][step])
        values = rng.standard_normal((len(set(ids)), WIDTH))
        if step % 2:
            # As in torch, where a gradient has the dtype of its table.
            values = values.astype(dtype)
        # Both read the same rows and compute the same update before rounding.
        wide(ids)
        wide.weight[...] = wide.weight.astype(dtype)
        half(ids)
        assert half(ids).tobytes() == wide(ids).astype(dtype).tobytes()
        for optimizer, numbers in ((ours, values), (theirs, values.astype(np.float32))):
            optimizer.step({"weight": RowGradient(np.unique(ids), numbers)})
        wide.weight[...] = wide.weight.astype(dtype)
        assert half.weight[ids].tobytes() == wide.weight[ids].astype(dtype).tobytes()
    state, other = ours.state_dict(), theirs.state_dict()
    for key, array in state.items():
        if isinstance(array, np.ndarray) and array.ndim:
            assert array.dtype == other[key].dtype and array.dtype != dtype
            np.testing.assert_array_equal(array, other[key])


def test_stochastic_rounding_keeps_tiny_updates_on_average():
    start = np.ones((2000, 16), ml_dtypes.bfloat16)
    every = {"weight": RowGradient(np.arange(2000), np.ones((2000, 16), np.float32))}
    layers = [Embedding(2000, 16, weight=start.copy()) for _ in range(3)]
    # 1/64 of the distance from 1 to the next smaller bfloat16.
    lr = 2.0**-8 / 64
    for layer, random in zip(layers, (True, True, False), strict=True):
        optimizer = RowSGD(layer, lr=lr, stochastic_rounding=random)
        for _ in range(20):
            optimizer.step(every)
    first, second, nearest = (layer.weight.astype(float) for layer in layers)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(nearest, 1.0)
    # With 32,000 weights, the standard error of the mean is below 1%.
    assert abs((1 - first).mean() / (20 * lr) - 1) < 0.05
    assert len(np.unique(first)) > 2


def test_stochastic_rounding_takes_gradients_in_half_precision():
    numbers = np.random.default_rng(1).standard_normal((3, WIDTH))
    rounded = numbers.astype(ml_dtypes.bfloat16)
    tables = []
    for values in (rounded, rounded.astype(np.float32)):
        layer = Embedding(ROWS, WIDTH, dtype=ml_dtypes.bfloat16, rng=0)
        optimizer = RowAdagrad(layer, lr=0.3, stochastic_rounding=True)
        for _ in range(2):
            optimizer.step({"weight": RowGradient(np.array([1, 4, 6]), values)})
        tables.append(layer.weight)
    assert tables[0].tobytes() == tables[1].tobytes()


def test_stochastic_rounding_keeps_exact_values_infinities_and_nan():
    numbers = np.array([[1.0, -3.5, np.inf, -np.inf, 0.0, np.nan]], np.float32)
    table = np.zeros((1, 6), ml_dtypes.bfloat16)
    for seed in range(50):
        kernels.store_rows(numbers, table, np.array([0]), noise=seed)
        np.testing.assert_array_equal(table.astype(np.float32), numbers)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_rows_are_stored_and_upcast(dtype):
    rng = np.random.default_rng(0)
    table, rows = np.zeros((9, 5), dtype), np.array([7, 0, 3])
    values = rng.standard_normal((3, 5)).astype(np.float32)
    kernels.store_rows(values, table, rows, noise=None)
    want = np.zeros((9, 5), dtype)
    want[rows] = values.astype(dtype)
    assert table.tobytes() == want.tobytes()
    np.testing.assert_array_equal(
        kernels.upcast_rows(table, rows), want[rows].astype(np.float32)
    )


def test_stale_rows_are_listed_once_and_not_marked_until_they_are_updated():
    before = [2**40, 3, 2**40, 0, 2]
    row_steps = np.array(before, np.int64)
    rows, from_step = kernels.stale_rows(np.array([4, 1, 99, -1, 4, 0]), row_steps, 2**40)
    assert rows.tolist() == [1, 4] and from_step.tolist() == [3, 2]
    assert row_steps.tolist() == before
    row_steps[rows] = 2**40
    rows, from_step = kernels.stale_range(2, 5, row_steps, 2**40)
    assert rows.tolist() == [3] and from_step.tolist() == [0] and row_steps[3] == 0


def test_interpolation_recovers_polynomial_coefficients():
    points, basis = interpolation()
    coefficients = np.random.default_rng(0).standard_normal(len(points))
    values = np.polynomial.polynomial.polyval(2 * points[:, 0] - 1, coefficients)
    np.testing.assert_allclose(basis @ values, coefficients, atol=1e-10)
    assert points[0] == 0 and points[-1] == 1


def check_raises(match, call, error: type[Exception] = ValueError):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.rejects
def test_invalid_options_raise():
    layer = Embedding(5, 2)
    decay = 'weight_decay must be 0 in exact updates by .*, got 0.1; use .*mode="lazy"'
    for make in (RowAdam, RowAdagrad, RowRMSprop):
        check_raises(decay, lambda make=make: make(layer, weight_decay=0.1))
        make(layer, weight_decay=0.1, mode="lazy")
    word: Any = "fast"
    check_raises(
        "mode must be 'exact' or 'lazy', got 'fast'", lambda: RowSGD(layer, mode=word)
    )
    check_raises("lr must not be negative, got -1", lambda: RowSGD(layer, -1.0))
    check_raises("lr must be a number, got str", lambda: RowSGD(layer, word), TypeError)
    check_raises(
        r'betas\[1\] must be above 0 in exact updates by Lion, .*got 0; use mode="lazy"',
        lambda: RowLion(layer, betas=(0.9, 0.0)),
    )
    check_raises("eps must not be negative, got -1", lambda: RowAdam(layer, eps=-1.0))
    check_raises(
        r"betas\[1\] must be in \[0, 1\), got 1.0", lambda: RowLion(layer, betas=(0, 1.0))
    )
    check_raises(r"alpha must be in \[0, 1\), got 2", lambda: RowRMSprop(layer, alpha=2))
    check_raises("nesterov needs momentum", lambda: RowSGD(layer, nesterov=True))
    check_raises(
        "initial_accumulator_value must not be negative, got -1",
        lambda: RowAdagrad(layer, initial_accumulator_value=-1),
    )
    check_raises(
        r"needs a table in bfloat16, got \['float32'\]",
        lambda: RowSGD(layer, stochastic_rounding=True),
    )
    gate = EngramGate(6, 4, rng=0)
    gate.projection = np.asfortranarray(gate.projection)
    check_raises(
        r"^projection must be C-contiguous to be trained, got strides \(4, 32\)$",
        lambda: RowSGD(gate),
    )
    layer.weight.flags.writeable = False
    check_raises(
        "weight must be writable to be trained, got it read-only", lambda: RowSGD(layer)
    )
    assert layer.table_state is None


@pytest.mark.rejects
def test_invalid_gradients_raise_and_change_nothing():
    layer = Embedding(5, 2, rng=0)
    optimizer = RowAdamW(layer)
    optimizer.step({"weight": RowGradient(np.array([1]), np.ones((1, 2), np.float32))})
    start = layer.stored_weight.copy()
    stale = RowGradient(np.array([1, 3]), np.ones((2, 2), np.float32))
    check_raises(
        "row 3 has a gradient, but was not up to date when it was read; read it through",
        lambda: optimizer.step({"weight": stale}),
    )
    check_raises(
        "row 0 has a gradient, but", lambda: optimizer.step({"weight": np.ones((5, 2))})
    )
    check_raises(
        r"grads must be of \['weight'\], got \['w'\]", lambda: optimizer.step({"w": stale})
    )
    check_raises(
        r"grads\['weight'\] must have shape \(5, 2\), got \(5,\)",
        lambda: optimizer.step({"weight": np.ones(5)}),
    )
    for ids, values, message in (
        ([7], 1, r"grads\['weight'\].ids\[0\] is 7, but the number of rows is 5"),
        ([-1, 2], 2, r"grads\['weight'\].ids\[0\] is -1, but the number of rows is 5"),
        ([1, 1], 2, r"grads\['weight'\].ids must be ascending, each once"),
        ([0, 1], 1, r"must have an id for each of 1 rows, got ids of shape \(2,\)"),
    ):
        bad = RowGradient(np.array(ids), np.ones((values, 2), np.float32))
        error = IndexError if "number of rows" in message else ValueError
        check_raises(message, lambda bad=bad: optimizer.step({"weight": bad}), error)
    assert optimizer.table_states["weight"].step_count == 1
    wide = RowGradient(np.array([1]), np.ones((1, 3)))
    check_raises(
        r"must be for rows of \(5, 2\), got values of shape \(1, 3\)",
        lambda: optimizer.step({"weight": wide}),
    )
    assert (layer.stored_weight == start).all()
    layer.resize(7)
    check_raises(
        r"the table must stay \(5, 2\) as its state is, got \(7, 2\); call resize_rows or "
        "make a new optimizer",
        lambda: optimizer.step({"weight": stale}),
    )


def test_resizing_a_position_grid_catches_up_and_training_continues():
    weight = np.random.default_rng(0).standard_normal((6, 2))
    tables = []
    for flush in (False, True):
        layer = LearnedPositions(4, 2, row_offset=2, weight=weight.copy())
        optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.5)
        for _ in range(3):
            y, pull = layer.vjp(np.zeros((1, 2)), [2])
            optimizer.step({"weight": pull(y)["weight"]})
        if flush:
            optimizer.flush()
        layer.resize_grid((1, 3), grid=(3, 1))
        y, pull = layer.vjp(np.zeros((1, 2)), [3])
        optimizer.step({"weight": pull(y)["weight"]})
        assert (np.abs(layer.encode([3])) < np.abs(y)).all()
        tables.append(layer.state_dict()["weight"])
    np.testing.assert_array_equal(*tables)


@pytest.mark.rejects
def test_invalid_state_raises_and_changes_nothing():
    layer = Embedding(5, 2, rng=0)
    optimizer = RowAdamW(layer)
    state = optimizer.state_dict()
    check_raises(
        r"state must have \['weight.exp_avg', .*, got \['weight.step'\]",
        lambda: optimizer.load_state_dict({"weight.step": state["weight.step"]}),
    )
    state["weight.exp_avg"] = np.zeros((4, 2))
    check_raises(
        r"weight.exp_avg must have shape \(5, 2\), got \(4, 2\)",
        lambda: optimizer.load_state_dict(state),
    )
    assert optimizer.table_states["weight"] is layer.table_state


@pytest.mark.parametrize(
    "kept, new_rows", [(range(9), 3), (range(5), 0), ([7, 2, 5], 2), (range(0), 4)]
)
def test_optimizer_state_follows_rows_that_are_resized(kept, new_rows):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((9, 2))
    layer = Embedding(weight=table.copy())
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.3, betas=(0.8, 0.95))
    twin = torch.nn.Parameter(torch.from_numpy(table.copy()))
    options = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.95)}
    theirs = torch.optim.AdamW([twin], **options)

    def step(rows):
        ids = rng.integers(0, rows, 3)
        y, pull = layer.vjp(ids)
        assert_close(y, twin.detach()[ids], 1e-9)
        optimizer.step(pull(y - 1.0))
        theirs.zero_grad()
        (0.5 * (twin[torch.from_numpy(ids)] - 1.0).square().sum()).backward()
        theirs.step()

    for _ in range(8):
        step(9)
    added, index = rng.standard_normal((new_rows, 2)), list(kept)
    layer.weight = np.concatenate([layer.weight[index], added])
    optimizer.resize_rows("weight", kept, new_rows)
    saved = theirs.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        fresh = torch.zeros(new_rows, 2, dtype=torch.float64)
        saved["state"][0][key] = torch.cat([saved["state"][0][key][index], fresh])
    twin = torch.nn.Parameter(torch.cat([twin.detach()[index], torch.from_numpy(added)]))
    theirs = torch.optim.AdamW([twin], **options)
    theirs.load_state_dict(saved)
    for _ in range(12):
        step(len(index) + new_rows)
    assert_close(layer.weight, twin.detach(), 1e-9)
    assert optimizer.state_dict()["weight.exp_avg"].shape == (len(index) + new_rows, 2)


@pytest.mark.rejects
def test_invalid_arguments_of_resize_rows_raise():
    layer = Embedding(9, 2, rng=0)
    optimizer = RowAdamW(layer)
    layer.resize(4)
    with pytest.raises(ValueError, match=r"must add up to the 4 rows .* got 4 \+ 1"):
        optimizer.resize_rows("weight", range(4), 1)
    with pytest.raises(IndexError, match=r"kept_ids\[2\] is 9, but the number of rows"):
        optimizer.resize_rows("weight", [0, 1, 9, 2])
    with pytest.raises(TypeError, match="kept_ids must be integers, got bool"):
        optimizer.resize_rows("weight", [True, True, False, True])
    with pytest.raises(ValueError, match=r"name must be of a table, \['weight'\], got 'w'"):
        optimizer.resize_rows("w", range(4))


@pytest.mark.parametrize("name, number", [("AdamW", 2), ("Adagrad", 1), ("SGD", 2)])
def test_reset_rows_start_from_a_new_state_and_miss_no_steps(name, number):
    options, rng = OPTIONS[name][number], np.random.default_rng(0)
    # The drift of Adam is a polynomial.
    tolerance = 1e-4 if name == "AdamW" else 1e-9
    table = rng.standard_normal((9, 2))
    layer = Embedding(weight=table.copy())
    optimizer = getattr(firstlayer.optim, f"Row{name}")(layer, **options)
    average = AveragedRows(optimizer, decay=0.7)
    twin = torch.nn.Parameter(torch.from_numpy(table.copy()))
    theirs, mean = dense(name, [twin], **options), table.copy()

    def step():
        ids = rng.integers(0, 6, 3)
        y, pull = layer.vjp(ids)
        assert_close(y, twin.detach()[ids], tolerance)
        optimizer.step(pull(y - 1.0))
        average.update_parameters()
        theirs.zero_grad()
        (0.5 * (twin[torch.from_numpy(ids)] - 1.0).square().sum()).backward()
        theirs.step()
        kept = 0.7 if average.n_averaged > 1 else 0.0
        mean[:] = kept * mean + (1 - kept) * twin.detach().numpy()

    for _ in range(8):
        step()
    rows, values = np.array([7, 2, 5]), rng.standard_normal((3, 2))
    layer.stored_weight[rows] = values
    optimizer.reset_rows("weight", rows)
    optimizer.reset_rows("weight", [])
    mean[rows] = values
    with torch.no_grad():
        twin[rows] = torch.from_numpy(values)
    initial = options.get("initial_accumulator_value", 0.0)
    for x in theirs.state[twin].values():
        if isinstance(x, torch.Tensor) and x.dim():
            x[rows] = initial
    for _ in range(12):
        step()
    assert_close(layer.weight, twin.detach(), tolerance)
    assert_close(average.average("weight"), mean, tolerance)


def test_the_state_follows_when_no_row_is_kept_or_reset():
    layer = Embedding(0, 2)
    optimizer = RowAdamW(layer, lr=0.5)
    changes = layer.resize(3, init="zeros")
    optimizer.resize_rows("weight", changes.kept, len(changes.added))
    optimizer.reset_rows("weight", [])
    y, pull = layer.vjp([2])
    optimizer.step(pull(np.ones_like(y)))
    assert_close(layer.weight, [[0.0, 0.0], [0.0, 0.0], [-0.5, -0.5]], 1e-6)


@pytest.mark.rejects
def test_invalid_arguments_of_reset_rows_raise():
    optimizer = RowAdamW(Embedding(9, 2, rng=0))
    with pytest.raises(IndexError, match=r"rows\[1\] is 9, but num_embeddings is 9"):
        optimizer.reset_rows("weight", [0, 9])
    with pytest.raises(TypeError, match="rows must be integers, got bool"):
        optimizer.reset_rows("weight", np.ones(9, bool))
    with pytest.raises(ValueError, match=r"name must be of a table, \['weight'\], got 'w'"):
        optimizer.reset_rows("w", [0])


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_an_error_before_rows_are_updated_leaves_a_step_without_gradient(name, monkeypatch):
    pair = Pair(name, {"lr": 0.1, "weight_decay": 0.05})
    draw = draw_ids("uniform", pair.rng)
    pair.step(draw())
    y, pull = pair.layer.vjp(draw())

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TableState, "_update_rows", fail)
        with pytest.raises(MemoryError):
            pair.ours.step(pull(y))
    pair.weight.grad = torch.zeros_like(pair.weight)
    pair.theirs.step()
    for _ in range(3):
        pair.step(draw())
    pair.ours.flush()
    assert_close(pair.layer.weight, pair.weight.detach(), 1e-9)
