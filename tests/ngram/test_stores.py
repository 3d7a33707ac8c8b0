"""N-gram tables of every kind of store: the rows in memory, training and prefetches."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import firstlayer.equinox as fe
import firstlayer.numpy as fn
import firstlayer.torch as ft
from firstlayer.files.safetensors import read, write
from firstlayer.ngram import ByteGroups, QwenNgram, SaltedNgram
from firstlayer.optim import RowAdamW
from firstlayer.stores import (
    MemoryStore,
    RowStore,
    SharedStore,
    create_store,
    open_store,
)
from firstlayer.torch.optim import RowAdamW as TorchRowAdamW

WIDTH = 32
SCHEME = QwenNgram(order=3, heads=2, base=61, layers=(2,), vocab_size=30, eos=3, seed=7)
ROWS = SCHEME.layout().rows
IDS = np.random.default_rng(0).integers(0, 30, (2, 9))
TABLE = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)
KINDS = ["memory", "shared", "file", "int8 file", "int4 file", "fp8_block file", "training"]
FRONT_ENDS = {"numpy": fn, "torch": ft, "equinox": fe}
MAKE: dict[str, Any] = {"numpy": np.asarray, "torch": torch.tensor, "equinox": jnp.asarray}


@contextmanager
def store_of(kind: str, folder: Path) -> Generator[RowStore, None, None]:
    """Yield a store of a kind with the rows of ``TABLE``."""
    if kind == "memory":
        store: RowStore = MemoryStore(TABLE)
    elif kind == "shared":
        store = SharedStore(f"ngram-{folder.name}", TABLE)
    elif kind == "training":
        store = create_store(folder / "table", TABLE.shape, rows=TABLE)
    else:
        path, name = folder / "table.safetensors", kind.removesuffix("file").strip()
        MemoryStore(TABLE).convert(path, format=name or None).close()
        store = open_store(path)
    with store:
        yield store


def array(x: Any) -> np.ndarray:
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_store_are_those_in_memory(kind, tmp_path):
    with store_of(kind, tmp_path) as store:
        # The rows as the store decodes them, in a table in memory.
        weight = store.read(np.arange(ROWS)).astype(np.float32)
        reference = fn.NgramEmbedding(SCHEME, fn.Embedding(weight=weight))
        history, ids = IDS[:, :2], IDS[:, 2:]
        options = {"history": history, "documents": np.sort(IDS), "dead": IDS == 5}
        expected = reference(ids, **options)
        assert expected.shape == (2, 7, 4 * WIDTH) and reference.embedding_dim == 4 * WIDTH
        for name, module in FRONT_ENDS.items():
            memory, make = module.NgramEmbedding(SCHEME, store, layer=2), MAKE[name]
            arguments = {key: make(value) for key, value in options.items()}
            memory.prefetch(make(ids), **arguments)
            found = array(memory(make(ids), **arguments))
            np.testing.assert_array_equal(found, expected, err_msg=name)
            memory.prefetch(make(ids))
            summed = module.NgramEmbedding(SCHEME, memory.table, combine="sum")
            np.testing.assert_allclose(
                array(summed(make(ids))),
                reference(ids).reshape(2, 7, 4, WIDTH).sum(-2),
                rtol=1e-5,
                atol=1e-5,
            )


def test_jax_reads_a_store_under_jit(tmp_path):
    with store_of("int8 file", tmp_path) as store:
        memory = fe.NgramEmbedding(SCHEME, store)
        compiled = eqx.filter_jit(memory)
        np.testing.assert_array_equal(compiled(jnp.asarray(IDS)), memory(IDS))
        assert not jax.tree.leaves(eqx.filter(memory, eqx.is_inexact_array))


def test_rows_of_a_store_that_is_not_trained_get_no_gradient(tmp_path):
    with store_of("file", tmp_path) as store:
        memory = fn.NgramEmbedding(SCHEME, store)
        y, pull = memory.vjp(IDS)
        assert pull(np.ones_like(y)) == {} and memory.parameters() == {}
        module = ft.NgramEmbedding(SCHEME, store)
        assert not module(torch.tensor(IDS)).requires_grad


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_training_on_disk_equals_training_in_memory(front_end, tmp_path):
    with store_of("training", tmp_path) as store:
        tables = {"disk": store, "memory": None}
        final = {}
        for place, table in tables.items():
            rng = np.random.default_rng(3)
            layer: Any
            optimizer: Any
            if front_end == "numpy":
                layer = fn.NgramEmbedding(
                    SCHEME, table or fn.Embedding(weight=TABLE.copy())
                )
                optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.2)
            else:
                if table is None:
                    weight = torch.tensor(TABLE)
                    table = ft.Embedding.from_pretrained(weight, freeze=False, sparse=True)
                layer = ft.NgramEmbedding(SCHEME, table)
                optimizer = TorchRowAdamW(layer, lr=0.1, weight_decay=0.2)
            for _ in range(4):
                ids = rng.integers(0, 30, (2, 6))
                dy = rng.standard_normal((2, 6, layer.embedding_dim)).astype(np.float32)
                if place == "disk":
                    layer.prefetch(MAKE[front_end](ids))
                if front_end == "numpy":
                    _, pull = layer.vjp(ids)
                    optimizer.step(pull(dy))
                else:
                    optimizer.zero_grad()
                    layer(torch.tensor(ids)).backward(torch.tensor(dy))
                    optimizer.step()
            optimizer.flush()
            weight = layer.table.weight
            final[place] = array(weight).copy()
        np.testing.assert_array_equal(final["disk"], final["memory"])
        assert np.abs(final["disk"] - TABLE).max() > 0.1
        np.testing.assert_array_equal(store.read(np.arange(ROWS)), final["disk"])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_prefetch_of_a_table_in_memory_changes_nothing(front_end):
    module, make = FRONT_ENDS[front_end], MAKE[front_end]
    if front_end == "torch":
        table = ft.Embedding.from_pretrained(torch.tensor(TABLE))
    else:
        table = module.Embedding(weight=TABLE)
    memory = module.NgramEmbedding(SCHEME, table)
    expected = array(memory(make(IDS)))
    memory.prefetch(make(IDS))
    np.testing.assert_array_equal(array(memory(make(IDS))), expected)


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_store_with_too_few_rows_is_refused(front_end):
    module = FRONT_ENDS[front_end]
    with pytest.raises(ValueError, match=f"table must have 600 rows, got {ROWS}"):
        module.NgramEmbedding(ByteGroups(sizes=(2, 3), rows=300), MemoryStore(TABLE))
    with pytest.raises(IndexError, match=r"ids\[0, 0\] is 30, but vocab_size is 30"):
        module.NgramEmbedding(SCHEME, MemoryStore(TABLE)).prefetch(MAKE[front_end]([[30]]))


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change, message",
    [
        ({"scheme": {"class": "os"}}, "scheme must be one of ByteGroups, .* got 'os'"),
        (
            {"scheme": {"class": "SaltedNgram", "rows": 9, "salts": 10**9}},
            "scheme must have at most 4096 columns, got 1000000000",
        ),
        (
            {"scheme": {"class": "SaltedNgram", "rows": 99}},
            "table must have 99 rows, got 9",
        ),
        ({"table": {"class": "EmbeddingBag"}}, "table must be the config of an Embedding"),
    ],
)
def test_a_forged_file_is_refused(change, message, tmp_path):
    path = tmp_path / "a.safetensors"
    fn.save(path, fn.NgramEmbedding(SaltedNgram(rows=9), 2, rng=0))
    tensors, config = read(path)
    write(path, tensors, config | change)
    with pytest.raises(ValueError, match=message):
        fn.load(path)


def test_row_numbers_of_64_bits_reach_the_store(tmp_path):
    """A file of 4 GB, all of which but a few rows is a hole."""
    rows, path = 2**31 + 9, tmp_path / "table.npy"
    written = {0: 1.0, 5: 2.0, 2**31 - 1: 3.0, 2**31: 4.0, 2**31 + 8: 5.0}
    with path.open("wb") as file:
        header = {"descr": "<f2", "fortran_order": False, "shape": (rows, 1)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.truncate(start + 2 * rows)
        for row, value in written.items():
            file.seek(start + 2 * row)
            file.write(np.float16(value).tobytes())
    ids, values = np.array([*written, 7]), [*written.values(), 0.0]
    scheme = SaltedNgram(orders=(2,), salts=2, rows=rows)
    with open_store(path) as store:
        assert store.read(ids)[:, 0].tolist() == values
        for name in ("numpy", "torch"):
            library, make = FRONT_ENDS[name], MAKE[name]
            found = array(library.Embedding.from_store(store)(make(ids)))
            assert found[:, 0].tolist() == values
            bag = library.EmbeddingBag.from_store(store, mode="sum")
            assert array(bag(make(ids[None]))).tolist() == [[15.0]]
            grams = library.NgramEmbedding(scheme, store)
            assert (array(grams(make(IDS))) == store.read(scheme(IDS))[..., 0]).all()
            with pytest.raises(IndexError, match=f"is {rows}, but num_embeddings is"):
                library.Embedding.from_store(store)(make(np.array([rows])))
        embedding = fe.Embedding.from_store(store)
        assert np.asarray(embedding(ids))[:, 0].tolist() == values
        error = rf"a table of {rows} rows can be read by Embedding.from_store with ids on"
        with pytest.raises(ValueError, match=error):
            jax.jit(embedding)(jnp.array([1, 2]))
        with pytest.raises(ValueError, match=error):
            fe.EmbeddingBag.from_store(store)(ids[None])
        with pytest.raises(ValueError, match=f"a table of {rows} rows needs jax.config"):
            fe.NgramEmbedding(scheme, store)(jnp.asarray(IDS))
