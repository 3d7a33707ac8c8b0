"""Layer files: atomic writing, exact reading, and refusal of damaged or forged files."""

import errno
import importlib
import json
import os
import stat
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from firstlayer.files.checkpoint import OLD_TORCH_MAGIC, ZIP_MAGIC
from firstlayer.files.safetensors import read, write

DTYPES = ["float64", "float32", "float16", "bfloat16"]
TENSORS = {"a": np.arange(6.0, dtype="float32").reshape(2, 3), "b": np.ones(2, "float16")}
CONFIG = {"class": "Some", "scale": 0.1, "norm": float("inf"), "rule": {"x": [1, None]}}


def named(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def bits(array):
    return array.dtype.name, array.shape, array.tobytes()


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


def run(script, path):
    """Run a script in a separate process."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), path], check=True)


def forge(path, *, config=None, key="firstlayer", tensors=None, data=b"", length=None):
    """Write a file with any header."""
    header = dict(tensors or {})
    if config is not None:
        header["__metadata__"] = {key: config}
    text = json.dumps(header).encode()
    start = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(start + text + data)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_tensors_are_kept_bit_for_bit(data, dtype, tmp_path_factory):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    size = named(dtype).itemsize * int(np.prod(shape))
    raw = data.draw(st.binary(min_size=size, max_size=size))
    # Includes NaNs with a payload, infinities, subnormals and -0.
    array = np.frombuffer(raw, named(dtype)).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "bits.safetensors"
    write(path, {"x.y": array, "half": np.ones(3, "float16")}, {"n": 1})
    tensors, _ = read(path)
    assert bits(tensors["x.y"]) == bits(array)
    assert bits(tensors["half"]) == bits(np.ones(3, "float16"))


def test_config_is_kept_and_tensors_are_copies(tmp_path):
    path = tmp_path / "a"
    write(path, TENSORS, CONFIG)
    tensors, config = read(str(path))
    assert config == CONFIG
    tensors["a"][...] = 7
    assert bits(read(path)[0]["a"]) == bits(TENSORS["a"])


def test_views_and_byte_swapped_arrays_keep_their_values(tmp_path):
    table = np.arange(24.0).reshape(4, 6)
    swapped = table.astype(table.dtype.newbyteorder())
    views = {"t": table.T, "s": table[::2, ::3], "c": table[:, 1], "o": swapped}
    write(tmp_path / "a", views, {})
    tensors, _ = read(tmp_path / "a")
    np.testing.assert_array_equal(tensors["t"], table.T)
    np.testing.assert_array_equal(tensors["s"], table[::2, ::3])
    np.testing.assert_array_equal(tensors["c"], table[:, 1])
    np.testing.assert_array_equal(tensors["o"], table)


def test_the_safetensors_package_opens_the_file(tmp_path):
    half = np.arange(5).astype(ml_dtypes.bfloat16)
    write(tmp_path / "a", {**TENSORS, "h": half}, CONFIG)
    loaded = safetensors.numpy.load_file(tmp_path / "a")
    assert {name: bits(x) for name, x in loaded.items()} == {
        name: bits(x) for name, x in {**TENSORS, "h": half}.items()
    }
    h = safetensors.torch.load_file(tmp_path / "a")["h"]
    assert h.dtype == torch.bfloat16 and h.tolist() == [0, 1, 2, 3, 4]


def test_a_new_process_reads_bfloat16(tmp_path):
    write(tmp_path / "a", {"h": np.arange(3).astype(ml_dtypes.bfloat16)}, {})
    script = """
        import sys
        from firstlayer.files.safetensors import read

        tensors, _ = read(sys.argv[1])
        assert tensors["h"].astype("float32").tolist() == [0.0, 1.0, 2.0]
        assert tensors["h"].dtype.name == "bfloat16"
    """
    run(script, tmp_path / "a")


def test_tensors_are_aligned_to_their_item_size(tmp_path):
    write(tmp_path / "a", {"a": np.ones(1, "float16"), "b": np.ones(1, "float64")}, {})
    raw = (tmp_path / "a").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["b"]["data_offsets"] == [0, 8]


def test_the_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor):
        status = os.fstat(descriptor)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(descriptor)

    def spy_replace(old, new):
        calls.append(os.path.basename(new))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write(tmp_path / "a", TENSORS, CONFIG)
    assert calls == [(tmp_path / "a").stat().st_size, "a", "folder"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_failed_write_leaves_only_the_old_file(step, tmp_path, monkeypatch):
    write(tmp_path / "a", TENSORS, {"k": 0})

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "a", {}, {"k": 1})
    assert names_in(tmp_path) == ["a"] and read(tmp_path / "a")[1] == {"k": 0}


def test_a_full_disk_leaves_only_the_old_file(tmp_path):
    script = """
        import resource, sys
        import numpy as np
        from firstlayer.files.safetensors import read, write

        write(sys.argv[1], {"w": np.ones(3)}, {"k": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write(sys.argv[1], {"w": np.ones(100_000)}, {"k": 1})
        except OSError as error:
            assert "File too large" in str(error), error
        else:
            raise SystemExit("the limit did not hold")
        assert read(sys.argv[1])[1] == {"k": 0}
    """
    path = tmp_path / "a"
    run(script, path)
    assert names_in(tmp_path) == ["a"]


def test_a_config_that_is_not_json_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path / "a", TENSORS, {"x": object()})
    assert names_in(tmp_path) == []


def test_new_files_follow_the_umask_and_existing_permissions_are_kept(tmp_path):
    path = tmp_path / "a"
    before = os.umask(0o027)
    try:
        write(path, TENSORS, {})
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write(path, TENSORS, {"k": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604 and read(path)[1] == {"k": 1}


def test_writing_through_a_symbolic_link_replaces_its_target(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/a")
    for k in (0, 1):
        write(link, TENSORS, {"k": k})
        assert link.is_symlink() and read(tmp_path / "there" / "a")[1] == {"k": k}
    assert names_in(tmp_path / "there") == ["a"]


def test_a_bare_file_name_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a", TENSORS, {"k": 3})
    assert read("a")[1] == {"k": 3}


def test_a_file_name_of_maximum_length_can_be_written_twice(tmp_path):
    path = tmp_path / ("n" * 255)
    for k in (0, 1):
        write(path, {}, {"k": k})
    assert read(path)[1] == {"k": 1}


@pytest.mark.rejects
@pytest.mark.parametrize("act", [read, lambda path: write(path, {}, {})])
def test_folders_and_devices_are_refused(act, tmp_path):
    with pytest.raises(IsADirectoryError, match="must be a file, but .* is a folder"):
        act(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="regular file, but .*pipe is a device or pipe"):
        act(tmp_path / "pipe")


@pytest.mark.rejects
def test_a_missing_file_or_folder_is_named_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*/nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no folder .*/nowhere to save .*/a in"):
        write(tmp_path / "nowhere" / "a", {}, {})


@pytest.mark.rejects
def test_every_truncation_is_detected(tmp_path):
    write(tmp_path / "a", TENSORS, CONFIG)
    whole = (tmp_path / "a").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "b").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is empty|is cut short") as caught:
            read(tmp_path / "b")
        assert "\n" not in str(caught.value)


@pytest.mark.rejects
@given(noise=st.binary(min_size=1, max_size=200))
@example(noise=OLD_TORCH_MAGIC)
@example(noise=OLD_TORCH_MAGIC[:9])
@example(noise=ZIP_MAGIC)
def test_random_bytes_are_refused(noise, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(noise)
    if noise.startswith(OLD_TORCH_MAGIC):
        message = "format of torch before 1.6"
    elif noise.startswith(ZIP_MAGIC):
        message = "a damaged zip archive"
    else:
        message = "cut short|not JSON|JSON object|no config in"
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.rejects
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 99])
def test_a_header_longer_than_the_file_is_refused(length, tmp_path):
    forge(tmp_path / "a", config="{}", length=length)
    with pytest.raises(ValueError, match=f"header would be {length} bytes long, but"):
        read(tmp_path / "a")


GOOD = '{"format": 1, "config": {}}'


@pytest.mark.rejects
@pytest.mark.parametrize(
    "config, message",
    [
        (
            None,
            r"has no config in its metadata, so it was not written by save: "
            r"Embedding\.from_pretrained reads a table, safetensors\.numpy\.load_file all "
            r"tensors$",
        ),
        ("", "a config that is not JSON"),
        ("{", "a config that is not JSON"),
        ("[" * 100_000, "a config that is not JSON"),
        ("9" * 5_000, "a config that is not JSON"),
        ("[]", "a config that Firstlayer did not write"),
        ("7", "a config that Firstlayer did not write"),
        ('{"config": {}}', "a config that Firstlayer did not write"),
        ('{"format": 1}', "a config that Firstlayer did not write"),
        ('{"format": "1", "config": {}}', "a config that Firstlayer did not write"),
        ('{"format": 0, "config": {}}', "a config that Firstlayer did not write"),
        ('{"format": 1, "config": []}', "a config that Firstlayer did not write"),
        ('{"format": 2, "config": []}', "format 2, but this version .* up to 1: install"),
        (" " * 2**17 + GOOD, "a config of 131099 characters"),
    ],
)
def test_a_config_that_firstlayer_did_not_write_is_refused(config, message, tmp_path):
    forge(tmp_path / "a", config=config)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a")
    forge(tmp_path / "a", config=GOOD)
    assert read(tmp_path / "a") == ({}, {})


@pytest.mark.rejects
def test_a_config_too_long_to_be_read_back_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="config must take at most 131072 characters"):
        write(tmp_path / "a", {}, {"x": "y" * 2**17})


@pytest.mark.rejects
@pytest.mark.parametrize("dtype, code", [("int32", "I32"), ("bool", "BOOL")])
def test_tensors_that_are_not_floats_are_refused(dtype, code, tmp_path):
    with pytest.raises(TypeError, match=f"dtype must be .* or bfloat16, got {dtype}"):
        write(tmp_path / "a", {"x": np.ones(2, dtype)}, {})
    metadata = {"firstlayer": GOOD}
    safetensors.numpy.save_file({"x": np.ones(2, dtype)}, tmp_path / "a", metadata=metadata)
    with pytest.raises(ValueError, match=f"a tensor 'x' of dtype '{code}', which no layer"):
        read(tmp_path / "a")


@pytest.mark.rejects
@pytest.mark.parametrize("shape", [[2**62, 4], [2**40, 2**40], [2**40], [3]])
def test_a_tensor_larger_than_the_file_is_refused(shape, tmp_path):
    tensors = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}
    forge(tmp_path / "a", config=GOOD, tensors=tensors, data=bytes(8))
    with pytest.raises(
        ValueError, match="a tensor 'x' of shape .* and dtype F32 in 8 bytes"
    ):
        read(tmp_path / "a")


@pytest.mark.rejects
def test_tensors_that_share_bytes_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    forge(tmp_path / "a", config=GOOD, tensors={"x": entry, "y": entry}, data=bytes(8))
    with pytest.raises(ValueError, match="has tensors that overlap"):
        read(tmp_path / "a")


# Files of version 0.1, which the project wrote under its old name.

OLD_FILES = Path(__file__).parents[1] / "data" / "version-0.1"


def test_the_metadata_key_of_version_0_1_is_read_and_replaced_by_the_new_one(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    config = '{"format": 1, "config": {"scale": 0.5}}'
    data = np.array([1.5, -2.0], "float32").tobytes()
    forge(tmp_path / "a", key="inlay", config=config, tensors={"x": entry}, data=data)
    tensors, config = read(tmp_path / "a")
    assert tensors["x"].tolist() == [1.5, -2.0] and config == {"scale": 0.5}
    write(tmp_path / "a", tensors, config)
    written = (tmp_path / "a").read_bytes()
    assert b'"firstlayer"' in written and b"inlay" not in written


@pytest.mark.parametrize("front_end", ["numpy", "torch", "equinox"])
def test_layers_saved_by_version_0_1_load_in_every_front_end(front_end):
    module = importlib.import_module(f"firstlayer.{front_end}")
    as_ids = torch.tensor if front_end == "torch" else np.array

    def output(layer, ids, **options):
        options = {name: as_ids(value) for name, value in options.items()}
        with torch.no_grad():
            return np.asarray(layer(as_ids(ids), **options))

    embedding = module.load(OLD_FILES / "embedding.safetensors")
    weight = np.load(OLD_FILES / "embedding.npz")["with_leaf"]
    np.testing.assert_array_equal(output(embedding, list(range(7))), weight)
    assert embedding.padding_idx == 2
    layer = module.load(OLD_FILES / "layer.safetensors")
    ids, segments = [[1, 3, 5], [11, 0, 2]], [[0, 1, 1], [1, 0, 0]]
    want = np.load(OLD_FILES / "layer_output.npy")
    np.testing.assert_allclose(output(layer, ids, segments=segments), want, atol=1e-6)
