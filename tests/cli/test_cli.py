"""Behavior shared by all commands: help, errors, exit codes, progress, output."""

import errno
import importlib
import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from firstlayer.cli import COMMANDS
from firstlayer.cli._group import message
from firstlayer.cli._output import check_output, columns, emit, plain, progress, say
from firstlayer.cli.train import command as train
from tests.support.command import call, call_alone, error_line, error_message, stdout_of

HEAVY = {"numpy", "numba", "rich", "tokenizers", "torch", "safetensors", "jaxtyping"}


def test_help_lists_every_command_with_examples():
    text = stdout_of("--help")
    for name, what in COMMANDS.items():
        assert f"  {name} " in text and what in text
    assert "Examples:\n    firstlayer train " in text
    assert max(map(len, text.splitlines())) <= 80
    assert stdout_of("-h") == text == stdout_of()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_json_and_quiet(name):
    text = stdout_of(name, "--help")
    assert stdout_of(name, "-h") == text
    assert "--json" in text and "-q, --quiet" in text
    assert f"Examples:\n    firstlayer {name}" in text
    assert "Options:\n  --json " in text and "\n  -h, --help " in text
    assert "RANGE" not in text and "x>" not in text and "[default:\n" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_train_has_sections():
    text = stdout_of("train", "--help")
    headings = ["Text", "Vocabulary", "Training", "Output", "Options"]
    assert re.findall(r"^(\w+):$", text, flags=re.M) == headings
    options = [max(one.opts, key=len) for one in train.params if one.opts[0][0] == "-"]
    lines = [line for line in text.splitlines() if line.startswith("  -")]
    assert len(lines) == len(options) + 1  # --help
    assert all(any(f"{name} " in line for line in lines) for name in options)
    forms = re.findall(r"^  -.*?\S {2,}(?=\S)", text, flags=re.M)
    assert len(forms) == len(lines) and len(set(map(len, forms))) == 1
    # Defaults that do not fit are broken at spaces.
    narrow = train.get_help(
        click.Context(train, terminal_width=50, **train.context_settings)
    )
    assert narrow.count("\n") > text.count("\n")
    assert set(narrow.split()) == set(text.split())


def test_commands_and_modules_match():
    folder = Path(importlib.import_module("firstlayer.cli").__path__[0])
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert modules == set(COMMANDS)
    for name in COMMANDS:
        command = importlib.import_module(f"firstlayer.cli.{name}").command
        assert isinstance(command, click.Command) and command.name == name


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["inspect", "-h"]])
def test_help_imports_only_click(args, tmp_path):
    watch = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
