"""Row optimizers refuse states and gradients that do not fit, and change nothing then.

Kernels write to rows unchecked, so a state that does not fit would corrupt memory.
"""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

import firstlayer.optim as numpy_optim
import firstlayer.torch.optim as torch_optim
from firstlayer.embeddings.row_gradient import RowGradient
from firstlayer.numpy import Embedding as NumpyEmbedding
from firstlayer.torch import Embedding

ROWS, WIDTH = 30, 3
#: Optimizers with options under which the state has all of its arrays.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "RowSGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02},
    "RowAdagrad": {"lr": 0.1, "lr_decay": 0.01},
    "RowWiseAdagrad": {"lr": 0.1, "lr_decay": 0.01},
    "RowAdam": {"lr": 0.1, "amsgrad": True},
    "RowAdamW": {"lr": 0.1, "weight_decay": 0.1},
    "RowRMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "RowWiseRMSprop": {"lr": 0.1, "alpha": 0.9},
    "RowLion": {"lr": 0.1, "weight_decay": 0.1},
}
NEEDS_STEP = ("RowAdagrad", "RowWiseAdagrad", "RowAdam", "RowAdamW")
WRONG_STEPS = [-1, -(2.0**40), 0.5, float("nan"), float("inf"), 2.0**80, [1.0, 2.0], "7"]


class TorchTraining:
    """A table and a dense parameter, trained by one row optimizer."""

    def __init__(self, name: str, *, rows: int = ROWS, **options: Any) -> None:
        torch.manual_seed(0)
        self.table, self.other = Embedding(rows, WIDTH, sparse=True), torch.nn.Linear(3, 1)
        parameters = [self.table.weight, *self.other.parameters()]
        options = {**OPTIMIZERS[name], **options}
        self.optimizer = getattr(torch_optim, name)(parameters, **options)

    def backward(self, seed: int) -> None:
        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, 5))
        self.optimizer.zero_grad()
        self.other(self.table(ids)).square().sum().backward()

    def steps(self, *seeds: int) -> "TorchTraining":
        for seed in seeds:
            self.backward(seed)
            self.optimizer.step()
        return self

    def contents(self) -> Any:
        """Return all numbers that a step changes, as lists."""
        self.optimizer.flush()
        modules = self.table.weight, *self.other.parameters()
        states = copy.deepcopy(self.optimizer.state_dict()["state"])
        return [p.tolist() for p in modules], {
            number: {name: torch.as_tensor(x).tolist() for name, x in sorted(state.items())}
            for number, state in states.items()
        }


def forged(name: str) -> dict[str, Any]:
    """Return changes of the table's saved state that make it not fit, by description."""
    state = TorchTraining(name).steps(1, 2).optimizer.state_dict()["state"][0]
    array = max(state.keys() - {"step"})
    value = state[array]
    rows, width = value.shape
    wrong = {
        "one row": value[:1],
        "fewer rows": value[: rows - 1],
        "more rows": torch.zeros(rows + 1, width),
        "no rows": value[:0],
        "more columns": torch.zeros(rows, width + 1),
        "no columns": torch.zeros(rows, 0),
        "transposed": torch.zeros(width + 2, rows),
        "one axis": torch.zeros(rows * width),
        "three axes": value[None],
        "a number": torch.tensor(1.0),
        "integers": value.long(),
        "complex numbers": value.to(torch.complex64),
        "bools": value.bool(),
        "sparse": value.to_sparse(),
        "no memory": value.to("meta"),
        "nested": torch.nested.nested_tensor([value], layout=torch.jagged),
        "a list": [1.0, 2.0],
        "a float": 1.0,
    }
    changes = {key: {**state, array: wrong_value} for key, wrong_value in wrong.items()}
    changes["another array"] = {**state, "exp_avg_of_another": value}
    if name != "RowSGD":
        changes["a missing array"] = {k: v for k, v in state.items() if k != array}
        changes["None"] = {**state, array: None}
    if name in NEEDS_STEP:
        changes["no step"] = {k: v for k, v in state.items() if k != "step"}
    for step in WRONG_STEPS:
        tensor = step if isinstance(step, str) else torch.tensor(step, dtype=torch.float64)
        changes[f"step {step}"] = {**state, "step": tensor}
    return changes


