"""Leaves written by ``eqx.tree_serialise_leaves``, by this version and by version 0.1."""

import io
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from firstlayer.equinox import Embedding, EmbeddingBag, LearnedPositions, load, load_leaves

DATA = Path(__file__).parent.parent / "data" / "version-0.1"
KEY = jax.random.key(3)
rng = np.random.default_rng(0)


class Model(eqx.Module):
    """Two tables with padding among other leaves, and one without padding."""

    head: eqx.nn.Linear
    counts: jax.Array  # integers of the model's own, just before a table
    token: Embedding
    position: LearnedPositions
    bags: list

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.head = eqx.nn.Linear(4, 2, key=keys[0])
        self.token = Embedding(7, 4, padding_idx=2, key=keys[1])
        self.position = LearnedPositions(
            5, 4, row_offset=2, padding_idx=1, dtype="bfloat16", key=keys[2]
        )
        self.bags = [
            EmbeddingBag(7, 4, key=keys[3]),
            EmbeddingBag(7, 4, padding_idx=0, key=keys[4]),
        ]
        self.counts = jnp.arange(4)


def old_leaves(tree, rows):
    """Return the leaves of version 0.1: tables in ``rows`` follow their padding row."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        for table, row in rows:
            if leaf is table:
                row = np.asarray(row)
                bits = row.view(np.int32)
                leaves.append(bits.reshape(*row.shape, 2) if row.dtype == "f8" else bits)
        leaves.append(leaf)
    return leaves


def written(leaves):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, leaves)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    ("name", "key"),
    [("embedding_with_padding_leaf", "with_leaf"), ("embedding_zero_padding", "zero")],
)
@pytest.mark.parametrize("suffix", ["", ".eqx"])
def test_files_of_version_0_1_load(name, key, suffix):
    want = np.load(DATA / "embedding.npz")[key]
    like = Embedding(7, 4, padding_idx=2, key=KEY)
    layer = load_leaves(DATA / f"{name}{suffix}", like)
    np.testing.assert_array_equal(layer.weight, want)
    np.testing.assert_array_equal(layer([2, 6]), want[[2, 6]])
    shapes = eqx.filter_eval_shape(lambda: Embedding(7, 4, padding_idx=2, key=KEY))
    assert eqx.tree_equal(load_leaves(str(DATA / f"{name}.eqx"), shapes), layer)


def test_safetensors_files_of_version_0_1_load():
    want = np.load(DATA / "embedding.npz")["with_leaf"]
    layer = load(DATA / "embedding.safetensors")
    assert layer.padding_idx == 2
    np.testing.assert_array_equal(layer.weight, want)


def test_model_of_version_0_1_loads_with_the_padding_rows_it_returned():
    model, like = Model(KEY), Model(jax.random.key(4))
    token_row = rng.standard_normal(4).astype("float32")
    position_row = np.array([1.0, -2.0, 0.5, 8.0], "float32")
    rows = [(model.token.weight, token_row), (model.position.weight, position_row)]
    got = load_leaves(written(old_leaves(model, rows)), like)
    want = eqx.tree_at(
        lambda model: (model.token, model.position),
        model,
        (model.token.set_padding(token_row), model.position.set_padding(position_row)),
    )
    assert eqx.tree_equal(got, want, typematch=True)
    np.testing.assert_array_equal(got.token([2, 3]), [token_row, model.token.weight[3]])


def test_float64_and_stacked_tables_of_version_0_1_load():
    with jax.enable_x64(True):
        table = rng.standard_normal((7, 4))
        layer = Embedding(7, 4, padding_idx=-1, weight=table)
        row = np.full(4, 0.1)
        got = load_leaves(written(old_leaves(layer, [(layer.weight, row)])), layer)
        assert np.asarray(got([6, 5])).tolist() == [row.tolist(), table[5].tolist()]
    build = eqx.filter_vmap(lambda key: Embedding(7, 4, padding_idx=2, key=key))
    stack = build(jax.random.split(KEY, 3))
    rows = rng.standard_normal((3, 4)).astype("float32")
    got = load_leaves(written(old_leaves(stack, [(stack.weight, rows)])), stack)
    want = np.array(stack.weight)
    want[:, 2] = rows
    np.testing.assert_array_equal(got.weight, want)


def test_files_of_this_version_load_as_with_equinox():
    model, like = Model(KEY), Model(jax.random.key(4))
    assert eqx.tree_equal(load_leaves(written(model), like), model, typematch=True)


@pytest.mark.rejects
def test_leaves_of_another_shape_are_an_error():
    like = Embedding(8, 4, padding_idx=2, key=KEY)
    for name in ("embedding_with_padding_leaf", "embedding_zero_padding"):
        with pytest.raises(RuntimeError, match=r"shape from \(8, 4\) in .* to \(7, 4\)"):
            load_leaves(DATA / f"{name}.eqx", like)
