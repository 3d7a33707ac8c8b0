"""Lazy row updates: the rows of a batch are stepped, all other rows stay the same."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from firstlayer.equinox import Embedding, EmbeddingBag, EmbeddingLayer
from firstlayer.equinox.rows import RowOptimizer, touched
from tests.equinox.test_token import bits

rng = np.random.default_rng(0)
KEY = jax.random.key(1)
TABLE = rng.standard_normal((12, 4)).astype("float32")
BATCHES = [np.array(ids) for ids in ([[1, 5, 1]], [[5, 5, 7]], [[0, 1, 7]], [[9, 5, 0]])]
TARGETS = rng.standard_normal((3, 4)).astype("float32")


def distance(layer, ids):
    """Return a loss whose gradient depends on the rows and sums repeated ids."""
    return ((layer(ids) - TARGETS) ** 2).sum()


def stepper(optimizer: RowOptimizer, loss: Any = distance, ids_of: Any = lambda ids: ids):
    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        value, grads = optimizer.value_and_grad(loss, ids_of(batch))(model, batch)
        model, state = optimizer.update(grads, state, model)
        return model, state, value

    return step


def trained(optimizer, model, *, batches=BATCHES, **options):
    step, state = stepper(optimizer, **options), optimizer.init(model)
    for ids in batches:
        model, state, _ = step(jnp.asarray(ids), model, state)
    return model, state


def trained_densely(optimizer, model, *, loss=distance, batches=BATCHES):
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, ids):
        grads = eqx.filter_grad(loss)(model, ids)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    for ids in batches:
        model, state = step(model, state, jnp.asarray(ids))
    return model


def layer_of(**options: Any) -> Embedding:
    return Embedding(12, 4, weight=TABLE, **options)


# Updated rows


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adagrad(0.3),
        optax.chain(
            optax.clip_by_global_norm(0.5), optax.sgd(optax.linear_schedule(0.3, 0.1, 4))
        ),
    ],
    ids=["adagrad", "sgd, clipped by global norm and scheduled"],
)
def test_optimizers_without_row_memory_equal_their_dense_updates(optimizer):
    model, _ = trained(RowOptimizer(optimizer), layer_of())
    want = trained_densely(optimizer, layer_of())
    np.testing.assert_allclose(model.weight, want.weight, atol=1e-6)


def test_adam_equals_torch_sparse_adam_and_not_dense_adam():
    # torch.optim.SparseAdam, torch 2.13.0.
    weight = torch.nn.Parameter(torch.from_numpy(TABLE.copy()))
    theirs = torch.optim.SparseAdam([weight], lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    for ids in BATCHES * 2:
        theirs.zero_grad()
        rows = torch.nn.functional.embedding(torch.from_numpy(ids), weight, sparse=True)
        ((rows - torch.from_numpy(TARGETS)) ** 2).sum().backward()
        theirs.step()
    optimizer = RowOptimizer(optax.adam(0.1, b1=0.8, b2=0.9, eps=1e-6))
    model, state = trained(optimizer, layer_of(), batches=BATCHES * 2)
    np.testing.assert_allclose(model.weight, weight.detach().numpy(), atol=1e-5)
    moments = theirs.state[weight]
    np.testing.assert_allclose(state.rows[0].mu, moments["exp_avg"].numpy(), atol=1e-5)
    np.testing.assert_allclose(state.rows[0].nu, moments["exp_avg_sq"].numpy(), atol=1e-5)
    dense = trained_densely(optax.adam(0.1, b1=0.8, b2=0.9, eps=1e-6), layer_of())
    assert not np.allclose(model.weight, dense.weight, atol=1e-2)


def test_rows_without_gradient_and_their_moments_do_not_change():
    optimizer = RowOptimizer(optax.adamw(0.1, weight_decay=0.5))
    step, model = stepper(optimizer), layer_of()
    state = optimizer.init(model)
    model, state, _ = step(jnp.array([[1, 5, 5]]), model, state)
    before, moments = np.array(model.weight), np.array(state.rows[0].nu)
    model, state, _ = step(jnp.array([[5, 2, 2]]), model, state)
    others, weight = np.delete(np.arange(12), [2, 5]), np.asarray(model.weight)
    assert bits(weight[others]) == bits(before[others])
    assert bits(np.asarray(state.rows[0].nu)[others]) == bits(moments[others])
    assert (weight[[2, 5]] != before[[2, 5]]).all() and moments[[1, 5]].all()
    assert int(state.rows[0].count) == 2
    # A traced id out of range updates no row.
    model, state, _ = step(jnp.array([[-1, -1, 40]]), model, state)
    assert bits(model.weight) == bits(weight)
    model, state, _ = step(jnp.array([[12, 3, -1]]), model, state)
    others, after = np.delete(np.arange(12), 3), np.asarray(model.weight)
    assert bits(after[others]) == bits(weight[others])
    assert np.isfinite(after).all() and (after[3] != weight[3]).all()
    assert np.isfinite(np.asarray(state.rows[0].mu)).all()


def counting() -> optax.GradientTransformation:
    """Count the steps in total, of each row and of each column; add the row's count."""

    def init(table):
        rows, columns = table.shape
        by_row = jnp.zeros((1, rows, 1))
        return {"steps": jnp.zeros(()), "rows": by_row, "columns": jnp.zeros(columns)}

    def update(updates, state, params=None):
        state = jax.tree.map(lambda count: count + 1, state)
        return state["rows"][0] * jnp.ones_like(updates), state

    return optax.GradientTransformation(init, update)  # pyright: ignore


