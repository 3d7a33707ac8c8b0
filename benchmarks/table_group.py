"""Training steps of 26 tables: one group, FBGEMM's fused operator, and 26 torch layers.

A step is forward, backward and an optimizer on 2048 samples with bags of 1 to 20 ids. The
optimizer is row-wise Adagrad, which FBGEMM fuses into the backward. Torch has none, so its
step is written out in few operators here. The other optimizer is Adagrad, with
``torch.optim.Adagrad``, which takes sparse gradients.

``python -m benchmarks`` compares tables of 100,000 rows, which fit into memory three times.
``python -m benchmarks.table_group`` times tables of a million rows (6.7 GB, and as much
again for the state of Adagrad), one library after the other in processes of their own.
"""

import argparse
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .timing import BATCHES, Case, Run, keep_freed_memory

TABLES, BATCH, WIDTH, MAX_IDS = 26, 2048, 64, 20
# With a smaller eps, Adagrad would move by the whole rate in the direction of a sum of
# gradients that is zero but for rounding, which differs between libraries.
LR, EPS = 0.05, 1e-4
Batch = list[tuple[np.ndarray, np.ndarray]]


def cases() -> Iterator[Case]:
    """Yield training steps of 26 tables of 100,000 rows."""
    rows = 100_000
    for optimizer, steps in STEPS.items():
        runs = {library: step(rows) for library, step in steps.items()}
        ours = runs.pop("firstlayer")
        yield Case(
            f"table group, step of {TABLES} tables {rows:,} × {WIDTH}, {optimizer}",
            ours,
            runs,
            {library: BARS[library] for library in runs},
            tolerance=1e-3,
            flatten=_joined,
        )


def batches(rows: int, count: int = BATCHES) -> list[Batch]:
    """Return the ids and offsets of each table, for some batches."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        batch = []
        for _ in range(TABLES):
            lengths = rng.integers(1, MAX_IDS + 1, BATCH)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            batch.append((rng.integers(0, rows, offsets[-1]), offsets))
        made.append(batch)
    return made


def _gradient() -> np.ndarray:
    """Return the gradient of the output, sample by sample, table by table."""
    shape = BATCH, TABLES, WIDTH
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _fill(table: Any, number: int) -> None:
    """Draw the initial values of a table; the same in every library."""
    rng = np.random.default_rng(number)
    table.numpy()[:] = rng.random(tuple(table.shape), dtype=np.float32) - 0.5


def _joined(vectors: Any) -> np.ndarray:
    """Return the vectors of each table side by side."""
    parts = vectors if isinstance(vectors, list) else [vectors]
    return np.concatenate([part.detach().numpy() for part in parts], axis=1)


def group_step(rows: int, optimizer: str = "RowWiseAdagrad") -> Run:
    """Return the step of a :class:`firstlayer.torch.TableGroup` and a row optimizer."""
    import torch

    from firstlayer.torch import Table, TableGroup, optim

    names = [f"table {number}" for number in range(TABLES)]
    group = TableGroup({name: Table(rows, WIDTH) for name in names}, sparse=True)
    for number, name in enumerate(names):
        _fill(group.tables[name].weight.detach(), number)
    row_optimizer = getattr(optim, optimizer)(group, lr=LR, eps=EPS)
    features = [
        {
            name: (torch.from_numpy(ids), torch.from_numpy(offsets))
            for name, (ids, offsets) in zip(names, batch, strict=True)
        }
        for batch in batches(rows)
    ]
    gradient = torch.from_numpy(_gradient())
    gradients = [gradient[:, number].contiguous() for number in range(TABLES)]

    def step(batch: int) -> list[Any]:
        row_optimizer.zero_grad()
        vectors = list(group(features[batch]).values())
        torch.autograd.backward(vectors, gradients)
        row_optimizer.step()
        return vectors

    return step


def fbgemm_step(rows: int) -> Run:
    """Return the step of FBGEMM's operator, whose backward updates the tables."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.FATAL,
    )
    for number, table in enumerate(tables.split_embedding_weights()):
        _fill(table.detach(), number)
    inputs = []
    for batch in batches(rows):
        starts = np.cumsum([0, *(ids.size for ids, _ in batch)])
        bounds = [
            offsets[:-1] + start
            for (_, offsets), start in zip(batch, starts[:-1], strict=True)
        ]
        ids = np.concatenate([ids for ids, _ in batch])
        offsets = np.concatenate([*bounds, starts[-1:]])
        inputs.append((torch.from_numpy(ids), torch.from_numpy(offsets)))
    gradient = torch.from_numpy(_gradient()).reshape(BATCH, -1)

    def step(batch: int) -> Any:
        vectors = tables(*inputs[batch])
        vectors.backward(gradient)
        return vectors

    return step


