"""Processes of a process group that run functions for tests.

The processes are started once and run the functions of many tests. Each has one thread. A
function gets a :class:`Rank` and its arguments; all are sent by reference to their module.
"""

import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class Rank:
    """One process of a run.

    Args:
        rank: Number of the process.
        mesh: Mesh of the run's processes, with one axis.
        grid: Mesh of two axes of two, if the run has four processes.
    """

    rank: int
    mesh: Any
    grid: Any


class Processes:
    """Processes with a gloo group of all of them and of the first one, two, and three.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int = 4) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, other = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, other), daemon=True
            )
            process.start()
            other.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
        """Return what the function returns on each of the first ``size`` processes."""
        call = pickle.dumps((function, args, size))
        for pipe in self.pipes[:size]:
            pipe.send_bytes(call)
        answers = [pipe.recv() for pipe in self.pipes[:size]]
        errors = [f"rank {n}: {e}" for n, (_, e) in enumerate(answers) if e is not None]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the processes, which have nothing to save."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(OMP_NUM_THREADS="1", FIRSTLAYER_NUM_THREADS="1")
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, size + 1)}
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]]) if size == 4 else None
    warnings.simplefilter("error")
    # Training with a tied head.
    warnings.filterwarnings("ignore", "the gradient of a table of", UserWarning)
    while True:
        call = pipe.recv_bytes()
        try:
            function, args, used = pickle.loads(call)
            result, error = function(Rank(rank, meshes[used], grid), *args), None
        except Exception:  # sent to the test
            result, error = None, traceback.format_exc()
        pipe.send((result, error))