"""
    done = call_alone(*args, folder=tmp_path, before=watch)
    loaded = set(done.stderr.split())
    assert done.returncode == 0 and "click" in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    commands = {f"firstlayer.cli.{name}" for name in COMMANDS}
    assert loaded & commands == ({f"firstlayer.cli.{args[0]}"} if len(args) > 1 else set())


def test_help_takes_less_than_a_fifth_of_a_second():
    def seconds():
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "firstlayer", "--help"], capture_output=True, check=True
        )
        after = os.times()
        spent = (after.children_user, after.children_system)
        return sum(spent) - before.children_user - before.children_system

    # CPU time, best of three: the machine is shared.
    assert min(seconds() for _ in range(3)) < 0.2


def test_python_m_firstlayer_and_version():
    done = subprocess.run(
        [sys.executable, "-m", "firstlayer", "--version"], capture_output=True, text=True
    )
    assert (
        done.stdout == f"firstlayer {importlib.import_module('firstlayer').__version__}\n"
    )


@pytest.mark.rejects
def test_wrong_usage_exits_with_2_and_a_one_line_message():
    want = "no command 'trian', did you mean 'train'? (see firstlayer --help)"
    assert error_message("trian", code=2) == want
    assert error_message("xyz", code=2) == "no command 'xyz' (see firstlayer --help)"
    assert error_message("inspect", code=2) == (
        "Missing argument 'PATH' (see firstlayer inspect --help)"
    )
    assert "--nonsense" in error_message("train", "--nonsense", code=2)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "option, want",
    [
        ("--dim=zero", "--dim must be an integer of at least 1, got 'zero'"),
        ("--dim=0", "--dim must be an integer of at least 1, got 0"),
        ("--seed=1.5", "--seed must be an integer of at least 0, got '1.5'"),
        ("--window=17", "--window must be an integer from 1 to 16, got 17"),
        ("--lr=0", "--lr must be a number above 0, got 0.0"),
        ("--lr=nan", "--lr must be a number above 0, got nan"),
        ("--lr=inf", "--lr must be a number above 0, got inf"),
    ],
)
def test_numbers_out_of_range_are_named_with_their_rule(option, want):
    message = error_message("train", option, code=2)
    assert message == f"{want} (see firstlayer train --help)"


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
        (KeyError("k"), "KeyError: 'k' (set FIRSTLAYER_TRACEBACK=1 for a traceback)"),
        (click.Abort(), "interrupted"),
    ],
)
@pytest.mark.rejects
def test_error_messages_are_one_line(error, want):
    assert message(error) == want


@pytest.fixture
def replace_command(monkeypatch):
    """Return a function that replaces the body of ``firstlayer inspect``."""
    module = importlib.import_module("firstlayer.cli.inspect")

    def replace(function):
        monkeypatch.setattr(module, "command", click.command()(function))

    return replace


@pytest.mark.rejects
def test_ctrl_c_prints_interrupted_and_exits_with_130(replace_command):
    def stop():
        raise KeyboardInterrupt

    replace_command(stop)
    done = call("inspect")
    assert done.exit_code == 130
    assert done.stderr.split("\n")[-2] == "firstlayer: interrupted"


@pytest.mark.rejects
def test_traceback_environment_variable(replace_command, monkeypatch):
    def fail():
        raise ZeroDivisionError("deep inside")

    replace_command(fail)
    want = "ZeroDivisionError: deep inside (set FIRSTLAYER_TRACEBACK=1 for a traceback)"
    assert error_message("inspect") == want
    monkeypatch.setenv("FIRSTLAYER_TRACEBACK", "1")
    done = call("inspect")
    assert "Traceback" in done.stderr and 'raise ZeroDivisionError("deep' in done.stderr


@pytest.mark.rejects
def test_missing_click_error_names_the_extra(tmp_path):
    hidden = "import sys; sys.modules['click'] = None"
    done = call_alone("--help", folder=tmp_path, before=hidden)
    want = "firstlayer: the command line needs click: pip install 'firstlayer[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", want)
    (tmp_path / "a.txt").write_text("one two " * 50)
    hidden = "import sys; sys.modules['tokenizers'] = None"
    done = call_alone("train", "a.txt", "-q", folder=tmp_path, before=hidden)
    want = "this needs tokenizers: pip install 'firstlayer[cli]'"
    assert error_line(done.stdout, done.stderr) == want and done.returncode == 1
    assert os.listdir(tmp_path) == ["a.txt"]


def test_full_or_closed_stdout_gives_no_traceback(tmp_path):
    with open("/dev/full", "w") as full:
        done = call_alone("--help", folder=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr == "firstlayer: no space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = call_alone("--help", folder=tmp_path, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_streams_closed_by_the_shell_are_accepted(tmp_path):
    for stream in ("1", "2"):
        script = f'"{sys.executable}" -m firstlayer --version {stream}>&-'
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == ""


WARNS = """
import warnings, click, firstlayer.cli.inspect as name
name.command = click.command()(lambda: warnings.warn("noise"))
"""


def test_python_warnings_are_hidden(tmp_path):
    done = call_alone("inspect", folder=tmp_path, before=WARNS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    shown = {**os.environ, "PYTHONWARNINGS": "default"}
    done = call_alone("inspect", folder=tmp_path, before=WARNS, env=shown)
    assert "UserWarning: noise" in done.stderr


@pytest.mark.rejects
def test_ctrl_c_during_imports_gives_a_one_line_message(tmp_path):
    pressed = """
import signal, sys
class Press:
    def find_spec(self, name, *rest):
        if name == "click": signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