def torch_step(rows: int, optimizer: str = "row-wise Adagrad") -> Run:
    """Return the step of 26 torch layers with sparse gradients."""
    import torch

    layers = []
    for number in range(TABLES):
        weight = torch.empty(rows, WIDTH)
        _fill(weight, number)
        layers.append(
            torch.nn.EmbeddingBag.from_pretrained(
                weight, freeze=False, mode="sum", sparse=True, include_last_offset=True
            )
        )
    weights = [layer.weight for layer in layers]
    if optimizer == "Adagrad":
        # The default, which torch warns about unless it is set.
        torch.sparse.check_sparse_tensor_invariants.disable()
        update = torch.optim.Adagrad(weights, lr=LR, eps=EPS).step
    else:
        squares = [torch.zeros(rows) for _ in weights]
        update = functools.partial(_row_wise_adagrad, weights, squares)
    inputs = [
        [(torch.from_numpy(ids), torch.from_numpy(offsets)) for ids, offsets in batch]
        for batch in batches(rows)
    ]
    gradient = torch.from_numpy(_gradient())
    gradients = [gradient[:, number].contiguous() for number in range(TABLES)]

    def step(batch: int) -> list[Any]:
        for weight in weights:
            weight.grad = None
        vectors = [layer(*x) for layer, x in zip(layers, inputs[batch], strict=True)]
        torch.autograd.backward(vectors, gradients)
        update()
        return vectors

    return step


def _row_wise_adagrad(weights: list[Any], squares: list[Any]) -> None:
    """Take a step of row-wise Adagrad with operators of torch."""
    import torch

    with torch.no_grad():
        for weight, sums in zip(weights, squares, strict=True):
            grad = weight.grad.coalesce()
            ids, values = grad.indices()[0], grad.values()
            sums.index_add_(0, ids, values.square().mean(1))
            scale = -LR / (sums[ids].sqrt() + EPS)
            weight.index_add_(0, ids, values * scale[:, None])


#: Makes the step of each library, by optimizer.
STEPS: dict[str, dict[str, Callable[[int], Run]]] = {
    "row-wise Adagrad": {
        "firstlayer": group_step,
        "FBGEMM": fbgemm_step,
        "torch": torch_step,
    },
    "Adagrad": {
        "firstlayer": functools.partial(group_step, optimizer="RowAdagrad"),
        "torch": functools.partial(torch_step, optimizer="Adagrad"),
    },
}
BARS = {"FBGEMM": 1.0, "torch": 5.0}


def main() -> None:
    """Print the median time of a step of each library, for tables of a million rows."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--optimizer", choices=[*STEPS], default="row-wise Adagrad")
    parser.add_argument("libraries", nargs="*", help="default: all")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    medians = {}
    for name in options.libraries or STEPS[options.optimizer]:
        with context.Pool(1) as pool:
            args = options.optimizer, name, options.rows, options.rounds
            medians[name] = pool.apply(_median, args)
        ratio = medians[name] / medians.get("firstlayer", float("nan"))
        print(f"{name}: {medians[name]:.1f} ms, {ratio:.2f}", flush=True)


def _median(optimizer: str, name: str, rows: int, rounds: int) -> float:
    """Return the median time of a step in milliseconds, after one round."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    keep_freed_memory()
    step, times = STEPS[optimizer][name](rows), []
    for i in range(BATCHES * (rounds + 1)):
        start = time.perf_counter()
        step(i % BATCHES)
        times.append(time.perf_counter() - start)
    return float(np.median(times[BATCHES:]) * 1e3)


if __name__ == "__main__":
    main()
