"""Tables in files: every layout gives the rows that a plain reading of its bytes gives."""

import copy
import json
import os
import pickle
import stat
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.files import word2vec
from firstlayer.stores import MemoryStore, open_store
from firstlayer.stores import file as file_module
from firstlayer.stores.formats import format_by_name
from tests.support.table_files import (
    gguf_bytes,
    gguf_string,
    tensor,
    word2vec_bytes,
    write_safetensors,
    write_sharded,
)

rng = np.random.default_rng(0)
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
QWEN = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def random(shape, dtype="float32"):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return rng.standard_normal(shape).astype(kind)


def equal(rows, want):
    assert rows.dtype == want.dtype
    np.testing.assert_array_equal(rows, want)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("pad", [8, 1])
def test_a_safetensors_table_gives_its_rows(dtype, pad, tmp_path):
    table, other = random((50, 7), dtype), random((3, 7), dtype)
    tensors = {"odd": ("U8", (3,), b"abc")} if pad == 1 else {}
    tensors |= {
        "h.weight": tensor(CODES[dtype], other),
        "wte.weight": tensor(CODES[dtype], table),
    }
    write_safetensors(tmp_path / "a.safetensors", tensors, pad=pad)
    ids = rng.integers(0, 50, (4, 5))
    with open_store(tmp_path / "a.safetensors") as store:
        assert store.shape == (50, 7) and len(store) == 50 and store.nbytes == table.nbytes
        assert store.dtype == table.dtype and store.format.name == dtype
        equal(store.read(ids), table[ids])
        equal(store.read(7), table[7])
        equal(store.read(np.zeros((0, 3), np.int32)), table[np.zeros((0, 3), int)])
        equal(store.read(np.array([3, 3, 0], np.uint8)), table[[3, 3, 0]])
    with open_store(tmp_path, "h") as store:
        equal(store.read([2, 0]), other[[2, 0]])


def test_every_row_of_a_large_request_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "BLOCK_ROWS", 1000)
    monkeypatch.setattr(file_module, "STAGED_BYTES", 3000)
    table = random((3000, 5))
    np.save(tmp_path / "a.npy", table)
    ids = rng.integers(0, 3000, 12_345)
    equal(open_store(tmp_path / "a.npy").read(ids), table[ids])
    blocks = random((300, 32))
    parts = format_by_name("fp8_block").encode(blocks)
    shards = {}
    for k in range(3):
        rows = slice(100 * k, 100 * k + 100)
        shards[f"e.shard_{k}.weight"] = tensor("F8_E4M3", parts["weight"][rows])
        shards[f"e.shard_{k}.scale"] = tensor("F8_E8M0", parts["scale"][rows])
    write_sharded(tmp_path, shards)
    want = MemoryStore(blocks, format="fp8_block").read(ids % 300)
    equal(open_store(tmp_path, "e").read(ids % 300), want)


@pytest.mark.parametrize("separator", ["shard_", "shards."])
def test_row_shards_are_joined_in_numeric_order(separator, tmp_path):
    table = random((26, 6), "bfloat16")
    bounds = [0, 3, 3, 8, 9, 11, 14, 15, 19, 20, 21, 25, 26]
    tensors = {
        f"{QWEN}.{separator}{k}.weight": tensor("BF16", table[lo:hi])
        for k, (lo, hi) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    }
    tensors[f"{QWEN}.hashstats_0"] = tensor("F32", random((1, 1)))
    write_sharded(tmp_path, dict(sorted(tensors.items())), per_file=2)
    ids = rng.integers(0, 26, 100)
    for name in (QWEN, f"{QWEN}.weight", None):
        with open_store(tmp_path, name) as store:
            assert store.shape == (26, 6)
            equal(store.read(ids), table[ids])
            equal(store.read(np.arange(26)), table)
    with pytest.raises(ValueError, match="is not one aligned array in its file"):
        assert open_store(tmp_path, QWEN).parts


def test_fp8_rows_of_shards_have_one_scale(tmp_path):
    codes = rng.integers(0, 120, (10, 32)).astype(np.uint8)
    scale = np.array([0.375], ml_dtypes.bfloat16)
    tensors = {
        f"{QWEN}.shard_{k}.weight": tensor("F8_E4M3", codes[5 * k : 5 * k + 5])
        for k in range(2)
    }
    tensors[f"{QWEN}.weight_scale"] = tensor("BF16", scale)
    write_sharded(tmp_path, tensors)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.375)
    with open_store(tmp_path, QWEN) as store:
        assert store.format.name == "fp8" and store.dtype == np.float32
        equal(store.read([9, 0, 4, 5]), want[[9, 0, 4, 5]])


