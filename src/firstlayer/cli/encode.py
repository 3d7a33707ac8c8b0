"""``firstlayer encode``: encode lines of text as vectors."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ._output import (
    check_output,
    cli_command,
    counted,
    emit,
    force_option,
    json_text,
    plain,
    progress,
    say,
    value_option,
)

if TYPE_CHECKING:
    import numpy as np

    from ..word_vectors.documents import ReadingOptions
    from ..word_vectors.vectors import Vectors

EXAMPLES = """
firstlayer encode vectors notes.txt -o notes.npy
echo "raise TypeError" | firstlayer encode vectors
firstlayer encode vectors notes.txt -o notes.jsonl
firstlayer encode vectors pages.jsonl.gz --text-field body -o pages.npy
"""
FORMATS = (".npy", ".jsonl")


@cli_command(examples=EXAMPLES)
@click.argument("table")
@click.argument("file", default="-", metavar="[FILE|-]")
@click.option("-o", "--output", metavar="PATH", help="A .npy or .jsonl file.")
@value_option("--encoding", "utf-8", "Encoding of FILE.", metavar="NAME")
@click.option(
    "--text-field",
    metavar="NAME",
    help="Read FILE as JSON lines with this field.  [default: text in a .jsonl file]",
)
@force_option
def command(
    table: str,
    file: str,
    output: str | None,
    encoding: str,
    text_field: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Encode each line of FILE as the mean of its token rows in TABLE.

    TABLE is a table as for firstlayer neighbors. Without FILE, or with -, standard input is
    read; .gz, .bz2 and .xz are decompressed. Lines without known words become zeros, and
    are counted. Without -o, one JSON object is printed per line.
    """
    if output is not None:
        if not output.endswith(FORMATS):
            raise click.UsageError(f"-o must end in .npy or .jsonl, got {output!r}")
        check_output(output, force=force)
    from ..word_vectors.documents import ReadingOptions
    from ..word_vectors.vectors import open_vectors

    reading = ReadingOptions(encoding, text_field)
    vectors = open_vectors(table)
    empty = Count()
    if output is None:
        _print(vectors, file, reading, empty, as_json=as_json)
        _tell(empty, quiet=quiet)
        return
    with progress("encoding", quiet=quiet) as draw:
        count = _write(vectors, file, reading, output, draw, empty)
    _tell(empty, quiet=quiet)
    shape = (count, vectors.weight.shape[1])
    emit(
        {"path": output, "shape": shape, "without_words": empty.lines},
        f"{output}: {counted(count, 'vector')} of {shape[1]}",
        as_json=as_json,
    )


@dataclass
class Count:
    """Number of lines without a known word."""

    lines: int = 0


def _tell(empty: Count, *, quiet: bool) -> None:
    if empty.lines:
        verb = "has" if empty.lines == 1 else "have"
        say(
            f"{counted(empty.lines, 'line')} {verb} no known word: vectors of zeros",
            quiet=quiet,
        )


def _print(
    vectors: "Vectors",
    file: str,
    reading: "ReadingOptions",
    empty: Count,
    *,
    as_json: bool,
) -> None:
    found = _rows(vectors, file, reading, empty)
    rows = ({"text": text, "vector": row} for text, row in found)
    if as_json:
        emit(list(rows), "", as_json=True)
        return
    for row in rows:
        click.echo(_line(row))


def _line(row: dict[str, Any]) -> str:
    return json_text(plain(row))


def _rows(
    vectors: "Vectors", file: str, reading: "ReadingOptions", empty: Count
) -> Iterator[tuple[str, "np.ndarray"]]:
    from ..word_vectors.documents import read_texts
    from ..word_vectors.encode import encode

    texts, lines = itertools.tee(read_texts(file, reading))
    for rows in encode(vectors, texts):
        empty.lines += int((~rows.any(axis=1)).sum())
        yield from ((next(lines), row) for row in rows)


def _write(
    vectors: "Vectors",
    file: str,
    reading: "ReadingOptions",
    output: str,
    draw: Callable[..., None],
    empty: Count,
) -> int:
    from ..files.atomic import replacing

    width, count = vectors.weight.shape[1], 0
    is_npy = output.endswith(".npy")
    with replacing(os.path.realpath(output)) as out:
        if is_npy:
            _npy_header(out, (0, width))
        for text, row in _rows(vectors, file, reading, empty):
            line = _line({"text": text, "vector": row}) + "\n"
            out.write(row.tobytes() if is_npy else line.encode())
            count += 1
            draw(count)
        if is_npy:
            # The header has room for the final number of rows.
            out.seek(0)
            _npy_header(out, (count, width))
    return count


def _npy_header(out: BinaryIO, shape: tuple[int, int]) -> None:
    from numpy.lib import format as npy

    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(out, header)
