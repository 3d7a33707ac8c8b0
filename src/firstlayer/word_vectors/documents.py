"""Documents in files, folders and standard input, as text that can be read repeatedly.

A document is a file, a line, or one field of a line of JSON. No context window crosses the
end of a document.
"""

import contextlib
import json
import os
import reprlib
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from .text import (
    UTF8,
    check_encoding,
    is_binary,
    lone_surrogate,
    read_blocks,
    read_lines,
)

#: Names of files with one JSON object per line, before the suffix of a compressed file.
JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz")
#: Field of JSON lines that holds the text.
TEXT_FIELD = "text"
#: Bytes of standard input that are kept in memory; the rest is in a temporary file.
IN_MEMORY = 1 << 26
SECONDS_PER_REPORT = 0.2

StrPath = str | os.PathLike[str]
#: Called with the number of bytes of a file that were read.
Report = Callable[[int], None]


@dataclass(frozen=True)
class ReadingOptions:
    """Options of reading text.

    Args:
        encoding: Encoding of the files; a byte order mark of UTF-16 is recognized.
        text_field: Field that holds the text of JSON lines; every file is then read as
            JSON lines. With None, only files named ``.jsonl`` or ``.ndjson`` are, and
            their field is ``"text"``.
        lines: Whether each line is a document.
    """

    encoding: str = UTF8
    text_field: str | None = None
    lines: bool = False

    def __post_init__(self) -> None:
        check_encoding(self.encoding)


