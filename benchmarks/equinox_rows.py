"""One Adam step on a table in JAX: exact and lazy row updates against dense updates.

The exact rows train by ``firstlayer.equinox.optim.RowAdamW`` and by dense AdamW of optax.
The rows that each lookup reads are compared; many of them have missed steps before.

The lazy rows train by ``firstlayer.equinox.rows``. Dense Adam also moves rows without a
gradient, so the two rules differ after the first step that uses a row. The results are
compared right after that step: the batches have no row in common, and until a batch is
used, the moments of its rows are zero for every implementation. All start from the same
table and have taken the same number of steps.

Each run starts from the gradient of the looked-up vectors and includes the lookup, the
gradient of the table and the step. JAX functions are jitted and donate their buffers.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .timing import BATCHES, Case, Run

WIDTH, IDS = 256, (32, 128)
RATE, DECAY = 1e-3, 1e-2


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
    for rows, bar in ((250_000, 10.0), (1_000_000, 40.0)):
        yield _exact_step(rows, bar)


def _exact_step(rows: int, bar: float) -> Case:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((rows, WIDTH), dtype=np.float32)
    # The batches share rows, which miss steps in between.
    ids = rng.integers(0, rows // 16, (BATCHES, *IDS), dtype=np.int32)
    gradients = rng.uniform(0.5, 1.5, (2, *IDS, WIDTH)).astype(np.float32)
    batches = [(ids[batch], gradients[batch % 2]) for batch in range(BATCHES)]
    return Case(
        f"exact AdamW step in JAX {rows:,} × {WIDTH}, 32 × 128 ids",
        _lazily(_exact, table, batches),
        {"optax dense": _lazily(_dense_adamw, table, batches)},
        {"optax dense": bar},
        tolerance=1e-5,
        most_rounds=2,
    )


def _step(rows: int) -> Case:
    ids = _batches(rows)
    table = np.random.default_rng(0).standard_normal((rows, WIDTH), dtype=np.float32)
    # Not close to zero, where SparseAdam's different use of ε would be visible.
    gradients = np.random.default_rng(1).uniform(0.5, 1.5, (2, *IDS, WIDTH))
    gradients = gradients.astype(np.float32)
    batches = [(ids[batch], gradients[batch % 2]) for batch in range(BATCHES)]
    peers = {"optax dense": _lazily(_dense, table, batches)}
    missing: tuple[str, ...] = ()
    if importlib.util.find_spec("torch"):
        peers["torch SparseAdam"] = _lazily(_torch, table, batches)
    else:
        missing = ("torch",)
    return Case(
        f"Adam step in JAX {rows:,} × {WIDTH}, 32 × 128 ids",
        _lazily(_ours, table, batches),
        peers,
        {"optax dense": 4.0 if rows == 50_000 else 10.0},
        missing,
        tolerance=1e-5,
        most_rounds=2,
        flatten=lambda result: np.asarray(result[0][result[1]]),
    )


def _lazily(make: Callable[..., Run], *args: Any) -> Run:
    """Call ``make`` at the first run: tables and moments are large."""
    runs: list[Run] = []

    def run(batch: int) -> Any:
        if not runs:
            runs.append(make(*args))
        return runs[0](batch)

    return run


def _batches(rows: int) -> list[np.ndarray]:
    """Return batches of ids without common rows; ids repeat within a batch."""
    rng = np.random.default_rng(2)
    parts = np.array_split(rng.permutation(rows).astype(np.int32), BATCHES)
    return [rng.choice(part, IDS) for part in parts]


def _ours(table: np.ndarray, batches: list[Any]) -> Run:
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

    trained: list[Any] = [Embedding(*table.shape, weight=table)]
    trained.append(optimizer.init(trained[0]))
    on_device = [(jnp.asarray(ids), jnp.asarray(dy)) for ids, dy in batches]

    def run(batch: int) -> tuple[Any, Any]:
        trained[:] = jax.block_until_ready(step(on_device[batch], *trained))
        return trained[0].weight, on_device[batch][0]

    return run


def _exact(table: np.ndarray, batches: list[Any]) -> Run:
    """Return a run of exact row updates. Its result is what the lookup read."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from firstlayer.equinox import Embedding
    from firstlayer.equinox.optim import RowAdamW

    optimizer = RowAdamW(RATE, weight_decay=DECAY)

    def loss(layer, ids, dy):
        y = layer(ids)
        return jnp.vdot(y, dy), y

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, layer, state):
        rows = optimizer.gather(layer, state, batch[0])
        (_, y), grads = eqx.filter_value_and_grad(loss, has_aux=True)(rows, *batch)
        return *optimizer.update(grads, state, rows), y

    trained = list(optimizer.init(Embedding(*table.shape, weight=table)))
    on_device = [(jnp.asarray(ids), jnp.asarray(dy)) for ids, dy in batches]

    def run(batch: int) -> Any:
        *trained[:], y = jax.block_until_ready(step(on_device[batch], *trained))
        return y

    return run


def _dense_adamw(table: np.ndarray, batches: list[Any]) -> Run:
    """Return a run of dense updates. Its result is what the lookup read."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adamw(RATE, weight_decay=DECAY)

    def loss(weight, ids, dy):
        y = weight[ids]
        return jnp.vdot(y, dy), y

    @partial(jax.jit, donate_argnums=(1, 2))
    def step(batch, weight, state):
        (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(weight, *batch)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state, y

    trained: list[Any] = [jnp.array(table)]
    trained.append(optimizer.init(trained[0]))
    on_device = [(jnp.asarray(ids), jnp.asarray(dy)) for ids, dy in batches]

    def run(batch: int) -> Any:
        *trained[:], y = jax.block_until_ready(step(on_device[batch], *trained))
        return y

    return run


def _dense(table: np.ndarray, batches: list[Any]) -> Run:
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

    trained: list[Any] = [jnp.array(table)]
    trained.append(optimizer.init(trained[0]))
    on_device = [(jnp.asarray(ids), jnp.asarray(dy)) for ids, dy in batches]

    def run(batch: int) -> tuple[Any, Any]:
        trained[:] = jax.block_until_ready(step(on_device[batch], *trained))
        return trained[0], on_device[batch][0]

    return run


def _torch(table: np.ndarray, batches: list[Any]) -> Run:
    import torch

    weight = torch.nn.Parameter(torch.from_numpy(table.copy()))
    optimizer = torch.optim.SparseAdam([weight], lr=RATE)
    tensors = [(torch.from_numpy(ids), torch.from_numpy(dy)) for ids, dy in batches]

    def run(batch: int) -> tuple[Any, Any]:
        ids, dy = tensors[batch]
        weight.grad = None
        torch.nn.functional.embedding(ids, weight, sparse=True).backward(dy)
        optimizer.step()
        return weight.detach(), ids.long()

    return run
