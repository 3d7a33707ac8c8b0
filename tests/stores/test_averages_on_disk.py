"""Averages of tables that are trained on disk: exact, and journalled with the table."""

import signal
from typing import Any

import numpy as np
import pytest
import torch

import firstlayer.optim
import firstlayer.torch
import firstlayer.torch.optim
from firstlayer.numpy import Embedding
from firstlayer.optim import AveragedRows, RowAdamW, RowSGD
from firstlayer.optim.table_events import TableEvents
from firstlayer.stores import create_store, open_store
from tests.support.optim_cases import OPTIONS

ROWS, WIDTH = 40, 16
CASES = [("AdamW", 0), ("SGD", 2), ("RMSprop", 2), ("Lion", 1), ("WiseAdagrad", 0)]


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)


def create(path, dtype="float32"):
    return create_store(path, (ROWS, WIDTH), dtype=dtype, rows=table())


class NumpyTraining:
    """A NumPy layer with its optimizer and averages."""

    def __init__(self, store=None, name="AdamW", number=0, decay=0.8):
        self.layer = (
            Embedding(weight=table()) if store is None else Embedding.from_store(store)
        )
        optimizer_class = getattr(firstlayer.optim, f"Row{name}")
        self.optimizer: Any = optimizer_class(self.layer, **OPTIONS[name][number])
        self.averaged = AveragedRows(self.optimizer, decay=decay)

    def train(self, steps: range) -> None:
        """Take steps whose ids and goals depend on their number alone."""
        for number in steps:
            ids, goal = _ids_and_goal(number)
            y, pull = self.layer.vjp(ids)
            self.optimizer.step(pull(y - goal))
            if number % 3 != 1:
                self.averaged.update_parameters()

    @property
    def state(self) -> Any:
        return self.optimizer.table_states["weight"]

    def averages(self) -> np.ndarray:
        return self.averaged.lookup("weight", np.arange(ROWS))


class TorchTraining:
    """A torch layer with its optimizer and averages."""

    def __init__(self, store=None, name="AdamW", number=0, decay=0.8):
        cls = firstlayer.torch.Embedding
        if store is None:
            weight = torch.from_numpy(table())
            self.layer: Any = cls(ROWS, WIDTH, _weight=weight, sparse=True)
        else:
            self.layer = cls.from_store(store)
        optimizer_class = getattr(firstlayer.torch.optim, f"Row{name}")
        self.optimizer: Any = optimizer_class(self.layer, **OPTIONS[name][number])
        self.averaged = firstlayer.torch.optim.AveragedRows(self.optimizer, decay=decay)

    def train(self, steps: range) -> None:
        """Take steps whose ids and goals depend on their number alone."""
        for number in steps:
            ids, goal = map(torch.from_numpy, _ids_and_goal(number))
            self.optimizer.zero_grad()
            (0.5 * (self.layer(ids) - goal) ** 2).sum().backward()
            self.optimizer.step()
            if number % 3 != 1:
                self.averaged.update_parameters()

    @property
    def state(self) -> Any:
        return self.optimizer.table_state_of(self.layer.weight)

    def averages(self) -> np.ndarray:
        return self.averaged.lookup(self.layer.weight, torch.arange(ROWS)).numpy()


