"""``firstlayer convert``: write a table in another format."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._output import (
    check_output,
    check_output_folder,
    cli_command,
    counted,
    emit,
    force_option,
    progress,
    say,
)

if TYPE_CHECKING:
    from ..stores import RowStore
    from ..vector_files.writing import Written

EXAMPLES = """
firstlayer convert model.safetensors table.safetensors --format int8
firstlayer convert model.gguf table.safetensors --format bfloat16
firstlayer convert glove.6B.300d.txt glove    a folder, which opens faster
firstlayer convert vectors vectors.bin        for gensim
firstlayer convert vectors vectors.tsv        for TensorBoard's projector
"""
#: Row formats that can be written.
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4", "fp8", "fp8_block")
#: Copied from :mod:`firstlayer.vector_files.writing`, so that help needs no import.
KINDS = ("folder", "word2vec", "word2vec-binary", "glove", "tsv", "npy", "parquet")
SAFETENSORS = "safetensors"


@cli_command(examples=EXAMPLES)
@click.argument("file")
@click.argument("output")
@click.option(
    "--to",
    type=click.Choice([SAFETENSORS, *KINDS]),
    help="Kind of OUTPUT.  [default: by its name]",
)
@click.option(
    "--format",
    metavar="NAME",
    type=click.Choice(FORMATS),
    help="Rows of a .safetensors file: float32, float16, bfloat16, int8, int4, fp8 or "
    "fp8_block.  [default: as in FILE]",
)
@click.option("--tensor", metavar="NAME", help="Name of the table, if FILE has several.")
@click.option(
    "--interleave/--no-interleave",
    default=True,
    help="Store the scales of a row next to its values.  [default: --interleave]",
)
@force_option
def command(
    file: str,
    output: str,
    to: str | None,
    format: str | None,
    tensor: str | None,
    interleave: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the table in FILE to OUTPUT, in another format.

    FILE is a table as for firstlayer neighbors. OUTPUT is one of these, by its name or by
    --to:

    \b
      x.safetensors  rows only, in any --format
      x              a folder that model2vec and sentence-transformers open
      x.txt, x.vec   word2vec's text, or GloVe's with --to glove; .gz too
      x.bin          word2vec's binary format
      x.tsv          with the words in x.metadata.tsv
      x.npy          with the words in x.vocab.txt
      x.parquet      columns word and vector, if pyarrow is installed

    Rows of safetensors, GGUF, .npy and binary word2vec files are read in place for a
    .safetensors file, so the table may be larger than memory.
    """
    if to is None:
        to = _kind(output)
    if Path(os.path.realpath(output)) == Path(os.path.realpath(file)):
        raise click.UsageError(f"OUTPUT must not be FILE, got {output!r} twice")
    if os.path.exists(output) and Path(os.path.realpath(output)).is_relative_to(
        os.path.realpath(file)
    ):
        raise click.UsageError(f"OUTPUT must not replace a file of FILE, got {output!r}")
    if to == SAFETENSORS:
        if not output.endswith(".safetensors"):
            raise click.UsageError(f"OUTPUT must end in .safetensors, got {output!r}")
        check_output(output, force=force)
        found, text = _write_rows(
            file, output, format, tensor, interleave=interleave, quiet=quiet
        )
        emit(found, text, as_json=as_json)
        return
    for name, value in (("--format", format), ("--tensor", tensor)):
        if value is not None:
            raise click.UsageError(f"{name} needs a .safetensors OUTPUT, got {output!r}")
    written = _write_words(file, output, to, force=force, quiet=quiet)
    _tell(written, to, quiet=quiet)
    text = f"{', '.join(written.files)}: {counted(written.rows, 'row')} of {written.width}"
    emit(
        {
            "path": output,
            "files": written.files,
            "shape": (written.rows, written.width),
            "format": to,
            "left_out": len(written.left_out),
            "duplicates": written.duplicates,
        },
        text,
        as_json=as_json,
    )


def _kind(output: str) -> str:
    from ..vector_files.writing import SUFFIXES, format_of

    if output.endswith(".safetensors"):
        return SAFETENSORS
    kind = format_of(output)
    if kind is None:
        names = ", ".join([".safetensors", *SUFFIXES])
        raise click.UsageError(
            f"OUTPUT must be a folder or end in one of {names}, got {output!r}: name its "
            "kind with --to"
        )
    return kind


def _write_rows(
    file: str,
    output: str,
    format: str | None,
    tensor: str | None,
    *,
    interleave: bool,
    quiet: bool,
) -> tuple[dict[str, Any], str]:
    with (
        _opened(file, tensor) as store,
        progress("converting", total=float(len(store)), quiet=quiet) as draw,
    ):
        converted = store.convert(
            output,
            format=format,
            interleave=interleave,
            progress=lambda done, total: draw(done),
        )
        with converted:
            found = {
                "path": output,
                "shape": converted.shape,
                "format": converted.format.name,
                "bytes": converted.nbytes,
                "bytes_before": store.nbytes,
            }
    rows, width = found["shape"]
    text = (
        f"{output}: {counted(rows, 'row')} of {width} in {found['format']}, "
        f"{found['bytes']:,} bytes (before: {found['bytes_before']:,})"
    )
    return found, text


def _opened(file: str, tensor: str | None) -> "RowStore":
    """Return the rows of a file, in place if its format allows it."""
    from ..stores import MemoryStore
    from ..vector_files.reading import read_rows
    from ..vector_files.rows import open_in_place

    store = open_in_place(Path(file), tensor)
    if store is not None:
        return store
    if tensor is not None:
        raise ValueError(f"{file} has one table without a name, but tensor is {tensor!r}")
    return MemoryStore(read_rows(file))


def _write_words(file: str, output: str, to: str, *, force: bool, quiet: bool) -> "Written":
    from ..vector_files.reading import read_vectors
    from ..vector_files.writing import files_of, has_all_ngrams, write_vectors

    check = check_output_folder if to == "folder" else check_output
    for path in files_of(output, to):
        check(path, force=force)
    table = read_vectors(file)
    is_kept = to == "folder" and has_all_ngrams(table)
    if table.subwords is not None and not is_kept:
        say("rows of character n-grams are left out", quiet=quiet)
    rows = float(len(table.words))
    with progress("converting", total=rows, quiet=quiet) as draw:
        return write_vectors(table, output, to, replace=force, report=draw)


def _tell(written: "Written", to: str, *, quiet: bool) -> None:
    spelled = sorted({word for word in written.left_out if word})
    nameless = len(written.left_out) - sum(map(bool, written.left_out))
    if spelled:
        some = ", ".join(map(repr, spelled[:3])) + (", …" if len(spelled) > 3 else "")
        words = counted(len(written.left_out) - nameless, "word")
        say(f"{words} left out, which {to} cannot hold: {some}", quiet=quiet)
    if nameless:
        say(f"{counted(nameless, 'row')} without a word left out", quiet=quiet)
    if written.duplicates:
        rows = counted(written.duplicates, "row")
        say(f"{rows} left out, whose words occur before", quiet=quiet)