def undisturbed(name: str, *, before_backward: bool = True) -> Any:
    """Return the contents after four steps, flushed before or after the last backward."""
    training = TorchTraining(name).steps(1, 2, 3)
    if before_backward:
        training.optimizer.flush()
    training.backward(4)
    training.optimizer.flush()
    training.optimizer.step()
    return training.contents()


@pytest.mark.rejects
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loading_a_state_that_does_not_fit_changes_nothing(name):
    training = TorchTraining(name).steps(1, 2, 3)
    state_dict, before = training.optimizer.state_dict(), training.contents()
    attached = getattr(training.table.weight, "table_state", None)
    for description, state in forged(name).items():
        wrong = {**state_dict, "state": {**state_dict["state"], 0: state}}
        with pytest.raises(ValueError, match=r"must (be|have)"):
            training.optimizer.load_state_dict(wrong)
            pytest.fail(f"{name} took a state with {description}")
    assert training.contents() == before
    assert getattr(training.table.weight, "table_state", None) is attached
    assert training.steps(4).contents() == undisturbed(name)


@pytest.mark.rejects
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_a_replaced_state_that_does_not_fit_changes_nothing(name):
    training = TorchTraining(name).steps(1, 2, 3)
    weight, optimizer = training.table.weight, training.optimizer
    training.backward(4)
    good, before = dict(optimizer.state[weight]), training.contents()
    for description, state in forged(name).items():
        # Without a name, an array starts from its initial value.
        if description in {"a missing array", "None"}:
            continue
        optimizer.state[weight] = dict(state)
        with pytest.raises(ValueError, match=r"must (be|have)"):
            optimizer.step()
            pytest.fail(f"{name} took a state with {description}")
    optimizer.state[weight] = good
    assert training.contents() == before
    optimizer.step()
    assert training.contents() == undisturbed(name, before_backward=False)


MEMORY = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "float64": lambda x: x.double(),
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "negated": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("memory", MEMORY)
def test_a_state_with_any_memory_layout_is_loaded(memory):
    training = TorchTraining("RowAdamW").steps(1, 2)
    state_dict = copy.deepcopy(training.optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        value = state_dict["state"][0][name]
        state_dict["state"][0][name] = MEMORY[memory](value)
        assert torch.equal(state_dict["state"][0][name].float(), value)
    training.optimizer.load_state_dict(state_dict)
    want = TorchTraining("RowAdamW").steps(1, 2)
    want.optimizer.flush()
    assert training.steps(3, 4).contents() == want.steps(3, 4).contents()


def test_arrays_that_share_memory_are_loaded_as_copies():
    training = TorchTraining("RowAdamW").steps(1, 2)
    state_dict = copy.deepcopy(training.optimizer.state_dict())
    shared = torch.full((1, 1), 0.5).expand(ROWS, WIDTH)
    state_dict["state"][0] |= {"exp_avg": shared, "exp_avg_sq": shared}
    training.optimizer.load_state_dict(state_dict)
    state_dict["state"][0] |= {"exp_avg": shared.clone(), "exp_avg_sq": shared.clone()}
    want = TorchTraining("RowAdamW").steps(1, 2)
    want.optimizer.load_state_dict(copy.deepcopy(state_dict))
    assert training.steps(3, 4).contents() == want.steps(3, 4).contents()
    assert (shared == 0.5).all()


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "other"}, "mode must be 'exact' or 'lazy', got 'other'"),
        ({"betas": (0.9,)}, r"betas must be 2 numbers, got \(0.9,\)"),
        ({"betas": None}, "betas must be 2 numbers, got None"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\), got 1.0"),
        ({"lr": float("nan")}, "lr must not be negative, got nan"),
        ({"lr": "0.1"}, "lr must be a number, got str"),
    ],
)
def test_a_step_with_wrong_options_changes_nothing(change, message):
    training = TorchTraining("RowAdamW").steps(1, 2)
    state_dict = training.optimizer.state_dict()
    state_dict["param_groups"][0] |= change
    before = training.contents()
    with pytest.raises((ValueError, TypeError), match=message):
        training.optimizer.load_state_dict(state_dict)
        training.steps(3)
    assert training.contents() == before


