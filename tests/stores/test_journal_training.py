"""Training on disk with NumPy layers: exact, and continued where a commit left off."""

import copy
import os
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

import firstlayer.optim
from firstlayer.numpy import Embedding
from firstlayer.optim import RowAdagrad, RowAdam, RowAdamW, RowRMSprop, RowSGD
from firstlayer.stores import create_store, open_store
from tests.support.optim_cases import OPTIONS, assert_close, copy_options, dense, scheduler

ROWS, WIDTH = 40, 16


def table(seed: int = 0, dtype="float32") -> np.ndarray:
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(dtype)


def create(path, dtype="float32"):
    return create_store(path, (ROWS, WIDTH), dtype=dtype, rows=table(0, dtype))


def train(layer, optimizer, steps: range, *, rows: int = ROWS) -> None:
    """Take steps whose ids, goals and learning rate depend on their number alone."""
    for number in steps:
        rng = np.random.default_rng(number)
        ids = np.minimum(rng.zipf(1.5, 5) - 1, rows - 1)
        y, pull = layer.vjp(ids)
        goal = rng.normal(size=y.shape).astype(np.float32)
        optimizer.lr = 0.02 / (1 + number % 7)
        optimizer.step(pull((y.astype(np.float32) - goal).astype(y.dtype)))


def arrays_of(optimizer) -> dict[str, np.ndarray]:
    """Return every array and number that training depends on."""
    state = optimizer.table_states["weight"]
    return {
        **{name: array.copy() for name, array in state.state.items()},
        "weight": state.table().astype(np.float32),
        "row_steps": np.maximum(state.row_steps, state.base_step),
        "has_state": state.has_state.copy(),
        "step_count": np.array(state.step_count),
        "coefficients": state.missed.coefficients.copy(),
    }


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


CASES = [
    (name, options)
    for name, choices in OPTIONS.items()
    for options in choices
    if not options.get("amsgrad") or name == "AdamW"
]


@pytest.mark.parametrize("name, options", CASES)
def test_a_run_in_three_sittings_equals_one_in_memory(tmp_path, name, options):
    optimizer_class = getattr(firstlayer.optim, f"Row{name}")
    memory = Embedding(weight=table(), padding_idx=3)
    expected = optimizer_class(memory, **options)
    train(memory, expected, range(60))
    create(tmp_path / "a").close()
    for steps in (range(7), range(7, 31), range(31, 60)):
        with open_store(tmp_path / "a", mode="r+") as store:
            layer = Embedding.from_store(store, padding_idx=3)
            optimizer = optimizer_class(layer, **options)
            assert optimizer.table_states["weight"].step_count == steps.start
            train(layer, optimizer, steps)
            got = arrays_of(optimizer)
    assert_same(got, arrays_of(expected))


@pytest.mark.parametrize("name, number", [("AdamW", 0), ("SGD", 2), ("RMSprop", 2)])
def test_rows_read_equal_the_dense_optimizer(tmp_path, name, number):
    options, steps = OPTIONS[name][number], 100
    weight = torch.nn.Parameter(torch.from_numpy(table().astype(np.float64)))
    theirs = dense(name, [weight], **options)
    schedule = scheduler("cosine", theirs, steps)
    rng, sign = np.random.default_rng(1), -1 if options.get("maximize") else 1
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        ours = getattr(firstlayer.optim, f"Row{name}")(layer, **options)
        for step in range(steps):
            ids = np.minimum(rng.zipf(1.3, 4) - 1, ROWS - 1)
            y, pull = layer.vjp(ids)
            want = weight.detach().numpy()[ids].copy()
            assert_close(y, want, 2e-4, f"step {step}")
            goal = rng.normal(size=y.shape)
            copy_options(theirs, ours.options)
            ours.step(pull((sign * (y - goal)).astype(np.float32)))
            weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(
                0, torch.from_numpy(ids), torch.from_numpy(sign * (want - goal))
            )
            theirs.step()
            schedule.step()
            if step % 10 == 9:
                store.commit()
        ours.flush()
        assert_close(layer.weight, weight.detach(), 2e-4, "after flush()")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_with_stochastic_rounding_continues(tmp_path, dtype):
    rounding = {"stochastic_rounding": dtype == "bfloat16"}
    memory = Embedding(weight=table(0, dtype))
    expected = RowAdamW(memory, weight_decay=0.1, **rounding)
    train(memory, expected, range(30))
    create(tmp_path / "a", dtype).close()
    for steps in (range(13), range(13, 30)):
        with open_store(tmp_path / "a", mode="r+") as store:
            layer = Embedding.from_store(store)
            optimizer = RowAdamW(layer, weight_decay=0.1, **rounding)
            train(layer, optimizer, steps)
            assert layer.dtype.name == dtype
            got = arrays_of(optimizer)
    assert_same(got, arrays_of(expected))


