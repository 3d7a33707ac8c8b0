"""Time of first calls: ``python -m benchmarks.first_call [--processes N]``.

Each process calls a lookup, a layer, its gradient, rotary and two steps of RowAdamW once:
one process with an empty cache of kernels, one that reads what the first has written. The
goals are at most 3 s in all for the first and 0.4 s for the second, imports excluded.

The bytecode of Python modules is cached, as after an installation by pip: a process before
the first writes it to a folder of its own. Numba imports many modules in its first call.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

GOALS = {"empty cache": 3.0, "cached": 0.4}
IDS = (8, 128)


def main() -> None:
    """Print the median seconds of each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=3, help="processes of each kind")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        json.dump(first_calls(), sys.stdout)
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in GOALS}
    with tempfile.TemporaryDirectory() as bytecode:
        with tempfile.TemporaryDirectory() as kernels:
            _in_process(kernels, bytecode)
        for _ in range(options.processes):
            with tempfile.TemporaryDirectory() as kernels:
                for kind in GOALS:
                    found[kind].append(_in_process(kernels, bytecode))
    for kind, runs in found.items():
        medians = {n: statistics.median(run[n] for run in runs) for n in runs[0]}
        total = statistics.median(sum(run.values()) - run["imports"] for run in runs)
        parts = "  ".join(f"{name} {seconds:.2f}" for name, seconds in medians.items())
        print(f"{kind:<12} {parts}  all but imports {total:.2f} s (goal {GOALS[kind]:g})")


def first_calls() -> dict[str, float]:
    """Return the seconds of each call in this process."""
    start = time.perf_counter()
    importlib.import_module("numba")
    from firstlayer import optim
    from firstlayer.numpy import Embedding, EmbeddingLayer, RotaryPositions

    seconds = {"imports": time.perf_counter() - start}
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, IDS)
    table = Embedding(1000, 64, rng=0)
    layer = EmbeddingLayer(1000, 64, max_positions=256, layer_norm=True, rng=0)
    trained = Embedding(1000, 64, rng=0)
    optimizer = optim.RowAdamW(trained)
    queries = rng.standard_normal((2, 4, 16, 64), dtype=np.float32)
    pulled = []

    def train() -> None:
        for _ in range(2):
            y, pull = trained.vjp(rng.integers(0, 1000, IDS))
            optimizer.step(pull(y))

    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: table(ids),
        "layer": lambda: pulled.extend(layer.vjp(ids)),
        "gradient": lambda: pulled[1](pulled[0]),
        "rotary": lambda: RotaryPositions(64)(queries),
        "RowAdamW": train,
    }
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    return seconds


def _in_process(kernels: str, bytecode: str) -> dict[str, float]:
    folders = {"NUMBA_CACHE_DIR": kernels, "PYTHONPYCACHEPREFIX": bytecode}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", "--child"],
        check=True,
        stdout=subprocess.PIPE,
        # An empty string is the same as no variable.
        env={**os.environ, **folders, "PYTHONDONTWRITEBYTECODE": ""},
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
