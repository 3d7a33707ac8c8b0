"""Converted tables: exact rows, readable by other programs, and never half a file."""

import ast
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from firstlayer.stores import MemoryStore, open_store
from firstlayer.stores import convert as convert_module
from firstlayer.stores.formats import format_by_name
from tests.support.table_files import gguf_bytes, tensor, word2vec_bytes, write_sharded

rng = np.random.default_rng(0)
WRITABLE = ["float32", "float16", "bfloat16", "int8", "int4", "fp8", "fp8_block"]


def random(shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(convert_module, "CHUNK_BYTES", 3000)


@pytest.mark.parametrize("format", WRITABLE)
@pytest.mark.parametrize("interleave", [True, False])
def test_a_file_has_the_rows_that_memory_would_have(format, interleave, tmp_path):
    table, steps = random((101, 64)), []
    path = tmp_path / "a.safetensors"
    want = MemoryStore(table, format=format)
    with MemoryStore(table).convert(
        path,
        format=format,
        interleave=interleave,
        progress=lambda *done: steps.append(done),
    ) as store:
        assert store.format == want.format and store.shape == (101, 64)
        assert store.nbytes == want.nbytes
        several = len(want.format.part_shapes(64)) > 1
        assert store.is_interleaved == (interleave and several)
        np.testing.assert_array_equal(store.read(np.arange(101)), want.read(np.arange(101)))
        assert store.parts.keys() == want.parts.keys()
        for name, part in store.parts.items():
            np.testing.assert_array_equal(part, want.parts[name])
            assert part.dtype == want.parts[name].dtype
    assert len(steps) > 5 and steps[-1] == (101, 101)
    assert steps == sorted(steps)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("format", ["float32", "int8", "fp8"])
def test_other_programs_can_open_the_file(format, tmp_path):
    path = tmp_path / "a.safetensors"
    table = random((9, 64))
    MemoryStore(table).convert(path, format=format, interleave=False).close()
    # The package has no NumPy dtype for e4m3fn, so fp8 codes are bytes.
    found = safetensors.numpy.load_file(path)
    parts = MemoryStore(table, format=format).parts
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        np.testing.assert_array_equal(found[name], part)


def test_rows_do_not_cross_pages(tmp_path):
    with MemoryStore(random((9, 64))).convert(tmp_path / "a.safetensors") as store:
        assert store.array.ctypes.data % 4096 == 0


@pytest.mark.parametrize("interleave", [True, False])
def test_rows_that_keep_their_format_keep_their_bytes(interleave, tmp_path):
    blocks = {"weight": rng.integers(0, 255, (7, 64)).astype(np.uint8)}
    blocks["scale"] = rng.integers(0, 255, (7, 2)).astype(np.uint8)
    codes = {"F8_E4M3": "weight", "F8_E8M0": "scale"}
    shards = {
        f"e.shard_{k}.{name}": tensor(code, blocks[name][lo:hi])
        for k, (lo, hi) in enumerate([(0, 4), (4, 7)])
        for code, name in codes.items()
    }
    write_sharded(tmp_path, shards)
    source = open_store(tmp_path, "e")
    with source.convert(tmp_path / "x.safetensors", interleave=interleave) as store:
        for name, part in blocks.items():
            np.testing.assert_array_equal(store.parts[name], part)
            np.testing.assert_array_equal(source.read_parts(np.arange(7))[name], part)
    content = rng.integers(0, 255, (3, 68)).astype(np.uint8)
    (tmp_path / "a.gguf").write_bytes(
        gguf_bytes({"a.weight": (8, (3, 64), content.tobytes())})
    )
    with open_store(tmp_path / "a.gguf").convert(tmp_path / "y.safetensors") as store:
        assert store.format.name == "q8_0"
        np.testing.assert_array_equal(store.parts["weight"], content)


def test_word2vec_becomes_a_table_of_bytes(tmp_path):
    table = random((6, 32))
    path = tmp_path / "v.bin"
    path.write_bytes(word2vec_bytes(list("abcdef"), table, newline=True))
    with open_store(path).convert(tmp_path / "a.safetensors", format="int8") as store:
        want = MemoryStore(table, format="int8").read(np.arange(6))
        np.testing.assert_array_equal(store.read(np.arange(6)), want)


def test_half_precision_is_widened_exactly(tmp_path):
    table = random((6, 8)).astype(ml_dtypes.bfloat16)
    with MemoryStore(table).convert(tmp_path / "a.safetensors", format="float32") as store:
        np.testing.assert_array_equal(store.read(np.arange(6)), table.astype(np.float32))


def test_a_table_can_replace_its_own_file(tmp_path):
    path = tmp_path / "a.safetensors"
    table = random((50, 64))
    MemoryStore(table).save(path)
    store = open_store(path)
    with store.convert(path, format="int8") as small:
        want = MemoryStore(table, format="int8").read(np.arange(50))
        np.testing.assert_array_equal(small.read(np.arange(50)), want)
        np.testing.assert_array_equal(store.read(np.arange(50)), table)


def test_a_table_without_rows(tmp_path):
    with MemoryStore(random((0, 64))).convert(
        tmp_path / "a.safetensors", format="int8"
    ) as store:
        assert store.shape == (0, 64) and store.read([]).shape == (0, 64)


@pytest.mark.rejects
def test_a_conversion_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    table = random((60, 64))
    MemoryStore(table).save(path)
    bad = table.copy()
    bad[43, 5] = np.inf
    with pytest.raises(ValueError, match=r"in rows 33 to 43 of .*, rows\[10, 5\] is inf"):
        MemoryStore(bad).convert(path, format="int8")

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MemoryStore(bad).convert(path, progress=interrupt)
    with pytest.raises(TypeError, match="rows of format q4_0 can be read but not written"):
        MemoryStore(table).convert(path, format="q4_0")
    with pytest.raises(ValueError, match=r"path must end in .safetensors, got .*a.npy"):
        MemoryStore(table).convert(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="multiple of 32 values, got 10"):
        MemoryStore(random((3, 10))).convert(path, format="fp8_block")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    np.testing.assert_array_equal(open_store(path).read(np.arange(60)), table)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "old, new, message",
    [
        (b'\\"version\\": 1', b'\\"version\\": 9', "install a newer one"),
        (b'\\"width\\": 64', b'\\"width\\": -4', "did not write"),
        (b'\\"width\\": 64', b'\\"width\\": 65', "rows of 72 bytes"),
        (
            b'\\"format\\": \\"int8\\"',
            b'\\"format\\": \\"int9\\"',
            "format must be .*, got 'int9'",
        ),
        (b'{\\"version\\"', b'[ \\"version\\"', "did not write"),
    ],
)
def test_a_damaged_description_is_refused(old, new, message, tmp_path):
    path = tmp_path / "a.safetensors"
    MemoryStore(random((3, 64))).convert(path, format="int8").close()
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(ValueError, match=message):
        open_store(path)


def test_a_killed_conversion_leaves_the_old_table_or_the_new(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.table_kills",
            tmp_path / "a.safetensors",
            "25",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    counts = ast.literal_eval(done.stdout)
    assert counts["killed while writing"] > 5 and counts["formats"] == 2


def test_formats_compare_by_value():
    assert format_by_name("int8") == format_by_name(format_by_name("int8"))
