"""The example is killed and resumed, and a process that dies does not stop the others."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "sharded.py"


def start(folder: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Start the example in two processes, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "FIRSTLAYER_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--folder", str(folder), *options],
            env={**os.environ, **shared, "RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]


def losses(printed: str) -> dict[int, str]:
    """Return the losses of a process, by step."""
    return {int(n): x for n, x in re.findall(r"step (\d+), ([\d.]+) nats", printed)}


def test_a_killed_run_ends_and_resumes_with_the_same_bits(tmp_path):
    survivor, killed = start(tmp_path, "--steps", "40", "--kill-at", "39")
    before, _ = killed.communicate(timeout=100)
    died = time.monotonic()
    printed, error = survivor.communicate(timeout=100)
    assert killed.returncode == -9 and survivor.returncode == 1
    # The time-out of the process group is ten seconds.
    assert time.monotonic() - died < 13
    assert "RuntimeError" in error.splitlines()[-1] or "DistBackendError" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-10",
        "step-20",
        "step-30",
    ]
    # An incomplete checkpoint is ignored.
    (tmp_path / "step-40").mkdir()
    (tmp_path / "step-40" / "__0_0.distcp").write_bytes(b"")
    again = start(tmp_path, "--steps", "40")
    outputs = [process.communicate(timeout=100)[0] for process in again]
    for first, second in zip((printed, before), outputs, strict=True):
        assert "continues after step 30" in second
        assert losses(second)[35] == losses(first)[35]
        assert float(losses(second)[40]) < float(losses(first)[1]) - 0.5
        assert "of 8,002 rows" in second and "kB of gradients" in second
