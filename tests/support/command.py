"""Running the command line in a test: in this process, or in one of its own."""

import os
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from firstlayer.cli._group import firstlayer
from tests.support.run_alone import start_python


def call(*args: Any, text: str | bytes | None = None) -> Result:
    """Run ``firstlayer ARGS`` here and return exit code, stdout and stderr."""
    return CliRunner().invoke(firstlayer, [str(arg) for arg in args], input=text)


def data(*args: Any, text: str | bytes | None = None) -> str:
    """Run ``firstlayer ARGS`` here, which must succeed, and return what it printed."""
    done = call(*args, text=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*args: Any, text: str | bytes | None = None, code: int = 1) -> str:
    """Run ``firstlayer ARGS`` here, which must fail, and return its one sentence."""
    done = call(*args, text=text)
    assert done.exit_code == code, done.output
    return one_sentence(done.stdout, done.stderr)


def one_sentence(stdout: str, stderr: str) -> str:
    """Return the sentence of a failure, which is all there is but for remarks."""
    assert stdout == ""
    *before, last = stderr.splitlines()
    assert last.startswith("firstlayer: ") and "Traceback" not in stderr
    assert all(line.startswith(("reading ", "learning ")) for line in before)
    return last.removeprefix("firstlayer: ")


def call_alone(
    *args: Any, folder: Path, before: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``firstlayer ARGS`` in a process of its own, after the code in ``before``."""
    code = f"{before}\nfrom firstlayer.cli import main\nmain()"
    return start_python(code, *map(str, args), folder=folder, **options)


def held(folder: Path) -> dict[str, bytes]:
    """Return every file under a folder and what it holds."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
