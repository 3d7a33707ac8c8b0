"""Exact row optimizers in JAX: every step equals that of the dense optimizer."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

from firstlayer.equinox import Embedding, EmbeddingBag, EmbeddingLayer, optim
from tests.equinox.test_token import bits

ROWS, WIDTH, STEPS = 60, 4, 520
KEY = jax.random.key(1)
rng = np.random.default_rng(0)
TABLE = rng.standard_normal((ROWS, WIDTH)).astype("float32")
# Zipf: the rarest ids occur a few times in all steps.
IDS = np.minimum(rng.zipf(1.3, (STEPS, 2, 3)), ROWS).astype("int32") - 1
TARGETS = rng.standard_normal((STEPS, 2, 3, WIDTH)).astype("float32")


class Model(eqx.Module):
    embed: Embedding
    head: eqx.nn.Linear

    def __call__(self, ids):
        return jax.vmap(jax.vmap(self.head))(self.embed(ids))


def new_model(**options: Any) -> Model:
    embed = Embedding(ROWS, WIDTH, weight=TABLE, **options)
    return Model(embed, eqx.nn.Linear(WIDTH, WIDTH, key=KEY))


def embed_of(model: Any) -> Any:
    return model.embed


def distance(model, ids, targets):
    return ((model(ids) - targets) ** 2).mean()


def trained(
    optimizer: optim.RowOptimizer,
    model: Any,
    batches: Any,
    *,
    loss: Callable[..., Any] = distance,
    ids_of: Callable[[Any], Any] = lambda ids, *others: ids,
    transform: Callable[[Any], Any] = lambda gradients: gradients,
) -> tuple[Any, Any, Any]:
    """Return the model without its tables, the state and the loss of each step."""
    arrays, static = eqx.partition(optimizer.init(model), eqx.is_array)

    def step(arrays, batch):
        model, state = eqx.combine(arrays, static)
        rows = optimizer.gather(model, state, ids_of(*batch))
        value, gradients = eqx.filter_value_and_grad(loss)(rows, *batch)
        new = optimizer.update(transform(gradients), state, rows)
        return eqx.filter(new, eqx.is_array), value

    arrays, losses = jax.jit(partial(jax.lax.scan, step))(arrays, batches)
    return *eqx.combine(arrays, static), losses


def trained_densely(
    transformation: Any,
    model: Any,
    batches: Any,
    *,
    loss: Callable[..., Any] = distance,
) -> tuple[Any, Any]:
    """Return the model and the loss of each step."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def step(carry, batch):
        arrays, state = carry
        value, gradients = jax.value_and_grad(
            lambda arrays: loss(eqx.combine(arrays, static), *batch)
        )(arrays)
        updates, state = transformation.update(gradients, state, arrays)
        return (optax.apply_updates(arrays, updates), state), value

    start = arrays, transformation.init(arrays)
    (arrays, _), losses = jax.jit(partial(jax.lax.scan, step))(start, batches)
    return eqx.combine(arrays, static), losses


def assert_same_trees(got: Any, want: Any, **tolerance: float) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# Every rule equals the dense optimizer


def formula(names: list[str], step: Callable[..., Any]) -> Any:
    """Return an optax transformation from the formula of a step on one array.

    Args:
        names: Names of the arrays of the state, which start at zero.
        step: Function of the number of the step from 1, the gradient, the parameter and the
            state. It returns the update and the new state.
    """

    class State(NamedTuple):
        count: Any
        arrays: dict[str, Any]

    def init(params):
        zeros = {name: jax.tree.map(jnp.zeros_like, params) for name in names}
        return State(jnp.zeros((), jnp.int32), zeros)

    def update(updates, state, params):
        count = state.count + 1
        leaves, structure = jax.tree.flatten(updates)
        columns = [structure.flatten_up_to(state.arrays[name]) for name in names]
        columns = [structure.flatten_up_to(params), *columns]
        new = [step(count, *args) for args in zip(leaves, *columns, strict=True)]
        updates, *arrays = (
            structure.unflatten(column) for column in zip(*new, strict=True)
        )
        return updates, State(count, dict(zip(names, arrays, strict=True)))

    return optax.GradientTransformation(init, update)  # pyright: ignore


SCHEDULE = optax.cosine_onecycle_schedule(STEPS, peak_value=0.05, pct_start=0.2)


def dampened_sgd(t, g, w, buffer):
    g = -g + 0.03 * w
    buffer = jnp.where(t == 1, g, 0.8 * buffer + (1 - 0.3) * g)
    return -SCHEDULE(t - 1) * buffer, buffer


def amsgrad(t, g, w, mean, square, largest):
    g = -g
    mean, square = 0.8 * mean + 0.2 * g, 0.95 * square + 0.05 * g * g
    largest = jnp.maximum(largest, square)
    root = jnp.sqrt(largest / (1 - 0.95**t)) + 1e-3
    return -SCHEDULE(t - 1) * (0.3 * w + mean / (1 - 0.8**t) / root), mean, square, largest


