"""State dicts and checkpoints of sharded tables."""

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
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.fsdp import fully_shard

from firstlayer.torch import EmbeddingLayer
from firstlayer.torch.optim import RowAdamW, RowWiseAdagrad, clip_grad_norm_
from firstlayer.torch.sharding import (
    shard_rows,
    shard_rows_and_columns,
    sharded_parameters,
)

ROWS, WIDTH = 13, 4
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: RowAdamW(p, lr=0.1, weight_decay=0.3),
    "row-wise adagrad": lambda p: RowWiseAdagrad(p, lr=0.2),
}


class Model(nn.Module):
    """A complete layer, a projection and the tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = EmbeddingLayer(
            ROWS, WIDTH, max_positions=8, layer_norm=True, padding_idx=2, sparse=True
        )
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Any) -> Any:
        return self.project(self.layer(ids)).tanh()


def batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS, (2, 6), generator=generator)


def step(model: Any, optimizer: Any, number: int) -> float:
    """Train on a batch that all ranks have alike."""
    optimizer.zero_grad()
    loss = model(batch(number)).square().sum()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.7)
    optimizer.step()
    return float(loss.detach())


def sharded(mesh: Any, name: str, fsdp: bool) -> Any:
    model = Model()
    function: Any = shard_rows if mesh.ndim == 1 else shard_rows_and_columns
    function(model.layer, mesh)
    if fsdp:
        fully_shard(model, mesh=mesh, ignored_params=sharded_parameters(model))
    return model, OPTIMIZERS[name](model)


def save(rank: Any, path: str, name: str, fsdp: bool, on_grid: bool = False) -> Any:
    model, optimizer = sharded(rank.grid if on_grid else rank.mesh, name, fsdp)
    losses = [step(model, optimizer, n) for n in range(3)]
    states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1]}
    save_checkpoint(state, checkpoint_id=path, process_group=rank.mesh.get_group())
    return losses, [step(model, optimizer, n) for n in range(3, 6)]


def resume(rank: Any, path: str, name: str, fsdp: bool) -> Any:
    model, optimizer = sharded(rank.mesh, name, fsdp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1]}
    load_checkpoint(state, checkpoint_id=path, process_group=rank.mesh.get_group())
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return [step(model, optimizer, n) for n in range(3, 6)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_four_ranks_loads_on_any_number(processes, name, tmp_path):
    fsdp = name == "adamw"
    results = processes.run(save, str(tmp_path), name, fsdp, size=4)
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    want = [step(model, optimizer, n) for n in range(6)]
    for before, after in results:
        assert [*before, *after] == pytest.approx(want, rel=1e-4)
    for size in (1, 2, 3):
        for losses in processes.run(resume, str(tmp_path), name, fsdp, size=size):
            assert losses == pytest.approx(want[3:], rel=1e-4)
    # Bit for bit on the same number of ranks.
    again = processes.run(resume, str(tmp_path), name, fsdp, size=4)
    assert again == [after for _, after in results]


def test_a_checkpoint_of_rows_and_columns_loads_by_rows(processes, tmp_path):
    results = processes.run(save, str(tmp_path), "adamw", False, True, size=4)
    want = [*results[0][0], *results[0][1]]
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model)
    assert want == pytest.approx([step(model, optimizer, n) for n in range(6)], rel=1e-4)
    for losses in processes.run(resume, str(tmp_path), "adamw", False, size=2):
        assert losses == pytest.approx(want[3:], rel=1e-4)
