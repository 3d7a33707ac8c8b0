"""Ids and offsets of NumPy arrays under an eager ``vmap``, which does not convert them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from firstlayer.equinox import (
    Embedding,
    EmbeddingBag,
    FrequencyEmbedding,
    HashedEmbedding,
    NgramEmbedding,
    QuotientRemainderEmbedding,
    Table,
    TableGroup,
)
from firstlayer.ngram import SaltedNgram
from firstlayer.stores import MemoryStore

KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
STORE = MemoryStore(TABLE, format="float16")
IDS = np.array([[1, 7, 3], [4, 0, 49]])
LARGE = np.array([[1, 2**40, 3], [-4, 5, 2**32 + 3]])
OFFSETS = np.array([[0, 1, 3], [0, 2, 3]])

LAYERS = {
    "token": (Embedding(50, 4, padding_idx=3, key=KEY), IDS),
    "store": (Embedding.from_store(STORE, max_norm=1.5), IDS),
    "quotients": (
        QuotientRemainderEmbedding(2**33, 4, buckets=2**17, key=KEY),
        LARGE % 2**33,
    ),
    "hashed": (HashedEmbedding(50, 4, importance_rows=9, key=KEY), LARGE),
    "frequent": (FrequencyEmbedding([2**40, 5], 50, 4, key=KEY), LARGE),
    "n-grams": (NgramEmbedding(SaltedNgram(rows=50), 4, key=KEY), LARGE),
    "n-grams of a store": (NgramEmbedding(SaltedNgram(rows=50), STORE), LARGE),
}
BAGS = {
    "table": EmbeddingBag(50, 4, include_last_offset=True, key=KEY),
    "store": EmbeddingBag.from_store(STORE, mode="max", include_last_offset=True),
}
GROUP = TableGroup({"a": Table(50, 4), "b": Table(9, 4, mode="mean")}, key=KEY)


@pytest.mark.parametrize("name", LAYERS)
def test_vmap_of_numpy_ids_equals_calls_one_by_one(name):
    layer, ids = LAYERS[name]
    for axis in (0, 1):
        want = jnp.stack([layer(one) for one in np.moveaxis(ids, axis, 0)])
        np.testing.assert_array_equal(jax.vmap(layer, in_axes=axis)(ids), want)
    if not name.startswith("n-grams"):
        np.testing.assert_array_equal(jax.vmap(jax.vmap(layer))(ids), layer(ids))


@pytest.mark.parametrize("name", BAGS)
def test_vmap_of_numpy_offsets_equals_calls_one_by_one(name):
    bag, pairs = BAGS[name], list(zip(IDS, OFFSETS, strict=True))
    want = jnp.stack([bag(*pair) for pair in pairs])
    np.testing.assert_allclose(jax.vmap(bag)(IDS, OFFSETS), want, atol=1e-6)
    got = jax.vmap(bag, in_axes=(0, 1))(IDS, OFFSETS.T)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_vmap_of_a_group_equals_calls_one_by_one():
    got = jax.vmap(GROUP)({"a": (IDS, OFFSETS), "b": IDS % 9})
    for i, (ids, offsets) in enumerate(zip(IDS, OFFSETS, strict=True)):
        want = GROUP({"a": (ids, offsets), "b": ids % 9})
        for name in want:
            np.testing.assert_allclose(got[name][i], want[name], atol=1e-6)


@pytest.mark.rejects
@pytest.mark.parametrize("wrong", [4, -1, 2**32 + 1])
def test_offsets_under_vmap_are_checked_before_they_are_truncated(wrong):
    offsets = np.where(OFFSETS == 2, wrong, OFFSETS)
    message = f"must be between 0 and 3, the number of ids, got {wrong}\\b"
    for bag in BAGS.values():
        with pytest.raises(ValueError, match="^offsets " + message):
            jax.vmap(bag)(IDS, offsets)
    with pytest.raises(ValueError, match="^offsets of a " + message):
        jax.vmap(GROUP)({"a": (IDS, offsets)})


@pytest.mark.rejects
def test_no_traced_offsets_with_include_last_offset_are_an_error():
    with pytest.raises(ValueError, match="^offsets must have an end with include_last_off"):
        jax.jit(BAGS["table"].__call__)(jnp.arange(3), jnp.zeros(0, int))