def test_state_arrays_that_grow_with_the_table_are_updated_by_row():
    # A square table: the shape alone does not tell rows from columns.
    model = Embedding(4, 4, weight=TABLE[:4])
    batches = [np.array([[3, 1, 3]]), np.array([[1, 1, 1]])]
    model, state = trained(RowOptimizer(counting()), model, batches=batches)
    assert float(state.rows["steps"]) == 2
    np.testing.assert_array_equal(state.rows["columns"], [2] * 4)
    np.testing.assert_array_equal(np.ravel(state.rows["rows"]), [0, 2, 0, 1])
    moved = np.asarray(model.weight) - TABLE[:4]
    np.testing.assert_allclose(moved[:, 0], [0, 1 + 2, 0, 1], atol=1e-6)


def test_half_precision_rows_equal_those_of_a_dense_step():
    layer = layer_of(dtype="bfloat16")
    ids = np.full((1, 3), 4)
    model, _ = trained(RowOptimizer(optax.sgd(0.125)), layer, batches=[ids])
    want = trained_densely(optax.sgd(0.125), layer_of(dtype="bfloat16"), batches=[ids])
    assert model.weight.dtype == jnp.bfloat16 and bits(model.weight) == bits(want.weight)


# Models, bags and padding


class Model(eqx.Module):
    embed: Embedding
    head: eqx.nn.Linear

    def __call__(self, ids):
        return jax.vmap(jax.vmap(self.head))(self.embed(ids))


def test_the_rest_of_a_model_is_updated_densely():
    def layer():
        options: Any = {"max_positions": 3, "layer_norm": True, "padding_idx": 5}
        return EmbeddingLayer(12, 4, key=KEY, **options)

    parts: Any = {"rows": optax.sgd(0.05), "rest": optax.adamw(0.01)}
    optimizer = RowOptimizer(
        parts["rows"], table=lambda layer: layer.token, rest=parts["rest"]
    )
    labels = eqx.tree_at(
        lambda layer: (layer.token, layer.position, layer.norm),
        layer(),
        ("rows", "rest", "rest"),
    )
    got, _ = trained(optimizer, layer())
    want = trained_densely(optax.multi_transform(parts, lambda _: labels), layer())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.asarray(got.parameters()["norm.bias"]).all()


def test_bags_equal_dense_updates():
    def bag():
        return EmbeddingBag(12, 4, mode="max", padding_idx=5, max_norm=1.5, weight=TABLE)

    def loss(bag, ids):
        return ((bag(ids) - TARGETS[:1]) ** 2).sum()

    got, _ = trained(RowOptimizer(optax.sgd(0.1)), bag(), loss=loss)
    want = trained_densely(optax.sgd(0.1), bag(), loss=loss)
    np.testing.assert_allclose(got.weight, want.weight, atol=1e-6)
    assert (np.asarray(got.weight) != TABLE).any()