class Documents:
    """Documents of files, read from the files on each iteration.

    Iterating yields documents, and iterating a document yields blocks of text that end
    between words.

    Args:
        sources: The files.
        options: Options of reading them.
        left_out: Number of binary and empty files in folders.
        report: Called a few times per second while files are read, with the share of their
            bytes that was read in this iteration.
    """

    def __init__(
        self,
        sources: Sequence["Source"],
        options: ReadingOptions,
        left_out: int = 0,
        report: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.sources, self.options, self.left_out = sources, options, left_out
        self.report, self._last = report, time.monotonic()

    def __iter__(self) -> Iterator[Iterable[str]]:
        before, total = 0, sum(source.size for source in self.sources)
        for source in self.sources:

            def report(place: int, before: int = before) -> None:
                if time.monotonic() - self._last >= SECONDS_PER_REPORT:
                    self._last = time.monotonic()
                    self.report(min(1.0, (before + place) / max(total, 1)))

            if source.is_json or self.options.text_field is not None or self.options.lines:
                yield from ([text] for text in source.texts(self.options, report))
            else:
                yield source.blocks(self.options, report)
            before += source.size

    @property
    def description(self) -> str:
        """Number of files, as words."""
        count = len(self.sources)
        text = f"{count:,} file{'s' * (count != 1)}"
        if self.left_out:
            text += f" ({self.left_out:,} left out: binary or empty)"
        return text


@dataclass(frozen=True)
class Source:
    """A file that can be opened repeatedly.

    Args:
        name: Name in messages.
        open: Function that returns its path, or the file itself at its first byte.
        size: Number of bytes.
        is_json: Whether its name is that of JSON lines.
    """

    name: str
    open: Callable[[], StrPath | BinaryIO]
    size: int = 0
    is_json: bool = False

    def blocks(self, options: ReadingOptions, report: Report) -> Iterator[str]:
        """Yield the text in blocks."""
        return read_blocks(
            self.open(), encoding=options.encoding, name=self.name, report=report
        )

    def texts(self, options: ReadingOptions, report: Report | None = None) -> Iterator[str]:
        """Yield the lines, or the text of each line of JSON that is not blank."""
        lines = read_lines(
            self.open(), encoding=options.encoding, name=self.name, report=report
        )
        if not self.is_json and options.text_field is None:
            yield from lines
            return
        field = options.text_field or TEXT_FIELD
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield field_of(line, field, place=f"{self.name}, line {number}")


def documents_in(
    paths: Sequence[StrPath],
    options: ReadingOptions | None = None,
    *,
    scratch: StrPath | None = None,
) -> Documents:
    """Return the documents of files and of all files in folders, in sorted order.

    Standard input and pipes are read now, once. A file that cannot be opened raises an
    error before anything is read. Hidden, binary and empty files in folders are left out.

    Args:
        paths: Files, folders, and ``-`` for standard input.
        options: Options of reading them.
        scratch: Folder of the temporary file that keeps standard input.
    """
    options = ReadingOptions() if options is None else options
    sources: list[Source] = []
    left_out = 0
    for path in paths:
        if path != "-" and os.path.isdir(path):
            files = list(_files_below(path))
            kept = [one for one in files if not is_binary(one, encoding=options.encoding)]
            if not kept:
                raise ValueError(f"{os.fspath(path)} is a folder without text files")
            left_out += len(files) - len(kept)
            sources += map(_file, kept)
        elif _is_file(path):
            open(path, "rb").close()
            sources.append(_file(path))
        else:
            sources.append(_spooled(path, scratch))
    return Documents(sources, options, left_out)


def read_texts(path: StrPath, options: ReadingOptions) -> Iterator[str]:
    """Yield the lines of a file, or the text of each line of JSON, as they are read.

    Args:
        path: File name, or ``-`` for standard input.
        options: Options of reading it.
    """
    name = "standard input" if path == "-" else os.fspath(path)
    return Source(name, lambda: path, is_json=_is_json(name)).texts(options)


def field_of(line: str, field: str, *, place: str) -> str:
    """Return a field of a line of JSON that holds text.

    Args:
        line: The line.
        field: Name of the field.
        place: File and line in errors.

    Example:
        >>> field_of('{"text": "one line", "id": 3}', "text", place="a.jsonl, line 1")
        'one line'
    """
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict) or field not in value:
        found = list(value) if isinstance(value, dict) else value
        raise ValueError(
            f"{place} must be an object with the field {field!r}, got {reprlib.repr(found)}"
        )
    if not isinstance(value[field], str):
        kind = type(value[field]).__name__
        raise ValueError(f"{place}: the field {field!r} must be a string, got {kind}")
    if (half := lone_surrogate(value[field])) is not None:
        raise ValueError(
            f"{place}: the field {field!r} must be Unicode text, got {half!a} without the "
            "other half of its character"
        )
    return value[field]


def _file(path: StrPath) -> Source:
    name = os.fspath(path)
    return Source(name, lambda: path, os.path.getsize(path), _is_json(name))


def _is_json(name: str) -> bool:
    plain = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        plain = plain.removesuffix(suffix)
    return plain.endswith(JSON_LINES)


def _is_file(path: StrPath) -> bool:
    """Return whether a path can be reopened by name. Missing files count as files."""
    return path != "-" and (os.path.isfile(path) or not os.path.lexists(path))


def _files_below(folder: StrPath) -> Iterator[str]:
    """Yield the files of a folder and its folders, sorted, without hidden ones."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (os.path.join(root, name) for name in sorted(names) if name[0] != ".")
        yield from (path for path in paths if os.path.isfile(path))


def _spooled(path: StrPath, scratch: StrPath | None) -> Source:
    """Return standard input or a pipe, read to its end."""
    # The file has no name in the folder, so that nothing is left if the process is killed.
    folder = None if scratch is None else os.fspath(scratch)
    spool = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=folder)
    with (
        contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb")
    ) as file:
        shutil.copyfileobj(file, spool, 1 << 20)
    size = spool.tell()

    def rewound() -> BinaryIO:
        spool.seek(0)
        return spool  # pyright: ignore[reportReturnType]

    name = "standard input" if path == "-" else os.fspath(path)
    source = Source(name, rewound, size)
    weakref.finalize(source, spool.close)
    return source
