"""Files, state dicts and copies of layers over every kind of store."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
import torch

import firstlayer.equinox
import firstlayer.numpy
import firstlayer.optim
import firstlayer.torch
import firstlayer.torch.optim
from firstlayer.equinox._module import replace_fields
from firstlayer.files import safetensors
from firstlayer.ngram import SaltedNgram
from firstlayer.stores import MemoryStore, SharedStore, create_store, open_store

ROWS, WIDTH = 12, 32
SCHEME = SaltedNgram(rows=ROWS)
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
NOT_SAVED = "the rows of a layer over .* are not saved with it: write them with save"
PACKAGES = {
    "numpy": firstlayer.numpy,
    "torch": firstlayer.torch,
    "equinox": firstlayer.equinox,
}
READ_ONLY = ["memory", "quantized", "shared", "file", "quantized file"]
LAYERS = ["Embedding", "EmbeddingBag", "NgramEmbedding", "EmbeddingLayer"]


def opened(kind: str, folder: Any) -> Any:
    """Return a store of a kind."""
    if kind in ("memory", "quantized"):
        return MemoryStore(TABLE, format="int8" if kind == "quantized" else None)
    if kind == "shared":
        return SharedStore(folder.name, TABLE)
    if kind == "training":
        return create_store(folder / "store", rows=TABLE)
    format = "int4" if kind == "quantized file" else "float32"
    return MemoryStore(TABLE).convert(folder / "table.safetensors", format=format)


def over(front_end: str, name: str, table: Any) -> Any:
    """Return a layer over a store, or over an array."""
    package = PACKAGES[front_end]
    is_store = not isinstance(table, np.ndarray)
    make = package.Embedding.from_store if is_store else package.Embedding.from_pretrained
    options: dict[str, Any] = {}
    if front_end == "torch" and not is_store:
        options = {"freeze": False, "sparse": True}
    given = torch.from_numpy(table) if options else table
    if name == "EmbeddingBag":
        bag = package.EmbeddingBag
        make = bag.from_store if is_store else bag.from_pretrained
        return make(given, mode="sum", padding_idx=3, **options)
    if name != "EmbeddingLayer":
        options["max_norm"] = 2.5
    embedding = make(given, padding_idx=3, **options)
    if name == "Embedding":
        return embedding
    if name == "NgramEmbedding":
        return package.NgramEmbedding(SCHEME, embedding, combine="sum")
    seed = {"key": jax.random.key(0)} if front_end == "equinox" else {}
    layer = package.EmbeddingLayer(ROWS, WIDTH, padding_idx=3, position=None, **seed)
    if front_end == "equinox":
        return replace_fields(layer, token=embedding)
    layer.token = embedding
    return layer


def call(front_end: str, layer: Any) -> np.ndarray:
    """Return the output for every id."""
    ids = np.arange(ROWS).reshape(2, -1)
    if front_end == "torch":
        with torch.no_grad():
            return layer(torch.from_numpy(ids)).numpy()
    return np.asarray(layer(ids))


def train(front_end: str, layer: Any, optimizer: Any, steps: range) -> None:
    """Take steps that leave most rows stale."""
    for step in steps:
        ids = np.array([[step % 5, 1]])
        if front_end == "torch":
            optimizer.zero_grad()
            (layer(torch.from_numpy(ids)) ** 2).sum().backward()
            optimizer.step()
        else:
            y, pull = layer.vjp(ids)
            optimizer.step(pull(2 * y))


def optimizer_of(front_end: str, layer: Any) -> Any:
    """Return an optimizer that moves rows without a gradient too."""
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    if front_end == "torch":
        return firstlayer.torch.optim.RowAdamW(layer.parameters(), **options)
    return firstlayer.optim.RowAdamW(layer, **options)


@pytest.mark.parametrize(
    "front_end, kind",
    [(front_end, kind) for front_end in PACKAGES for kind in READ_ONLY]
    + [("equinox", "training")],
)
def test_a_layer_that_only_reads_a_store(front_end, kind, tmp_path):
    path = tmp_path / "layer.safetensors"
    with opened(kind, tmp_path) as store:
        want = {}
        for name in LAYERS:
            layer = over(front_end, name, store)
            want[name] = call(front_end, layer)
            with pytest.raises(TypeError, match=NOT_SAVED):
                PACKAGES[front_end].save(path, layer)
            assert not path.exists()
            if front_end == "equinox":
                assert not jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))
            else:
                assert not layer.state_dict()
                layer.load_state_dict({})
            for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
                if kind == "training":
                    with pytest.raises(TypeError, match="cannot be copied or pickled"):
                        copied(layer)
                else:
                    np.testing.assert_array_equal(
                        call(front_end, copied(layer)), want[name]
                    )
        # The way that the error names.
        store.save(path)
    with open_store(path) as store:
        for name in LAYERS:
            layer = over(front_end, name, store)
            np.testing.assert_array_equal(call(front_end, layer), want[name])


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trained_on_disk_is_saved_with_its_rows(front_end, name, tmp_path):
    memory = over(front_end, name, TABLE.copy())
    expected = optimizer_of(front_end, memory)
    save, path = PACKAGES[front_end].save, tmp_path / "layer.safetensors"
    with create_store(tmp_path / "a", rows=TABLE, keep=1) as store:
        layer = over(front_end, name, store)
        optimizer = optimizer_of(front_end, layer)
        train(front_end, memory, expected, range(7))
        train(front_end, layer, optimizer, range(7))
        store.commit("own")
        before = store.array.copy()
        save(path, layer)
        # Nothing is written to the store: its rows stay stale, its tags are kept.
        assert store.tags == ["own"]
        np.testing.assert_array_equal(store.array, before)
        save(tmp_path / "memory.safetensors", memory)
        assert path.read_bytes() == (tmp_path / "memory.safetensors").read_bytes()
        tensors, _ = safetensors.read(path)
        assert (
            tensors[f"{'table' if 'Ngram' in name else 'token'}.weight"] != before
        ).any()
        for other, package in PACKAGES.items():
            got = call(other, package.load(path))
            np.testing.assert_allclose(got, call(front_end, memory), rtol=1e-6, atol=1e-6)
        # Training goes on. Rows in memory have caught up to be saved, and round otherwise.
        train(front_end, memory, expected, range(7, 11))
        train(front_end, layer, optimizer, range(7, 11))
        want = call(front_end, memory)
        np.testing.assert_allclose(call(front_end, layer), want, rtol=1e-4, atol=1e-6)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied"):
                copied(layer)
    with pytest.raises(ValueError, match="is closed"):
        save(tmp_path / "closed.safetensors", layer)
    assert not (tmp_path / "closed.safetensors").exists()
    # In a later run, before there is an optimizer.
    with open_store(tmp_path / "a", mode="r+") as store:
        layer = over(front_end, name, store)
        save(path, layer)
        # A loaded layer has its rows in memory.
        loaded = PACKAGES[front_end].load(path)
        np.testing.assert_allclose(call(front_end, loaded), want, rtol=1e-4, atol=1e-6)
        layer.load_state_dict(loaded.state_dict())
        np.testing.assert_array_equal(call(front_end, layer), call(front_end, loaded))


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_a_table_is_not_saved_over_the_file_that_it_is_trained_in(front_end, tmp_path):
    path = tmp_path / "table.safetensors"
    MemoryStore(TABLE).save(path)
    with open_store(path, mode="r+") as store:
        layer = over(front_end, "Embedding", store)
        message = "path must not be the file of a table that is trained, got"
        with pytest.raises(ValueError, match=message):
            PACKAGES[front_end].save(path, layer)
        with pytest.raises(ValueError, match=message):
            store.save(path)
        store.write([1], TABLE[[2]])
    np.testing.assert_array_equal(open_store(path).read([1, 2]), TABLE[[2, 2]])
