"""``firstlayer convert``: write a table in another format."""

import click

from ._output import check_output, cli_command, emit, force_option, progress

EXAMPLES = """
firstlayer convert model.safetensors table.safetensors --format int8
firstlayer convert model.gguf table.safetensors --format bfloat16
firstlayer convert vectors.bin table.safetensors
"""


@cli_command(examples=EXAMPLES)
@click.argument("file")
@click.argument("output")
@click.option(
    "--format",
    metavar="NAME",
    help="float32, float16, bfloat16, int8, int4, fp8 or fp8_block.  [default: as in FILE]",
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
    format: str | None,
    tensor: str | None,
    interleave: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the table in FILE to OUTPUT, a .safetensors file, in another format.

    FILE is a safetensors file, an index or folder of a sharded checkpoint, a GGUF file, a
    .npy file, or a binary word2vec file. Rows are read in place, so the table may be larger
    than memory.
    """
    if not output.endswith(".safetensors"):
        raise click.UsageError(f"OUTPUT must end in .safetensors, got {output!r}")
    check_output(output, force=force)
    from ..stores import open_store

    with open_store(file, tensor) as store:
        with progress("converting", total=float(len(store)), quiet=quiet) as draw:
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
        f"{output}: {rows:,} rows of {width} in {found['format']}, "
        f"{found['bytes']:,} bytes (before: {found['bytes_before']:,})"
    )
    emit(found, text, as_json=as_json)
