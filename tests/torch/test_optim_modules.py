"""Row optimizers with copies, checkpoints, killed runs, torch.compile and GradScaler."""

import copy
import io
import pickle
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from firstlayer.torch import (
    Embedding,
    EmbeddingBag,
    FrozenRowsEmbedding,
    functional,
    load,
    save,
)
from firstlayer.torch._tensors.row_parameter import without_catch_up
from firstlayer.torch.optim import RowAdagrad, RowAdamW, RowRMSprop, RowSGD
from tests.support.run_alone import run_alone
from tests.support.torch_round_trips import forget_graphs, graphs

OPTIONS: Any = {"lr": 0.05, "weight_decay": 0.1}


def train(model, optimizer, steps, *, generator=None, scheduler=None):
    """Train a table of 30 rows towards random goals."""
    for _ in range(steps):
        ids = torch.randint(0, 30, (4,), generator=generator)
        y = model(ids)
        goal = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (y - goal.to(y.dtype)).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def partly_trained(layer=None, *, steps=7, make=RowAdamW, **options):
    """Return a table with stale rows, its optimizer, and a dense twin with its own."""
    torch.manual_seed(0)
    if layer is None:
        layer = Embedding(30, 3, sparse=True, dtype=torch.float64)
    twin = nn.Embedding(30, 3, _weight=layer.weight.detach().clone())
    optimizer = make(layer, **{**OPTIONS, **options})
    dense = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    for each, trained in ((optimizer, layer), (dense, twin)):
        train(trained, each, steps, generator=torch.Generator().manual_seed(1))
    return layer, optimizer, twin, dense


def assert_near(got, want):
    torch.testing.assert_close(got.detach(), want.detach(), atol=1e-10, rtol=0)


def torch_saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False).weight


def saved_and_loaded(layer, folder):
    save(folder / "a", layer)
    return load(folder / "a").weight


READS = {
    "deepcopy": lambda layer, folder: copy.deepcopy(layer).weight,
    "deepcopy of the parameter": lambda layer, folder: copy.deepcopy(layer.weight),
    "pickle": lambda layer, folder: pickle.loads(pickle.dumps(layer)).weight,
    "torch.save": lambda layer, folder: torch_saved(layer),
    "state_dict": lambda layer, folder: layer.state_dict()["weight"],
    "weight": lambda layer, folder: layer.weight,
    "logits": lambda layer, folder: layer.logits(torch.eye(3, dtype=torch.float64)).T,
    "file": saved_and_loaded,
    "averaged model": lambda layer, folder: (
        torch.optim.swa_utils.AveragedModel(layer).module.weight
    ),
    "another dtype": lambda layer, folder: copy.deepcopy(layer).half().double().weight,
    "functional": lambda layer, folder: functional.embedding(
        torch.arange(30), layer.weight
    ),
    "bags": lambda layer, folder: functional.embedding_bag(
        torch.arange(30)[:, None], layer.weight, mode="sum"
    ),
    "resized": lambda layer, folder: (copy.deepcopy(layer).resize(40), layer.weight)[1],
    "scripted": lambda layer, folder: layer.__prepare_scriptable__().weight,
    "vmap": lambda layer, folder: torch.vmap(lambda i: layer(i))(torch.arange(30)),
    "another optimizer": lambda layer, folder: (RowAdamW(layer), layer.weight)[1],
    "a layer with its weight": lambda layer, folder: (
        Embedding(30, 3, _weight=layer.weight).weight
    ),
    "from_pretrained": lambda layer, folder: Embedding.from_pretrained(layer.weight).weight,
    "a bag": lambda layer, folder: EmbeddingBag.from_pretrained(layer.weight).weight,
    "frozen rows": lambda layer, folder: (
        FrozenRowsEmbedding.from_pretrained(layer.weight, frozen=[3]).weight
    ),
    "torch's layer": lambda layer, folder: (
        nn.Embedding.from_pretrained(layer.weight.detach()).weight
    ),
}


@pytest.mark.parametrize("name", READS)
def test_every_way_of_reading_a_table_catches_up(name, tmp_path):
    layer, _, twin, _ = partly_trained()
    with without_catch_up():
        assert not torch.allclose(layer.weight, twin.weight, atol=1e-3)
    got = READS[name](layer, tmp_path)
    if name == "another dtype":
        torch.testing.assert_close(got, twin.weight, atol=2e-3, rtol=0)
    else:
        assert_near(got, twin.weight)


NN_EMBEDDING_READS = [
    "deepcopy",
    "deepcopy of the parameter",
    "pickle",
    "torch.save",
    "state_dict",
]