"""
    done = call_alone("--help", folder=tmp_path, before=pressed)
    assert (done.returncode, done.stderr) == (130, "firstlayer: interrupted\n")


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


def test_progress_is_drawn_only_on_a_terminal_and_not_when_quiet(monkeypatch):
    text = drawn(Terminal(), monkeypatch, quiet=False)
    assert "working" in text and "50 %" in text and "7 tokens/s" in text
    assert "a remark" in text
    assert drawn(io.StringIO(), monkeypatch, quiet=False) == "a remark\n"
    assert drawn(Terminal(), monkeypatch, quiet=True) == ""


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_bar_and_the_time_left_fit_in_every_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    note = "1,234,567 tokens/s, loss 3.210"
    with progress("training", total=10, quiet=False) as draw:
        draw(9, what="reading")
        draw(5, note=note)
    plain_text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = re.findall(r"(?:reading|training) [^\r\n]*", plain_text)
    assert len(lines[0]) <= columns and re.match("reading .* 90 % ", lines[0])
    line = lines[-1]
    assert len(line) <= columns and line.startswith("training ") and "━" * 3 in line
    assert " 50 % " in line and re.search(r"-:--|\d:\d\d", line)
    assert (note in line) == (columns >= 80)
    # A note is cut between its parts.
    assert "tokens" not in line or " tokens/s" in line


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("training", total=2.0, quiet=False) as draw:
        for done in (0.1, 0.5, 1.0, 1.5):
            draw(done, note="loss 3.2")
            now[0] += 6
    with progress("encoding", quiet=False) as draw:
        now[0] += 10
        draw(1234)
        now[0] += 10
        draw(2, what="reading")
    lines = stream.getvalue().splitlines()
    assert lines == ["training 50%, loss 3.2", "encoding 1,234", "reading 2"]


def test_progress_without_total_shows_a_count(monkeypatch):
    text = drawn(Terminal(), monkeypatch, quiet=False, total=None)
    assert "working 5 7 tokens/s" in text and "%" not in text


@dataclass(frozen=True)
class Found:
    name: str
    values: np.ndarray
    loss: Any
    path: Path


def test_emit_prints_json_or_text(capsys):
    found = Found("é\x1b", np.array([1.5, np.nan]), np.float32(np.inf), Path("a/b"))
    emit(found, ["name é\x1b[2J"], as_json=True)
    want = {"name": "é\x1b", "values": [1.5, None], "loss": None, "path": "a/b"}
    assert json.loads(capsys.readouterr().out) == want
    emit(found, ["name é\x1b[2J"], as_json=False)
    assert capsys.readouterr().out == "name é\\x1b[2J\n"
    assert plain({1: (np.int64(3), True, None)}) == {"1": [3, True, None]}


def test_columns_are_aligned():
    rows = [("a", "1,000", "x"), ("bcd", "-2.5", "")]
    assert columns(rows) == ["a    1,000  x", "bcd   -2.5"]
    assert columns([]) == [] and columns([], head=["n"]) == ["n"]
    # Numbers with a unit or a fraction, and missing numbers.
    rows = [("5 B", "0.25", "1.50 (0.10)"), ("10.2 MB", "–", "12.25 (1.10)")]
    assert columns(rows) == ["    5 B  0.25   1.50 (0.10)", "10.2 MB     –  12.25 (1.10)"]


@pytest.mark.rejects
def test_existing_output_needs_force(tmp_path):
    path = tmp_path / "x"
    assert check_output(path, force=False) == path
    path.symlink_to("nowhere")
    with pytest.raises(click.ClickException, match="x exists; use --force to replace it"):
        check_output(path, force=False)
    assert check_output(path, force=True) == path


@pytest.mark.rejects
def test_unwritable_folder_is_rejected(tmp_path):
    # In sysfs, even root cannot create a file.
    with pytest.raises(OSError, match=r"nothing can be written in /sys: \w+"):
        check_output("/sys/x", force=False)
    with pytest.raises(click.ClickException, match=f"no folder {tmp_path}/a to write"):
        check_output(tmp_path / "a" / "b", force=True)
    assert os.listdir(tmp_path) == []