def adagrad(t, g, w, total):
    total = total + g * g
    lr = SCHEDULE(t - 1) / (1 + (t - 1) * 0.01)
    return lr * g / (jnp.sqrt(0.2 + total) + 1e-3), total


def row_wise(entrywise, t, g, w, average):
    """Apply a formula to a table with one number per row, kept in its first column."""
    if w.shape != TABLE.shape:
        return entrywise(t, g, w, average)
    scale = jnp.sqrt((g * g).mean(-1, keepdims=True))
    scale = jnp.where(scale > 0, scale, 1.0)
    update, average = entrywise(t, scale * jnp.sign(g), w, average)
    return update * jnp.abs(g) / scale, average


def rmsprop(t, g, w, average):
    average = 0.9 * average + 0.1 * g * g
    return SCHEDULE(t - 1) * g / (jnp.sqrt(average) + 1e-3), average


def centered(*, eps: float) -> Any:
    return optax.chain(
        optax.scale(-1.0),
        optax.scale_by_stddev(decay=0.9, eps=eps, eps_in_sqrt=False),
        optax.trace(0.7),
        optax.scale_by_learning_rate(SCHEDULE),
    )


CASES = {
    "SGD, Nesterov": (
        optim.RowSGD(SCHEDULE, momentum=0.8, weight_decay=0.03, nesterov=True),
        optax.chain(
            optax.add_decayed_weights(0.03), optax.sgd(SCHEDULE, 0.8, nesterov=True)
        ),
    ),
    "SGD, dampened": (
        optim.RowSGD(
            SCHEDULE, momentum=0.8, dampening=0.3, weight_decay=0.03, maximize=True
        ),
        formula(["buffer"], dampened_sgd),
    ),
    "SGD, decay": (
        optim.RowSGD(SCHEDULE, weight_decay=0.3),
        optax.chain(optax.add_decayed_weights(0.3), optax.sgd(SCHEDULE)),
    ),
    "Adagrad": (
        optim.RowAdagrad(
            SCHEDULE, lr_decay=0.01, initial_accumulator_value=0.2, eps=1e-3, maximize=True
        ),
        formula(["sum"], adagrad),
    ),
    "RowWiseAdagrad": (
        optim.RowWiseAdagrad(
            SCHEDULE, lr_decay=0.01, initial_accumulator_value=0.2, eps=1e-3, maximize=True
        ),
        formula(["sum"], partial(row_wise, adagrad)),
    ),
    "Adam": (
        optim.RowAdam(SCHEDULE, betas=(0.8, 0.95), eps=1e-3),
        optax.adam(SCHEDULE, 0.8, 0.95, eps=1e-3),
    ),
    "AdamW": (
        optim.RowAdamW(SCHEDULE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.3),
        optax.adamw(SCHEDULE, 0.9, 0.95, eps=1e-3, weight_decay=0.3),
    ),
    "AdamW, replayed": (
        optim.RowAdamW(SCHEDULE, betas=(0.95, 0.6), eps=1e-3, weight_decay=0.3),
        optax.adamw(SCHEDULE, 0.95, 0.6, eps=1e-3, weight_decay=0.3),
    ),
    "AdamW, amsgrad": (
        optim.RowAdamW(
            SCHEDULE,
            betas=(0.8, 0.95),
            eps=1e-3,
            weight_decay=0.3,
            amsgrad=True,
            maximize=True,
        ),
        formula(["mean", "square", "largest"], amsgrad),
    ),
    "RMSprop": (
        optim.RowRMSprop(
            SCHEDULE, alpha=0.9, eps=1e-3, momentum=0.7, centered=True, maximize=True
        ),
        centered(eps=1e-3),
    ),
    "RowWiseRMSprop": (
        optim.RowWiseRMSprop(SCHEDULE, alpha=0.9, eps=1e-3, maximize=True),
        formula(["average"], partial(row_wise, rmsprop)),
    ),
    "Lion": (
        optim.RowLion(SCHEDULE, betas=(0.8, 0.95), weight_decay=0.3),
        optax.lion(SCHEDULE, 0.8, 0.95, weight_decay=0.3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_of_the_dense_optimizer(name):
    optimizer, dense = CASES[name]
    # Every row catches up 8 times within the compiled steps.
    optimizer.tables, optimizer.max_missed_steps = embed_of, 64
    sign = -1.0 if optimizer.execution.options["maximize"] else 1.0

    def loss(model, ids, targets):
        return sign * distance(model, ids, targets)

    batches = IDS, TARGETS
    model, state, losses = trained(optimizer, new_model(), batches, loss=loss)
    want, dense_losses = trained_densely(dense, new_model(), batches, loss=loss)
    np.testing.assert_allclose(losses, dense_losses, rtol=2e-5, atol=1e-6)
    assert_same_trees(optimizer.flush(model, state), want, rtol=0, atol=2e-5)
    assert int(state.step) == STEPS
    if state.missed is not None:
        assert int(state.missed.start) == STEPS - STEPS % 64
        assert (np.asarray(state.tables[0].row_steps) < STEPS - 64).any()
