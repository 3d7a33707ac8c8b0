"""``firstlayer warmup``: compile the kernels before they are needed."""

import click

from ._output import amount, cli_command, counted, emit, progress

#: Copied from :mod:`firstlayer._warmup`, so that help needs no import.
DTYPES = ("float32", "float16", "bfloat16", "float64")
EXAMPLES = """
firstlayer warmup                           kernels of float32
firstlayer warmup --dtype float32 --dtype bfloat16
NUMBA_CACHE_DIR=/opt/kernels firstlayer warmup
"""


@cli_command(examples=EXAMPLES)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Dtype of the tables; may be repeated.  [default: float32]",
)
def command(dtypes: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Compile the kernels of layers and row optimizers that are not in the cache.

    Kernels are otherwise compiled by the first process that calls them. The cache is in
    NUMBA_CACHE_DIR if that is set; otherwise next to the installed package, or in your
    cache folder if the package's folder cannot be written.
    """
    from .. import warmup

    with progress("kernels", total=1.0, quiet=quiet) as draw:
        done = warmup(
            dtypes or ("float32",),
            progress=lambda count, total, name: draw(count / total, note=name),
        )
    if done.compiled:
        first = f"compiled {counted(done.compiled, 'kernel')} in {done.seconds:.1f} s"
    else:
        first = "nothing to compile: all kernels are in the cache"
    where = done.folder or "no folder: none can be written"
    emit(done, [first, f"cache: {where}, {amount(done.cache_bytes)}"], as_json=as_json)