@pytest.mark.rejects
def test_a_state_that_is_not_a_dict_is_refused():
    training = TorchTraining("RowAdamW").steps(1)
    state_dict = training.optimizer.state_dict()
    state_dict["state"] = {**state_dict["state"], 0: [1.0]}
    with pytest.raises(ValueError, match="state of parameter 0 must be a dict, got list"):
        training.optimizer.load_state_dict(state_dict)


@pytest.mark.rejects
def test_a_state_of_a_smaller_table_is_refused():
    small = TorchTraining("RowAdamW", rows=ROWS + 1).steps(1).optimizer.state_dict()
    large = TorchTraining("RowAdamW", rows=100_000)
    message = (
        r"exp_avg of parameter 0 of its group must be real of shape \(100000, 3\), "
        r"got float32 of shape \(31, 3\)"
    )
    with pytest.raises(ValueError, match=message):
        large.optimizer.load_state_dict(small)


@pytest.mark.rejects
@pytest.mark.parametrize("saved", OPTIMIZERS)
@pytest.mark.parametrize("loaded", OPTIMIZERS)
def test_a_state_of_another_optimizer_is_refused(saved, loaded):
    state_dict = TorchTraining(saved).steps(1, 2).optimizer.state_dict()
    training = TorchTraining(loaded).steps(1)
    if saved == loaded or {saved, loaded} == {"RowAdam", "RowAdamW"}:
        training.optimizer.load_state_dict(state_dict)
        return
    before = training.contents()
    # Arrays of row-wise Adagrad fit a parameter that is not a table.
    pair = {saved, loaded} == {"RowAdagrad", "RowWiseAdagrad"}
    if pair and loaded == "RowWiseAdagrad":
        training.optimizer.load_state_dict(state_dict)
        training.backward(2)
        with pytest.raises(ValueError, match=r"sum must be \(30, 1\) in float32"):
            training.optimizer.step()
        return
    with pytest.raises(ValueError, match=r"must (be|have)"):
        training.optimizer.load_state_dict(state_dict)
    assert training.contents() == before


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("name", "option"), [("RowAdam", "amsgrad"), ("RowRMSprop", "centered")]
)
def test_a_state_without_an_array_that_its_options_need_is_refused(name, option):
    state_dict = TorchTraining(name, **{option: False}).steps(1).optimizer.state_dict()
    state_dict["param_groups"][0][option] = True
    with pytest.raises(ValueError, match="the state of parameter 0 of its group must have"):
        TorchTraining(name).optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copied_saved_and_pickled_states_continue_exactly(name):
    want = TorchTraining(name).steps(1, 2, 3)
    # Saving brings every row up to date, which rounds stale rows.
    want.optimizer.flush()
    file = io.BytesIO()
    torch.save(want.optimizer.state_dict(), file)
    table, other = copy.deepcopy(want.table), copy.deepcopy(want.other)
    copied = copy.deepcopy(want)
    want.steps(4, 5)
    loaded = TorchTraining(name)
    loaded.table, loaded.other = table, other
    parameters = [loaded.table.weight, *loaded.other.parameters()]
    loaded.optimizer.param_groups[0]["params"] = parameters
    file.seek(0)
    loaded.optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.steps(4, 5).contents() == want.contents()
    assert copied.steps(4, 5).contents() == want.contents()


