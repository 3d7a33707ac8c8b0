"""Read UTF-8 text from files and standard input, in blocks or lines.

A file that is empty, binary or in another encoding raises a ValueError that names the first
wrong byte.
"""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

#: Approximate number of bytes per block.
BLOCK = 1 << 18
#: Largest block without a space to end at.
LONGEST = 1 << 22
# Python's tests are mostly data, and not installed everywhere.
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library() -> list[Path]:
    """Return the source files of the running Python, excluding its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (root / path for path in sorted(relative) if not EXCLUDED & set(path.parts))
    files = [path for path in kept if path.stat().st_size]
    if not files:
        raise FileNotFoundError(f"no Python source in {root}: name files to learn from")
    return files


def read_blocks(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the text of a file in blocks that end between words.

    Args:
        path: File name, or ``-`` for standard input. An empty file or one that is not UTF-8
            is a ValueError.
    """
    name = "standard input" if path == "-" else os.fspath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{name} is a folder: name the files in it")
    with _opened(path) as file:
        start, rest = 0, b""
        while block := file.read(BLOCK):
            block = rest + block
            cut = _cut(block)
            yield _decoded(block[:cut], name=name, start=start)
            start, rest = start + cut, block[cut:]
        if start == 0 and not rest:
            raise ValueError(f"{name} is empty")
        yield _decoded(rest, name=name, start=start)


def _opened(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[BinaryIO]:
    if path == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    return open(path, "rb")


def _cut(block: bytes) -> int:
    """Return the end of the last complete word in a block, 0 if there is none."""
    # These bytes never occur inside a multi-byte UTF-8 character.
    cut = 1 + max(block.rfind(space) for space in (b"\n", b" ", b"\t"))
    if cut == 0 and len(block) >= LONGEST:
        cut = len(block) - 1
        while cut > 0 and block[cut] & 0xC0 == 0x80:
            cut -= 1
    return cut


def _decoded(block: bytes, *, name: str, start: int) -> str:
    if (zero := block.find(0)) >= 0:
        raise ValueError(f"{name} is binary, not text: byte {start + zero} is 0")
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        place, value = start + error.start, block[error.start]
        raise ValueError(
            f"{name} is not UTF-8 text: byte {place} is 0x{value:02x}"
        ) from None
    return text.removeprefix("\ufeff") if start == 0 else text


def documents_in(paths: Sequence[str | os.PathLike[str]]) -> list[Iterable[str]]:
    """Return each file as an iterable of blocks that can be iterated repeatedly.

    Files are read on each iteration. Standard input and pipes are read once and kept in
    memory. A file that cannot be opened raises an error before anything is read.
    """
    for path in paths:
        if _is_file(path):
            open(path, "rb").close()
    return [
        _FileBlocks(path) if _is_file(path) else list(read_blocks(path)) for path in paths
    ]


def _is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path can be reopened by name. Missing files count as files."""
    return path != "-" and (os.path.isfile(path) or not os.path.lexists(path))


@dataclass(frozen=True)
class _FileBlocks:
    path: str | os.PathLike[str]

    def __iter__(self) -> Iterator[str]:
        return read_blocks(self.path)


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a file without line endings.

    Args:
        path: File name, or ``-`` for standard input.
    """
    rest = ""
    for block in read_blocks(path):
        *lines, rest = (rest + block).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if rest:
        yield rest.removesuffix("\r")
