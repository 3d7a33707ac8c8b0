"""Running code in a process of its own, which it may abort, fork, hang or patch."""

import subprocess
import sys
import textwrap
from pathlib import Path


def run_alone(*parts: str, folder: Path | None = None) -> None:
    """Run the parts, one after the other, and fail with what they wrote if they failed."""
    done = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, parts))],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