@pytest.mark.parametrize("name", NN_EMBEDDING_READS)
def test_copies_of_nn_embedding_catch_up_when_the_model_is_given(name, tmp_path):
    table = nn.Embedding(30, 3, sparse=True, dtype=torch.float64)
    layer, _, twin, _ = partly_trained(table)
    assert_near(READS[name](layer, tmp_path), twin.weight)


@pytest.mark.parametrize("make", [Embedding, nn.Embedding])
def test_copies_are_caught_up_and_independent_of_the_original(make):
    layer, optimizer, twin, dense = partly_trained(
        make(30, 3, sparse=True, dtype=torch.float64)
    )
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    want = twin.weight.detach().clone()
    for each, trained in ((optimizer, layer), (dense, twin)):
        train(trained, each, 5, generator=torch.Generator().manual_seed(2))
    assert_near(layer.state_dict()["weight"], twin.weight)
    for other in copies:
        assert "table_state" not in vars(other.weight)
        assert_near(other(torch.arange(30)), want)
        # The copy keeps the hooks and can be trained by another optimizer.
        mine = RowAdamW(other.parameters(), **OPTIONS)
        train(other, mine, 3)
        assert_near(other(torch.arange(30)), other.state_dict()["weight"])


def test_attributes_of_a_parameter_are_pickled():
    layer, *_ = partly_trained()
    layer.weight.note = "mine"  # pyright: ignore
    assert pickle.loads(pickle.dumps(layer)).weight.note == "mine"


def test_missed_steps_are_not_applied_to_loaded_rows():
    layer, *_ = partly_trained()
    other = Embedding(30, 3, dtype=torch.float64)
    layer.load_state_dict(other.state_dict())
    assert_near(layer(torch.arange(30)), other.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_run_is_bitwise_equal(dtype):
    def build(seed):
        torch.manual_seed(seed)
        table = Embedding(30, 3, sparse=True, dtype=dtype)
        model = nn.Sequential(table, nn.Linear(3, 2, dtype=dtype))
        half = dtype == torch.bfloat16
        optimizer = RowAdamW(model, **OPTIONS, amsgrad=True, stochastic_rounding=half)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 50)

    model, optimizer, scheduler = build(0)
    generator = torch.Generator().manual_seed(1)
    train(model, optimizer, 20, generator=generator, scheduler=scheduler)
    # The order in which the parts are saved does not matter.
    parts = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    parts["scheduler"] = scheduler.state_dict()
    file, again = io.BytesIO(), generator.clone_state()
    torch.save(parts, file)
    train(model, optimizer, 20, generator=generator, scheduler=scheduler)

    other, resumed, schedule = build(5)
    file.seek(0)
    parts = torch.load(file)
    other.load_state_dict(parts["model"])
    resumed.load_state_dict(parts["optimizer"])
    schedule.load_state_dict(parts["scheduler"])
    train(other, resumed, 20, generator=again, scheduler=schedule)
    for name, want in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], want), name
    ours, theirs = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    for number, state in theirs.items():
        for key, want in state.items():
            assert torch.equal(ours[number][key], want), key
    assert theirs[0]["exp_avg"].dtype == torch.float32


def test_checkpoints_are_interchangeable_with_torch_adamw():
    layer, optimizer, twin, dense = partly_trained()
    for source, target in ((optimizer, dense), (dense, optimizer)):
        assert_near(layer.state_dict()["weight"], twin.weight)
        state = copy.deepcopy(source.state_dict())
        # torch's checkpoints have no such option.
        state["param_groups"][0].pop("mode", None)
        target.load_state_dict(state)
        for each, trained in ((optimizer, layer), (dense, twin)):
            train(trained, each, 5, generator=torch.Generator().manual_seed(4))
        assert_near(layer.state_dict()["weight"], twin.weight)


def test_optimizers_that_load_the_same_state_do_not_share_it():
    layer, optimizer, *_ = partly_trained()
    state = optimizer.state_dict()
    other = copy.deepcopy(layer)
    second = RowAdamW(other, **OPTIONS)
    second.load_state_dict(state)
    train(other, second, 3, generator=torch.Generator().manual_seed(6))
    once = other.state_dict()["weight"].clone()
    third = copy.deepcopy(layer)
    again = RowAdamW(third, **OPTIONS)
    again.load_state_dict(state)
    train(third, again, 3, generator=torch.Generator().manual_seed(6))
    assert torch.equal(third.state_dict()["weight"], once)


def test_optimizers_are_copied_and_pickled_with_their_models():
    layer, optimizer, twin, dense = partly_trained()
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        layer, optimizer = copied((layer, optimizer))
        for each, trained in ((optimizer, layer), (dense, twin)):
            train(trained, each, 4, generator=torch.Generator().manual_seed(8))
        assert_near(layer(torch.arange(30)), twin.weight)


