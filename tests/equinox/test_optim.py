"""Exact row optimizers in JAX: every step equals that of the dense optimizer."""

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
    ids_of: Callable[..., Any] = lambda ids, *others: ids,
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


def assert_same_trees(got: Any, want: Any, *, atol: float = 1e-5) -> None:
    got, want = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (got, want))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


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


SCHEDULE: Any = optax.cosine_onecycle_schedule(STEPS, peak_value=0.05, pct_start=0.2)


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
    "Adam, replayed": (
        optim.RowAdam(SCHEDULE, betas=(0.95, 0.6), eps=1e-3),
        optax.adam(SCHEDULE, 0.95, 0.6, eps=1e-3),
    ),
    "AdamW": (
        optim.RowAdamW(SCHEDULE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.3),
        optax.adamw(SCHEDULE, 0.9, 0.95, eps=1e-3, weight_decay=0.3),
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
def test_steps_equal_those_of_the_dense_optimizer_in_float64(name):
    optimizer, dense = CASES[name]
    # Every row catches up 8 times within the compiled steps.
    optimizer.tables, optimizer.max_missed_steps = embed_of, 64
    sign = -1.0 if optimizer.execution.options["maximize"] else 1.0

    def loss(model, ids, targets):
        return sign * distance(model, ids, targets)

    start = new_model()
    model, state, losses = trained(optimizer, start, (IDS, TARGETS), loss=loss)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda array: jnp.asarray(array, jnp.float64), start)
        batches = IDS, TARGETS.astype("float64")
        want, exact_losses = trained_densely(dense, exact, batches, loss=loss)
    np.testing.assert_allclose(losses, exact_losses, rtol=2e-5, atol=1e-6)
    # Dense updates in float32 differ from those in float64 by as much, some CPUs' by more.
    atol = {"RMSprop": 2e-5, "Adam, replayed": 1e-5}.get(name, 5e-6)
    assert_same_trees(optimizer.flush(model, state), want, atol=atol)
    assert int(state.step) == STEPS
    if state.missed is not None:
        assert int(state.missed.start) == STEPS - STEPS % 64
        assert (np.asarray(state.tables[0].row_steps) < STEPS - 64).any()


# Several tables, shared tables, padding, bags


SHORT = slice(0, 40)
# SGD moves rows without a gradient as others do, and compiles faster than Adam.
DENSE_SGD: Any = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.8))


def sgd(**options: Any) -> optim.RowSGD:
    more: Any = {"max_missed_steps": 16, **options}
    return optim.RowSGD(0.1, momentum=0.8, weight_decay=0.1, **more)


class Towers(eqx.Module):
    """Two tables, one of them in bags, and a layer that shares the other."""

    left: Embedding
    right: Embedding
    bag: EmbeddingBag

    def __call__(self, left, right, bags):
        return self.left(left) + self.right(right) + self.bag(bags)


def test_several_tables_shared_tables_padding_and_bags_equal_dense_updates():
    def towers():
        shared = jnp.asarray(TABLE)
        return Towers(
            Embedding(weight=shared, padding_idx=0, max_norm=1.2),
            Embedding(weight=shared, padding_idx=3, scale_grad_by_freq=True),
            EmbeddingBag(weight=TABLE[::2], mode="sum", padding_idx=1),
        )

    def dense_loss(model, ids, targets):
        # One weight for both layers, with the gradients of both.
        right = eqx.tree_at(lambda layer: layer.weight, model.right, model.left.weight)
        model = eqx.tree_at(lambda model: model.right, model, right)
        return loss(model, ids, targets)

    def loss(model, ids, targets):
        left, right, bags = ids
        return ((model(left, right, bags) - targets) ** 2).mean()

    bags = np.minimum(IDS[SHORT, 0, ::-1, None] + np.arange(2), ROWS // 2 - 1)
    ids = IDS[SHORT, 0], IDS[SHORT, 1], bags
    batches = ids, TARGETS[SHORT, 0]
    optimizer = sgd(tables=lambda model: {"a": model.bag, "b": (model.left, model.right)})

    def ids_of(ids, targets):
        return {"a": ids[2], "b": (ids[0], ids[1])}

    model, state, losses = trained(optimizer, towers(), batches, loss=loss, ids_of=ids_of)
    want, dense_losses = trained_densely(DENSE_SGD, towers(), batches, loss=dense_loss)
    assert len(state.tables) == 2
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-5)
    got = optimizer.flush(model, state)
    assert got.left.weight is got.right.weight
    assert_same_trees([got.left, got.bag], [want.left, want.bag])
    assert (np.asarray(got.left.weight)[3] != TABLE[3]).all()