def test_padding_row_and_parameters_without_optimizer_do_not_change():
    table = TABLE.copy()
    table[5] = 2.0
    head = eqx.nn.Linear(4, 4, key=KEY)
    head_weight = np.array(head.weight)
    model = Model(Embedding(12, 4, weight=table, padding_idx=5), head)
    optimizer = RowOptimizer(
        optax.adamw(0.1, weight_decay=0.9), table=lambda model: model.embed
    )
    model, state = trained(optimizer, model)
    np.testing.assert_array_equal(np.asarray(model.embed.weight)[5], [2.0] * 4)
    moments = np.asarray(state.rows[0].mu)
    assert not moments[5].any() and moments[1].all()
    assert state.rest is None and bits(model.head.weight) == bits(head_weight)


def test_has_aux_returns_auxiliary_data():
    optimizer = RowOptimizer(optax.sgd(0.1))

    def loss(layer, ids, *, scale):
        rows = layer(ids)
        return scale * rows.sum(), rows

    value_and_grad = eqx.filter_jit(optimizer.value_and_grad(loss, [3, 3, 1], has_aux=True))
    (value, rows), grads = value_and_grad(layer_of(), [3, 1], scale=2.0)
    assert bits(rows) == bits(TABLE[[3, 1]])
    np.testing.assert_allclose(value, 2 * TABLE[[3, 1]].sum(), rtol=1e-5)
    ids, values = map(np.asarray, (grads.weight.ids, grads.weight.values))
    np.testing.assert_array_equal(ids[:2], [1, 3])
    np.testing.assert_array_equal(values, [[2.0] * 4, [2.0] * 4, [0.0] * 4])


# Invalid ids


def test_id_without_a_row_in_the_subset_is_nan():
    @jax.jit
    def lookup(weight, subset, ids):
        table = Embedding(12, 4, weight=weight, padding_idx=6)
        return touched(table, subset)(ids), touched(table, subset[:0])(ids)

    out, empty = map(np.asarray, lookup(TABLE, np.array([8, 3, 3, 11]), np.arange(12)))
    present = [3, 6, 8, 11]
    assert bits(out[present]) == bits(TABLE[present])
    assert np.isnan(np.delete(out, present, axis=0)).all()
    # The padding row is always there.
    assert bits(empty[6]) == bits(TABLE[6])
    assert np.isnan(np.delete(empty, 6, axis=0)).all()


def test_gradients_of_ids_without_a_row_are_zero():
    layer, optimizer = layer_of(), RowOptimizer(optax.sgd(0.1))
    # 15 is beyond the table, and the number of an unused entry of the subset.
    ids = jnp.array([[15, 3, -1], [3, 12, 40]])

    @jax.jit
    def run(ids):
        def total(layer, ids):
            return jnp.sum(layer(ids) ** 2)

        _, grads = optimizer.value_and_grad(total, ids)(layer, ids)
        weight = jnp.asarray(TABLE)
        _, tangent = jax.jvp(
            lambda weight: layer_of_weight(weight)(ids), (weight,), (2 * weight,)
        )
        return grads.weight, tangent

    def layer_of_weight(weight):
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)

    subset, tangent = run(ids)
    assert 15 in subset.ids.tolist()
    want = np.zeros((6, 4), "float32")
    want[0] = 4 * TABLE[3]
    np.testing.assert_allclose(subset.values, want, rtol=1e-6)
    want = np.zeros((2, 3, 4), "float32")
    want[0, 1] = want[1, 0] = 2 * TABLE[3]
    np.testing.assert_array_equal(tangent, want)


@pytest.mark.rejects
def test_touched_rejects_invalid_ids_and_layers():
    with pytest.raises(IndexError, match=r"^ids\[1\] is 12, but num_embeddings is 12$"):
        touched(layer_of(), [3, 12])
    with pytest.raises(
        TypeError, match="^table must be an Embedding or EmbeddingBag, got L"
    ):
        touched(eqx.nn.Linear(2, 2, key=KEY), [0])  # pyright: ignore
    with pytest.raises(TypeError, match="^logits needs every row of the table, got those "):
        touched(layer_of(), [3]).logits(np.ones(4))