TRAINING = """
import os, signal, torch
from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW
torch.manual_seed(0)
layer = Embedding(30, 3, sparse=True)
optimizer = RowAdamW(layer, lr=0.05, weight_decay=0.1)
path, first = os.path.join(folder, "checkpoint"), 0
if os.path.exists(path):
    found = torch.load(path)
    layer.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    first = found["step"]
for step in range(first, 30):
    if step == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 10 == 0:
        parts = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "step": step}, path + ".new")
        os.replace(path + ".new", path)
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 30, (4,), generator=generator)
    optimizer.zero_grad()
    (layer(ids) - torch.randn(4, 3, generator=generator)).square().sum().backward()
    optimizer.step()
torch.save(layer.state_dict(), os.path.join(folder, "end"))
"""


def test_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    exec(TRAINING, {"folder": str(whole), "die_at": -1})
    code = f"folder, die_at = {str(killed)!r}, 17\n{TRAINING}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    exec(TRAINING, {"folder": str(killed), "die_at": -1})
    ends = [torch.load(folder / "end")["weight"] for folder in (whole, killed)]
    assert torch.equal(*ends)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_lookup_catches_up_without_graph_breaks(backend):
    forget_graphs()
    torch.manual_seed(0)
    layer = Embedding(30, 3, padding_idx=0, sparse=True, dtype=torch.float64)
    twin = nn.Embedding(30, 3, padding_idx=0, _weight=layer.weight.detach().clone())
    optimizer = RowAdamW(layer, **OPTIONS)
    dense = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for step in range(12):
        ids = torch.randint(0, 30, (4,))
        got, want = compiled(ids), twin(ids)
        assert_near(got, want)
        if backend == "inductor" and step > 1:
            # Only rows of the last two batches are up to date. The other backend copies
            # the table.
            state: Any = layer.weight.table_state  # pyright: ignore
            assert (state.row_steps != state.step_count).sum() >= 22
        if step % 3 == 0:
            # A second, eager forward before the same step.
            assert_near(layer(ids + ids % 2), twin(ids + ids % 2))
        for each, y in ((optimizer, got), (dense, want)):
            each.zero_grad()
            y.tanh().sum().backward()
            each.step()
        assert layer.weight.grad is not None and layer.weight.grad.is_sparse
    assert_near(layer.state_dict()["weight"], twin.weight)
    # Forward and backward, before and after table_state is attached.
    assert graphs() <= 4


def test_compiled_logits_catch_up():
    forget_graphs()
    layer, _, twin, _ = partly_trained()
    logits = torch.compile(layer.logits, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_near(logits(torch.eye(3, dtype=torch.float64)).T, twin.weight)


def test_compiled_nn_embedding_catches_up_by_its_hooks():
    forget_graphs()
    table = nn.Embedding(30, 3, sparse=True, dtype=torch.float64)
    layer, _, twin, _ = partly_trained(table)
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.arange(30))
    assert_near(got, twin.weight)


@pytest.mark.parametrize("make", [RowAdamW, RowSGD])
def test_compiled_training_steps_call_the_optimizer_outside_of_their_graphs(make):
    forget_graphs()
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(30, 3, sparse=True), nn.Linear(3, 2)).double()
    twin = copy.deepcopy(model)
    twin[0].sparse = False  # pyright: ignore
    optimizer = make(model, **OPTIONS)
    theirs = {RowAdamW: torch.optim.AdamW, RowSGD: torch.optim.SGD}[make]
    dense = theirs(twin.parameters(), **OPTIONS)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, dense)
    ]

    def step(model, optimizer, ids):
        optimizer.zero_grad()
        model(ids).tanh().sum().backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    for _ in range(6):
        ids = torch.randint(0, 30, (4,))
        compiled(model, optimizer, ids)
        step(twin, dense, ids)
        for each in schedules:
            each.step()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(got, want)


def test_grad_scaler_unscales_sparse_gradients_and_skips_overflow():
    torch.manual_seed(0)
    layer = Embedding(30, 3, sparse=True)
    twin = nn.Embedding(30, 3, _weight=layer.weight.detach().clone())
    optimizers = RowAdamW(layer, **OPTIONS), torch.optim.AdamW(twin.parameters(), **OPTIONS)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for step in range(20):
        ids = torch.randint(0, 30, (4,))
        goal = torch.randn(4, 3) if step != 5 else torch.full((4, 3), float("inf"))
        kept = layer.state_dict()["weight"].clone() if step == 5 else None
        for model, optimizer, scaler in zip(
            (layer, twin), optimizers, scalers, strict=True
        ):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(ids) - goal).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if kept is not None:
            assert torch.equal(layer.state_dict()["weight"], kept)
    torch.testing.assert_close(
        layer.state_dict()["weight"], twin.weight.detach(), atol=1e-5, rtol=0
    )


