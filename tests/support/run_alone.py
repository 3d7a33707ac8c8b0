"""Run code in a separate process, which it may abort, fork, hang or patch."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def run_alone(*parts: str, folder: Path | None = None) -> str:
    """Run the concatenated parts, which must succeed, and return their stdout."""
    done = start_python("".join(map(textwrap.dedent, parts)), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_python(
    code: str, *args: str, folder: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python code with command-line arguments and options of ``subprocess.run``."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=folder,
        text=True,
        timeout=200,
        check=False,
        **{"capture_output": "stdout" not in options, **options},
    )