@pytest.mark.parametrize("edit", ["replace", "clear", "step", "data"])
def test_an_edited_state_is_used_as_by_torch(edit):
    training = TorchTraining("RowAdamW")
    ours, weight = training.optimizer, training.table.weight
    dense = torch.nn.Parameter(weight.detach().clone())
    theirs = torch.optim.AdamW([dense], lr=0.1, weight_decay=0.1)
    rng = np.random.default_rng(0)
    for step in range(8):
        ids = torch.from_numpy(rng.integers(0, ROWS, 6))
        goal = torch.from_numpy(rng.standard_normal((6, WIDTH)).astype(np.float32))
        for optimizer, table in ((ours, training.table), (theirs, None)):
            optimizer.zero_grad()
            rows = dense[ids] if table is None else table(ids)
            (rows - goal).square().sum().backward()
            optimizer.step()
        if step == 3:
            ours.flush()
            for optimizer, parameter in ((ours, weight), (theirs, dense)):
                state = optimizer.state[parameter]
                if edit == "replace":
                    state["exp_avg"] = -0.5 * state["exp_avg"]
                elif edit == "data":
                    state["exp_avg_sq"].data = torch.full((ROWS, WIDTH), 0.25)
                elif edit == "step":
                    state["step"].fill_(100.0)
                else:
                    optimizer.state.clear()
    ours.flush()
    torch.testing.assert_close(weight, dense, rtol=0, atol=2e-6)


def test_an_option_that_is_switched_off_leaves_its_array_unused_as_in_torch():
    training = TorchTraining("RowAdam")
    ours, weight = training.optimizer, training.table.weight
    dense = torch.nn.Parameter(weight.detach().clone())
    theirs = torch.optim.Adam([dense], lr=0.1, amsgrad=True)
    rng = np.random.default_rng(0)
    for step in range(12):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["amsgrad"] = not 4 <= step < 8
        ids = torch.from_numpy(rng.integers(0, ROWS, 6))
        size = 10.0 if step < 4 else 0.1
        for optimizer, table in ((ours, training.table), (theirs, None)):
            optimizer.zero_grad()
            rows = dense[ids] if table is None else table(ids)
            (size * rows).square().sum().backward()
            optimizer.step()
        if step == 5:
            # The unused array is saved and loaded with the others.
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.flush()
    torch.testing.assert_close(weight, dense, rtol=0, atol=2e-6)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change",
    ["fewer rows", "columns", "dtype", "one row for all", "strided", "cut", "no memory"],
)
def test_a_step_of_a_table_that_was_changed_changes_nothing(change):
    training = TorchTraining("RowAdamW").steps(1, 2)
    weight = training.table.weight
    training.backward(3)
    before = training.contents()
    original = weight.detach().clone()
    if change == "no memory":
        weight.untyped_storage().resize_(0)
    else:
        weight.data = {
            "fewer rows": original[:7].clone(),
            "columns": original[:, :2].clone(),
            "dtype": original.double(),
            "one row for all": original[:1].expand(ROWS, WIDTH),
            # Its last rows are outside of the memory after this.
            "strided": torch.zeros(ROWS, 100)[:, :WIDTH],
            "cut": original.clone(),
        }[change]
    if change in ("strided", "cut"):
        weight.untyped_storage().resize_(original.nbytes - 4 * (change == "cut"))
    # torch itself checks the gradient when the table is assigned.
    match = "must stay|must have the shape|must have its memory|and contiguous"
    with pytest.raises(ValueError, match=match):
        training.optimizer.step()
    if change == "no memory":
        weight.untyped_storage().resize_(original.nbytes)
        with torch.no_grad():
            weight.copy_(original)
    else:
        weight.data = original
    assert training.contents() == before


def sparse(ids: list[int], values: torch.Tensor, shape: Any = (ROWS, WIDTH)) -> Any:
    return torch.sparse_coo_tensor(
        torch.tensor([ids]), values, shape, check_invariants=False, is_coalesced=True
    )


WRONG_GRADIENTS = {
    r"grad.indices\(\)\[0\]\[0\] is -1, but the number of rows is 30": [-1],
    r"grad.indices\(\)\[0\]\[1\] is 30, but the number of rows is 30": [4, 30],
    r"grad.indices\(\)\[0\] must be ascending, each once": [7, 4],
    r"grad.indices\(\)\[0\] must be ascending, each once ?": [4, 4],
}