def test_results_are_bitwise_equal_for_one_and_two_threads():
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        layer = Embedding(3000, 96, sparse=True)
        optimizer = RowAdamW(layer, **OPTIONS)
        for seed in range(3):
            ids = torch.randint(
                0, 3000, (2500,), generator=torch.Generator().manual_seed(seed)
            )
            optimizer.zero_grad()
            layer(ids).square().sum().backward()
            optimizer.step()
        results.append([
            layer.state_dict()["weight"],
            *optimizer.state[layer.weight].values(),
        ])
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_step_allocates_no_array_of_the_size_of_the_table():
    run_alone("""
        import torch
        from pathlib import Path
        from firstlayer.torch import Embedding
        from firstlayer.torch.optim import RowAdamW, clip_grad_norm_

        def peak():
            line = next(s for s in open("/proc/self/status") if s.startswith("VmHWM"))
            return int(line.split()[1]) / 1024

        layer = Embedding(400_000, 64, sparse=True)  # 100 MB
        optimizer = RowAdamW(layer, lr=0.1, amsgrad=True)
        size = 400_000 * 64 * 4 / 2**20

        def step():
            optimizer.zero_grad()
            layer(torch.randint(0, 400_000, (256,))).square().sum().backward()
            clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

        for _ in range(2):
            step()
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        for _ in range(20):
            step()
        assert peak() - before < 0.2 * size, (before, peak(), size)
        optimizer.flush()
        assert peak() - before < 0.4 * size, (before, peak(), size)
    """)


def test_bfloat16_update_rounds_once_and_keeps_float32_state():
    torch.manual_seed(0)
    half = Embedding(30, 3, sparse=True, dtype=torch.bfloat16)
    wide = Embedding(30, 3, sparse=True, _weight=half.weight.detach().float())
    optimizers = [RowAdamW(layer, **OPTIONS) for layer in (half, wide)]
    ids = torch.tensor([4, 9])
    for layer, optimizer in zip((half, wide), optimizers, strict=True):
        # This gradient is exact in bfloat16.
        layer(ids).sum().backward()
        optimizer.step()
    assert_near(half(ids), wide(ids).bfloat16())
    state = optimizers[0].state[half.weight]
    assert state["exp_avg"].dtype == torch.float32
    assert_near(state["exp_avg"], optimizers[1].state[wide.weight]["exp_avg"])


def test_rules_that_do_not_move_rows_without_gradient_need_no_hooks():
    for make in (RowAdagrad, RowRMSprop, RowSGD):
        torch.manual_seed(0)
        layer = nn.Embedding(30, 3, sparse=True)
        twin = nn.Embedding(30, 3, _weight=layer.weight.detach().clone())
        # Given parameters instead of the model, the optimizer adds no hooks.
        optimizer = make(layer.parameters(), lr=0.05)
        dense = getattr(torch.optim, make.__name__[3:])(twin.parameters(), lr=0.05)
        for each, trained in ((optimizer, layer), (dense, twin)):
            train(trained, each, 20, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(layer.weight, twin.weight, atol=1e-6, rtol=0)


STATES = {
    "adamw": (RowAdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "tensor lr": (RowAdamW, {"lr": torch.tensor(0.05), "weight_decay": 0.1}),
    "sgd": (RowSGD, {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}),
    "adagrad": (RowAdagrad, {"lr": 0.05, "initial_accumulator_value": 0.3}),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("layer_class", [Embedding, nn.Embedding])
def test_states_of_distributed_checkpoints_continue_without_a_warning(name, layer_class):
    """``set_optimizer_state_dict`` takes a step with dense gradients of zeros."""
    make, options = STATES[name]
    torch.manual_seed(0)
    models = [nn.Sequential(layer_class(30, 3, sparse=True)) for _ in range(2)]
    optimizers = [make(model, **copy.deepcopy(options)) for model in models]
    generator = torch.Generator().manual_seed(1)
    train(models[0], optimizers[0], 5, generator=generator)
    saved: Any = copy.deepcopy((
        get_model_state_dict(models[0]),
        get_optimizer_state_dict(models[0], optimizers[0]),
    ))
    set_model_state_dict(models[1], saved[0])
    set_optimizer_state_dict(models[1], optimizers[1], saved[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 5, generator=torch.Generator().manual_seed(2))
    weights = [model.state_dict()["0.weight"] for model in models]
    assert torch.equal(*weights)
    for optimizer in optimizers:
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
