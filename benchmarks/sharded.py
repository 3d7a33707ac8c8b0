"""Sharded tables in two gloo processes: time, peak memory and bytes sent of a step.

``python -m benchmarks.sharded [--steps N] [--rows N]``. A step is a lookup of 4,096 ids in
each process, a backward and an optimizer step. Peers: DTensor's ``RowwiseParallel`` with
fused AdamW on the ids of both processes, which gives the same weights; and TorchRec's
row-wise ``EmbeddingCollection`` with SGD in the backward, included for its speed: its Adam
does not run on the CPU. Each implementation runs in processes of its own. The rows after
two steps are compared with DTensor's. Bags, pooled by the owners of the rows, are reported
apart.

Bars: a step is 10 times as fast as DTensor's at 1M × 128, its memory is at most 2 % of
DTensor's, and the bytes sent are at most 1.2 times those of the rows and gradients that
must be sent, and 8 for each id.
"""

import argparse
import ctypes
import gc
import logging
import multiprocessing
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from firstlayer.torch import Embedding, EmbeddingBag
from firstlayer.torch.optim import RowAdamW
from firstlayer.torch.sharding import shard_rows, traffic

from .ids import DISTRIBUTIONS, batches
from .timing import BATCHES

PROCESSES, IDS, BAG = 2, 4096, 8
SIZES = ((1_000_000, 128), (4_000_000, 64))
RATE = 1e-3
SPEED_BAR, MEMORY_BAR, TRAFFIC_BAR = 10.0, 0.02, 1.2
OURS, BAGS, DTENSOR, TORCHREC = "ours", "ours, bags", "DTensor", "TorchRec"


class Measured(NamedTuple):
    """Figures of one process."""

    milliseconds: float
    megabytes: float
    #: Bytes sent in a step, or None if they are not counted.
    sent: float | None
    #: Bytes of the remote rows and gradients of a step, and 8 for each remote id.
    needed: float
    #: Some rows of the table after the first steps.
    rows: Any


class Setup(NamedTuple):
    """Size of the table, and ids of this process and of all."""

    rows: int
    width: int
    rank: int
    own: list[torch.Tensor]
    every: list[torch.Tensor]

    def weight(self) -> torch.Tensor:
        """Return the table at the start."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.rows, self.width, generator=generator)


#: Takes a step on a batch by number, and drops the gradients.
Step = Callable[[int], None]
#: A step, some rows of the table, and bytes sent so far or None.
Built = tuple[Step, Callable[[], Any], Callable[[], float | None]]


def _ours(setup: Setup, mesh: Any) -> Built:
    layer: Any = Embedding(setup.rows, setup.width, sparse=True, _weight=setup.weight())
    shard_rows(layer, mesh)
    optimizer = RowAdamW(layer.parameters(), lr=RATE)

    def step(number: int) -> None:
        layer(setup.own[number]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sample() -> Any:
        return layer(setup.every[0][:100]).detach()

    return step, sample, lambda: float(traffic(layer).total)


def _bags(setup: Setup, mesh: Any) -> Built:
    weight = setup.weight()
    layer: Any = EmbeddingBag(
        setup.rows, setup.width, mode="sum", sparse=True, _weight=weight
    )
    shard_rows(layer, mesh)
    optimizer = RowAdamW(layer.parameters(), lr=RATE)

    def step(number: int) -> None:
        layer(setup.own[number].view(-1, BAG)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sample() -> Any:
        return layer(setup.every[0][:100, None]).detach()

    return step, sample, lambda: float(traffic(layer).total)


def _dtensor(setup: Setup, mesh: Any) -> Built:
    layer = torch.nn.Embedding(setup.rows, setup.width, _weight=setup.weight())
    parallelize_module(layer, mesh, RowwiseParallel(input_layouts=Replicate()))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=RATE, fused=True)

    def step(number: int) -> None:
        # The mean over processes, as in data-parallel training.
        (layer(setup.every[number]).sum() / PROCESSES).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sample() -> Any:
        return layer(setup.every[0][:100]).detach()

    return step, sample, lambda: None


def _torchrec(setup: Setup, mesh: Any) -> Built:
    import torchrec
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    device = torch.device("cpu")
    config = torchrec.EmbeddingConfig(
        name="table",
        embedding_dim=setup.width,
        num_embeddings=setup.rows,
        feature_names=["ids"],
    )
    model = torch.nn.Sequential()
    model.add_module("t", torchrec.EmbeddingCollection(tables=[config], device=device))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE})
    sharders: Any = [EmbeddingCollectionSharder()]
    plan = EmbeddingShardingPlanner(
        topology=Topology(PROCESSES, "cpu", local_world_size=PROCESSES),
        batch_size=1,
        constraints={
            "table": ParameterConstraints(
                sharding_types=["row_wise"], compute_kernels=["fused"]
            )
        },
    ).collective_plan(model, sharders, mesh.get_group())
    env = ShardingEnv.from_process_group(mesh.get_group())
    parallel: Any = DistributedModelParallel(
        model, env=env, device=device, plan=plan, sharders=sharders
    )

    def look_up(ids: torch.Tensor) -> Any:
        lengths = torch.tensor([len(ids)])
        features = torchrec.KeyedJaggedTensor.from_lengths_sync(["ids"], ids, lengths)
        return parallel.module.t(features).wait()["ids"].values()

    def step(number: int) -> None:
        look_up(setup.own[number]).sum().backward()

    return step, lambda: None, lambda: None


BUILD: dict[str, Callable[[Setup, Any], Built]] = {
    OURS: _ours,
    BAGS: _bags,
    DTENSOR: _dtensor,
    TORCHREC: _torchrec,
}


def _serve(
    rank: int, port: int, pipe: Any, rows: int, width: int, ids: str, name: str, steps: int
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(PROCESSES))
    # TorchRec logs and warns at length.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    drawn = [torch.from_numpy(x) for x in batches(ids, rows, (PROCESSES, IDS))]
    own, every = [x[rank].contiguous() for x in drawn], [x.reshape(-1) for x in drawn]
    setup = Setup(rows, width, rank, own, every)
    pipe.send(_measure(setup, BUILD[name](setup, mesh), steps=steps))
    dist.barrier()
    dist.destroy_process_group()


def _measure(setup: Setup, built: Built, *, steps: int) -> Measured:
    step, sample, sent = built
    for number in range(2):
        step(number)
    rows = sample()
    rows = rows if rows is None else torch.Tensor(rows).numpy()
    gc.collect()
    # Return freed memory to the system, so that it does not count as used before.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _megabytes("VmRSS")
    step(2)
    megabytes = _megabytes("VmHWM") - before
    times, sent_before = [], sent()
    for number in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step(number % BATCHES)
        dist.barrier()
        times.append(1e3 * (time.perf_counter() - start))
    sent_after = sent()
    per_step = None
    if sent_before is not None and sent_after is not None:
        per_step = (sent_after - sent_before) / steps
    needed = statistics.mean(_needed(setup, number % BATCHES) for number in range(steps))
    return Measured(statistics.median(times), megabytes, per_step, needed, rows)


def _needed(setup: Setup, number: int) -> float:
    """Return the bytes that this process must send in a step, without any overhead."""
    chunk = -(-setup.rows // PROCESSES)
    remote = 0.0
    for rank, ids in enumerate(setup.every[number].view(PROCESSES, IDS)):
        owners = ids.unique() // chunk
        if rank == setup.rank:
            # Ids and gradients of rows that others own.
            remote += int((owners != setup.rank).sum()) * (8 + 4 * setup.width)
        else:
            remote += int((owners == setup.rank).sum()) * 4 * setup.width
    return remote


def run(rows: int, width: int, ids: str, name: str, *, steps: int) -> list[Measured]:
    """Return the figures of each process.

    Args:
        rows: Number of rows.
        width: Width of each row.
        ids: Distribution of the ids.
        name: Implementation.
        steps: Number of timed steps.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(PROCESSES):
        mine, other = context.Pipe(duplex=False)
        arguments = rank, port, other, rows, width, ids, name, steps
        processes.append(context.Process(target=_serve, args=arguments))
        processes[-1].start()
        other.close()
        pipes.append(mine)
    measured = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return measured


