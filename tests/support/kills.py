"""Kill, interrupt and race the writers of files and folders.

Every function takes a count, so that the tests run a short form and
``python -m benchmarks.reliability`` a long one. Each returns what it counted.
"""

import errno
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from firstlayer.files import atomic
from firstlayer.files.safetensors import read, write
from firstlayer.vector_files.folder import write_folder
from firstlayer.word_vectors.vectors import open_vectors

ROWS, WIDTH = 64, 1024


def without_exchange() -> None:
    """Make this process replace folders as on a system that cannot exchange two names."""

    def unsupported(one: str, other: str) -> None:
        raise OSError(errno.ENOSYS, "not supported")

    setattr(atomic, "_exchange", unsupported)  # noqa: B010


def write_version(path: Path, version: int) -> None:
    """Write a layer file or a folder of word vectors in which all files say ``version``."""
    weight = np.full((ROWS, WIDTH), version, np.float32)
    if path.suffix == ".safetensors":
        write(path, {"w": weight}, {"version": version})
        return
    words = {f"v{version}-{row}": row for row in range(ROWS)}
    tokenizer = Tokenizer(models.WordLevel(words, f"v{version}-0"))
    write_folder(path, weight, tokenizer=tokenizer, about={"v": version}, replace=True)


def read_version(path: Path) -> int:
    """Return the version of a file or folder; a mixture of two is an AssertionError."""
    if path.suffix == ".safetensors":
        tensors, config = read(path)
        weight, version = tensors["w"], config["version"]
    else:
        vectors = open_vectors(path)
        weight, version = vectors.weight, int(vectors.words[0][1:].split("-")[0])
    assert weight.shape == (ROWS, WIDTH)
    assert (weight == version).all(), f"words of {version}, rows of {weight[0, 0]}"
    return version


def leftovers(folder: Path) -> list[str]:
    """Return the names of temporary files and folders."""
    return [name for name in os.listdir(folder) if name.startswith(".firstlayer-")]


def kill_writers(path: Path, count: int) -> dict[str, int]:
    """Kill ``count`` writers of a path at random moments, and read it after each kill."""
    draw = random.Random(0)
    write_version(path, 0)
    # Long enough for two or three saves.
    longest = 3 * max(_seconds(lambda: write_version(path, 0)) for _ in range(5))
    versions, left = {0}, 0
    for _ in range(count):
        last = read_version(path)
        started, start = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(start, b"x")
                for version in range(last + 1, 1 << 30):
                    write_version(path, version % 2)
            finally:
                os._exit(1)
        # A busy machine may take longer to start the child than a save takes.
        os.close(start)
        os.read(started, 1)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(started)
        left += bool(leftovers(path.parent))
        assert len(leftovers(path.parent)) <= 2, leftovers(path.parent)
        versions.add(read_version(path))
    write_version(path, 0)
    assert not leftovers(path.parent), leftovers(path.parent)
    return {"kills": count, "killed while writing": left, "versions": len(versions)}


def race_writers(path: Path, seconds: float) -> dict[str, int]:
    """Read a path while two processes replace it again and again."""
    write_version(path, 0)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                for version in range(1 << 30):
                    write_version(path, version % 7)
            finally:
                os._exit(1)
        children.append(child)
    reads, versions = 0, set()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            versions.add(read_version(path))
            reads += 1
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return {"reads": reads, "versions": len(versions)}


def interrupt_writer(path: Path, count: int) -> dict[str, int]:
    """Send SIGINT to this process ``count`` times while it writes; nothing may be left."""
    write_version(path, 0)
    seconds = min(_seconds(lambda: write_version(path, 0)) for _ in range(5))
    draw, raised = random.Random(1), 0
    for number in range(count):
        timer = threading.Timer(
            draw.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT)
        )
        try:
            timer.start()
            write_version(path, number % 2)
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            raised += 1
        timer.join()
        assert not leftovers(path.parent), leftovers(path.parent)
        read_version(path)
    return {"interrupts": count, "raised": raised}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    function, path, count, *options = sys.argv[1:]
    if "without-exchange" in options:
        without_exchange()
    counts = globals()[function](Path(path), float(count) if "." in count else int(count))
    sys.stdout.write(f"{counts}\n")
