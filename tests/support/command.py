"""Run the command line in a test, in this process or in a separate one."""

import os
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from firstlayer.cli._group import firstlayer
from tests.support.run_alone import start_python


def call(*args: Any, text: str | bytes | None = None) -> Result:
    """Run ``firstlayer ARGS`` in this process; return exit code, stdout and stderr."""
    return CliRunner().invoke(firstlayer, [str(arg) for arg in args], input=text)


def stdout_of(*args: Any, text: str | bytes | None = None) -> str:
    """Run ``firstlayer ARGS``, check that it succeeds, and return its stdout."""
    done = call(*args, text=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def error_message(*args: Any, text: str | bytes | None = None, code: int = 1) -> str:
    """Run ``firstlayer ARGS``, check that it fails, and return its error message."""
    done = call(*args, text=text)
    assert done.exit_code == code, done.output
    return error_line(done.stdout, done.stderr)


def error_line(stdout: str, stderr: str) -> str:
    """Return the one-line error message; only progress messages may precede it."""
    assert stdout == ""
    *before, last = stderr.splitlines()
    assert last.startswith("firstlayer: ") and "Traceback" not in stderr
    assert all(line.startswith(("reading ", "training ")) for line in before)
    return last.removeprefix("firstlayer: ")


def call_alone(
    *args: Any, folder: Path, before: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``firstlayer ARGS`` in a separate process, after the code in ``before``."""
    code = f"{before}\nfrom firstlayer.cli import main\nmain()"
    return start_python(code, *map(str, args), folder=folder, **options)


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file under a folder, by relative path."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
