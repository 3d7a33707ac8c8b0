"""Training of tables that a layer shards by row, on 8 devices, for ``test_sharding.py``.

Compared with dense optimizers of optax on one device. The checks run in the process of
:mod:`tests.support.sharded_layers`.
"""

import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from firstlayer.equinox import Embedding, optim
from tests.support.row_shards import (
    AUTO,
    EXPLICIT,
    IDS,
    KEY,
    ROWS,
    largest_array,
    mesh_of,
    on,
    own_rows,
    program_text,
)


class Model(eqx.Module):
    """A table with padding, and a head."""

    embed: Embedding
    head: Any

    @classmethod
    def of(cls, sharding: Any) -> Any:
        embed = Embedding(17, 6, padding_idx=2, key=KEY, sharding=sharding)
        head = jnp.linspace(-1.0, 1.0, 6)
        if sharding is not None:
            head = jax.device_put(head, NamedSharding(sharding.mesh, P()))
        return cls(embed, head)


def loss(model: Any, ids: Any) -> Any:
    return jnp.sum(jnp.tanh(model.embed(ids).sum(-2)) @ model.head)


def train(rule: Any, model: Any, batches: Any, state: Any = None) -> Any:
    """Return the model, the state and the losses of training steps."""

    @eqx.filter_jit
    def step(model: Any, state: Any, ids: Any) -> Any:
        rows = rule.gather(model, state, ids)
        value, gradients = eqx.filter_value_and_grad(loss)(rows, ids)
        return *rule.update(gradients, state, rows), value

    if state is None:
        model, state = rule.init(model)
    losses = []
    for ids in batches:
        model, state, value = step(model, state, ids)
        losses.append(float(value))
    return model, state, losses


def train_dense(rule: Any, model: Any, batches: Any) -> tuple[Any, list[float]]:
    """Return the model and the losses of training steps with an optimizer of optax."""
    state = rule.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, ids: Any) -> Any:
        value, gradients = eqx.filter_value_and_grad(loss)(model, ids)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, state = rule.update(gradients, state, parameters)
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for ids in batches:
        model, state, value = step(model, state, jnp.asarray(ids))
        losses.append(float(value))
    return model, losses


BATCHES = [IDS, (IDS + 3) % 17, IDS % 5, IDS, IDS % 7]
RATE = optax.exponential_decay(0.1, 2, 0.5)
#: Row optimizers and the same of optax.
RULES = {
    "AdamW": (
        partial(optim.RowAdamW, 0.05, weight_decay=0.1, eps=1e-3),
        optax.adamw(0.05, weight_decay=0.1, eps=1e-3),
    ),
    "momentum": (partial(optim.RowSGD, RATE, momentum=0.9), optax.sgd(RATE, momentum=0.9)),
}


def check_optimizer(name: str, kind: AxisType, spec: P) -> None:
    """Training on a mesh has the losses and the table of a dense optimizer."""
    mesh, (rule, dense) = mesh_of(kind), RULES[name]
    rule = rule(tables=lambda model: model.embed, max_missed_steps=3)
    want_model, want = train_dense(dense, Model.of(None), BATCHES)
    batches = [on(mesh, ids, "data") for ids in BATCHES]
    model, state, losses = train(rule, Model.of(NamedSharding(mesh, spec)), batches)
    np.testing.assert_allclose(losses, want, rtol=2e-5, atol=1e-5)
    whole = eqx.filter_jit(rule.flush)(model, state).embed
    np.testing.assert_allclose(
        whole.parameters()["weight"], want_model.embed.weight, rtol=1e-5, atol=1e-5
    )
    for leaf in (whole.weight, *state.tables[0].arrays.values()):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert not np.asarray(leaf)[17:].any()
    if kind is AUTO:
        return
    # Rows for an evaluation, outside of a compiled function.
    rows = rule.gather(model, state, batches[1])
    got, want = rows.embed(batches[1]), want_model.embed(BATCHES[1])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="is in the optimizer state"):
        model.embed(batches[0])


def check_row_wise() -> None:
    """A state of one number for each row, of a table whose columns are sharded too."""
    mesh = mesh_of(AUTO)
    rule = optim.RowWiseAdagrad(
        0.1, tables=lambda model: model.embed, initial_accumulator_value=0.1
    )
    _, want, want_losses = train(rule, Model.of(None), map(jnp.asarray, BATCHES))
    place = NamedSharding(mesh, P("rows", "data"))
    _, state, losses = train(rule, Model.of(place), map(jnp.asarray, BATCHES))
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5, atol=1e-5)
    pairs = zip(jax.tree.leaves(state.tables), jax.tree.leaves(want.tables), strict=True)
    for got, wanted in pairs:
        np.testing.assert_allclose(own_rows(got, wanted), wanted, rtol=1e-5, atol=1e-6)
        assert not got.ndim or not got.sharding.is_fully_replicated


