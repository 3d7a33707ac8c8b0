"""Training on disk with torch layers."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import firstlayer.torch.optim
from firstlayer.stores import create_store, open_store
from firstlayer.torch import Embedding, EmbeddingBag
from firstlayer.torch.optim import RowAdam, RowAdamW, RowSGD
from tests.support.optim_cases import OPTIONS, dense

ROWS, WIDTH = 40, 16


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)


def create(path, dtype="float32"):
    return create_store(path, (ROWS, WIDTH), dtype=dtype, rows=table())


def in_memory(**options) -> Embedding:
    return Embedding(ROWS, WIDTH, _weight=torch.from_numpy(table()), sparse=True, **options)


def train(layer, optimizer, steps: range) -> None:
    """Take steps whose ids, goals and learning rate depend on their number alone."""
    for number in steps:
        rng = np.random.default_rng(number)
        ids = torch.from_numpy(np.minimum(rng.zipf(1.5, 5) - 1, ROWS - 1))
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + number % 7)
        optimizer.zero_grad()
        y = layer(ids if not isinstance(layer, nn.EmbeddingBag) else ids[:, None])
        goal = torch.from_numpy(rng.normal(size=(5, WIDTH)).astype(np.float32))
        ((y.float() - goal) ** 2).sum().backward()
        optimizer.step()


def values(layer, optimizer) -> dict[str, np.ndarray]:
    """Return every array and number that training depends on."""
    state = optimizer._table_states[layer.weight]
    return {
        **{name: array.copy() for name, array in state.state.items()},
        "weight": state.table().copy(),
        "row_steps": np.maximum(state.row_steps, state.base_step),
        "step": np.array(state.step_count),
        "coefficients": state.missed.coefficients.copy(),
    }


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize(
    "name, number, kind",
    [("AdamW", 2, Embedding), ("SGD", 3, Embedding), ("RMSprop", 2, EmbeddingBag)]
    + [("Adagrad", 1, Embedding), ("Lion", 1, EmbeddingBag)],
)
def test_a_run_in_three_sittings_equals_one_in_memory(tmp_path, name, number, kind):
    options, optimizer_class = (
        OPTIONS[name][number],
        getattr(firstlayer.torch.optim, f"Row{name}"),
    )
    memory = kind(ROWS, WIDTH, _weight=torch.from_numpy(table()), sparse=True, max_norm=3.0)
    expected = optimizer_class(memory.parameters(), **options)
    train(memory, expected, range(40))
    create(tmp_path / "a").close()
    for steps in (range(7), range(7, 21), range(21, 40)):
        with open_store(tmp_path / "a", mode="r+") as store:
            layer = kind.from_store(store, max_norm=3.0)
            assert layer.weight.is_leaf and layer.weight.requires_grad
            optimizer = optimizer_class(layer.parameters(), **options)
            train(layer, optimizer, steps)
            assert list(optimizer.state[layer.weight]) == ["step"]
            got = values(layer, optimizer)
    assert_same(got, values(memory, expected))


def test_every_row_equals_the_dense_optimizer_after_100_steps(tmp_path):
    options = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    weight = nn.Parameter(torch.from_numpy(table()).double())
    theirs = dense("AdamW", [weight], **options)
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        ours = RowAdamW(layer.parameters(), **options)
        for number in range(100):
            rng = np.random.default_rng(number)
            ids = torch.from_numpy(np.minimum(rng.zipf(1.4, 6) - 1, ROWS - 1))
            goal = torch.from_numpy(rng.normal(size=(6, WIDTH)))
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] = 0.02 / (1 + number % 5)
                optimizer.zero_grad()
            read = layer(ids)
            torch.testing.assert_close(read.double(), weight[ids], rtol=0, atol=2e-4)
            ((read.double() - goal) ** 2).sum().backward()
            ((weight[ids] - goal) ** 2).sum().backward()
            ours.step()
            theirs.step()
            if number % 9 == 0:
                store.commit()
        rows = torch.from_numpy(store.read(range(ROWS))).double()
        torch.testing.assert_close(rows, weight.detach(), rtol=0, atol=2e-4)


def test_uncommitted_changes_are_undone(tmp_path):
    store = create(tmp_path / "a")
    layer = Embedding.from_store(store, max_norm=2.0, padding_idx=2)
    optimizer = RowAdam(layer.parameters())
    train(layer, optimizer, range(12))
    store.commit()
    want = values(layer, optimizer)
    train(layer, optimizer, range(12, 15))
    layer(torch.arange(20))
    layer.project()
    layer.set_padding(5.0)
    optimizer.flush()
    layer.reset_parameters()
    assert (store.array != want["weight"]).any(axis=1).all()
    store.close()
    with open_store(tmp_path / "a", mode="r+") as store:
        layer = Embedding.from_store(store, max_norm=2.0, padding_idx=2)
        optimizer = RowAdam(layer.parameters())
        assert_same(values(layer, optimizer), want)


def test_evaluation_of_a_store_with_stale_rows(tmp_path):
    memory = in_memory()
    expected = RowAdamW(memory.parameters(), weight_decay=0.1)
    train(memory, expected, range(15))
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        train(layer, RowAdamW(layer.parameters(), weight_decay=0.1), range(15))
    want = memory(torch.arange(ROWS)).detach()
    with open_store(tmp_path / "a", mode="r+") as store:
        with pytest.raises(ValueError, match="are stale; make a layer from the store"):
            store.read([30])
        # No optimizer is made.
        layer, before = Embedding.from_store(store).eval(), store.array.copy()
        with torch.no_grad():
            torch.testing.assert_close(layer(torch.arange(ROWS)), want, rtol=0, atol=0)
        np.testing.assert_array_equal(store.array, before)
        rows = store.read([30])
        np.testing.assert_array_equal(rows, want[[30]].numpy())
        assert (rows != before[30]).any()


def test_state_dicts_refer_to_a_commit(tmp_path):
    with create(tmp_path / "a") as store:
        model = nn.ModuleDict({
            "table": Embedding.from_store(store),
            "head": nn.Linear(3, 2),
        })
        optimizer = RowAdamW(model.parameters())
        train(model["table"], optimizer, range(6))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        want = values(model["table"], optimizer)
        train(model["table"], optimizer, range(6, 9))
        saved, saved_optimizer = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert set(saved) == {"table.weight.store", "head.weight", "head.bias"}
        assert saved["table.weight.store"].numel() < 500
        with pytest.raises(ValueError, match=r"must be 9 as in the store .* got 6"):
            optimizer.load_state_dict(saved_optimizer)
        model.load_state_dict(saved)
        optimizer.load_state_dict(saved_optimizer)
        assert_same(values(model["table"], optimizer), want)
        train(model["table"], optimizer, range(6, 9))
        after = values(model["table"], optimizer)
        model.load_state_dict(saved)
        # The optimizer follows its store.
        (weight,) = model["table"].parameters()
        assert optimizer.state[weight]["step"] == 6
        train(model["table"], optimizer, range(6, 9))
        assert_same(values(model["table"], optimizer), after)
    # Another process.
    with open_store(tmp_path / "a", mode="r+") as store:
        model = nn.ModuleDict({
            "table": Embedding.from_store(store),
            "head": nn.Linear(3, 2),
        })
        model.load_state_dict(saved)
        optimizer = RowAdamW(model.parameters())
        optimizer.load_state_dict(saved_optimizer)
        train(model["table"], optimizer, range(6, 9))
        assert_same(values(model["table"], optimizer), after)
    with create(tmp_path / "b") as store:
        layer = nn.ModuleDict({"table": Embedding.from_store(store)})
        part = {"table.weight.store": saved["table.weight.store"]}
        with pytest.raises(RuntimeError, match="refers to the store at"):
            layer.load_state_dict(part)
        values_of = {"table.weight": torch.ones(ROWS, WIDTH)}
        with pytest.raises(RuntimeError, match="cannot be replaced by assign=True"):
            layer.load_state_dict(values_of, assign=True)
        layer.load_state_dict(values_of)
        assert (store.array == 1).all()


def test_state_of_a_run_in_memory_is_continued_on_disk(tmp_path):
    memory = in_memory()
    expected = RowAdamW(memory.parameters(), weight_decay=0.1)
    train(memory, expected, range(10))
    saved, weight = expected.state_dict(), memory.state_dict()
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        layer.load_state_dict(weight)
        optimizer = RowAdamW(layer.parameters(), weight_decay=0.1)
        optimizer.load_state_dict(saved)
        train(layer, optimizer, range(10, 20))
        train(memory, expected, range(10, 20))
        optimizer.flush()
        expected.flush()
        np.testing.assert_allclose(
            store.array, memory.weight.detach().numpy(), rtol=1e-5, atol=1e-6
        )
        assert list(optimizer.state[layer.weight]) == ["step"]


def test_copies_casts_and_moves_are_refused(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        model = nn.Sequential(layer)
        optimizer = RowAdam(model.parameters())
        for trained in (False, True):
            if trained:
                train(layer, optimizer, range(3))
            for call in (copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    call(model)
            for call in (model.half, model.double, lambda: model.to("meta")):
                with pytest.raises(TypeError, match="cannot be cast or moved to"):
                    call()
            with pytest.raises(TypeError, match="cannot be resized"):
                layer.resize(50)
            # These change nothing.
            address = layer.weight.data_ptr()
            model.to("cpu").float().share_memory()
            assert layer.weight.data_ptr() == address
            assert vars(layer.weight)["row_store"] is store
        with pytest.raises(TypeError, match="dtype must not be given"):
            Embedding.from_store(store, dtype=torch.float16)


def test_other_optimizers_are_refused(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store, sparse=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="must be trained by a row optimizer .* SGD"):
            optimizer.step()
        np.testing.assert_array_equal(store.array, table())
        # A dense gradient is journalled too.
        with pytest.warns(UserWarning, match="is dense"):
            RowSGD(layer.parameters(), lr=0.1, momentum=0.9).step()
        assert (store.array[1] != table()[1]).all()
        store.close()
    with open_store(tmp_path / "a", mode="r+") as store:
        np.testing.assert_array_equal(store.array, table())
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        other.step()


def test_a_table_on_disk_has_no_compiled_step(tmp_path):
    with create(tmp_path / "a") as store:
        layer = Embedding.from_store(store)
        optimizer = RowSGD(layer.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="cannot be trained in compiled code"):
            optimizer.row_step(layer.weight)
        # The refusal leaves the optimizer usable.
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()
        np.testing.assert_allclose(store.array[1], table()[1] - 0.1, rtol=1e-6)


def test_bfloat16_table_is_trained(tmp_path):
    with create(tmp_path / "a", "bfloat16") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdamW(layer.parameters(), stochastic_rounding=True)
        train(layer, optimizer, range(5))
        assert layer.weight.dtype == torch.bfloat16
        assert layer(torch.tensor([3])).dtype == torch.bfloat16
        got = values(layer, optimizer)
    with open_store(tmp_path / "a", mode="r+") as store:
        layer = Embedding.from_store(store)
        optimizer = RowAdamW(layer.parameters(), stochastic_rounding=True)
        assert_same(values(layer, optimizer), got)