@pytest.mark.rejects
@pytest.mark.parametrize(("message", "ids"), WRONG_GRADIENTS.items())
def test_a_wrong_gradient_of_the_second_table_changes_nothing(message, ids):
    torch.manual_seed(0)
    tables = [Embedding(ROWS, WIDTH, sparse=True) for _ in range(2)]
    other = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [other, tables[0].weight]}, {"params": [tables[1].weight]}]
    optimizer = torch_optim.RowAdamW(groups, lr=0.1)
    for round_ in range(2):
        state = copy.deepcopy(optimizer.state_dict()["state"])
        before = [p.detach().clone() for p in (other, *(t.weight for t in tables))]
        other.grad = torch.ones(4)
        tables[0].weight.grad = sparse([1, 2], torch.ones(2, WIDTH))
        tables[1].weight.grad = sparse(ids, torch.ones(len(ids), WIDTH))
        with pytest.raises((ValueError, IndexError), match=f"^{message}$"):
            optimizer.step()
        after = [p.detach() for p in (other, *(t.weight for t in tables))]
        assert all(map(torch.equal, before, after))
        assert str(optimizer.state_dict()["state"]) == str(state)
        if not round_:
            # The second time, the tables have a state.
            tables[1].weight.grad = sparse([3], torch.ones(1, WIDTH))
            optimizer.step()


@pytest.mark.rejects
def test_a_wrong_dense_gradient_changes_nothing():
    training = TorchTraining("RowAdamW").steps(1)
    training.backward(2)
    before = training.contents()
    grad = training.other.bias.grad
    assert grad is not None
    grad.data = torch.ones(5)
    with pytest.raises(ValueError, match=r"shape \(1,\) of its parameter, got \(5,\)"):
        training.optimizer.step()
    assert training.contents() == before


@pytest.mark.parametrize("first", [2**24 - 1, 2**31 - 2, 2**40, 2**53 - 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_after_any_number_of_steps(name, first):
    training = TorchTraining(name).steps(1, 2)
    state_dict = copy.deepcopy(training.optimizer.state_dict())
    for state in state_dict["state"].values():
        if "step" in state:
            state["step"] = torch.tensor(float(first), dtype=torch.float64)
    training.optimizer.load_state_dict(state_dict)
    training.steps(3, 4, 5)
    weight = training.table.weight
    assert training.optimizer.state[weight]["step"].item() == first + 3
    resumed = copy.deepcopy(training)
    assert resumed.steps(6).contents() == training.steps(6).contents()
    assert np.isfinite(weight.detach().numpy()).all()


def numpy_training(name: str, **options: Any) -> tuple[NumpyEmbedding, Any]:
    layer = NumpyEmbedding(ROWS, WIDTH, rng=0)
    options = {**OPTIMIZERS[name], **options}
    return layer, getattr(numpy_optim, name)(layer, **options)


def numpy_steps(layer: NumpyEmbedding, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        ids = np.random.default_rng(seed).integers(0, ROWS, 5)
        y, pull = layer.vjp(ids)
        optimizer.step(pull(y))


def numpy_contents(layer: NumpyEmbedding, optimizer: Any) -> Any:
    state = {name: array.tolist() for name, array in optimizer.state_dict().items()}
    return layer.weight.tolist(), state


@pytest.mark.rejects
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numpy_states_that_do_not_fit_change_nothing(name):
    layer, optimizer = numpy_training(name)
    numpy_steps(layer, optimizer, 1, 2, 3)
    state, before = optimizer.state_dict(), numpy_contents(layer, optimizer)
    array = max(key for key in state if key != "weight.step")
    value = state[array]
    rows, width = value.shape
    wrong: list[Any] = [value[:1], value[:0], np.zeros((rows + 1, width)), value[None]]
    wrong += [np.zeros((rows, width + 1)), np.zeros(rows * width), np.float32(1), None]
    wrong += [value.astype(complex), value.astype(np.int64), value.astype(str), "exp_avg"]
    changes = [{**state, array: x} for x in wrong]
    changes += [{**state, "weight.step": np.array(x)} for x in WRONG_STEPS]
    changes += [{k: v for k, v in state.items() if k != key} for key in state]
    changes += [{**state, "weight.another": value}, {}]
    for change in changes:
        with pytest.raises((ValueError, TypeError), match=r"must (be|have)"):
            optimizer.load_state_dict(change)
            pytest.fail(f"{name} took {change}")
    assert numpy_contents(layer, optimizer) == before
    numpy_steps(layer, optimizer, 4)
    other, continued = numpy_training(name)
    numpy_steps(other, continued, 1, 2, 3)
    continued.flush()
    numpy_steps(other, continued, 4)
    assert numpy_contents(layer, optimizer) == numpy_contents(other, continued)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("name", "option", "off"),
    [
        ("RowAdam", "amsgrad", False),
        ("RowRMSprop", "centered", False),
        ("RowRMSprop", "momentum", 0.0),
        ("RowSGD", "momentum", 0.0),
    ],
)
def test_numpy_states_of_other_options_are_refused(name, option, off):
    trained, plain = numpy_training(name), numpy_training(name, **{option: off})
    for one, two in ((trained, plain), (plain, trained)):
        numpy_steps(*one, 1)
        with pytest.raises(ValueError, match="state must have"):
            two[1].load_state_dict(one[1].state_dict())


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float32])
def test_numpy_steps_of_any_dtype_are_loaded(dtype):
    layer, optimizer = numpy_training("RowAdamW")
    numpy_steps(layer, optimizer, 1, 2, 3)
    state = optimizer.state_dict()
    other, continued = numpy_training("RowAdamW")
    other.weight[:] = layer.weight
    continued.load_state_dict({**state, "weight.step": np.array(3, dtype)})
    numpy_steps(layer, optimizer, 4, 5)
    numpy_steps(other, continued, 4, 5)
    assert numpy_contents(layer, optimizer) == numpy_contents(other, continued)


