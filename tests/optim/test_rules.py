"""Executions of a rule's specification agree at every step: on every row, on the rows of a
batch with NumPy operators, and in kernels.
"""

import copy
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import firstlayer.optim
from firstlayer.kernels.optim import scalars
from firstlayer.kernels.optim.drivers import _compiled, _in_dtype
from firstlayer.kernels.runtime.cache import _source_stamps
from firstlayer.numpy import Embedding
from firstlayer.optim.missed_steps import MAX_STEPS, MissedSteps, host_values
from firstlayer.optim.rule import ArrayOps
from firstlayer.optim.table_state import TableState
from tests.support.optim_cases import OPTIONS, ROWS, WIDTH, assert_close, draw_ids
from tests.support.rule_execution import DenseTable, OperatorTable
from tests.support.run_alone import run_alone

#: Every option of each rule at a value that is not its default.
EVERY_OPTION: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02}
        | {"maximize": True},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}
        | {"maximize": True},
    ],
    "Adagrad": [
        {"lr": 0.3, "lr_decay": 0.01, "eps": 1e-3, "initial_accumulator_value": 0.1}
        | {"maximize": True}
    ],
    "WiseAdagrad": [
        {"lr": 0.3, "lr_decay": 0.01, "eps": 1e-3, "initial_accumulator_value": 0.1}
        | {"maximize": True}
    ],
    "Adam": [
        {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-3, "amsgrad": True, "maximize": True}
    ],
    "AdamW": [
        {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1}
        | {"amsgrad": True, "maximize": True}
    ],
    "RMSprop": [
        {"lr": 0.002, "alpha": 0.9, "eps": 1e-3, "momentum": 0.8, "centered": True}
        | {"maximize": True},
        {"lr": 0.002, "alpha": 0.9, "centered": True},
    ],
    "WiseRMSprop": [{"lr": 0.01, "alpha": 0.9, "eps": 1e-2, "maximize": True}],
    "Lion": [{"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "maximize": True}],
}
CASES = [
    (name, options)
    for name in OPTIONS
    for options in (*OPTIONS[name], *EVERY_OPTION.get(name, ()))
]
# Approximated by a polynomial; all other rules are exact to rounding.
POLYNOMIAL_ERROR = 1e-6


def new_rule(name, options, *, lazy=False):
    """Return a rule and all of its options."""
    optimizer: Any = getattr(firstlayer.optim, f"Row{name}")
    layer = Embedding(2, 2, rng=0)
    made = optimizer(layer, mode="lazy" if lazy else "exact", **options)
    return made.rule, made.options


class Executions:
    """The same table three times: dense, with operators, and with kernels."""

    def __init__(self, name, options, *, dtype="float64", lazy=False):
        self.rule, self.options = new_rule(name, options, lazy=lazy)
        self.rng = np.random.default_rng(0)
        start = self.rng.standard_normal((ROWS, WIDTH)).astype(dtype)
        self.dense = DenseTable(self.rule, start.astype("float64"), self.options)
        self.operators = OperatorTable(self.rule, start, self.options)
        self.table = start.copy()
        self.kernels = TableState(self.rule, lambda: self.table, options=self.options)
        self.draw = draw_ids("zipf", self.rng)

    def step(self):
        ids = np.unique(self.draw())
        gradient = self.dense.weight[ids] + self.rng.standard_normal((len(ids), WIDTH))
        gradient *= -1 if self.options["maximize"] else 1
        options, gradient = dict(self.options), gradient.astype(self.table.dtype)
        self.dense.step(ids, gradient, options)
        self.operators.step(ids, gradient, options)
        self.kernels.catch_up(ids)
        self.kernels.check_step(ids, gradient, options=options)
        self.kernels.step(ids, gradient, options=options)

    def check(self, tolerance, label):
        every, want = np.arange(ROWS), self.dense.weight
        assert_close(self.operators.caught_up(every)[0], want, tolerance, f"ops {label}")
        assert_close(self.kernels.caught_up_rows(every), want, tolerance, label)

    def check_state(self, tolerance):
        self.kernels.catch_up()
        self.operators.store(
            self.options, slice(None), self.operators.caught_up(np.arange(ROWS))
        )
        assert_close(self.table, self.dense.weight, tolerance, "table")
        assert self.kernels.state.keys() == self.dense.state.keys()
        for name, want in self.dense.state.items():
            assert_close(self.operators.state[name], want, tolerance, f"ops {name}")
            assert_close(self.kernels.state[name], want, tolerance, name)


def tolerance_of(name, options):
    is_approximated = "Adam" in name and options.get("eps", 0) > 1e-5
    return POLYNOMIAL_ERROR if is_approximated else 1e-9


@pytest.mark.parametrize("name, options", CASES)
def test_executions_agree_at_every_step_of_a_schedule(name, options):
    run, tolerance = Executions(name, options), tolerance_of(name, options)
    lr = run.options["lr"]
    for step in range(120):
        phase = np.cos(step / 15)
        run.options["lr"] = lr * (1 + 0.9 * phase)
        if options.get("momentum"):
            run.options["momentum"] = options["momentum"] * (0.9 + 0.1 * phase)
        if "betas" in run.options and 0 < run.options["betas"][0]:
            first = options.get("betas", (0.9, 0.99))[0]
            run.options["betas"] = first * (0.95 + 0.05 * phase), run.options["betas"][1]
        run.step()
        run.check(tolerance, f"step {step}")
    run.check_state(tolerance)


@pytest.mark.parametrize(
    ("name", "options", "change"),
    [
        # Until then no row becomes stale.
        ("SGD", {"lr": 0.05}, {"weight_decay": 0.1}),
        ("SGD", {"lr": 0.05, "weight_decay": 0.1}, {"momentum": 0.9}),
        ("SGD", {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
        ("RMSprop", {"lr": 0.01, "momentum": 0.5}, {"momentum": 0.0}),
        ("RMSprop", {"lr": 0.01, "eps": 0.1}, {"momentum": 0.5, "centered": True}),
        ("AdamW", {"lr": 0.02, "weight_decay": 0.1}, {"amsgrad": True}),
        ("AdamW", {"lr": 0.02, "amsgrad": True}, {"amsgrad": False}),
        ("Adam", {"lr": 0.02, "eps": 1e-8}, {"eps": 0.1}),
    ],
)
def test_options_that_choose_a_variant_may_change_while_rows_are_stale(
    name, options, change
):
    run = Executions(name, options)
    for step in range(60):
        if step == 30:
            # The maximum of the second moment starts with the rows as they are then.
            run.options |= change
            run.dense.add_arrays(run.options)
        run.step()
        if not change.get("centered"):
            run.check(POLYNOMIAL_ERROR, f"step {step}")
        else:
            every = np.arange(ROWS)
            rows = run.operators.caught_up(every)[0]
            assert_close(run.kernels.caught_up_rows(every), rows, 1e-12, f"step {step}")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "WiseRMSprop"])
def test_lazy_updates_with_weight_decay_equal_the_specification(name):
    run = Executions(name, {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3}, lazy=True)
    dense = DenseTable(run.rule, run.table, run.options)
    for _ in range(20):
        ids = np.unique(run.draw())
        gradient = run.rng.standard_normal((len(ids), WIDTH))
        dense.update(ids, gradient, run.options)
        run.kernels.step(ids, gradient, options=run.options)
    assert_close(run.table, dense.weight, 1e-12)
    for array, want in dense.state.items():
        assert_close(run.kernels.state[array], want, 1e-12, array)


@pytest.mark.parametrize("name, options", [(name, OPTIONS[name][-1]) for name in OPTIONS])
def test_float32_kernels_round_as_float32_operators_do(name, options):
    run = Executions(name, options, dtype="float32")
    for _ in range(40):
        run.step()
    # The dense table is float64, and gradients are the same for all.
    every, want = np.arange(ROWS), run.dense.weight
    operators = np.abs(run.operators.caught_up(every)[0] - want).max()
    assert operators < 1e-4
    assert_close(run.kernels.caught_up_rows(every), want, 3 * operators + 1e-6)


@settings(deadline=None, max_examples=60)
@given(
    case=st.sampled_from([case for case in CASES if "Adagrad" not in case[0]]),
    rates=st.lists(st.floats(0, 0.1), min_size=1, max_size=30),
    before=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_coefficients_equal_updates_with_a_gradient_of_zero(case, rates, before, seed):
    rule, options = new_rule(*case)
    rng = np.random.default_rng(seed)
    table = DenseTable(rule, rng.standard_normal((1, WIDTH)), options)
    for _ in range(before):
        table.update(slice(None), rng.standard_normal((1, WIDTH)), options)
    start = copy.deepcopy(table.arrays(options))
    missed = MissedSteps(rule, options, before)
    for step, lr in enumerate(rates, start=before + 1):
        options["lr"] = lr
        missed.record(host_values(rule, options, step), options, step)
        table.update(slice(None), np.zeros((1, WIDTH)), options)
    kind: Any = missed.kind
    coefficients = kind(*missed.coefficients[:, 0])
    is_steep = case[0].startswith("Adam")
    assert coefficients.is_accurate(np) or is_steep
    if coefficients.is_accurate(np):
        got = coefficients.catch_up(ArrayOps(np), *start)
        for one, other in zip(got, table.arrays(options), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name, options", [(name, OPTIONS[name][-1]) for name in OPTIONS])
def test_float32_kernels_compute_in_float32(name, options):
    rule, options = new_rule(name, options)
    number = np.float32(0.5)
    state = len(rule.initial_state(options)) * (number,)
    step = _in_dtype(host_values(rule, options, 3), np.dtype("float32"))
    update = _compiled(type(step), "update")

    @numba.njit
    def call_update(step, number, state):
        return update(step, scalars, number, number, *state)

    results = [call_update(step, number, state)]
    if "Adagrad" not in name:
        caught_up: Any = rule.caught_up_coefficients(np, options, 3)
        coefficients = _in_dtype(caught_up, np.dtype("float32"))
        catch_up = _compiled(type(coefficients), "catch_up")

        @numba.njit
        def call_catch_up(coefficients, number, state):
            return catch_up(coefficients, scalars, number, *state)

        results.append(call_catch_up(coefficients, number, state))
        (signature,) = call_catch_up.nopython_signatures
        assert set(signature.return_type) == {numba.float32}
    (signature,) = call_update.nopython_signatures
    assert set(signature.return_type) == {numba.float32}
    assert all(len(result) == 1 + len(state) for result in results)


def test_a_second_process_finds_the_kernels_in_the_cache(tmp_path):
    code = f"""
        import os
        os.environ["NUMBA_CACHE_DIR"] = {str(tmp_path)!r}
        import numpy as np
        from firstlayer.kernels.optim import drivers
        from firstlayer.numpy import Embedding
        from firstlayer.optim import RowSGD
        layer = Embedding(5, 2, rng=0)
        optimizer = RowSGD(layer, lr=0.1, weight_decay=0.1)
        for ids in ([1], [2]):
            y, pull = layer.vjp(ids)
            optimizer.step(pull(y))
        optimizer.flush()
        for kernel in (drivers._update, drivers._catch_up):
            print(sum(kernel.stats.cache_hits.values()), len(kernel.nopython_signatures))
    """
    assert run_alone(code).split() == ["0", "1", "0", "1"]
    assert run_alone(code).split() == ["1", "1", "1", "1"]


def test_a_changed_rule_makes_the_cache_stale():
    names = [name for name, _, _ in _source_stamps()]
    assert "adam.py" in names and "drivers.py" in names


def test_a_full_history_restarts_and_stays_exact():
    run = Executions("Lion", {"lr": 1e-4, "weight_decay": 0.01})
    for _ in range(20):
        run.step()
    for _ in range(MAX_STEPS + 5):
        options, ids = dict(run.options), np.array([1])
        gradient = np.full((1, WIDTH), 0.3)
        run.dense.step(ids, gradient, options)
        run.kernels.step(ids, gradient, options=options)
    assert run.kernels.missed.count < 100
    assert_close(run.kernels.caught_up_rows(np.arange(ROWS)), run.dense.weight, 1e-10)


def test_reading_out_of_place_writes_nothing_and_equals_catching_up():
    for name, dtype in (("AdamW", "float32"), ("SGD", "float64")):
        run = Executions(name, {**OPTIONS[name][-1], "maximize": False}, dtype=dtype)
        for _ in range(20):
            run.step()
        state = run.kernels
        before = copy.deepcopy((run.table, state.state, state.row_steps, state.has_state))
        ids = np.array([3, 0, 3, ROWS - 1, 1])
        rows = state.caught_up_rows(ids)
        np.testing.assert_equal(
            (run.table, state.state, state.row_steps, state.has_state), before
        )
        assert (rows[1] != run.table[0]).any()
        state.catch_up()
        assert rows.tobytes() == run.table[ids].tobytes()


@pytest.mark.rejects
def test_reading_a_row_out_of_range_raises():
    state = Executions("SGD", {"lr": 0.1}).kernels
    with pytest.raises(IndexError, match=r"ids\[1\] is 40, but num_embeddings is 40"):
        state.caught_up_rows(np.array([0, 40]))


@pytest.mark.rejects
def test_row_wise_rmsprop_refuses_momentum():
    from firstlayer.torch import Embedding as TorchEmbedding
    from firstlayer.torch.optim import RowWiseRMSprop

    table = TorchEmbedding(5, 2, sparse=True)
    with pytest.raises(ValueError, match="momentum must be 0.0 for RowWiseRMSprop.*0.9"):
        RowWiseRMSprop(table, momentum=0.9)
    with pytest.raises(ValueError, match="centered must be False for RowWiseRMSprop"):
        RowWiseRMSprop(table, centered=True)
