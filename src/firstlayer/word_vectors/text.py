"""Read text from files and standard input, in blocks or lines.

Text is UTF-8 unless another encoding is named; a byte order mark of UTF-16 or UTF-32 is
recognized. Files compressed by gzip, bzip2 or xz are decompressed, whatever their name. A
file that is empty, binary or in another encoding raises a ValueError that names the first
wrong byte and its line.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO

UTF8 = "utf-8"
#: Approximate number of bytes per block.
BLOCK = 1 << 18
#: Largest block without a space to end at, in characters.
LONGEST = 1 << 22
#: Bytes that are read to find out whether a file is binary.
SAMPLE = 1 << 12
# Python's tests are mostly data, and not installed everywhere.
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
#: First bytes of compressed files, and the functions that open them.
COMPRESSED = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
ZSTD = b"\x28\xb5\x2f\xfd"
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError)
#: Byte order marks. That of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def standard_library() -> list[Path]:
    """Return the source files of the running Python, excluding its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (root / path for path in sorted(relative) if not EXCLUDED & set(path.parts))
    files = [path for path in kept if path.stat().st_size]
    if not files:
        raise FileNotFoundError(f"no Python source in {root}: name files to learn from")
    return files


def check_encoding(encoding: str) -> None:
    """Raise a ValueError unless Python knows an encoding of text by this name."""
    try:
        # No codec is looked up for an empty string.
        b"a".decode(encoding, "replace")
    except LookupError:
        raise ValueError(
            f"encoding must be the name of a text encoding, got {encoding!r}"
        ) from None


def lone_surrogate(text: str) -> str | None:
    r"""Return the first half of a surrogate pair without the other, which is not Unicode.

    Strings of JSON can have such halves, and so do arguments of a command that are not in
    the encoding of the terminal.

    Example:
        >>> lone_surrogate("whole: \U0001f600"), lone_surrogate("half: \ud83d") is None
        (None, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def read_blocks(
    path: str | os.PathLike[str] | BinaryIO,
    *,
    encoding: str = UTF8,
    name: str | None = None,
    report: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Yield the text of a file in blocks that end between words.

    Args:
        path: File name, ``-`` for standard input, or an open file. An empty file or one in
            another encoding is a ValueError.
        encoding: Encoding of the text, unless a byte order mark tells another one.
        name: Name of the file in errors; its path if None.
        report: Called after each block with the number of bytes of the file that were read.
    """
    check_encoding(encoding)
    name = _name(path) if name is None else name
    with _opened(path) as raw, decompressed(raw, name) as file:
        rest, is_empty = "", True
        for text in _decoded(file, name=name, encoding=encoding):
            is_empty = False
            if report is not None:
                report(raw.tell())
            rest += text
            cut = _cut(rest)
            if cut:
                yield rest[:cut]
            rest = rest[cut:]
        if is_empty:
            raise ValueError(f"{name} is empty")
        if rest:
            yield rest