def test_fp8_blocks_have_the_scales_beside_them(tmp_path):
    name = "layers.1.engram.embed"
    parts = format_by_name("fp8_block").encode(random((9, 64)))
    tensors = {
        f"{name}.weight": tensor("F8_E4M3", parts["weight"]),
        f"{name}.scale": tensor("F8_E8M0", parts["scale"]),
        "layers.1.engram.wkv.weight": tensor("F8_E4M3", parts["weight"]),
    }
    write_safetensors(tmp_path / "a.safetensors", tensors)
    values = parts["weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    powers = 2.0 ** (parts["scale"].astype(np.float32) - 127)
    with open_store(tmp_path / "a.safetensors", name) as store:
        assert store.format.name == "fp8_block" and store.shape == (9, 64)
        assert store.parts.keys() == {"weight", "scale"}
        want = values * np.repeat(powers, 32, axis=1)
        equal(store.read([8, 1]), want[[8, 1]].astype(np.float32))


@pytest.mark.parametrize("code", ["BF16", "F16"])
def test_mlx_tables_take_bits_and_groups_from_the_config(code, tmp_path):
    words = rng.integers(0, 2**32, (6, 12), dtype=np.uint32)
    dtype = {"BF16": "bfloat16", "F16": "float16"}[code]
    scales, biases = random((6, 2), dtype), random((6, 2), dtype)
    tensors = {
        "embed_tokens.weight": tensor("U32", words),
        "embed_tokens.scales": tensor(code, scales),
        "embed_tokens.biases": tensor(code, biases),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    q = bits.reshape(6, 64, 6) @ (1 << np.arange(6))
    want = np.repeat(scales.astype(np.float32), 32, 1) * q.astype(np.float32)
    want = want + np.repeat(biases.astype(np.float32), 32, 1)
    with pytest.raises(ValueError, match='pass format=, such as "mlx4_g32"'):
        open_store(tmp_path)
    by_format = open_store(tmp_path, format="mlx6_g32")
    config = {"group_size": 64, "bits": 4, "embed_tokens": {"group_size": 32, "bits": 6}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": config}))
    for store in (by_format, open_store(tmp_path)):
        assert store.shape == (6, 64)
        np.testing.assert_allclose(store.read([5, 0]), want[[5, 0]], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="format of MLX, but format is 'int8'"):
        open_store(tmp_path, format="int8")


@pytest.mark.parametrize(
    "kind, name, width, row_bytes",
    [(8, "q8_0", 64, 68), (2, "q4_0", 64, 36), (12, "q4_k", 256, 144)],
)
def test_gguf_blocks_are_read_in_place(kind, name, width, row_bytes, tmp_path):
    content = rng.integers(0, 60, (5, row_bytes)).astype(np.uint8)
    vocabulary = gguf_string(b"tokens") + np.array([9, 8, 2, 0], "<u4").tobytes()
    vocabulary += gguf_string(b"general.alignment") + gguf_string(b"")
    depth = gguf_string(b"nested") + np.array([9, 9], "<u4").tobytes()
    depth += np.array([1], "<u8").tobytes() + np.array([4, 2, 0, 7, 8], "<u4").tobytes()
    tensors = {
        "a": (0, (3,), bytes(12)),
        "token_embd.weight": (kind, (5, width), content.tobytes()),
    }
    want = np.empty((5, width), np.float32)
    format_by_name(name).decode({"weight": content}, want)
    for version, alignment in ((2, 32), (3, 64)):
        path = tmp_path / "a.gguf"
        path.write_bytes(
            gguf_bytes(
                tensors, values=(vocabulary, depth), alignment=alignment, version=version
            )
        )
        with open_store(path) as store:
            assert store.format.name == name and store.shape == (5, width)
            equal(store.read([4, 0, 3]), want[[4, 0, 3]])


@pytest.mark.parametrize("kind, dtype", [(0, "float32"), (1, "float16"), (30, "bfloat16")])
def test_gguf_floats(kind, dtype, tmp_path):
    table = random((4, 3), dtype)
    path = tmp_path / "model.bin"
    path.write_bytes(gguf_bytes({"x.weight": (kind, (4, 3), table.tobytes())}))
    equal(open_store(path, "x").read([3, 1]), table[[3, 1]])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_npy(dtype, tmp_path):
    table = random((5, 3), dtype)
    np.save(tmp_path / "a.npy", table)
    format = "bfloat16" if dtype == "bfloat16" else None
    equal(open_store(tmp_path / "a.npy", format=format).read([4, 4, 0]), table[[4, 4, 0]])


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_bytes_of_a_given_format(format, tmp_path):
    table = random((6, 96))
    encoded = format_by_name(format).encode_table(table)
    np.save(tmp_path / "a.npy", encoded)
    write_safetensors(tmp_path / "a.safetensors", {"x": tensor("U8", encoded)})
    want = MemoryStore(table, format=format).read([5, 2])
    for file in ("a.npy", "a.safetensors"):
        with open_store(tmp_path / file, format=format) as store:
            assert store.is_interleaved and store.shape == (6, 96)
            equal(store.read([5, 2]), want)
        with pytest.raises(ValueError, match="bytes"):
            open_store(tmp_path / file)


@pytest.mark.parametrize("newline", [False, True])
def test_word2vec_is_scanned_once(newline, tmp_path, monkeypatch):
    table = random((40, 5))
    words = [f"w{'x' * (i % 7)}{i}" for i in range(40)]
    path = tmp_path / "v.bin"
    path.write_bytes(word2vec_bytes(words, table, newline=newline))
    ids = rng.integers(0, 40, 90)
    equal(open_store(path).read(ids), table[ids])
    assert (tmp_path / "v.bin.rows").exists()

    def fail(*arguments):
        raise AssertionError("scanned again")

    with monkeypatch.context() as patch:
        patch.setattr(word2vec, "_scan", fail)
        equal(open_store(path).read(ids), table[ids])
    # Another file of the same size.
    path.write_bytes(word2vec_bytes(words[::-1], table[::-1], newline=newline))
    os.utime(path, ns=(1, 1))
    equal(open_store(path).read(ids), table[::-1][ids])


def test_the_index_of_a_read_only_folder_is_in_the_cache(tmp_path, monkeypatch):
    table = random((4, 5))
    path = tmp_path / "v.bin"
    path.write_bytes(word2vec_bytes(["a", "b", "c", "d"], table, newline=True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def only_cache(target):
        if "cache" not in target:
            raise PermissionError(target)
        return real(target)

    real = word2vec.replacing
    monkeypatch.setattr(word2vec, "replacing", only_cache)
    equal(open_store(path).read([3, 1]), table[[3, 1]])
    assert not (tmp_path / "v.bin.rows").exists()
    assert len(list((tmp_path / "cache" / "firstlayer").iterdir())) == 1
    monkeypatch.setattr(word2vec, "_scan", None)
    equal(open_store(path).read([3, 1]), table[[3, 1]])


@pytest.mark.rejects
def test_an_index_that_points_outside_of_the_file_is_refused(tmp_path):
    path = tmp_path / "v.bin"
    path.write_bytes(word2vec_bytes(["a", "b"], random((2, 5)), newline=True))
    open_store(path).close()
    index = tmp_path / "v.bin.rows"
    for offset in (10**12, -1, path.stat().st_size - 19, 2**63 - 1):
        content = index.read_bytes()[:-8] + int(offset).to_bytes(8, "little", signed=True)
        index.write_bytes(content)
        with open_store(path) as store, pytest.raises(ValueError, match="does not fit"):
            store.read([0, 1])


def test_bytes_beside_the_index_of_word2vec_are_not_trusted(tmp_path):
    table = random((2, 5))
    path = tmp_path / "v.bin"
    path.write_bytes(word2vec_bytes(["a", "b"], table, newline=True))
    open_store(path).close()
    index = tmp_path / "v.bin.rows"
    for content in (b"", index.read_bytes()[:-1], b"x" * 300):
        index.write_bytes(content)
        equal(open_store(path).read([1]), table[[1]])


@pytest.mark.rejects
@pytest.mark.parametrize("ids", [[0, 5], [-1], [2**40], np.array([2**63 + 1], np.uint64)])
def test_an_id_out_of_range_is_an_index_error(ids, tmp_path):
    np.save(tmp_path / "a.npy", random((5, 3)))
    with open_store(tmp_path / "a.npy", cache_rows=2) as store:
        for call in (store.read, store.prefetch, lambda x: store.write(x, random((1, 3)))):
            with pytest.raises(IndexError, match=rf"is {ids[-1]}, but num_embeddings is 5"):
                call(ids)
        with pytest.raises(TypeError, match="ids must be integers, got float64"):
            store.read([0.5])


@pytest.mark.rejects
@pytest.mark.parametrize(
    "tensors, arguments, message",
    [
        ({"a": ("F64", (1, 2), bytes(16))}, {}, "dtype .F64., which no format of rows has"),
        ({"a": ("F32", (4,), bytes(16))}, {}, r"shape \(4,\), but a table has 2 axes"),
        ({"a": ("F32", (4, 0), b"")}, {}, "a table of width 0"),
        ({"a": ("F32", (1, 4), bytes(16))}, {"tensor": "b"}, "no tensor 'b': it has a"),
        (
            {"a": ("F32", (1, 4), bytes(16))},
            {"format": "int8"},
            "rows of format float32, but format is 'int8'",
        ),
        (
            {"a.weight": ("F32", (1, 1), bytes(4)), "b.weight": ("F32", (1, 1), bytes(4))},
            {},
            "several tables: pass tensor=, one of a.weight, b.weight",
        ),
        (
            {
                "a.shard_0.weight": ("F32", (1, 1), bytes(4)),
                "a.shard_2.weight": ("F32", (1, 1), bytes(4)),
            },
            {},
            "no shard 1 of 'a'",
        ),
        (
            {
                "a.shard_0.weight": ("F32", (1, 1), bytes(4)),
                "a.shard_1.weight": ("F32", (1, 2), bytes(8)),
            },
            {},
            "shards of width 1 and dtype .F32., and of width 2",
        ),
        ({"a.weight": ("F8_E4M3", (1, 4), bytes(4))}, {}, "no scales of 'a.weight'"),
        (
            {
                "a.weight": ("F8_E4M3", (2, 32), bytes(64)),
                "a.scale": ("F8_E8M0", (3, 1), bytes(3)),
            },
            {},
            "2 rows, but 3 rows of scale",
        ),
        (
            {
                "a.weight": ("F8_E4M3", (2, 64), bytes(128)),
                "a.scale": ("F8_E8M0", (2, 1), bytes(2)),
            },
            {},
            "scale rows of 1 bytes",
        ),
        ({}, {}, "has no tensors"),
    ],
)
def test_a_table_that_cannot_be_opened_says_why(tensors, arguments, message, tmp_path):
    write_safetensors(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        open_store(tmp_path / "x.safetensors", **arguments)


@pytest.mark.rejects
def test_arguments_are_checked(tmp_path):
    np.save(tmp_path / "a.npy", random((5, 3)))
    with pytest.raises(ValueError, match='mode must be "r" or "r\\+", got \'w\''):
        open_store(tmp_path / "a.npy", mode="w")  # pyright: ignore
    with pytest.raises(ValueError, match="cache_rows must be at least 0, got -1"):
        open_store(tmp_path / "a.npy", cache_rows=-1)
    with pytest.raises(ValueError, match="one table without a name, but tensor is 'x'"):
        open_store(tmp_path / "a.npy", "x")
    with pytest.raises(FileNotFoundError, match="no file"):
        open_store(tmp_path / "b.npy")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty"):
        open_store(tmp_path / "empty")
    np.save(tmp_path / "f.npy", np.asfortranarray(random((5, 3))))
    with pytest.raises(ValueError, match="Fortran order"):
        open_store(tmp_path / "f.npy")
    # Words with a space, without a letter, and numbers that are not finite.
    for line in ("king 1 2", "new york 1 2", " 1 2", "king nan -inf", "king 1,5 2e-3"):
        (tmp_path / "v.txt").write_text(f"9 2\n{line}\n" + "w 0.12345 0.12345\n" * 8)
        with pytest.raises(ValueError, match="word2vec's text format"):
            open_store(tmp_path / "v.txt")
    assert not (tmp_path / "v.txt.rows").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="device or pipe"):
        open_store(tmp_path / "pipe")


def test_reading_does_not_change_the_file(tmp_path):
    np.save(tmp_path / "a.npy", random((5, 3)))
    os.chmod(tmp_path / "a.npy", stat.S_IRUSR)
    store = open_store(tmp_path / "a.npy")
    with pytest.raises(ValueError, match='read-only: open it with mode="r\\+" to write'):
        store.write([0], random((1, 3)))
    with pytest.raises(ValueError, match="read-only"):
        store.array[0] = 1
    array = store.array
    store.close()
    assert store.closed and np.isfinite(array).all()
    for call in (lambda: store.read([0]), lambda: store.prefetch([0]), store.flush):
        with pytest.raises(ValueError, match="is closed"):
            call()
    store.close()


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("interleave", [True, False])
def test_written_rows_are_in_a_converted_file(format, interleave, tmp_path):
    path = tmp_path / "a.safetensors"
    memory = MemoryStore(random((9, 64)), format=format)
    new = random((2, 2, 64))
    memory.write([[3, 8], [0, 3]], new)
    with memory.convert(path, interleave=interleave) as store:
        equal(store.read(np.arange(9)), memory.read(np.arange(9)))
    np.testing.assert_allclose(memory.read(3), new[1, 1], atol=0.2)
    with pytest.raises(ValueError, match=r"rows must have shape \(2, 64\), got \(2, 1\)"):
        memory.write([1, 2], [[1], [2]])


@pytest.mark.parametrize("format", ["float32", "int8", "fp8_block"])
@pytest.mark.parametrize("cache_rows", [0, 8])
def test_bags_are_summed_in_place(format, cache_rows, tmp_path):
    memory = MemoryStore(random((30, 64)), format=format)
    memory.save(tmp_path / "a.safetensors")
    ids, bounds = rng.integers(0, 30, 50), np.array([0, 7, 7, 30, 50])
    weights, divisors = random(50), np.array([2, 1, 4, 5], np.float32)
    rows = memory.read(ids) * weights[:, None]
    pairs = zip(bounds[:-1], bounds[1:], divisors, strict=True)
    want = [rows[lo:hi].sum(0) / divisor for lo, hi, divisor in pairs]
    with open_store(tmp_path / "a.safetensors", cache_rows=cache_rows) as store:
        sums = store.sum_bags(ids, bounds, weights=weights, divisors=divisors)
        np.testing.assert_allclose(sums, want, atol=1e-5)
        with pytest.raises(IndexError, match=r"ids\[1\] is 30, but num_embeddings is 30"):
            store.sum_bags(np.array([0, 30]), np.array([0, 2]))


@settings(max_examples=60)
@given(
    ids=st.lists(st.lists(st.integers(0, 39), max_size=30), min_size=1, max_size=8),
    cache_rows=st.integers(0, 60),
)
def test_cached_rows_are_the_rows_of_the_file(ids, cache_rows, tmp_path_factory):
    table = np.arange(120, dtype=np.float32).reshape(40, 3)
    path = tmp_path_factory.getbasetemp() / "cached.npy"
    if not path.exists():
        np.save(path, table)
    with open_store(path, cache_rows=cache_rows) as store:
        seen = 0
        for batch in ids:
            equal(store.read(batch), table[np.array(batch, int)])
            seen += len(batch)
            info = store.cache_info()
            assert info.currsize <= info.maxsize < cache_rows + 8
            assert info.hits + info.misses == (seen if cache_rows else 0)


def test_repeated_rows_hit_the_cache(tmp_path):
    table = random((1000, 3))
    np.save(tmp_path / "a.npy", table)
    store = open_store(tmp_path / "a.npy", cache_rows=512)
    hot = rng.integers(0, 1000, 100)
    store.read(hot)
    assert store.cache_info().hits == 0
    store.read(hot)
    # A set of eight may overflow.
    assert store.cache_info().hits > 90
    plain = open_store(tmp_path / "a.npy")
    assert plain.cache_info() == (0, 0, 0, 0)


def test_prefetch_reads_on_another_thread(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", random((500, 3)))
    store = open_store(tmp_path / "a.npy")
    threads, ids = [], np.array([[3, 4], [499, 0]])

    def fetch(found):
        threads.append((threading.current_thread(), found.tolist()))

    monkeypatch.setattr(store._prefetcher, "fetch", fetch)
    store.prefetch(ids)
    ids[:] = 0
    store._prefetcher.wait()
    ((thread, found),) = threads
    assert thread is not threading.current_thread() and found == [3, 4, 499, 0]


def test_an_error_while_prefetching_is_raised_by_the_next_call(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", random((5, 3)))
    store = open_store(tmp_path / "a.npy")

    def fetch(ids):
        raise OSError("disk on fire")

    for call in (lambda: store.read([0]), lambda: store.prefetch([0]), store.close):
        monkeypatch.setattr(store._prefetcher, "fetch", fetch)
        store.prefetch([1])
        store._prefetcher.wait()
        with pytest.raises(OSError, match="disk on fire"):
            call()
    assert store.closed


def test_prefetch_never_waits(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", random((5, 3)))
    store, go = open_store(tmp_path / "a.npy"), threading.Event()
    seen = []

    def fetch(ids):
        seen.append(int(ids[0]))
        assert go.wait(20)

    monkeypatch.setattr(store._prefetcher, "fetch", fetch)
    for number in range(100):
        store.prefetch([number % 5])
    go.set()
    store._prefetcher.wait()
    # The first call may have been taken from the queue before the others were added.
    assert seen[-32:] == [number % 5 for number in range(68, 100)] and len(seen) <= 33


def test_a_fork_can_prefetch_and_read(tmp_path):
    table = random((50, 3))
    np.save(tmp_path / "a.npy", table)
    store = open_store(tmp_path / "a.npy", cache_rows=8)
    store.prefetch(np.arange(50))
    cache = store._cache
    assert cache is not None
    with cache.lock, store._prefetcher.changed:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store.prefetch([4, 5])
                store._prefetcher.wait()
                code = int(not (store.read([4, 5]) == table[[4, 5]]).all())
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pickled_store_is_opened_again(tmp_path, monkeypatch):
    table = random((50, 3))
    np.save(tmp_path / "a.npy", table)
    monkeypatch.chdir(tmp_path)
    store = open_store("a.npy", cache_rows=16)
    other = pickle.loads(pickle.dumps(store))
    equal(other.read([4]), table[[4]])
    assert other.cache_info().maxsize == 16 and store.cache_info().misses == 0
    equal(copy.deepcopy(store).read([5]), table[[5]])


def test_threads_read_at_the_same_time(tmp_path):
    table = random((400, 16))
    np.save(tmp_path / "a.npy", table)
    store, wrong = open_store(tmp_path / "a.npy", cache_rows=64), []

    def read(seed):
        draw = np.random.default_rng(seed)
        for _ in range(100):
            ids = draw.integers(0, 400, 50)
            store.prefetch(ids)
            wrong.extend(np.flatnonzero((store.read(ids) != table[ids]).any(1)))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sum(store.cache_info()[:2]) == 4 * 100 * 50


def test_ids_that_another_thread_changes_never_crash(tmp_path):
    np.save(tmp_path / "a.npy", random((400, 16)))
    parts = MemoryStore(random((400, 32)), format="int8")
    parts.convert(tmp_path / "b.safetensors").close()
    ids, stop = np.zeros(5000, np.int64), threading.Event()

    def change():
        while not stop.is_set():
            ids[:] = 2**62
            ids[:] = 0

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for name in ("a.npy", "b.safetensors"):
            with open_store(tmp_path / name) as store:
                for _ in range(300):
                    try:
                        store.read(ids)
                    except IndexError as error:
                        assert "num_embeddings is 400" in str(error)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("format", ["float32", "fp8_block"])
def test_memory_follows_the_rows_that_are_read(format, tmp_path):
    rows, width = 200_000, 64
    path = tmp_path / "a.safetensors"
    table = np.zeros((rows, width), np.float32)
    MemoryStore(table).convert(path, format=format, interleave=False).close()
    code = """if True:
        import os, sys
        import numpy as np
        from firstlayer.stores import open_store
        def resident(kind):
            words = open("/proc/self/status").read().split()
            return int(words[words.index(kind + ":") + 1]) << 10
        path = sys.argv[1]
        with open_store(path) as warm:
            warm.read(np.arange(1000))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        anonymous, mapped = resident("RssAnon"), resident("RssFile")
        store = open_store(path)
        ids = np.random.default_rng(0).integers(0, len(store), 1000)
        rows = store.read(ids)
        assert resident("RssFile") - mapped < 16 << 20, resident("RssFile") - mapped
        rows = store.read(np.arange(len(store)))
        growth = resident("RssAnon") - anonymous - rows.nbytes
        assert growth < 64 << 20, growth
    """
    subprocess.run([sys.executable, "-c", code, path], check=True)