def main() -> None:
    """Print the figures of every size, distribution of ids and implementation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded")
    parser.add_argument("--steps", type=int, default=24, help="timed steps")
    parser.add_argument("--rows", type=int, help="only tables of this many rows, × 64")
    options = parser.parse_args()
    sizes = SIZES if options.rows is None else ((options.rows, 64),)
    for rows, width in sizes:
        for ids in DISTRIBUTIONS:
            _compare(rows, width, ids, steps=options.steps)


def _compare(rows: int, width: int, ids: str, *, steps: int) -> None:
    print(f"{rows:,} × {width}, {PROCESSES} processes, {IDS:,} ids each, {ids}", flush=True)
    results = {}
    for name in BUILD:
        results[name] = run(rows, width, ids, name, steps=steps)
        if name == DTENSOR:
            for ours, peer in zip(results[OURS], results[DTENSOR], strict=True):
                torch.testing.assert_close(ours.rows, peer.rows, atol=1e-4, rtol=1e-4)
        slowest = max(each.milliseconds for each in results[name])
        memory = max(each.megabytes for each in results[name])
        label = f"{name} (SGD)" if name == TORCHREC else name
        line = f"  {label:15} {slowest:9.2f} ms {memory:9.2f} MB"
        sent, needed = results[name][0].sent, results[name][0].needed
        if sent is not None:
            line += f" {sent / 1e3:9.1f} kB sent, {sent / needed:.2f} × the rows needed"
        print(line, flush=True)
    ours, peer = results[OURS], results[DTENSOR]
    speed = max(e.milliseconds for e in peer) / max(e.milliseconds for e in ours)
    memory = max(e.megabytes for e in ours) / max(e.megabytes for e in peer)
    traffic_ratio = max(each.sent / each.needed for each in ours)
    bars = [
        f"speed {speed:.1f} × DTensor"
        + (f" (bar {SPEED_BAR:g})" if (rows, width) == SIZES[0] else ""),
        f"memory {memory:.2%} of DTensor's (bar {MEMORY_BAR:.0%})",
        f"bytes {traffic_ratio:.3f} × needed (bar {TRAFFIC_BAR:g})",
    ]
    print("  " + ", ".join(bars), flush=True)


def _megabytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    main()
