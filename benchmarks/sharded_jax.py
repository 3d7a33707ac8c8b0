"""A table sharded over 8 devices, against JAX's own: ``python -m benchmarks.sharded_jax``.

The devices are threads of the host, so that the times say little about a cluster; the bytes
per device do not depend on the machine. They are those of XLA's memory analysis: what a
program needs besides its arguments. Three operations on a table of which each device has an
eighth of the rows:

- the lookup of ids that all devices have, against ``jnp.take``;
- the gradient of the table, against ``jax.grad`` of ``jnp.take``;
- a step of AdamW, by ``firstlayer.equinox.optim``, against dense AdamW of optax whose state
  is sharded too. The looked-up rows are compared, many of which have missed steps before.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from firstlayer.equinox import Embedding
from firstlayer.equinox.optim import RowAdamW

from .timing import BATCHES, Case, Run, keep_freed_memory, measure

ROWS, WIDTH, IDS = 250_000, 128, 4096
RATE, DECAY = 1e-3, 1e-2
PEER = "JAX"


@dataclass(frozen=True)
class Program:
    """A compiled program, which may replace some of its arguments.

    Args:
        run: Runs it on a batch, by batch number.
        bytes: Bytes that a device needs besides the arguments.
    """

    run: Run
    bytes: int


def programs() -> Iterator[tuple[str, Program, Program, float]]:
    """Yield the name, ours, JAX's own, and the allowed difference of results."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ROWS, WIDTH), dtype=np.float32)
    ids = rng.integers(0, ROWS // 16, (BATCHES, IDS), dtype=np.int32)
    everywhere = NamedSharding(mesh, PartitionSpec())
    batches = [jax.device_put(batch, everywhere) for batch in ids]
    place = NamedSharding(mesh, PartitionSpec("rows", None))
    layer = Embedding(*table.shape, weight=table, sharding=place)
    weight = jax.device_put(table, place)

    def ours(layer: Any, ids: Any) -> Any:
        return layer(ids)

    def theirs(weight: Any, ids: Any) -> Any:
        return jnp.take(weight, ids, axis=0)

    yield (
        "lookup",
        _program(ours, layer, batches),
        _program(theirs, weight, batches),
        0.0,
    )
    yield (
        "gradient",
        _program(jax.grad(_loss(ours)), layer, batches),
        _program(jax.grad(_loss(theirs)), weight, batches),
        1e-6,
    )
    yield "AdamW step", _row_step(layer, batches), _dense_step(table, place, batches), 1e-4


def _loss(look_up: Callable[..., Any]) -> Callable[..., Any]:
    return lambda table, ids: (look_up(table, ids) ** 2).sum()


def _program(function: Callable[..., Any], table: Any, batches: list[Any]) -> Program:
    compiled = jax.jit(function).lower(table, batches[0]).compile()

    def run(batch: int) -> Any:
        out = jax.block_until_ready(compiled(table, batches[batch]))
        return jax.tree.leaves(out)[0]

    return Program(run, _bytes(compiled))


def _row_step(layer: Any, batches: list[Any]) -> Program:
    optimizer = RowAdamW(RATE, weight_decay=DECAY)

    def step(model: Any, state: Any, ids: Any) -> Any:
        def loss(model: Any) -> Any:
            y = model(ids)
            return (y**2).sum(), y

        rows = optimizer.gather(model, state, ids)
        (_, y), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(rows)
        return *optimizer.update(gradients, state, rows), y

    # A copy of the table: its buffer is donated.
    layer = eqx.tree_at(lambda one: one.weight, layer, layer.weight + 0)
    return _training(step, optimizer.init(layer), batches)


def _dense_step(table: np.ndarray, place: NamedSharding, batches: list[Any]) -> Program:
    optimizer = optax.adamw(RATE, weight_decay=DECAY)

    def step(weight: Any, state: Any, ids: Any) -> Any:
        def loss(weight: Any) -> Any:
            y = jnp.take(weight, ids, axis=0)
            return (y**2).sum(), y

        (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(weight)
        updates, state = optimizer.update(gradient, state, weight)
        weight = jax.lax.with_sharding_constraint(weight + updates, place)
        return weight, state, y

    weight = jax.device_put(table, place)
    return _training(step, (weight, optimizer.init(weight)), batches)


def _training(step: Callable[..., Any], start: Any, batches: list[Any]) -> Program:
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*start, batches[0]).compile()
    trained = list(start)

    def run(batch: int) -> Any:
        out = jax.block_until_ready(compiled(*trained, batches[batch]))
        *trained[:], y = out
        return y

    return Program(run, _bytes(compiled))


def _bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + new


def main() -> None:
    """Print times and bytes per device."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_jax", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds")
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    for name, ours, peer, tolerance in programs():
        name = f"{name} on 8 devices {ROWS:,} × {WIDTH}, {IDS:,} ids"
        case = Case(name, ours.run, {PEER: peer.run}, tolerance=tolerance)
        result = measure(case, rounds=options.rounds)
        rows.append(result.as_dict() | {"bytes": ours.bytes, "peer bytes": peer.bytes})
        if not options.json:
            print(
                f"{name}: {result.ours:.2f} ms, {ours.bytes:,} bytes per device  "
                f"({PEER}: {result.peers[PEER]:.2f} ms, {peer.bytes:,} bytes)",
                flush=True,
            )
    if options.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