def test_embeddings_in_equinox_shared_have_one_table():
    model = eqx.nn.Shared(
        (Embedding(weight=TABLE), Embedding(weight=TABLE)),
        where=lambda pair: pair[1].weight,
        get=lambda pair: pair[0].weight,
    )

    def loss(model, ids, targets):
        first, second = model()
        return ((first(ids[0]) + second(ids[1]) - targets[0]) ** 2).mean()

    optimizer = sgd(tables=lambda model: model.pytree[0])
    batches = IDS[SHORT], TARGETS[SHORT]
    got, state, losses = trained(optimizer, model, batches, loss=loss)
    want, dense_losses = trained_densely(DENSE_SGD, model, batches, loss=loss)
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-5)
    assert_same_trees(optimizer.flush(got, state), want)


def test_layers_with_learned_positions_and_normalisation_equal_dense_updates():
    layer = EmbeddingLayer(
        ROWS, WIDTH, max_positions=3, layer_norm=True, padding_idx=2, key=KEY
    )
    optimizer = sgd(tables=lambda layer: layer.token)
    batches = IDS[SHORT], TARGETS[SHORT]
    got, state, losses = trained(optimizer, layer, batches)
    want, dense_losses = trained_densely(DENSE_SGD, layer, batches)
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-5)
    assert_same_trees(optimizer.flush(got, state), want)


# Clipping, accumulation, masks, other optimizers


def test_gradients_clip_as_dense_gradients_do():
    clip: Any = optax.clip_by_global_norm(0.2)
    batches = IDS[SHORT], TARGETS[SHORT]
    optimizer = sgd(tables=embed_of)
    got, state, _ = trained(
        optimizer, new_model(), batches, transform=lambda g: clip.update(g, None)[0]
    )
    want, _ = trained_densely(optax.chain(clip, DENSE_SGD), new_model(), batches)
    assert_same_trees(optimizer.flush(got, state), want)
    free, _ = trained_densely(DENSE_SGD, new_model(), batches)
    assert np.abs(np.asarray(free.embed.weight) - want.embed.weight).max() > 1e-3


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch():
    optimizer = sgd(tables=embed_of)
    ids, targets = IDS[:40].reshape(10, 4, 2, 3), TARGETS[:40].reshape(10, 4, 2, 3, WIDTH)
    arrays, static = eqx.partition(optimizer.init(new_model()), eqx.is_array)

    def step(arrays, batch):
        model, state = eqx.combine(arrays, static)
        rows = optimizer.gather(model, state, batch[0])
        total = jax.tree.map(jnp.zeros_like, eqx.filter(rows, eqx.is_inexact_array))

        def add(total, micro_batch):
            gradients = eqx.filter_grad(distance)(rows, *micro_batch)
            return jax.tree.map(lambda a, b: a + b / 4, total, gradients), None

        gradients, _ = jax.lax.scan(add, total, batch)
        return eqx.filter(optimizer.update(gradients, state, rows), eqx.is_array), None

    arrays, _ = jax.jit(partial(jax.lax.scan, step))(arrays, (ids, targets))
    got = optimizer.flush(*eqx.combine(arrays, static))
    batches = ids.reshape(10, 8, 3), targets.reshape(10, 8, 3, WIDTH)
    want, _ = trained_densely(DENSE_SGD, new_model(), batches)
    assert_same_trees(got, want)


def test_other_parameters_may_have_their_own_optimizer_and_masks():
    mask = jax.tree.map(lambda _: True, new_model())
    mask = eqx.tree_at(lambda mask: mask.head.bias, mask, False)
    batches, rest = (IDS[SHORT], TARGETS[SHORT]), optax.adam(0.01)
    labels = eqx.tree_at(
        lambda model: (model.embed, model.head.weight, model.head.bias),
        new_model(),
        ("rows", "rest", "none"),
    )
    dense = optax.multi_transform(
        {"rows": DENSE_SGD, "rest": rest, "none": optax.set_to_zero()}, lambda _: labels
    )
    want, _ = trained_densely(dense, new_model(), batches)
    for given in (mask, lambda model: mask):
        optimizer = sgd(tables=embed_of, rest=rest, mask=given)
        got, state, _ = trained(optimizer, new_model(), batches)
        assert_same_trees(optimizer.flush(got, state), want)


