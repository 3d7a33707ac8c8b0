"""Train a recommender whose tables are sharded over processes, and resume after a kill.

A history of items predicts the next item. Each process has some rows of two tables: the
items of histories, which are averaged where their rows are, and the items to predict.
Everything else is sharded by ``fully_shard``. A checkpoint is saved every ten steps; run
the same command again, with any number of processes, to continue from the last one.

Run it: ``torchrun --nproc-per-node 2 examples/sharded.py --folder /tmp/run``, and with
``--kill-at 25`` to see the processes end when one of them is killed.
"""

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from firstlayer.torch import Embedding, EmbeddingBag
from firstlayer.torch.optim import RowAdamW, clip_grad_norm_
from firstlayer.torch.sharding import shard_rows, sharded_parameters, traffic

ITEMS, TOPICS, WIDTH = 4_001, 40, 32
BATCH, HISTORY = 128, 10
SAVE_EVERY = 10


class Recommender(nn.Module):
    """Scores of items for histories of items."""

    def __init__(self) -> None:
        super().__init__()
        # Without memory: no process ever has a whole table.
        self.history = EmbeddingBag(ITEMS, WIDTH, mode="mean", sparse=True, device="meta")
        self.item = Embedding(ITEMS, WIDTH, sparse=True, device="meta")
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, histories: Tensor, items: Tensor) -> Tensor:
        """Return the score of every item for every history."""
        return self.project(self.history(histories)) @ self.item(items).mT


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return histories and next items; items of one history have the same topic."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    topics = torch.randint(TOPICS, (BATCH, 1), generator=generator)
    others = torch.randint(ITEMS // TOPICS, (BATCH, HISTORY + 1), generator=generator)
    items = topics + TOPICS * others
    return items[:, :-1], items[:, -1]


def last_checkpoint(folder: Path) -> int:
    """Return the step of the last complete checkpoint, or 0."""
    # The metadata is written last.
    names = [path.parent.name for path in folder.glob("step-*/.metadata")]
    return max((int(name.partition("-")[2]) for name in names), default=0)


def main() -> None:
    """Train, save and print the loss, and memory and traffic of this process."""
    parser = argparse.ArgumentParser(description="Train a sharded recommender.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, help="kill the last process at this step")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    torch.manual_seed(0)
    model = Recommender()
    for table in (model.history, model.item):
        shard_rows(table, mesh).to_empty(device="cpu").reset_parameters()
        with torch.no_grad():
            table.weight *= WIDTH**-0.5
    fully_shard(model, mesh=mesh, ignored_params=sharded_parameters(model))
    optimizer = RowAdamW(model.parameters(), lr=0.05, weight_decay=0.01)

    first = last_checkpoint(options.folder)
    if first:
        weights, state = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": state}, checkpoint_id=path(options, first))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        print(f"rank {rank}: continues after step {first}", flush=True)
    for step in range(first + 1, options.steps + 1):
        if step == options.kill_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        histories, items = batch(step, rank)
        loss = nn.functional.cross_entropy(model(histories, items), torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            weights, state = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": state}, checkpoint_id=path(options, step))
        if step % 5 == 0 or step == first + 1:
            print(f"rank {rank}: step {step}, {loss.item():.9f} nats", flush=True)
    sent, steps = traffic(model), options.steps - first
    rows = model.history.weight.shape[0] + model.item.weight.shape[0]
    print(
        f"rank {rank}: {rows:,} of {2 * ITEMS:,} rows, {rows * WIDTH * 4 / 1e6:.1f} MB; "
        f"sent {sent.total / max(1, steps) / 1e3:.1f} kB in each step: "
        f"{sent.ids / 1e3:.0f} kB of ids, {sent.rows / 1e3:.0f} kB of rows, "
        f"{sent.gradients / 1e3:.0f} kB of gradients in all",
        flush=True,
    )
    dist.destroy_process_group()


def path(options: argparse.Namespace, step: int) -> str:
    """Return the folder of a checkpoint."""
    return str(options.folder / f"step-{step}")


if __name__ == "__main__":
    main()
