"""Commands that are interrupted or killed while they write leave nothing half-written."""

import os
import signal

import numpy as np
import pytest

from tests.support.command import call_alone, file_contents, stdout_of

TRAIN = ["train", "a.txt", "--dim", "4", "--epochs", "1", "--sample", "1", "-q"]
COMMANDS = {
    "train": [*TRAIN, "--force"],
    "convert": ["convert", "vectors", "a.bin", "--force", "-q"],
    "map": ["map", "vectors", "-o", "a.html", "--force", "-q"],
}
#: Send a signal to this process when the function is first called.
SEND = """
import os, signal
import {module} as owner
function = {owner}.{function}
def sending(*args):
    {owner}.{function} = function
    os.kill(os.getpid(), signal.{signal})
    return function(*args)
{owner}.{function} = sending
"""
WRITING = {"module": "os", "owner": "owner", "function": "fsync"}
TRAINING = {
    "module": "firstlayer.word_vectors.word2vec",
    "owner": "owner.Word2Vec",
    "function": "_step",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).choice("red green blue cat dog cow".split(), 900)
    (tmp_path / "a.txt").write_text(" ".join(words))
    stdout_of(*TRAIN)
    for name in ("a.bin", "a.html"):
        (tmp_path / name).write_text("old")
    return tmp_path


@pytest.mark.rejects
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_and_kill_keep_the_old_output(command, folder):
    before = file_contents(folder)
    names = sorted(os.listdir(folder))
    # A finished training is saved in spite of Ctrl-C.
    place = TRAINING if command == "train" else WRITING
    pressed = SEND.format(**place, signal="SIGINT")
    done = call_alone(*COMMANDS[command], folder=folder, before=pressed)
    assert done.returncode == 130, done.stderr
    assert sorted(os.listdir(folder)) == names
    if command == "train":
        want = (
            "firstlayer: interrupted at 57%; resume with: firstlayer train --resume a.txt"
        )
        assert done.stderr == want + " -o vectors\n"
        stdout_of("train", "--resume", "a.txt", "-q")
    else:
        assert done.stdout == "" and done.stderr == "\nfirstlayer: interrupted\n"
    assert file_contents(folder) == before
    killed = SEND.format(**WRITING, signal="SIGKILL")
    done = call_alone(*COMMANDS[command], folder=folder, before=killed)
    assert done.returncode == -signal.SIGKILL and done.stdout == ""
    assert len(os.listdir(folder)) == len(names) + 1
    left = {name: content for name, content in file_contents(folder).items()}
    assert {name: left[name] for name in before} == before
    # The next run removes what was left.
    stdout_of(*COMMANDS[command])
    assert sorted(os.listdir(folder)) == names
