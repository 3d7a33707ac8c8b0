"""The manners that every verb has."""

import errno
import importlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from firstlayer.cli import VERBS
from firstlayer.cli._group import sentence
from firstlayer.cli._output import columns, emit, free_to_write, plain, progress, say
from tests.support.command import call, call_alone, data, one_sentence, refusal

HEAVY = {"numpy", "numba", "rich", "tokenizers", "torch", "safetensors", "jaxtyping"}


def test_help_lists_every_verb_and_shows_examples():
    text = data("--help")
    for name, what in VERBS.items():
        assert f"  {name} " in text and what in text
    assert "Examples:\n    firstlayer train " in text
    assert data("-h") == text == data()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples_json_and_quiet(verb):
    text = data(verb, "--help")
    assert data(verb, "-h") == text
    assert "--json" in text and "-q, --quiet" in text
    assert f"Examples:\n    firstlayer {verb}" in text


def test_every_verb_in_the_table_has_a_module_and_none_is_forgotten():
    folder = Path(importlib.import_module("firstlayer.cli").__path__[0])
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert modules == set(VERBS)
    for verb in VERBS:
        command = importlib.import_module(f"firstlayer.cli.{verb}").command
        assert isinstance(command, click.Command) and command.name == verb


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["inspect", "-h"]])
def test_help_imports_click_and_nothing_heavier(args, tmp_path):
    watch = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
"""
    done = call_alone(*args, folder=tmp_path, before=watch)
    loaded = set(done.stderr.split())
    assert done.returncode == 0 and "click" in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    verbs = {f"firstlayer.cli.{verb}" for verb in VERBS}
    assert loaded & verbs == ({f"firstlayer.cli.{args[0]}"} if len(args) > 1 else set())


def test_help_takes_less_than_a_fifth_of_a_second():
    def seconds():
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "firstlayer", "--help"], capture_output=True, check=True
        )
        after = os.times()
        spent = (after.children_user, after.children_system)
        return sum(spent) - before.children_user - before.children_system

    # Of the processor, and the best of three, for others work on this machine.
    assert min(seconds() for _ in range(3)) < 0.2


def test_python_m_firstlayer_and_version():
    done = subprocess.run(
        [sys.executable, "-m", "firstlayer", "--version"], capture_output=True, text=True
    )
    assert (
        done.stdout == f"firstlayer {importlib.import_module('firstlayer').__version__}\n"
    )


@pytest.mark.rejects
def test_what_is_asked_wrongly_exits_with_2_and_one_sentence():
    want = "no verb 'trian', did you mean 'train'? (see firstlayer --help)"
    assert refusal("trian", code=2) == want
    assert refusal("xyz", code=2) == "no verb 'xyz' (see firstlayer --help)"
    assert refusal("inspect", code=2) == (
        "Missing argument 'PATH'. (see firstlayer inspect --help)"
    )
    assert "--nonsense" in refusal("train", "--nonsense", code=2)
    assert "'zero' is not" in refusal("train", "--dim", "zero", code=2)


@pytest.mark.parametrize(
    "error, want",
    [
        (ValueError("two\n lines"), "two lines"),
        (FileNotFoundError("no file x"), "no file x"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a/b"),
            "a/b: permission denied",
        ),
        (MemoryError("8 EB"), "not enough memory: 8 EB"),
        (ImportError("needs PyTorch"), "needs PyTorch"),
        (
            ModuleNotFoundError("No module", name="torch"),
            "this needs torch: pip install 'firstlayer[torch]'",
        ),
        (
            ModuleNotFoundError("No module", name="matplotlib"),
            "this needs matplotlib: pip install 'firstlayer[plot]'",
        ),
        (ModuleNotFoundError("No module named 'x'", name="x"), "No module named 'x'"),
        (KeyError("k"), "KeyError: 'k' (FIRSTLAYER_TRACEBACK=1 shows where)"),
        (click.Abort(), "interrupted"),
    ],
)
@pytest.mark.rejects
def test_every_failure_is_one_sentence(error, want):
    assert sentence(error) == want


@pytest.fixture
def raising(monkeypatch):
    """A verb that does what a test wants."""
    module = importlib.import_module("firstlayer.cli.inspect")

    def become(function):
        monkeypatch.setattr(module, "command", click.command()(function))

    return become


@pytest.mark.rejects
def test_ctrl_c_says_so_and_exits_with_1(raising):
    def stop():
        raise KeyboardInterrupt

    raising(stop)
    done = call("inspect")
    assert done.exit_code == 1 and done.stderr.split("\n")[-2] == "firstlayer: interrupted"


@pytest.mark.rejects
def test_a_traceback_is_shown_when_asked_for(raising, monkeypatch):
    def fail():
        raise ZeroDivisionError("deep inside")

    raising(fail)
    want = "ZeroDivisionError: deep inside (FIRSTLAYER_TRACEBACK=1 shows where)"
    assert refusal("inspect") == want
    monkeypatch.setenv("FIRSTLAYER_TRACEBACK", "1")
    done = call("inspect")
    assert "Traceback" in done.stderr and 'raise ZeroDivisionError("deep' in done.stderr


@pytest.mark.rejects
def test_a_missing_extra_says_what_to_install(tmp_path):
    hidden = "import sys; sys.modules['click'] = None"
    done = call_alone("--help", folder=tmp_path, before=hidden)
    want = "firstlayer: the command line needs click: pip install 'firstlayer[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", want)
    (tmp_path / "a.txt").write_text("one two " * 50)
    hidden = "import sys; sys.modules['tokenizers'] = None"
    done = call_alone("train", "a.txt", "-q", folder=tmp_path, before=hidden)
    want = "this needs tokenizers: pip install 'firstlayer[cli]'"
    assert one_sentence(done.stdout, done.stderr) == want and done.returncode == 1
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_full_or_closed_stdout_ends_without_a_traceback(tmp_path):
    with open("/dev/full", "w") as full:
        done = call_alone("--help", folder=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr == "firstlayer: no space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = call_alone("--help", folder=tmp_path, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_a_stream_that_the_shell_has_closed_is_no_error(tmp_path):
    for stream in ("1", "2"):
        script = f'"{sys.executable}" -m firstlayer --version {stream}>&-'
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == ""


WARNS = """
import warnings, click, firstlayer.cli.inspect as verb
verb.command = click.command()(lambda: warnings.warn("noise"))
"""


def test_python_s_warnings_are_no_part_of_what_is_said(tmp_path):
    done = call_alone("inspect", folder=tmp_path, before=WARNS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    shown = {**os.environ, "PYTHONWARNINGS": "default"}
    done = call_alone("inspect", folder=tmp_path, before=WARNS, env=shown)
    assert "UserWarning: noise" in done.stderr


@pytest.mark.rejects
def test_ctrl_c_while_the_program_is_loading_is_one_sentence(tmp_path):
    pressed = """
