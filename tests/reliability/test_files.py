"""Files and folders after kills, interrupts and races, and hostile files."""

import ast
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from firstlayer.analysis.inspect import inspect
from firstlayer.files import atomic
from firstlayer.files.atomic import (
    opened_once,
    read_folder,
    recover_folder,
    replacing,
    replacing_folder,
)
from firstlayer.files.safetensors import read
from firstlayer.vector_files.folder import check_output_folder, read_one_save
from firstlayer.word_vectors.neighbors import neighbors, parse
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.command import error_message, stdout_of
from tests.support.damaged import open_damaged_files
from tests.support.kills import leftovers, read_version, without_exchange, write_version

KINDS = {
    "file": ("a.safetensors",),
    "folder": ("vectors",),
    "folder in two steps": ("vectors", "without-exchange"),
}


def run(function, path, count, *options):
    """Run a function of ``tests.support.kills`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kills", function, path, str(count), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_writer_leaves_the_old_content_or_the_new(kind, tmp_path):
    name, *options = KINDS[kind]
    counts = run("kill_writers", tmp_path / name, 60, *options)
    assert counts["versions"] == 2 and counts["killed while writing"] > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_never_mixes_the_saves_of_two_writers(kind, tmp_path):
    name, *options = KINDS[kind]
    counts = run("race_writers", tmp_path / name, 1.5, *options)
    assert counts["reads"] > 20 and counts["versions"] > 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_writer_leaves_no_temporary_file(kind, tmp_path):
    name, *options = KINDS[kind]
    counts = run("interrupt_writer", tmp_path / name, 100, *options)
    assert counts["raised"] > 50


def test_a_folder_moved_away_by_a_killed_writer_is_recovered(tmp_path):
    write_version(tmp_path / "vectors", 1)
    moved = tmp_path / (".firstlayer-" + "0" * 16 + ".vectors.old")
    os.rename(tmp_path / "vectors", moved)
    # Other saves in the same place do not remove the only copy.
    write_version(tmp_path / "a.safetensors", 0)
    assert moved.is_dir()
    assert read_version(tmp_path / "vectors") == 1
    assert not moved.exists()
    write_version(tmp_path / "vectors", 0)
    os.rename(tmp_path / "vectors", moved)
    write_version(tmp_path / "vectors", 1)
    assert read_version(tmp_path / "vectors") == 1 and not leftovers(tmp_path)


def test_a_moved_folder_is_recovered_through_a_symbolic_link(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "store" / "vectors")
    write_version(tmp_path / "latest", 1)
    moved = tmp_path / "store" / (".firstlayer-" + "0" * 16 + ".vectors.old")
    os.rename(tmp_path / "store" / "vectors", moved)
    assert read_version(tmp_path / "latest") == 1
    os.rename(tmp_path / "store" / "vectors", moved)
    write_version(tmp_path / "latest", 2)
    assert read_version(tmp_path / "latest") == 2 and (tmp_path / "latest").is_symlink()
    assert os.listdir(tmp_path / "store") == ["vectors"]
    os.rename(tmp_path / "store" / "vectors", moved)
    with pytest.raises(FileExistsError, match="latest exists already"):
        check_output_folder(tmp_path / "latest", replace=False)


def test_a_moved_folder_is_removed_under_another_name(tmp_path, monkeypatch):
    # A reader would otherwise move a folder back that is being removed.
    removed, rmtree = [], shutil.rmtree
    monkeypatch.setattr(atomic, "_exchange", atomic._exchange)
    without_exchange()

    def spy(path, **options):
        removed.append(os.path.basename(path))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", spy)
    for version in range(2):
        write_version(tmp_path / "vectors", version)
    (tmp_path / f".firstlayer-{atomic._COMPUTER}{'0' * 8}.vectors.old").mkdir()
    write_version(tmp_path / "vectors", 2)
    assert len(removed) > 3 and all(name.endswith(".tmp") for name in removed)
    assert os.listdir(tmp_path) == ["vectors"]


@pytest.mark.parametrize("make", [os.mkdir, lambda path: open(path, "x").close()])
def test_files_of_another_computer_are_kept_for_a_day(make, tmp_path):
    path, other = tmp_path / "a", tmp_path / (".firstlayer-" + "0" * 16 + ".tmp")
    make(other)
    with replacing(str(path)):
        pass
    assert other.exists()
    old = time.time() - 2 * 86_400
    os.utime(other, (old, old))
    with replacing(str(path)):
        pass
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_folder_is_reported_after_few_attempts(tmp_path, monkeypatch):
    calls, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (calls.append(path), listdir(path))[1])
    with pytest.raises(FileNotFoundError, match="no file or folder .*missing"):
        open_vectors(tmp_path / "missing")
    assert 0 < len(calls) < 20


def test_a_read_only_folder_is_not_replaced(tmp_path, monkeypatch):
    write_version(tmp_path / "vectors", 1)
    # The administrator may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="vectors is read-only, so it is not repl"):
        write_version(tmp_path / "vectors", 2)
    assert read_version(tmp_path / "vectors") == 1


def test_a_damaged_neighbor_of_a_file_is_not_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    save_tensors(tmp_path / "a.safetensors", embeddings=np.ones((2, 3), np.float32))
    assert inspect(tmp_path / "a.safetensors").tables[0].shape == (2, 3)


def test_recovery_prefers_what_is_in_place(tmp_path):
    write_version(tmp_path / "vectors", 1)
    old = tmp_path / (".firstlayer-" + "0" * 16 + ".vectors.old")
    old.mkdir()
    recover_folder(tmp_path / "vectors")
    assert read_version(tmp_path / "vectors") == 1 and old.exists()


def test_temporary_files_of_running_writers_are_kept(tmp_path):
    with replacing(str(tmp_path / "a")) as file, replacing_folder(tmp_path / "b") as folder:
        file.write(b"a")
        (folder / "x").write_text("b")
        write_version(tmp_path / "c.safetensors", 0)
        assert len(leftovers(tmp_path)) == 2
    assert (tmp_path / "a").read_bytes() == b"a"
    assert (tmp_path / "b" / "x").read_text() == "b"
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("old_mode", [0o600, 0o640, 0o664])
def test_a_file_has_the_mode_of_the_old_one_from_the_first_byte(old_mode, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"secret")
    path.chmod(old_mode)
    with replacing(str(path)) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == old_mode
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == old_mode


@pytest.mark.parametrize("old_mode", [0o700, 0o750, 0o2775])
def test_a_folder_and_its_files_have_the_modes_of_the_old_ones(old_mode, tmp_path):
    path = tmp_path / "vectors"
    write_version(path, 0)
    (path / "model.safetensors").chmod(0o440)
    (path / "config.json").chmod(0o600)
    path.chmod(old_mode)
    with replacing_folder(path) as new:
        # Nobody else can open the files before they have their modes.
        assert mode_of(new) == 0o700
        for name in ("model.safetensors", "config.json", "another"):
            (new / name).write_text(name)
        default = mode_of(new / "another")
    assert mode_of(path) == old_mode
    names = {name: mode_of(path / name) for name in os.listdir(path)}
    assert names == {"model.safetensors": 0o440, "config.json": 0o600, "another": default}


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_group_that_cannot_be_kept_is_replaced_by_everybody(
    is_allowed, tmp_path, monkeypatch
):
    path, given = tmp_path / "a", []

    def chown(place, owner, group):
        given.append(group)
        if not is_allowed:
            raise PermissionError

    path.write_text("secret")
    path.chmod(0o674)
    old = os.stat(path)
    # As if the file belonged to a group that the writer is not in.
    values = [*old[:5], old.st_gid + 1, *old[6:]]
    monkeypatch.setattr(atomic, "_stat", lambda path: os.stat_result(values))
    monkeypatch.setattr(os, "chown", chown)
    with replacing(str(path)) as file:
        file.write(b"new")
    assert given == [old.st_gid + 1]
    assert mode_of(path) == (0o674 if is_allowed else 0o644)


def test_a_new_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_version(tmp_path / "a.safetensors", 0)
        write_version(tmp_path / "vectors", 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "vectors").stat().st_mode) == 0o750


def test_folder_and_parent_are_synced_around_the_exchange(tmp_path, monkeypatch):
    write_version(tmp_path / "vectors", 0)
    events = []
    fsync, exchange = os.fsync, atomic._exchange

    def spy_fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def spy_exchange(one, other):
        events.append("exchange")
        exchange(one, other)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(atomic, "_exchange", spy_exchange)
    write_version(tmp_path / "vectors", 1)
    place = events.index("exchange")
    synced = {name.split(".")[-1] for name in events[: place - 1]}
    # Every file (the safetensors file under its temporary name), then the new folder.
    assert {"json", "tmp"} <= synced
    assert events[place - 1].endswith(".tmp")
    assert events[place + 1] == tmp_path.name


def test_files_of_different_saves_are_refused(tmp_path):
    for version in (1, 2):
        write_version(tmp_path / f"v{version}", version)
    config = (tmp_path / "v2" / "config.json").read_bytes()
    (tmp_path / "v1" / "config.json").write_bytes(config)
    with pytest.raises(ValueError, match="v1 holds files of different saves: the generati"):
        open_vectors(tmp_path / "v1")
    assert "holds files of different saves" in error_message("inspect", tmp_path / "v1")


def test_a_reader_sees_the_folder_that_was_there_when_it_began(tmp_path):
    path = tmp_path / "vectors"
    write_version(path, 1)

    def slow(opener):
        with open(path / "config.json", opener=opener) as file:
            first = json.load(file)["firstlayer"]["v"]
        write_version(path, first + 1)
        with open(path / "tokenizer.json", opener=opener) as file:
            return first, min(json.load(file)["model"]["vocab"])

    assert read_one_save(path, slow) == (1, "v1-0")
    assert read_version(path) == 2


def test_reading_starts_again_when_an_unexpected_file_is_gone(tmp_path):
    path = tmp_path / "folder"
    for version in (1, 2):
        (tmp_path / f"{version}").mkdir()
        (tmp_path / f"{version}" / "x").write_text(str(version))
    os.rename(tmp_path / "1", path)
    attempts = []

    def slow(opener):
        attempts.append(len(attempts))
        if len(attempts) == 1:
            shutil.rmtree(path)
            os.rename(tmp_path / "2", path)
        with open(path / "x", opener=opener) as file:
            return file.read()

    assert read_folder(path, slow) == "2"
    assert attempts == [0, 1]
    with pytest.raises(FileNotFoundError, match="no file or folder .*gone"):
        read_folder(tmp_path / "gone", slow)


def test_a_file_is_opened_once(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with opened_once() as opener:
        with open(path, opener=opener) as file:
            assert file.read() == "old"
        with replacing(str(path)) as out:
            out.write(b"new")
        with open(path, opener=opener) as file:
            assert file.read() == "old"
    assert path.read_text() == "new"


def test_an_interrupt_between_the_two_steps_restores_the_old_folder(tmp_path, monkeypatch):
    path = tmp_path / "vectors"
    write_version(path, 1)
    exchange, rename = atomic._exchange, os.rename
    without_exchange()

    def interrupted(one, other):
        if other == str(path):
            monkeypatch.setattr(os, "rename", rename)
            raise KeyboardInterrupt
        rename(one, other)

    monkeypatch.setattr(os, "rename", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_version(path, 2)
    finally:
        monkeypatch.setattr(atomic, "_exchange", exchange)
    assert read_version(path) == 1 and not leftovers(tmp_path)


def save_tensors(path, **tensors):
    """Write a safetensors file by hand, with any shapes and dtypes."""
    header, data = {}, b""
    for name, array in tensors.items():
        codes = {"float32": "F32", "int64": "I64"}
        end = len(data) + array.nbytes
        header[name] = {
            "dtype": codes[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [len(data), end],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def peak_memory(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_table_without_columns_takes_no_memory(tmp_path):
    path = tmp_path / "model.safetensors"
    empty = np.empty((2**29, 0), np.float32)
    save_tensors(path, embeddings=empty)
    assert path.stat().st_size < 100

    def refused():
        with pytest.raises(ValueError, match="has no embedding table"):
            inspect(path)
        with pytest.raises(ValueError, match="must have rows and a width"):
            inspect(path, names=["embeddings"])
        with pytest.raises(ValueError, match="has no token table"):
            (tmp_path / "tokenizer.json").write_text("{}")
            open_vectors(tmp_path)

    assert peak_memory(refused) < 2**20


def clustered_folder(folder, weight, mapping, **more):
    folder.mkdir(exist_ok=True)
    save_tensors(folder / "model.safetensors", embeddings=weight, mapping=mapping, **more)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(len(mapping))}, "w0"))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_clustered_table_is_not_copied_for_each_word(tmp_path):
    weight = np.random.default_rng(0).standard_normal((2, 20_000)).astype(np.float32)
    clustered_folder(tmp_path, weight, np.zeros(10_000, np.int64))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())

    def near():
        found = neighbors(open_vectors(tmp_path), parse(["w1"]), count=2)
        assert [round(one.cosine, 5) for one in found[0].found] == [1, 1]

    # Copied, it would take 800 MB.
    assert size < 2**20 and peak_memory(near) < 20 * 2**20


def test_clustered_neighbors_are_those_of_the_expanded_table(tmp_path):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 8)).astype(np.float32)
    mapping, scale = rng.integers(0, 5, 30), rng.standard_normal(30).astype(np.float32)
    clustered_folder(tmp_path, weight, mapping, weights=scale)
    vectors = open_vectors(tmp_path)
    expanded = weight[mapping] * scale[:, None]
    np.testing.assert_array_equal(vectors.take(np.arange(30)), expanded)
    whole = type(vectors)(vectors.words, expanded, vectors.tokenizer)
    queries = parse(["w3", "w1 - w4 + w9"])
    for ours, theirs in zip(
        neighbors(vectors, queries, count=29),
        neighbors(whole, queries, count=29),
        strict=True,
    ):
        cosines = [one.cosine for one in ours.found]
        np.testing.assert_allclose(cosines, [o.cosine for o in theirs.found], atol=1e-6)


@pytest.mark.parametrize(
    ("mapping", "more", "message"),
    [
        (np.array([0, 2]), {}, "must have a mapping to rows below 2"),
        (np.array([0, -1]), {}, "must have a mapping to rows below 2"),
        (np.array([[0, 1]]), {}, "must have a mapping to rows below 2"),
        (np.array([0.0, 1], np.float32), {}, "must have a mapping to rows below 2"),
        (np.array([0, 1]), {"weights": np.ones(3)}, r"must have weights of shape \(2,\)"),
        (np.array([0, 1]), {"weights": np.ones((2, 1))}, "must have weights of shape"),
    ],
)
def test_a_wrong_mapping_is_refused(mapping, more, message, tmp_path):
    more = {name: array.astype(np.float32) for name, array in more.items()}
    clustered_folder(tmp_path, np.ones((2, 3), np.float32), mapping, **more)
    with pytest.raises(ValueError, match=message):
        open_vectors(tmp_path)


NAME = "a\x1b[2Jb\x9b31mc\u202ed"


def test_error_messages_escape_control_characters(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, **{NAME: np.ones((2, 2, 2), np.float32)})
    shown = r"a\x1b[2Jb\x9b31mc\u202ed"
    for arguments in (["inspect", path], ["inspect", path, "--tensor", NAME]):
        assert shown in error_message(*arguments)
    missing = error_message("inspect", tmp_path / NAME)
    assert shown in missing and missing.isprintable()


def test_json_escapes_control_characters(tmp_path):
    path = tmp_path / "a.safetensors"
    name = NAME + ".wte.weight"
    save_tensors(path, **{name: np.ones((2, 2), np.float32)})
    text = stdout_of("inspect", path, "--json")
    assert all(line.isprintable() for line in text.splitlines())
    assert json.loads(text)["tables"][0]["name"] == name


def test_encoded_text_escapes_control_characters(tmp_path):
    clustered_folder(tmp_path, np.ones((2, 3), np.float32), np.array([0, 1]))
    line = stdout_of("encode", tmp_path, text=NAME + " w1\n")
    assert line.rstrip("\n").isprintable()
    assert json.loads(line)["text"] == NAME + " w1"


def start_training(folder, *options):
    arguments = ["--epochs", "40", "--dim", "8", "--batch", "64", "--threads", "1", "-q"]
    return subprocess.Popen(
        [sys.executable, "-m", "firstlayer", "train", "text.txt", *arguments, *options],
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )


def test_a_killed_run_resumes_from_its_last_save(tmp_path):
    words = np.random.default_rng(0).zipf(1.3, 20_000).clip(max=400)
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    killed = start_training(tmp_path, "-o", "killed", "--save-every", "0.002")
    deadline = time.monotonic() + 100
    while not (tmp_path / "killed" / "training.safetensors").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # Afterwards, so that both do not compile the same kernels at the same time.
    assert start_training(tmp_path, "-o", "whole").wait() == 0
    _, config = read(tmp_path / "killed" / "training.safetensors")
    assert 0 <= config["counts"]["place"][0] < 40
    stdout_of("train", tmp_path / "text.txt", "--resume", "-o", tmp_path / "killed", "-q")
    one, other = (open_vectors(tmp_path / name) for name in ("whole", "killed"))
    assert one.words == other.words
    assert one.weight.tobytes() == other.weight.tobytes()


def test_a_generation_depends_on_the_content_only(tmp_path):
    for name, version in [("a", 1), ("b", 1), ("c", 2)]:
        write_version(tmp_path / name, version)
    generations = [
        json.loads((tmp_path / name / "config.json").read_text())["firstlayer"][
            "generation"
        ]
        for name in "abc"
    ]
    assert generations[0] == generations[1] != generations[2]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


def test_damaged_files_give_one_sentence_and_take_little_memory(tmp_path):
    counts = open_damaged_files(tmp_path, 600)
    assert counts["read"] > 50 and counts["refused"] > 200