def _ids_and_goal(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    ids = np.minimum(rng.zipf(1.5, 5) - 1, ROWS - 1)
    return ids, rng.normal(size=(5, WIDTH)).astype(np.float32)


def snapshot(training: Any) -> dict[str, np.ndarray]:
    """Return every array and number that weights and averages depend on."""
    state = training.state
    return {
        **{name: array.copy() for name, array in state.state.items()},
        "weight": state.table().copy(),
        "row_steps": np.maximum(state.row_steps, state.base_step),
        "step_count": np.array(state.step_count),
        "coefficients": state.missed.coefficients.copy(),
        "averages": training.averages(),
        "n_averaged": np.array(training.averaged.n_averaged),
    }


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


front_ends = pytest.mark.parametrize("kind", [NumpyTraining, TorchTraining])


@front_ends
@pytest.mark.parametrize("name, number", CASES)
def test_a_run_in_three_sittings_equals_one_in_memory(tmp_path, kind, name, number):
    expected = kind(None, name, number)
    expected.train(range(40))
    create(tmp_path / "a").close()
    for steps in (range(7), range(7, 21), range(21, 40)):
        with open_store(tmp_path / "a", mode="r+") as store:
            training = kind(store, name, number)
            training.train(steps)
            got = snapshot(training)
    assert_same(got, snapshot(expected))


@front_ends
def test_uncommitted_updates_are_undone(tmp_path, kind):
    store = create(tmp_path / "a")
    training = kind(store)
    training.train(range(12))
    store.commit()
    want = snapshot(training)
    training.train(range(12, 20))
    training.optimizer.flush()
    assert (training.averages() != want["averages"]).any(axis=1).all()
    store.close()
    with open_store(tmp_path / "a", mode="r+") as store:
        assert_same(snapshot(kind(store)), want)


@front_ends
def test_averages_return_to_a_tag(tmp_path, kind):
    with create(tmp_path / "a") as store:
        training = kind(store)
        training.train(range(10))
        store.commit("ten")
        want = snapshot(training)
        training.train(range(10, 20))
        store.return_to("ten")
        assert_same(snapshot(training), want)
        training.train(range(10, 20))
        expected = kind()
        expected.train(range(20))
        assert_same(snapshot(training), snapshot(expected))


@front_ends
def test_averages_begin_again_where_a_commit_has_none(tmp_path, kind):
    with create(tmp_path / "a") as store:
        layer = kind(store)
        store.discard_state()
        store.commit("untrained")
        training = kind(store)
        training.train(range(5))
        store.commit()
        store.return_to("untrained")
        assert training.averaged.n_averaged == 0
        training.averaged.update_parameters()
        np.testing.assert_array_equal(training.averages(), table())
        with pytest.raises(RuntimeError, match="another optimizer trains it"):
            layer.averaged.update_parameters()


def test_rows_that_catch_up_without_an_optimizer_keep_their_averages(tmp_path):
    with create(tmp_path / "a") as store:
        NumpyTraining(store).train(range(20))
    with open_store(tmp_path / "a", mode="r+") as store:
        # The lookup of a training step writes rows that have missed steps and updates.
        Embedding.from_store(store).vjp(np.arange(0, ROWS, 2))
    expected = NumpyTraining()
    expected.train(range(20))
    with open_store(tmp_path / "a", mode="r+") as store:
        np.testing.assert_allclose(
            NumpyTraining(store).averages(), expected.averages(), rtol=0, atol=1e-6
        )


@front_ends
def test_swapped_averages_are_neither_committed_nor_kept(tmp_path, kind):
    store = create(tmp_path / "a")
    training = kind(store)
    training.train(range(15))
    store.commit()
    training.optimizer.flush()
    weight, averages = store.array.copy(), training.averages()
    with training.averaged.swapped():
        np.testing.assert_array_equal(store.array, averages)
        with pytest.raises(ValueError, match="commit must not be made while averages"):
            store.commit()
    np.testing.assert_array_equal(store.array, weight)
    store.commit()
    with training.averaged.swapped():
        # As after a kill.
        store.close()
    with open_store(tmp_path / "a", mode="r+") as store:
        training = kind(store)
        np.testing.assert_array_equal(store.read(np.arange(ROWS)), weight)
        np.testing.assert_array_equal(training.averages(), averages)


@front_ends
@pytest.mark.parametrize("on_disk", [True, False])
def test_interrupted_swaps_lose_no_weights(tmp_path, kind, on_disk, monkeypatch):
    training = kind(create(tmp_path / "a") if on_disk else None)
    training.train(range(15))
    training.optimizer.flush()
    want, attach_average = training.state.table().copy(), TableEvents.attach_average

    def interrupted(self, average):
        signal.raise_signal(signal.SIGINT)
        attach_average(self, average)

    with monkeypatch.context() as patch:
        patch.setattr(TableEvents, "attach_average", interrupted)
        with pytest.raises(KeyboardInterrupt), training.averaged.swapped():
            pytest.fail("the interrupt was lost")
    np.testing.assert_array_equal(training.state.table(), want)
    with pytest.raises(KeyboardInterrupt), training.averaged.swapped():
        assert (training.state.table() != want).any()
        signal.raise_signal(signal.SIGINT)
    np.testing.assert_array_equal(training.state.table(), want)
    # A step is an error while averages are swapped.
    training.train(range(15, 16))


def test_averages_of_a_bfloat16_table_are_float32(tmp_path):
    with create(tmp_path / "a", "bfloat16") as store:
        layer = Embedding.from_store(store)
        optimizer = RowSGD(layer, lr=0.1, momentum=0.9)
        averaged = AveragedRows(optimizer, decay=0.75)
        want: Any = None
        for number in range(8):
            ids, _ = _ids_and_goal(number)
            y, pull = layer.vjp(ids)
            optimizer.step(pull(y))
            averaged.update_parameters()
            weight = store.read(np.arange(ROWS)).astype(np.float32)
            want = weight if want is None else 0.75 * want + 0.25 * weight
        assert averaged.average("weight").dtype == np.float32
        np.testing.assert_allclose(averaged.average("weight"), want, rtol=0, atol=1e-2)


@pytest.mark.rejects
def test_states_of_another_number_of_updates_are_refused(tmp_path):
    with create(tmp_path / "a") as store, create(tmp_path / "b") as other:
        ours = NumpyTraining(store)
        ours.train(range(3))
        assert ours.averaged.state_dict().keys() == {"n_averaged"}
        ours.averaged.load_state_dict(ours.averaged.state_dict())
        match = "n_averaged must be 2 as in the store of weight, got 5"
        with pytest.raises(ValueError, match=match):
            ours.averaged.load_state_dict({"n_averaged": np.array(5)})
        theirs = TorchTraining(other)
        theirs.train(range(3))
        state = theirs.averaged.state_dict()
        assert state == {"n_averaged": 2, "averages": [None]}
        theirs.averaged.load_state_dict(state)
        match = "n_averaged must be 2 as in the store of parameter 0, got 1"
        with pytest.raises(ValueError, match=match):
            theirs.averaged.load_state_dict({**state, "n_averaged": 1})
        assert theirs.averaged.n_averaged == 2


def test_tables_on_disk_and_in_memory_are_averaged_together(tmp_path):
    with create(tmp_path / "a") as store:
        layer = firstlayer.torch.Embedding.from_store(store)
        head = torch.nn.Linear(WIDTH, 1)
        groups = [*layer.parameters(), *head.parameters()]
        optimizer = firstlayer.torch.optim.RowAdamW(groups, lr=0.1)
        averaged = firstlayer.torch.optim.AveragedRows(optimizer, decay=0.6)
        want = None
        for number in range(6):
            optimizer.zero_grad()
            head(layer(torch.from_numpy(_ids_and_goal(number)[0]))).sum().backward()
            optimizer.step()
            averaged.update_parameters()
            weight = head.weight.detach().clone()
            want = weight if want is None else torch.lerp(want, weight, 0.4)
        torch.testing.assert_close(averaged.average(head.weight), want)
        state = averaged.state_dict()
        assert [each is None for each in state["averages"]] == [True, False, False]
        store.commit()
        resumed = firstlayer.torch.optim.RowAdamW(groups, lr=0.1)
        again = firstlayer.torch.optim.AveragedRows(resumed, decay=0.6)
        again.load_state_dict(state)
        torch.testing.assert_close(again.average(head.weight), want)
        assert again.n_averaged == 6


def test_a_store_that_is_closed_refuses_updates(tmp_path):
    store = create(tmp_path / "a")
    averaged = AveragedRows(RowAdamW(Embedding.from_store(store)), decay=0.5)
    store.close()
    with pytest.raises(RuntimeError, match="is closed, or another optimizer trains it"):
        averaged.update_parameters()