import signal, sys
class Press:
    def find_spec(self, name, *rest):
        if name == "click": signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
"""
    done = call_alone("--help", folder=tmp_path, before=pressed)
    assert (done.returncode, done.stderr) == (1, "firstlayer: interrupted\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(stream, monkeypatch, *, quiet, total: float | None = 10):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("working", total=total, quiet=quiet) as draw:
        draw(5, note="7 tokens/s")
        say("a remark", quiet=quiet)
    monkeypatch.undo()
    return stream.getvalue()


def test_progress_is_drawn_on_a_terminal_alone_and_never_when_quiet(monkeypatch):
    text = drawn(Terminal(), monkeypatch, quiet=False)
    assert "working" in text and "50 %" in text and "7 tokens/s" in text
    assert "a remark" in text
    assert drawn(io.StringIO(), monkeypatch, quiet=False) == "a remark\n"
    assert drawn(Terminal(), monkeypatch, quiet=True) == ""


def test_progress_towards_nobody_knows_what_is_a_count(monkeypatch):
    text = drawn(Terminal(), monkeypatch, quiet=False, total=None)
    assert "working 5 7 tokens/s" in text and "%" not in text


@dataclass(frozen=True)
class Found:
    name: str
    values: np.ndarray
    loss: Any
    path: Path


def test_a_result_is_printed_as_json_or_for_people(capsys):
    found = Found("é\x1b", np.array([1.5, np.nan]), np.float32(np.inf), Path("a/b"))
    emit(found, ["name é\x1b[2J"], as_json=True)
    want = {"name": "é\x1b", "values": [1.5, None], "loss": None, "path": "a/b"}
    assert json.loads(capsys.readouterr().out) == want
    emit(found, ["name é\x1b[2J"], as_json=False)
    assert capsys.readouterr().out == "name é\\x1b[2J\n"
    assert plain({1: (np.int64(3), True, None)}) == {"1": [3, True, None]}


def test_columns_stand_under_each_other():
    rows = [("a", "1,000", "x"), ("bcd", "-2.5", "")]
    assert columns(rows) == ["a    1,000  x", "bcd   -2.5"]
    assert columns([]) == [] and columns([], head=["n"]) == ["n"]
    # Numbers with a unit or a share, and those that are missing.
    rows = [("5 B", "0.25", "1.50 (0.10)"), ("10.2 MB", "–", "12.25 (1.10)")]
    assert columns(rows) == ["    5 B  0.25   1.50 (0.10)", "10.2 MB     –  12.25 (1.10)"]


@pytest.mark.rejects
def test_what_is_there_is_not_overwritten_unless_forced(tmp_path):
    path = tmp_path / "x"
    assert free_to_write(path, force=False) == path
    path.symlink_to("nowhere")
    with pytest.raises(click.ClickException, match="x exists; --force replaces it"):
        free_to_write(path, force=False)
    assert free_to_write(path, force=True) == path


@pytest.mark.rejects
def test_a_folder_that_takes_no_files_is_refused(tmp_path):
    # Not even the superuser can make a file in sysfs.
    with pytest.raises(OSError, match=r"nothing can be written in /sys: \w+"):
        free_to_write("/sys/x", force=False)
    with pytest.raises(click.ClickException, match=f"no folder {tmp_path}/a to write"):
        free_to_write(tmp_path / "a" / "b", force=True)
    assert os.listdir(tmp_path) == []
