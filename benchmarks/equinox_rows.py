"""One step of Adam on a table in JAX: the rows of a batch, against the whole table.

Dense Adam and lazy Adam are not the same rule: a dense step also moves rows that were
touched before. What they make of a row at the first step that touches it is the same. So
every batch has rows of its own, and the rows of each batch are compared right after the
first step on it, when all contestants have taken equally many: their moments are zero
until then in every one of them. Each starts from the same table and goes on with its own.

All are given the gradient of the looked-up vectors, and go from there to the new table:
lookup, gradient of the table, step. JAX's are compiled and have their buffers donated.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .timing import BATCHES, Case, Run

WIDTH, IDS = 256, (32, 128)
RATE = 1e-3


def cases() -> Iterator[Case]:
    """Yield a step on 32 × 128 ids for tables of 50,000 to 1,000,000 rows."""
    try:
        import equinox  # noqa: F401
        import jax  # noqa: F401
        import optax  # noqa: F401
    except ImportError:
        return
    for rows in (50_000, 250_000, 1_000_000):
        yield _step(rows)


def _step(rows: int) -> Case:
    ids = _batches(rows)
    table = np.random.default_rng(0).standard_normal((rows, WIDTH), dtype=np.float32)
    # None near zero, where SparseAdam's other place for ε would show.
    gradients = np.random.default_rng(1).uniform(0.5, 1.5, (2, *IDS, WIDTH))
    gradients = gradients.astype(np.float32)
    given = [(ids[batch], gradients[batch % 2]) for batch in range(BATCHES)]
    peers = {"optax dense": _when_needed(_dense, table, given)}
    missing: tuple[str, ...] = ()
    if importlib.util.find_spec("torch"):
        peers["torch SparseAdam"] = _when_needed(_torch, table, given)
    else:
        missing = ("torch",)
    return Case(
        f"Adam step in JAX {rows:,} × {WIDTH}, 32 × 128 ids",
        _when_needed(_ours, table, given),
        peers,
        {"optax dense": 3.0 if rows == 50_000 else 10.0},
        missing,
        tolerance=1e-5,
        most_rounds=2,
        flatten=lambda made: np.asarray(made[0][made[1]]),
    )


def _when_needed(make: Callable[..., Run], *args: Any) -> Run:
    """Return what ``make`` makes, made at its first call: tables and moments are large."""
    made: list[Run] = []

    def run(batch: int) -> Any:
        if not made:
            made.append(make(*args))
        return made[0](batch)

    return run


def _batches(rows: int) -> list[np.ndarray]:
    """Return batches of ids that have no row in common, some of them repeated in each."""
    rng = np.random.default_rng(2)
    shares = np.array_split(rng.permutation(rows).astype(np.int32), BATCHES)
    return [rng.choice(share, IDS) for share in shares]


def _ours(table: np.ndarray, given: list[Any]) -> Run:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    from firstlayer.equinox import Embedding
    from firstlayer.equinox.rows import RowOptimizer

    optimizer = RowOptimizer(optax.adam(RATE))

    def loss(layer, ids, dy):
        return jnp.vdot(layer(ids), dy)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, layer, state):
        ids, dy = batch
        _, grads = optimizer.value_and_grad(loss, ids)(layer, ids, dy)
        return optimizer.update(grads, state, layer)

    held: list[Any] = [Embedding(*table.shape, weight=table)]
    held.append(optimizer.init(held[0]))
    batches = [(jnp.asarray(ids), jnp.asarray(dy)) for ids, dy in given]

    def run(batch: int) -> tuple[Any, Any]:
        held[:] = jax.block_until_ready(step(batches[batch], *held))
        return held[0].weight, batches[batch][0]

    return run


def _dense(table: np.ndarray, given: list[Any]) -> Run:
    from functools import partial

    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(RATE)

    def loss(weight, ids, dy):
        return jnp.vdot(weight[ids], dy)

    @partial(jax.jit, donate_argnums=(1, 2))
    def step(batch, weight, state):
        updates, state = optimizer.update(jax.grad(loss)(weight, *batch), state)
        return optax.apply_updates(weight, updates), state

    held: list[Any] = [jnp.array(table)]
    held.append(optimizer.init(held[0]))
    batches = [(jnp.asarray(ids), jnp.asarray(dy)) for ids, dy in given]

    def run(batch: int) -> tuple[Any, Any]:
        held[:] = jax.block_until_ready(step(batches[batch], *held))
        return held[0], batches[batch][0]

    return run


def _torch(table: np.ndarray, given: list[Any]) -> Run:
    import torch

    weight = torch.nn.Parameter(torch.from_numpy(table.copy()))
    optimizer = torch.optim.SparseAdam([weight], lr=RATE)
    batches = [(torch.from_numpy(ids), torch.from_numpy(dy)) for ids, dy in given]

    def run(batch: int) -> tuple[Any, Any]:
        ids, dy = batches[batch]
        weight.grad = None
        torch.nn.functional.embedding(ids, weight, sparse=True).backward(dy)
        optimizer.step()
        return weight.detach(), ids.long()

    return run
