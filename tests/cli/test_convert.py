"""The command convert."""

import json

import numpy as np

from firstlayer.cli import convert
from firstlayer.stores import MemoryStore, open_store
from tests.support.command import error_message, stdout_of
from tests.support.table_files import tensor, write_safetensors

rng = np.random.default_rng(0)


def test_a_table_is_converted(tmp_path):
    table = rng.standard_normal((20, 64)).astype(np.float32)
    tensors = {"a.weight": tensor("F32", table[:3]), "b.weight": tensor("F32", table)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    output = tmp_path / "b.safetensors"
    arguments = "convert", tmp_path / "a.safetensors", output, "--tensor", "b"
    text = stdout_of(*arguments, "--format", "int8", "--no-interleave")
    assert "20 rows of 64 in int8, 1,440 bytes (before: 5,120)" in text
    with open_store(output) as store:
        want = MemoryStore(table, format="int8").read(np.arange(20))
        np.testing.assert_array_equal(store.read(np.arange(20)), want)
        assert not store.is_interleaved
    assert "exists; use --force" in error_message(*arguments)
    found = json.loads(stdout_of(*arguments, "--force", "--json"))
    assert found["format"] == "float32" and found["shape"] == [20, 64]
    assert found["bytes"] == found["bytes_before"] == table.nbytes


def test_progress_is_the_number_of_rows(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.zeros((7, 4), np.float32))
    drawn = []

    class Bar:
        def __enter__(self):
            return drawn.append

        def __exit__(self, *error):
            pass

    def progress(what, *, total, quiet):
        drawn.append((what, total, quiet))
        return Bar()

    monkeypatch.setattr(convert, "progress", progress)
    stdout_of("convert", tmp_path / "a.npy", tmp_path / "b.safetensors", "-q")
    assert drawn == [("converting", 7.0, True), 7]


def test_wrong_arguments_are_refused_before_any_work(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((7, 4), np.float32))
    arguments = "convert", tmp_path / "a.npy"
    message = error_message(*arguments, tmp_path / "b.csv", code=2)
    assert "OUTPUT must be a folder or end in one of .safetensors, .txt" in message
    message = error_message(*arguments, tmp_path / "b.npy", "--to", "safetensors", code=2)
    assert "OUTPUT must end in .safetensors" in message
    message = error_message(*arguments, tmp_path / "b.txt", "--format", "int8", code=2)
    assert "--format needs a .safetensors OUTPUT" in message
    output = tmp_path / "b.safetensors"
    assert "got 'int5'" in error_message(*arguments, output, "--format", "int5")
    assert "no file" in error_message("convert", tmp_path / "c.npy", output)
    assert "tensor is 'x'" in error_message(*arguments, output, "--tensor", "x")
    assert not output.exists()
