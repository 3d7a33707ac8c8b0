"""The command convert."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from firstlayer import open_vectors
from firstlayer.cli import convert
from firstlayer.numpy import Embedding
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


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("option", ["--interleave", "--no-interleave"])
def test_a_converted_table_is_read_by_every_command_and_layer(format, option, tmp_path):
    table = rng.standard_normal((6, 40)).astype(np.float32)
    table[3] = 0
    np.save(tmp_path / "a.npy", table)
    output = tmp_path / "b.safetensors"
    stdout_of("convert", tmp_path / "a.npy", output, "--format", format, option)
    (tmp_path / "vocab.txt").write_text("a\nb\nc\nd\ne\nf\n")
    with open_store(output) as store:
        want, nbytes = store.read(np.arange(6)).astype(np.float32), store.nbytes
    (found,) = json.loads(stdout_of("inspect", output, "--json"))["tables"]
    assert (found["shape"], found["dtype"], found["nbytes"]) == ([6, 40], format, nbytes)
    assert found["zero"]["rows"] == [3]
    norms = np.linalg.norm(want.astype(np.float64), axis=1)
    np.testing.assert_allclose(found["norm_max"], norms.max(), rtol=1e-6)
    assert Embedding.from_pretrained(output).weight.tolist() == want.tolist()
    assert open_vectors(output)["e"].tolist() == want[4].tolist()
    again = tmp_path / "c.safetensors"
    stdout_of("convert", output, again, "--format", "float32")
    with open_store(again) as store:
        assert store.read(np.arange(6)).tolist() == want.tolist()


def test_words_of_model2vec_that_share_rows_are_converted_one_by_one(tmp_path):
    rows = rng.standard_normal((3, 8)).astype(np.float32)
    scale, mapping = np.array([1, 2, 3, 4], np.float32), np.array([0, 2, 2, 1])
    (tmp_path / "m").mkdir()
    tensors = {"embeddings": rows, "mapping": mapping, "weights": scale}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    stdout_of("convert", tmp_path / "m", tmp_path / "a.safetensors")
    with open_store(tmp_path / "a.safetensors") as store:
        want = rows[mapping] * scale[:, None]
        assert store.read(np.arange(4)).tolist() == want.tolist()


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
    for name in "int5", "q4_k":  # the second can only be read
        message = error_message(*arguments, output, "--format", name, code=2)
        assert message == (
            f"Invalid value for '--format': {name!r} is not one of 'float32', 'float16', "
            "'bfloat16', 'int8', 'int4', 'fp8', 'fp8_block' (see firstlayer convert --help)"
        )
    assert "no file" in error_message("convert", tmp_path / "c.npy", output)
    assert "tensor is 'x'" in error_message(*arguments, output, "--tensor", "x")
    assert not output.exists()


@pytest.mark.rejects
def test_a_checkpoint_is_not_replaced_by_its_own_table(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"wte.weight": tensor("F32", np.ones((3, 2), np.float32))}
    write_safetensors(path, {**tensors, "h.0.weight": tensor("F32", np.ones((2, 2)))})
    before = path.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(path)
    for output in (path, tmp_path / "link.safetensors"):
        message = error_message("convert", path, output, "--force", code=2)
        assert "OUTPUT must not be FILE, got" in message
    message = error_message("convert", tmp_path, path, "--force", code=2)
    assert f"OUTPUT must not replace a file of FILE, got '{path}'" in message
    assert path.read_bytes() == before