def test_uncommitted_steps_lookups_and_writes_are_undone(tmp_path):
    store = create(tmp_path / "a")
    layer = Embedding.from_store(store, max_norm=1.5, padding_idx=2)
    optimizer = RowAdamW(layer, weight_decay=0.1)
    train(layer, optimizer, range(20))
    store.commit()
    want = arrays_of(optimizer)
    train(layer, optimizer, range(20, 25))
    layer(np.arange(20))  # Catches rows up.
    layer.project(np.arange(5, 9))
    layer.set_padding(7.0)
    store.write([30], np.ones((1, WIDTH)))
    optimizer.flush()
    layer.project()
    assert (arrays_of(optimizer)["weight"] != want["weight"]).any(axis=1).sum() > 30
    store.close()
    with open_store(tmp_path / "a", mode="r+") as store:
        layer = Embedding.from_store(store, max_norm=1.5, padding_idx=2)
        assert_same(arrays_of(RowAdamW(layer, weight_decay=0.1)), want)


def test_store_returns_to_a_tag_while_it_is_trained(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        store.commit("untrained")
        optimizer = RowAdam(layer, betas=(0.8, 0.95))
        train(layer, optimizer, range(10))
        store.commit("ten")
        at_ten = arrays_of(optimizer)
        train(layer, optimizer, range(10, 15))
        store.commit()
        train(layer, optimizer, range(15, 20))
        at_twenty = arrays_of(optimizer)
        store.return_to("ten")
        assert_same(arrays_of(optimizer), at_ten)
        train(layer, optimizer, range(10, 20))
        assert_same(arrays_of(optimizer), at_twenty)
        store.return_to("untrained")
        np.testing.assert_array_equal(store.array, table())
        train(layer, optimizer, range(20))
        assert_same(arrays_of(optimizer), at_twenty)


def test_state_dict_refers_to_a_commit(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdamW(layer)
        train(layer, optimizer, range(10))
        saved, saved_optimizer = layer.state_dict(), optimizer.state_dict()
        want = arrays_of(optimizer)
        assert saved.keys() == {"weight.store"} and saved["weight.store"].nbytes < 500
        assert saved_optimizer.keys() == {"weight.step"}
        train(layer, optimizer, range(10, 14))
        with pytest.raises(ValueError, match=r"must be 14 as in the store .* got 10"):
            optimizer.load_state_dict(saved_optimizer)
        layer.load_state_dict(saved)
        optimizer.load_state_dict(saved_optimizer)
        assert_same(arrays_of(optimizer), want)
        values = {"weight": np.ones((ROWS, WIDTH), np.float32)}
        layer.load_state_dict(values)
        assert (store.array == 1).all()
    with create(tmp_path / "b") as other:
        with pytest.raises(ValueError, match="refers to the store at .* which is not"):
            Embedding.from_store(other).load_state_dict(saved)
        with pytest.raises(ValueError, match="must refer to a training store"):
            Embedding.from_store(other).load_state_dict({"weight.store": np.ones(3)})


@pytest.mark.parametrize("is_file", [False, True])
def test_training_continues_after_the_process_changes_its_folder(
    tmp_path, monkeypatch, is_file
):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    np.save("t.npy", table())
    path = "t.npy" if is_file else "folder"
    if is_file:
        store = open_store(path, mode="r+")
    else:
        store = create_store(path, rows=table())
    monkeypatch.chdir("other")
    layer = Embedding.from_store(store)
    optimizer = RowAdam(layer, lr=0.1)
    train(layer, optimizer, range(5))
    store.commit("five")
    want = arrays_of(optimizer)
    train(layer, optimizer, range(5, 9))
    store.commit("nine")
    store.return_to("five")
    assert_same(arrays_of(optimizer), want)
    store.close()
    assert os.listdir() == []
    with open_store(tmp_path / path, mode="r+") as store:
        assert store.tags == ["five"]
        assert_same(arrays_of(RowAdam(Embedding.from_store(store), lr=0.1)), want)


def test_a_tag_that_is_not_kept_is_named(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        saved = layer.state_dict()
        for name in ("a", "b"):
            store.commit(name)
        with pytest.raises(ValueError, match=r"does not keep; it keeps \['a', 'b'\]"):
            layer.load_state_dict(saved)


def test_copies_of_a_layer_on_disk_are_refused(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        for call in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied, pickled or resized"):
                call(layer)
        with pytest.raises(TypeError, match="cannot be copied, pickled or resized"):
            layer.resize(50)


def test_another_optimizer_takes_over(tmp_path):
    memory = Embedding(weight=table())
    expected = RowAdamW(memory, weight_decay=0.1)
    train(memory, expected, range(20))
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        first = RowAdamW(layer, weight_decay=0.1)
        train(layer, first, range(11))
        second = RowAdamW(layer, weight_decay=0.1)
        train(layer, second, range(11, 20))
        assert_same(arrays_of(second), arrays_of(expected))
        with pytest.raises(RuntimeError, match="another optimizer trains it"):
            train(layer, first, range(20, 21))
        with pytest.raises(ValueError, match=r"state of AdamW in .* got SGD in mode"):
            RowSGD(layer, momentum=0.9)
        store.discard_state()
        expected.flush()
        np.testing.assert_array_equal(layer.weight, memory.weight)
        train(layer, RowSGD(layer, momentum=0.9), range(20, 30))
        train(memory, RowSGD(memory, momentum=0.9), range(20, 30))
        np.testing.assert_array_equal(store.read(range(ROWS)), memory(range(ROWS)))
    names = {name.split(".")[0] for name in os.listdir(tmp_path / "a")}
    assert {"momentum_buffer", "weight"} <= names and "exp_avg" not in names


def test_discarded_state_returns_with_its_commit(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdam(layer)
        train(layer, optimizer, range(9))
        store.commit("adam")
        want = arrays_of(optimizer)
        store.discard_state()
        optimizer = RowAdam(layer)
        train(layer, optimizer, range(4))
        assert optimizer.table_states["weight"].step_count == 4
        store.commit("again")
        train(layer, optimizer, range(4, 6))
    with open_store(tmp_path / "a", mode="r+", at="adam") as store:
        assert_same(arrays_of(RowAdam(Embedding.from_store(store))), want)


def test_arrays_that_new_options_need_are_added(tmp_path):
    memory = Embedding(weight=table())
    expected = RowAdam(memory)
    train(memory, expected, range(10))
    expected.options["amsgrad"] = True
    train(memory, expected, range(10, 20))
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdam(layer)
        train(layer, optimizer, range(10))
        store.commit("plain")
        want = arrays_of(optimizer)
        optimizer.options["amsgrad"] = True
        train(layer, optimizer, range(10, 15))
    with open_store(tmp_path / "a", mode="r+") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdam(layer, amsgrad=True)
        train(layer, optimizer, range(15, 20))
        assert_same(arrays_of(optimizer), arrays_of(expected))
    with open_store(tmp_path / "a", mode="r+", at="plain") as store:
        assert_same(arrays_of(RowAdam(Embedding.from_store(store))), want)
        assert not list((tmp_path / "a").glob("max_exp_avg_sq*"))


def test_two_stores_are_trained_by_one_optimizer(tmp_path):
    class Model:
        def __init__(self, one, two):
            self.layers = {"one.weight": one, "two.weight": two}

        def parameters(self):
            return {name: layer.weight for name, layer in self.layers.items()}

        def embeddings(self):
            return self.layers

    def steps(model, optimizer, numbers):
        for number in numbers:
            gradients = {}
            for name, layer in model.layers.items():
                y, pull = layer.vjp([number % ROWS, 3, number // 2])
                gradients[name] = pull(y - number)["weight"]
            optimizer.step(gradients)

    memory = Model(Embedding(weight=table(1)), Embedding(weight=table(2)))
    expected = RowRMSprop(memory, momentum=0.5)
    steps(memory, expected, range(12))
    for name, seed in (("a", 1), ("b", 2)):
        shape = (ROWS, WIDTH)
        create_store(tmp_path / name, shape, rows=table(seed)).close()
    with (
        open_store(tmp_path / "a", mode="r+") as one,
        open_store(tmp_path / "b", mode="r+", sync="full") as two,
    ):
        model = Model(Embedding.from_store(one), Embedding.from_store(two))
        optimizer = RowRMSprop(model, momentum=0.5)
        steps(model, optimizer, range(12))
        for name, state in optimizer.table_states.items():
            np.testing.assert_array_equal(
                state.state["square_avg"], expected.table_states[name].state["square_avg"]
            )


def test_a_full_disk_ends_a_step_before_it_starts(tmp_path):
    import resource

    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdagrad(layer, initial_accumulator_value=0.1)
        train(layer, optimizer, range(5))
        store.commit()
        y, pull = layer.vjp(np.arange(30))
        gradients, want = pull(y), arrays_of(optimizer)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        end = store._journal.newest.end
        resource.setrlimit(resource.RLIMIT_FSIZE, (end + 50, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                optimizer.step(gradients)
            with pytest.raises(OSError, match="too large"):
                create_store(tmp_path / "b", (1 << 20, 4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_same(arrays_of(optimizer), want)
        optimizer.step(gradients)
        assert optimizer.table_states["weight"].step_count == 6


def test_memory_is_bounded_by_the_rows_in_use(tmp_path):
    rows, width = 60_000, 256

    def anonymous() -> int:
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    with create_store(tmp_path / "a", (rows, width)) as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdamW(layer)
        train(layer, optimizer, range(3), rows=rows)
        before = anonymous()
        for number in range(12):
            ids = np.random.default_rng(number).integers(0, rows, 2000)
            y, pull = layer.vjp(ids)
            optimizer.step(pull(y + 1))
            store.commit()
        # Weight and state have 184 MB.
        assert anonymous() - before < 48 << 20
