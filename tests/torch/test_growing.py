"""Growing embeddings on torch: gradients, optimizers, state dicts and repeated forwards."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import firstlayer.torch.optim
from firstlayer.torch import GrowingEmbedding
from firstlayer.torch.optim import AveragedRows, RowAdam, RowAdamW, row_optimizer
from tests.support.growing import WIDTH, ReferenceTable
from tests.support.optim_cases import OPTIONS, assert_close


def new_layer(capacity: int = 9, **options: Any) -> Any:
    options = {"seed": 4, "dtype": torch.float64, **options}
    return GrowingEmbedding(capacity, WIDTH, **options)


def batches(steps: int, seed: int = 0, size: int = 4):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = (rng.zipf(1.5, size) % 40 - 9) * 2**41
        yield ids, rng.standard_normal((size, WIDTH))


def backward(y, goal, sign=1):
    (0.5 * sign * (y - torch.from_numpy(goal)).square().sum()).backward()


def train(layer, optimizer, reference, steps=40, seed=0, sign=1, parts=1):
    """Take steps with a layer and a reference, and compare the rows before each."""
    part = list(batches(steps, seed))
    for i in range(0, steps, parts):
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        for ids, goal in part[i : i + parts]:
            y, places = layer(torch.from_numpy(ids)), reference.assign(ids)
            assert_close(y.detach(), reference.weight.detach()[places], 1e-6)
            for each in (y, reference.weight[places]):
                backward(each, goal, sign)
        optimizer.step()
        reference.optimizer.step()


@pytest.mark.parametrize(
    "execution", ["kernels", "background", "operators", "accumulated", "reloaded"]
)
@pytest.mark.parametrize("name, evict", [("AdamW", "lru"), ("Adagrad", "lfu")])
def test_row_optimizers_forget_the_state_of_lost_rows(name, evict, execution, monkeypatch):
    if execution == "operators":
        monkeypatch.setattr(row_optimizer, "trains_by_kernels", lambda parameter: False)
    options = {**OPTIONS[name][-1], "maximize": True}
    layer = new_layer(evict=evict)
    reference = ReferenceTable(name, options, layer.initial, 9, evict=evict, min_count=1)
    own = {"background": True} if execution == "background" else {}
    make = getattr(firstlayer.torch.optim, f"Row{name}")
    optimizer = make(layer.parameters(), **options, **own)
    # The reference keeps the rows of lost ids, which get their gradients; so no gradient
    # reaches the next id.
    parts = 3 if execution == "accumulated" else 1
    train(layer, optimizer, reference, 39, sign=-1, parts=parts)
    if execution == "reloaded":
        # Ids lose rows between the loading of a state and the first step.
        saved = copy.deepcopy(optimizer.state_dict())
        layer = copy.deepcopy(layer)
        optimizer = make(layer.parameters(), **options)
        optimizer.load_state_dict(saved)
        train(layer, optimizer, reference, 30, seed=1, sign=-1, parts=2)
    rows = reference.map.rows.values()
    want = reference.weight.detach()[[reference.places[row] for row in rows]]
    layer.eval()
    assert_close(layer(torch.tensor([*reference.map.rows])).detach(), want, 1e-6)
    assert reference.count > 20


@pytest.mark.parametrize(
    "make, sparse, name, options",
    [
        (torch.optim.Adam, False, "Adam", {"lr": 0.05}),
        (torch.optim.SGD, False, "SGD", {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.SGD, True, "SGD", {"lr": 0.05, "momentum": 0.9}),
        (
            *(torch.optim.Adagrad, False, "Adagrad"),
            {"lr": 0.1, "initial_accumulator_value": 0.2},
        ),
        (torch.optim.Rprop, False, "Rprop", {"lr": 0.05, "etas": (0.6, 1.3)}),
    ],
)
def test_optimizers_of_torch_forget_the_state_of_lost_rows(make, sparse, name, options):
    layer = new_layer(sparse=sparse)
    reference = ReferenceTable(name, options, layer.initial, 9, evict="lru", min_count=1)
    optimizer = make(layer.parameters(), **options)
    # Another layer under the same optimizer class keeps its state.
    other = new_layer(sparse=sparse)
    of_other = make(other.parameters(), **options)
    backward(other(torch.tensor([1])), np.ones((1, WIDTH)))
    of_other.step()
    before = copy.deepcopy(of_other.state_dict()["state"])
    train(layer, optimizer, reference, 40)
    assert reference.count > 20
    after = of_other.state_dict()["state"]
    for key, x in before[0].items():
        if isinstance(x, torch.Tensor):
            dense = [y.to_dense() if y.is_sparse else y for y in (x, after[0][key])]
            assert torch.equal(*dense)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, RowAdamW])
def test_a_closure_gives_rows_with_a_new_state(make, by_keyword):
    layer = new_layer(5, sparse=make is RowAdamW)
    options = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}
    reference = ReferenceTable("AdamW", options, layer.initial, 5, evict="lru", min_count=1)
    optimizer = make(layer.parameters(), **options)
    for ids, goal in batches(30):
        places = reference.assign(ids)

        def closure(ids=ids, goal=goal, places=places):
            optimizer.zero_grad()
            y = layer(torch.from_numpy(ids))
            assert_close(y.detach(), reference.weight.detach()[places], 1e-6)
            backward(y, goal)
            return float(goal[0, 0])

        loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        assert loss == goal[0, 0]
        reference.step(places, goal)
    assert reference.count > 15


def test_lazy_optimizers_forget_the_state_of_lost_rows():
    layer = new_layer(2)
    optimizer = firstlayer.torch.optim.RowAdam(layer.parameters(), lr=0.1, mode="lazy")
    for ids in ([1, 2], [3], [3, 4]):
        optimizer.zero_grad()
        y = layer(torch.tensor(ids))
        y.sum().backward()
        optimizer.step()
    state = optimizer.state[layer.table.weight]
    # Row 1 belongs to 3, which had two gradients of one, and row 2 to 4, which had one.
    assert layer.rows(torch.tensor([3, 4])).tolist() == [1, 2]
    assert_close(state["exp_avg"][1:, 0], [0.19, 0.1], 1e-12)


@pytest.mark.parametrize("is_reloaded", [False, True])
@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_averages_start_when_an_id_gets_its_row(mode, is_reloaded):
    layer = new_layer(6)
    weight = layer.table.weight
    optimizer = RowAdam(layer.parameters(), lr=0.1, betas=(0.8, 0.9), mode=mode)
    averaged = AveragedRows(optimizer, decay=0.7)
    expected = None
    for step, (ids, goal) in enumerate(batches(40)):
        if is_reloaded and step % 5 == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if is_reloaded and step % 7 == 6 and expected is not None:
            state = averaged.state_dict()
            averaged = AveragedRows(optimizer, decay=0.7)
            averaged.load_state_dict(state)
        before = layer.ids.clone()
        y = layer(torch.from_numpy(ids))
        if expected is not None:
            is_new = torch.zeros(7, dtype=torch.bool)
            is_new[1 : 1 + len(layer.ids)] = True
            is_new[1 : 1 + len(before)] = layer.ids[: len(before)] != before
            expected[is_new] = weight.detach()[is_new]
        backward(y, goal)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            now = weight.detach().clone()
            expected = now if expected is None else 0.7 * expected + 0.3 * now
            averaged.update_parameters()
            assert_close(averaged.average(weight), expected, 1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_of_ids_that_have_lost_their_row_are_dropped(sparse):
    def gradient(layer):
        grad = layer.table.weight.grad
        return (grad.to_dense() if sparse else grad)[:, 0].tolist()

    # Before the backward.
    layer = new_layer(2, sparse=sparse)
    first, second = layer(torch.tensor([5, 6])), layer(torch.tensor([7, 6]))
    (first.sum() + 3 * second.sum()).backward()
    assert gradient(layer) == [0.0, 3.0, 4.0]
    # After the backward, before the step.
    layer = new_layer(2, sparse=sparse)
    layer(torch.tensor([5, 6])).sum().backward()
    (3 * layer(torch.tensor([7]))).sum().backward()
    assert gradient(layer) == [0.0, 3.0, 1.0]
    # An id that has come back is not the one that was read.
    layer = new_layer(1, sparse=sparse)
    first = layer(torch.tensor([5]))
    layer(torch.tensor([6]))
    (first + 3 * layer(torch.tensor([5]))).sum().backward()
    assert gradient(layer) == [0.0, 3.0]


def test_evaluation_reads_the_unknown_row_and_changes_nothing():
    layer = new_layer(2, min_count=2)
    optimizer = firstlayer.torch.optim.RowSGD(layer.parameters(), lr=1.0)
    y = layer(torch.tensor([[7, 8, 7]]))
    assert not y[0, 1].any() and y[0, 0].all()
    y.sum().backward()
    optimizer.step()
    layer.eval()
    before = copy.deepcopy(layer.state_dict())
    got = layer(torch.tensor([8, 9, 7], dtype=torch.int32)).detach()
    # Row 0 was trained by 8.
    assert got[:2].tolist() == [[-1.0] * WIDTH] * 2
    assert torch.equal(got[2], y[0, 0].detach() - 2)
    after = layer.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    wide = torch.tensor([2**63 - 1, 7]).to(torch.uint64)
    assert layer.rows(wide).tolist() == [0, 1]


def test_a_forward_that_the_backward_repeats_is_not_another_batch():
    counts = []
    for repeats in (False, True):
        layer = new_layer(3, min_count=2)
        ids = torch.tensor([1, 2, 2])
        y = checkpoint(layer, ids, use_reentrant=False) if repeats else layer(ids)
        (y * torch.arange(3.0).double()[:, None]).sum().backward()
        grad = layer.table.weight.grad.to_dense()
        counts.append((layer.id_map.state()["uses"].tolist(), grad.tolist()))
        assert layer.rows(ids).tolist() == [0, 1, 1]
    assert counts[0] == counts[1]


def test_compiled_models_call_the_layer_outside_of_their_graph():
    model: Any = torch.nn.Sequential(new_layer(3), torch.nn.Linear(WIDTH, 2).double())
    run = torch.compile(model, backend="eager")
    for ids in ([1, 2], [3, 4]):
        y = run(torch.tensor(ids))
        y.sum().backward()
        assert torch.equal(y, model(torch.tensor(ids)))
    assert model[0].ids.tolist() == [4, 2, 3]


def test_copied_and_saved_layers_continue_with_the_same_bits():
    def run(layer, optimizer, part):
        outputs = []
        for ids, goal in part:
            optimizer.zero_grad()
            y = layer(torch.from_numpy(ids))
            backward(y, goal)
            optimizer.step()
            outputs.append(y.detach())
        return outputs

    every = list(batches(40))
    layer = new_layer(7, evict="lfu", min_count=2)
    optimizer = firstlayer.torch.optim.RowAdamW(layer.parameters(), lr=0.1)
    run(layer, optimizer, every[:20])
    model = torch.nn.ModuleDict({"embed": layer})
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = torch.nn.ModuleDict({"embed": new_layer(7, evict="lfu", min_count=2)})
    fresh.load_state_dict(torch.load(file, weights_only=True))
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh["embed"]]
    saved = copy.deepcopy(optimizer.state_dict())
    want = run(layer, optimizer, every[20:])
    for one in copies:
        again = firstlayer.torch.optim.RowAdamW(one.parameters(), lr=0.1)
        again.load_state_dict(saved)
        got = run(one, again, every[20:])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(one.ids, layer.ids)


@pytest.mark.rejects
def test_state_dicts_that_do_not_fit_raise():
    layer = new_layer(3)
    layer(torch.tensor([4, 5]))
    state = layer.state_dict()
    broken = {**state, "id_map.ids": torch.tensor([0, 4, 4, 0])}
    with pytest.raises(RuntimeError, match=r"id_map\.\*: ids must be different"):
        layer.load_state_dict(broken)
    del broken["id_map.ids"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"id_map.ids"'):
        layer.load_state_dict(broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        new_layer(4).load_state_dict(state)
    assert layer.ids.tolist() == [4, 5]
    with pytest.raises(TypeError, match="ids must be a tensor, got list"):
        layer([4])