def test_a_masked_table_stays_in_the_model():
    mask = Model(*(False, True))  # pyright: ignore
    optimizer = sgd(tables=embed_of, mask=mask)
    model, state, losses = trained(optimizer, new_model(), (IDS[SHORT], TARGETS[SHORT]))
    assert state.tables == () and bits(model.embed.weight) == bits(TABLE)
    assert (np.asarray(model.head.weight) != np.asarray(new_model().head.weight)).all()


# Dense steps


def test_a_tied_head_makes_steps_dense_with_a_warning():
    def loss(model, ids, targets):
        hidden = jnp.tanh(model(ids) + targets)
        return optax.softmax_cross_entropy_with_integer_labels(
            model.logits(hidden), (ids + 1) % ROWS
        ).mean()

    optimizer, batches = sgd(), (IDS[SHORT], TARGETS[SHORT])
    with pytest.warns(
        UserWarning, match=r"table of shape \(60, 4\) has a gradient for every"
    ):
        got, state, losses = trained(
            optimizer, Embedding(weight=TABLE), batches, loss=loss, ids_of=lambda *_: None
        )
    want, dense_losses = trained_densely(
        DENSE_SGD, Embedding(weight=TABLE), batches, loss=loss
    )
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-5)
    assert_same_trees(optimizer.flush(got, state), want)