def check_dense_step(kind: AxisType) -> None:
    """A tied head gives every row a gradient, those of zeros at the end excepted."""
    mesh = mesh_of(kind)
    rule = optim.RowRMSprop(0.05, eps=0.0)  # a zero gradient would be NaN

    def losses(embed: Any, batches: Any) -> Any:
        @eqx.filter_jit
        def step(model: Any, state: Any, ids: Any) -> Any:
            def loss(model: Any) -> Any:
                return jnp.sum(jnp.tanh(model.logits(model(ids).sum(1))))

            whole = rule.flush(model, state)
            value, gradients = eqx.filter_value_and_grad(loss)(whole)
            return *rule.update(gradients, state, whole), value

        model, state = rule.init(embed)
        values = []
        for ids in batches:
            model, state, value = step(model, state, ids)
            values.append(float(value))
        return values, rule.flush(model, state)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a table of shape")
        want, plain = losses(Embedding(17, 6, key=KEY), map(jnp.asarray, BATCHES[:3]))
        place = NamedSharding(mesh, ROWS)
        batches = [on(mesh, ids, "data") for ids in BATCHES[:3]]
        got, layer = losses(Embedding(17, 6, key=KEY, sharding=place), batches)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(layer.parameters()["weight"], plain.weight, atol=1e-5)
    assert not np.asarray(layer.weight)[17:].any()


def check_step_memory(kind: AxisType) -> None:
    """A step has no array as large as the table, and one collective for its rows."""
    mesh = mesh_of(kind)
    place = NamedSharding(mesh, P(("rows", "data"), None))
    rule = optim.RowSGD(0.05, momentum=0.9, max_missed_steps=16)
    model, state = rule.init(Embedding(400_001, 16, key=KEY, sharding=place))
    ids = on(mesh, IDS, "data")

    def step(model: Any, state: Any, ids: Any) -> Any:
        rows = rule.gather(model, state, ids)
        gradients = eqx.filter_grad(lambda model: (model(ids) ** 2).sum())(rows)
        return rule.update(gradients, state, rows)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(model, state, ids).compile()
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    table = 400_001 * 16
    # Rows of a chunk that catches up are the largest array besides the shards.
    assert largest_array(text) < table / 4
    assert memory.temp_size_in_bytes < table * 4 / 4
    assert memory.alias_size_in_bytes >= 2 * table * 4 / 8
    assert largest_array(program_text(rule.flush, model, state)) < table / 4
    # No collective has more than the rows of the batch.
    lines = [line for line in text.splitlines() if re.search(r" all-(reduce|gather)", line)]
    assert max(map(largest_array, lines)) <= IDS.size * 16


def check_checkpoint() -> None:
    """A checkpoint of 8 devices is restored on 4 and on 1, and training goes on."""
    rule, dense = RULES["momentum"]
    rule = rule(tables=lambda model: model.embed, max_missed_steps=3)
    batches = list(map(jnp.asarray, BATCHES))
    _, want = train_dense(dense, Model.of(None), BATCHES)
    mesh = mesh_of(AUTO, (8,))
    model, state, losses = train(rule, Model.of(NamedSharding(mesh, ROWS)), batches[:3])
    np.testing.assert_allclose(losses, want[:3], rtol=2e-5, atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, leaves((model, state)))
        for devices in (4, 1):
            small = mesh_of(EXPLICIT if devices == 4 else AUTO, (devices,))
            model, state = rule.init(Model.of(NamedSharding(small, ROWS)))
            target = jax.tree.map(
                orbax.checkpoint.utils.to_shape_dtype_struct, leaves((model, state))
            )
            with orbax.checkpoint.StandardCheckpointer() as checkpointer:
                # Another number of rows of zeros at the end.
                restored = checkpointer.restore(path, target, strict=False)
            structure = jax.tree.structure((model, state))
            model, state = jax.tree.unflatten(structure, restored.values())
            assert len(state.tables[0].weight) == (20 if devices == 4 else 17)
            _, _, losses = train(rule, model, batches[3:], state)
            np.testing.assert_allclose(losses, want[3:], rtol=2e-5, atol=1e-5)


def leaves(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by number."""
    return {f"{i:03}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def checks() -> dict[str, Callable[[], None]]:
    """Return every check by name."""
    both = P(("data", "rows"), None)
    return {
        "row shards: AdamW": partial(check_optimizer, "AdamW", AUTO, both),
        "row shards: momentum": partial(check_optimizer, "momentum", EXPLICIT, ROWS),
        "row shards: row-wise Adagrad": check_row_wise,
        "row shards: dense step": partial(check_dense_step, EXPLICIT),
        "row shards: memory of a step": partial(check_step_memory, AUTO),
        "row shards: checkpoint": check_checkpoint,
    }