# Memory


def compiled_step(rows: int) -> Any:
    optimizer = RowOptimizer(optax.adam(0.1))
    layer = eqx.filter_eval_shape(lambda: Embedding(rows, 32, init="zeros", key=KEY))
    state = eqx.filter_eval_shape(optimizer.init, layer)

    def step(ids, weight, state):
        model = eqx.tree_at(lambda one: one.weight, layer, weight)
        value, grads = optimizer.value_and_grad(lambda m, i: (m(i) ** 2).sum(), ids)(
            model, ids
        )
        model, state = optimizer.update(grads, state, model)
        return model.weight, state, value

    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    lowered = jax.jit(step, donate_argnums=(1, 2)).lower(ids, layer.weight, state)
    return lowered.compile().memory_analysis()


def test_step_writes_in_place_and_needs_memory_for_the_batch_only():
    small, large = compiled_step(1_000), compiled_step(100_000)
    table = 100_000 * 32 * 4
    # The weight and both moments are updated in place.
    assert large.alias_size_in_bytes >= 3 * table
    assert large.output_size_in_bytes - large.alias_size_in_bytes < 1000
    assert large.temp_size_in_bytes <= small.temp_size_in_bytes + 1000 < table / 10


# Forged states


def _forged(change):
    """Return an optimizer, gradients, a changed state and the model they belong to."""
    optimizer = RowOptimizer(
        optax.adam(0.1), table=lambda m: m[0], rest=optax.sgd(0.1, momentum=0.9)
    )
    model = (Embedding(12, 4, weight=TABLE), jnp.ones(3))
    run = optimizer.value_and_grad(lambda m, ids: distance(m[0], ids), BATCHES[0])
    _, gradients = run(model, BATCHES[0])
    return optimizer, gradients, change(optimizer.init(model)), model


def _rows_replaced(**fields):
    def change(state):
        adam = state.rows[0]._replace(**fields)
        return state._replace(rows=(adam, *state.rows[1:]))

    return change


FORGED = {
    "fewer rows": (
        _rows_replaced(mu=jnp.zeros((5, 4))),
        ValueError,
        r"state\.rows\[0\]\.mu must have shape \(12, 4\), got \(5, 4\)",
    ),
    "transposed": (
        _rows_replaced(nu=jnp.zeros((4, 12))),
        ValueError,
        r"state\.rows\[0\]\.nu must have shape \(12, 4\), got \(4, 12\)",
    ),
    "integer moments": (
        _rows_replaced(nu=jnp.zeros((12, 4), jnp.int32)),
        TypeError,
        r"state\.rows\[0\]\.nu must be float32, got int32",
    ),
    "negative count": (
        _rows_replaced(count=jnp.array(-3)),
        ValueError,
        r"state\.rows\[0\]\.count must not be negative, got -3",
    ),
    "another optimizer": (
        lambda state: state._replace(rows=optax.sgd(0.1).init(TABLE)),
        ValueError,
        "state.rows must be a state of this optimizer, got another structure",
    ),
    "rest of another model": (
        lambda state: state._replace(rest=jax.tree.map(lambda x: x[:2], state.rest)),
        ValueError,
        r"state\.rest.* must have shape \(3,\), got \(2,\)",
    ),
    "no RowState": (lambda state: tuple(state), TypeError, "must be a RowState, got tuple"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused_before_anything_changes(name):
    change, error, message = FORGED[name]
    optimizer, gradients, state, model = _forged(change)
    with pytest.raises(error, match=message):
        optimizer.update(gradients, state, model)
    if name != "negative count":
        with pytest.raises(error, match=message):
            eqx.filter_jit(optimizer.update)(gradients, state, model)
    np.testing.assert_array_equal(model[0].weight, TABLE)


def test_dense_gradients_are_refused():
    optimizer, _, state, model = _forged(lambda state: state)
    dense = eqx.filter_grad(lambda m: distance(m[0], BATCHES[0]))(model)
    with pytest.raises(TypeError, match="gradients must be those of value_and_grad"):
        optimizer.update(dense, state, model)