@pytest.mark.filterwarnings("ignore:a table of shape")
def test_dense_steps_and_row_steps_may_alternate():
    optimizer = sgd(tables=embed_of)
    dense_model = new_model()
    model, state = optimizer.init(new_model())
    dense_state = DENSE_SGD.init(eqx.filter(dense_model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, batch, is_dense):
        rows = optimizer.gather(model, state, None if is_dense else batch[0])
        return optimizer.update(eqx.filter_grad(distance)(rows, *batch), state, rows)

    @eqx.filter_jit
    def dense_step(model, state, batch):
        gradients = eqx.filter_grad(distance)(model, *batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = DENSE_SGD.update(gradients, state, params)
        return eqx.apply_updates(model, updates), state

    for i in range(40):
        batch = jnp.asarray(IDS[i]), jnp.asarray(TARGETS[i])
        model, state = step(model, state, batch, i % 7 == 3)
        dense_model, dense_state = dense_step(dense_model, dense_state, batch)
    assert_same_trees(optimizer.flush(model, state), dense_model)


# Fixed sizes, dtypes


def test_ids_that_fill_up_a_batch_move_nothing():
    optimizer = sgd(tables=embed_of)
    filled = np.concatenate(
        [np.full((40, 1, 3), -1), IDS[SHORT], np.full((40, 1, 3), 99)], 1
    )

    def loss(model, ids, targets):
        return distance(model, ids[1:3], targets)

    want, state, losses = trained(optimizer, new_model(), (IDS[SHORT], TARGETS[SHORT]))
    got, other, filled_losses = trained(
        optimizer, new_model(), (filled.astype("int32"), TARGETS[SHORT]), loss=loss
    )
    np.testing.assert_allclose(filled_losses, losses, rtol=1e-6)
    assert_same_trees(optimizer.flush(got, other), optimizer.flush(want, state), atol=1e-6)
    np.testing.assert_array_equal(other.tables[0].row_steps, state.tables[0].row_steps)


def test_bfloat16_tables_have_a_float32_state():
    def model_of(dtype):
        embed = Embedding(weight=TABLE, dtype=dtype)
        return Model(embed, eqx.nn.Linear(WIDTH, WIDTH, key=KEY))

    def loss(model, ids, targets):
        return distance(model, ids, targets).astype(jnp.float32)

    optimizer, batches = sgd(tables=embed_of), (IDS[SHORT], TARGETS[SHORT])
    got, state, _ = trained(optimizer, model_of("bfloat16"), batches, loss=loss)
    want, _ = trained_densely(DENSE_SGD, new_model(), batches)
    weight = optimizer.flush(got, state).embed.weight
    assert weight.dtype == jnp.bfloat16
    assert state.tables[0].arrays["momentum_buffer"].dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(weight, "float32"), want.embed.weight, rtol=0, atol=0.05
    )
    moved = np.abs(np.asarray(want.embed.weight) - TABLE)
    assert np.median(moved) > 0.1


def test_float64_tables_are_computed_in_float64():
    with jax.enable_x64(True):
        table = jnp.asarray(TABLE, jnp.float64)
        optimizer = sgd()
        batches = IDS[SHORT], TARGETS[SHORT].astype("float64")
        got, state, losses = trained(optimizer, Embedding(weight=table), batches)
        want, dense_losses = trained_densely(DENSE_SGD, Embedding(weight=table), batches)
        assert got.weight.dtype == jnp.float64
        np.testing.assert_allclose(losses, dense_losses, rtol=1e-12)
        assert_same_trees(optimizer.flush(got, state), want, atol=1e-12)


# Reading


def test_stale_rows_cannot_be_read():
    bag = EmbeddingBag(weight=TABLE)
    layer = EmbeddingLayer(ROWS, WIDTH, max_positions=3, layer_norm=True, key=KEY)
    optimizer = sgd(tables=lambda model: (model[0].embed, model[1], model[2].token))
    (model, bag, layer), _ = optimizer.init((new_model(max_norm=1.0), bag, layer))
    reads = {
        "lookup": lambda: model.embed([3]),
        "compiled lookup": lambda: eqx.filter_jit(model)(jnp.asarray(IDS[0])),
        "gradient": lambda: eqx.filter_grad(distance)(model, IDS[0], TARGETS[0]),
        "head": lambda: model.embed.logits(jnp.ones(WIDTH)),
        "bag": lambda: bag([[1, 2]]),
        "layer": lambda: layer([[1, 2]]),
        "projection": lambda: model.embed.projected(),
        "resizing": lambda: model.embed.resize(70),
        "saving": lambda: np.asarray(model.embed.weight),
        "index": lambda: model.embed.weight[3],
        "update": lambda: model.embed.weight.at[3].set(1.0),
        "arithmetic": lambda: jnp.asarray(model.embed.weight) * 2,
        "product": lambda: jnp.ones((2, WIDTH)) @ model.embed.weight,
    }
    for name, read in reads.items():
        with pytest.raises(RuntimeError, match="is in the optimizer state, where rows may"):
            pytest.fail(f"{name} gave {read()}")
    # What walks over the arrays of a model finds no table.
    shapes = [leaf.shape for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    assert shapes == [(WIDTH, WIDTH), (WIDTH,)]
    assert model.embed.weight.shape == (ROWS, WIDTH) and model.embed.weight.ndim == 2


def test_gather_and_flush_return_caught_up_rows_and_change_nothing():
    optimizer = sgd(tables=embed_of)
    batches = IDS[SHORT], TARGETS[SHORT]
    model, state, _ = trained(optimizer, new_model(), batches)
    want, _ = trained_densely(DENSE_SGD, new_model(), batches)
    before = jax.tree.map(np.array, state)
    ids = np.arange(ROWS)[::-1].reshape(3, 20)
    rows = optimizer.gather(model, state, ids[:2])
    np.testing.assert_allclose(rows.embed(ids[:2]), want.embed(ids[:2]), rtol=0, atol=1e-5)
    assert np.isnan(np.asarray(rows.embed(ids[2]))).all()
    full = optimizer.flush(model, state).embed
    np.testing.assert_allclose(full(ids), want.embed(ids), rtol=0, atol=1e-5)
    stale = np.asarray(state.tables[0].weight)
    assert np.abs(stale - np.asarray(want.embed.weight)).max() > 1e-3
    assert jax.tree.map(bits, state) == jax.tree.map(bits, before)
    # Nothing is copied if no row is stale.
    model, state = optimizer.init(new_model())
    assert optimizer.flush(model, state).embed.weight is state.tables[0].weight


# Checkpoints


def test_training_goes_on_from_a_checkpoint_with_stale_rows(tmp_path):
    optimizer = optim.RowAdamW(
        0.02, betas=(0.95, 0.6), max_missed_steps=16, tables=embed_of
    )

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        rows = optimizer.gather(model, state, batch[0])
        return optimizer.update(eqx.filter_grad(distance)(rows, *batch), state, rows)

    def run(start, steps) -> Any:
        model, state = start
        for i in steps:
            batch = jnp.asarray(IDS[i]), jnp.asarray(TARGETS[i])
            model, state = step(batch, model, state)
        return model, state

    first = run(optimizer.init(new_model()), range(25))
    assert int(first[1].missed.start) == 16
    arrays: Any = eqx.filter(first, eqx.is_array)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", arrays)
        checkpointer.wait_until_finished()
        like = optimizer.init(new_model())
        shapes = jax.eval_shape(lambda: eqx.filter(like, eqx.is_array))
        restored = checkpointer.restore(tmp_path / "orbax", shapes)
    eqx.tree_serialise_leaves(tmp_path / "equinox", first)
    own = eqx.tree_deserialise_leaves(tmp_path / "equinox", like)
    want = run(first, range(25, 40))
    static = eqx.filter(like, eqx.is_array, inverse=True)
    starts: Any = eqx.combine(restored, static), own
    for start in starts:
        got = run(start, range(25, 40))
        assert jax.tree.map(bits, got) == jax.tree.map(bits, want)


# Memory and compilation


@pytest.mark.parametrize("kind", [optim.RowAdamW, optim.RowSGD, optim.RowWiseAdagrad])
def test_steps_write_in_place_and_compile_once(kind):
    rows, width, traces = 200_000, 32, []
    optimizer = kind(0.01, max_missed_steps=3)

    @eqx.filter_jit(donate="all-except-first")
    def step(ids, model, state):
        traces.append(ids)
        small = optimizer.gather(model, state, ids)
        gradients = eqx.filter_grad(lambda model: (model(ids) ** 2).sum())(small)
        return optimizer.update(gradients, state, small)

    model, state = optimizer.init(Embedding(weight=np.ones((rows, width), "float32")))
    ids = jnp.arange(64, dtype=jnp.int32) * 7
    compiled = step.lower(ids, model, state).compile().compiled
    table, memory = rows * width * 4, compiled.memory_analysis()
    # Tables and state are updated in place; temporary arrays are chunks of a table.
    tables = 1 + sum(
        array.shape == (rows, width) for array in state.tables[0].arrays.values()
    )
    assert memory.alias_size_in_bytes >= tables * table
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
    assert memory.temp_size_in_bytes < table / 4
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert copies and not any(f"[{rows},{width}]" in line for line in copies)
    for _ in range(7):
        place = state.tables[0].weight.unsafe_buffer_pointer()
        old = state.tables[0].weight
        model, state = step(ids, model, state)
        assert old.is_deleted() and state.tables[0].weight.unsafe_buffer_pointer() == place
    assert len(traces) == 1


# Errors


@pytest.mark.parametrize("is_schedule", [False, True])
def test_learning_rates_may_be_traced(is_schedule):
    batches = IDS[SHORT], TARGETS[SHORT]

    def weight(lr):
        rate = optax.cosine_decay_schedule(lr, 50) if is_schedule else lr
        optimizer = optim.RowAdamW(rate, tables=embed_of, weight_decay=0.1)
        model, state, _ = trained(optimizer, new_model(), batches)
        return optimizer.flush(model, state).embed.weight

    rates = jnp.array([0.01, 0.03])
    got = jax.vmap(weight)(rates)
    for lr, one in zip(rates, got, strict=True):
        rate = optax.cosine_decay_schedule(lr, 50) if is_schedule else lr
        dense = optax.adamw(rate, weight_decay=0.1)  # pyright: ignore
        want, _ = trained_densely(dense, new_model(), batches)
        np.testing.assert_allclose(one, want.embed.weight, rtol=0, atol=1e-5)


@pytest.mark.rejects
def test_models_that_do_not_fit_are_refused():
    optimizer = sgd(tables=embed_of)
    model, state = optimizer.init(new_model())
    with pytest.raises(ValueError, match=r"model must be the one that init .* got .*None"):
        optimizer.gather(new_model(), state, IDS[0])
    with pytest.raises(IndexError, match=r"^ids\[0, 1\] is 60, but num_embeddings is 60$"):
        optimizer.gather(model, state, [[3, 60]])
    with pytest.raises(
        TypeError, match="tables must return an Embedding or .*, got Linear"
    ):
        sgd(tables=lambda model: model.head).init(new_model())
    with pytest.raises(ValueError, match="ids must have the structure that tables returns"):
        several = sgd(tables=lambda model: {"a": model.embed})
        several.gather(*several.init(new_model()), {"b": IDS[0]})
    tied = eqx.tree_at(
        lambda model: model.head.weight, new_model(), new_model().embed.weight
    )
    tied = eqx.tree_at(lambda model: model.head.weight, tied, tied.embed.weight)
    with pytest.raises(
        ValueError, match=r"model\.head\.weight must not be the array of a t"
    ):
        optimizer.init(tied)
    rows = optimizer.gather(model, state, IDS[0])
    gradients = eqx.filter_grad(distance)(new_model(), IDS[0], TARGETS[0])
    with pytest.raises(
        ValueError, match=r"must be those of the model, of shape \(6, 4\) for"
    ):
        optimizer.update(gradients, state, rows)
    gradients = eqx.filter_grad(distance)(rows, IDS[0], TARGETS[0])
    with pytest.raises(
        ValueError,
        match=r"^model must be the one that gather or flush returned, .* \(60, 4\) is in",
    ):
        optimizer.update(gradients, state, model)


def _replaced(where: Callable[[Any], Any], value: Any) -> Callable[[Any], Any]:
    return lambda state: eqx.tree_at(where, state, value)


def _buffer(state: Any) -> Any:
    return state.tables[0].arrays["momentum_buffer"]


FORGED = {
    "fewer rows": (
        _replaced(_buffer, jnp.zeros((5, WIDTH))),
        r"momentum_buffer must be \(60, 4\) in float32, got \(5, 4\) in float32",
    ),
    "integers": (
        _replaced(_buffer, jnp.zeros((ROWS, WIDTH), jnp.int32)),
        r"momentum_buffer must be \(60, 4\) in float32, got \(60, 4\) in int32",
    ),
    "row steps": (
        _replaced(lambda state: state.tables[0].row_steps, jnp.zeros(3, jnp.int32)),
        r"row_steps must be \(60,\) in int32, got \(3,\) in int32",
    ),
    "another rule": (
        lambda _: optim.RowLion(tables=embed_of).init(new_model())[1],
        r"state must have the arrays \['momentum_buffer'\] .*, got \['exp_avg'\]",
    ),
    "missed steps": (
        _replaced(
            lambda state: state.missed.coefficients, jnp.zeros((3, 17, 2), jnp.uint32)
        ),
        r"coefficients must be \(4, 17, 2\) in uint32, got \(3, 17, 2\) in uint32",
    ),
}


@pytest.mark.rejects
@pytest.mark.parametrize("name", FORGED)
def test_a_state_that_does_not_fit_is_refused(name):
    optimizer = sgd(tables=embed_of)
    model, state = optimizer.init(new_model())
    change, message = FORGED[name]
    with pytest.raises(ValueError, match=message):
        eqx.filter_eval_shape(optimizer.gather, model, change(state), IDS[0])
    rows = eqx.filter_eval_shape(optimizer.gather, model, state, IDS[0])
    with pytest.raises(ValueError, match=message):
        optimizer.update(eqx.filter(rows, eqx.is_array), change(state), rows)


@pytest.mark.rejects
def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="^max_missed_steps must be positive, got 0$"):
        optim.RowAdamW(max_missed_steps=0)
    lazy = "firstlayer.equinox.rows$"
    with pytest.raises(ValueError, match=f"^weight_decay must be 0 .*RowAdamW or {lazy}"):
        optim.RowAdam(weight_decay=0.1)
    for make in (optim.RowAdagrad, optim.RowRMSprop):
        with pytest.raises(ValueError, match=f"^weight_decay must be 0 .* use {lazy}"):
            make(weight_decay=0.1)
    with pytest.raises(ValueError, match=rf"^betas\[1\] must be above 0 .* use {lazy}"):
        optim.RowLion(betas=(0.9, 0.0))
    with pytest.raises(ValueError, match=r"^betas\[0\] must be in \[0, 1\), got 1.5$"):
        optim.RowLion(betas=(1.5, 0.9))
    with pytest.raises(TypeError, match="^RowSGD has no argument 'mode'$"):
        optim.RowSGD(mode="lazy")
    with pytest.raises(TypeError, match="^RowAdamW has no argument 'learning_rate'$"):
        optim.RowAdamW(learning_rate=0.1)
    with pytest.raises(ValueError, match="^lr must not be negative, got -1"):
        optim.RowSGD(lambda count: -1.0)