def read_lines(
    path: str | os.PathLike[str] | BinaryIO,
    *,
    encoding: str = UTF8,
    name: str | None = None,
    report: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Yield the lines of a file without line endings.

    Args:
        path: File name, ``-`` for standard input, or an open file.
        encoding: As for :func:`read_blocks`.
        name: As for :func:`read_blocks`.
        report: As for :func:`read_blocks`.
    """
    parts: list[str] = []
    for block in read_blocks(path, encoding=encoding, name=name, report=report):
        first, *others = block.split("\n")
        parts.append(first)
        for line in others:
            yield "".join(parts).removesuffix("\r")
            parts = [line]
    if any(parts):
        yield "".join(parts).removesuffix("\r")


def is_binary(path: str | os.PathLike[str], *, encoding: str = UTF8) -> bool:
    """Return whether the beginning of a file is empty or not text.

    A file in the wrong encoding is text.
    """
    with open(path, "rb") as raw, decompressed(raw, os.fspath(path)) as file:
        sample = file.read(SAMPLE)
    text = sample.decode(encoding_of(sample, encoding), "replace")
    return not text or "\0" in text or sample.startswith(b"%PDF-")


def encoding_of(begin: bytes, encoding: str) -> str:
    """Return the encoding that a byte order mark tells, otherwise ``encoding``.

    Example:
        >>> encoding_of("née".encode("utf-16"), "utf-8"), encoding_of(b"plain", "latin-1")
        ('utf-16', 'latin-1')
    """
    if codecs.lookup(encoding).name == UTF8:
        for mark, found in MARKS.items():
            if begin.startswith(mark):
                return found
    return encoding


def _name(path: str | os.PathLike[str] | BinaryIO) -> str:
    if path == "-":
        return "standard input"
    return os.fspath(path) if isinstance(path, str | os.PathLike) else str(path)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str] | BinaryIO) -> Generator[BinaryIO, None, None]:
    """Open a file; standard input and open files stay open."""
    if path == "-":
        yield sys.stdin.buffer
    elif not isinstance(path, str | os.PathLike):
        yield path
    elif os.path.isdir(path):
        raise IsADirectoryError(f"{os.fspath(path)} is a folder: name the files in it")
    else:
        with open(path, "rb") as file:
            yield file


@contextlib.contextmanager
def decompressed(raw: BinaryIO, name: str) -> Generator[BinaryIO, None, None]:
    """Yield the content of a file that may be compressed."""
    begin = _peek(raw, 6)
    if begin.startswith(ZSTD):
        raise ValueError(f"{name} is compressed by zstd: decompress it first")
    openers = [open for magic, open in COMPRESSED.items() if begin.startswith(magic)]
    if not openers:
        yield raw
        return
    try:
        with openers[0](raw) as file:
            yield file
    except DAMAGED as error:
        raise ValueError(f"{name} is damaged: {error}") from None
    except OSError as error:
        # bz2 has no error class of its own.
        if error.errno is not None:
            raise
        raise ValueError(f"{name} is damaged: {error}") from None


def _peek(raw: BinaryIO, size: int) -> bytes:
    """Return the first bytes of a file without moving on."""
    if isinstance(raw, io.BufferedReader):
        return raw.peek(size)[:size]
    begin = raw.read(size)
    raw.seek(0)
    return begin


def _decoded(file: BinaryIO, *, name: str, encoding: str) -> Iterator[str]:
    """Yield the text of a file, at least one character at a time."""
    block = file.read(BLOCK)
    encoding = encoding_of(block, encoding)
    decoder = codecs.getincrementaldecoder(encoding)()
    place, line = 0, 1
    while True:
        place += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            bad = place - len(error.object) + error.start
            line += _readable(error).count("\n")
            raise ValueError(
                f"{name} is not {_shown(encoding)} text: byte {bad} (line {line}) is "
                f"0x{error.object[error.start]:02x}"
            ) from None
        except UnicodeError as error:
            # A UTF-16 or UTF-32 decoder without a byte order mark names no byte.
            raise ValueError(f"{name} is not {_shown(encoding)} text: {error}") from None
        if (zero := text.find("\0")) >= 0:
            after = len(text[zero:].encode(encoding)) - len("".encode(encoding))
            bad = place - len(decoder.getstate()[0]) - after
            raise ValueError(f"{name} is binary, not text: byte {bad} is 0")
        if text:
            yield text
        if not block:
            return
        line += text.count("\n")
        block = file.read(BLOCK)


def _readable(error: UnicodeDecodeError) -> str:
    """Return the text before the byte that cannot be decoded."""
    return error.object[: error.start].decode(error.encoding, "replace")


def _shown(encoding: str) -> str:
    """Return the name of an encoding as in prose.

    Example:
        >>> _shown("utf-8-sig"), _shown("latin-1")
        ('UTF-8', 'latin-1')
    """
    return "UTF-8" if codecs.lookup(encoding).name.startswith(UTF8) else encoding


def _cut(text: str) -> int:
    """Return the end of the last complete word, 0 if there is none."""
    cut = 1 + max(text.rfind(space) for space in "\n \t")
    return len(text) if cut == 0 and len(text) >= LONGEST else cut