@pytest.mark.parametrize("first", [2**31 - 2, 2**40, 2**60])
def test_numpy_training_continues_after_any_number_of_steps(first):
    layer, optimizer = numpy_training("RowAdamW")
    numpy_steps(layer, optimizer, 1, 2)
    state = {**optimizer.state_dict(), "weight.step": np.array(first)}
    optimizer.load_state_dict(state)
    numpy_steps(layer, optimizer, 3, 4, 5)
    assert int(optimizer.state_dict()["weight.step"]) == first + 3
    assert np.isfinite(layer.weight).all()


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change", ["array", "array dtype", "read-only array", "table", "dtype", "read-only"]
)
def test_a_numpy_step_with_changed_arrays_changes_nothing(change):
    layer, optimizer = numpy_training("RowAdamW")
    numpy_steps(layer, optimizer, 1, 2)
    y, pull = layer.vjp([1, 2, 3])
    grads, before = pull(y), numpy_contents(layer, optimizer)
    arrays, weight = optimizer.table_states["weight"].state, layer.weight
    array = arrays["exp_avg_sq"]
    if change == "array":
        arrays["exp_avg_sq"] = array[:4].copy()
    elif change == "array dtype":
        arrays["exp_avg_sq"] = array.astype(np.float64)
    elif change == "read-only array":
        arrays["exp_avg_sq"] = array.copy()
        arrays["exp_avg_sq"].flags.writeable = False
    elif change == "table":
        layer.weight = weight[:4].copy()
    elif change == "dtype":
        layer.weight = weight.astype(">f4")
    else:
        layer.weight = weight.copy()
        layer.weight.flags.writeable = False
    with pytest.raises(ValueError, match="must (be|stay)"):
        optimizer.step(grads)
    arrays["exp_avg_sq"], layer.weight = array, weight
    assert numpy_contents(layer, optimizer) == before


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([-1], np.ones((1, WIDTH)), r"ids\[0\] is -1, but the number of rows is 30"),
        ([30], np.ones((1, WIDTH)), r"ids\[0\] is 30, but the number of rows is 30"),
        ([2, 1], np.ones((2, WIDTH)), "ids must be ascending, each once"),
        ([1, 2], np.ones((1, WIDTH)), "must have an id for each of 1 rows"),
        ([1], np.ones((1, WIDTH), complex), "must be real, got complex128"),
    ],
)
def test_a_wrong_numpy_gradient_changes_nothing(ids, values, message):
    layer, optimizer = numpy_training("RowAdamW")
    numpy_steps(layer, optimizer, 1)
    before = numpy_contents(layer, optimizer)
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        optimizer.step({"weight": RowGradient(np.array(ids), values)})
    assert numpy_contents(layer, optimizer) == before
