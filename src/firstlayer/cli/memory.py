"""``firstlayer memory``: what a table costs to train and to keep."""

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from ._figures import FORMATS, checked_picture, picture_option, write_picture
from ._output import amount, columns, emit, force_option, progress, verb

if TYPE_CHECKING:
    from ..analysis.memory import Footprint, PositionTable

#: As in :mod:`firstlayer.analysis.memory`, which is not imported for a page of help.
DTYPES = ("float64", "float32", "float16", "bfloat16")
OPTIMIZERS = (
    "sgd",
    "adagrad",
    "rmsprop",
    "adamw",
    "row-sgd",
    "row-adagrad",
    "rowwise-adagrad",
    "row-rmsprop",
    "row-lion",
    "row-adamw",
)
PARTS = ("parameters", "gradient", "state", "activations", "total")
USUAL = ("sgd", "adamw", "row-adamw", "rowwise-adagrad")
EXAMPLES = """
firstlayer memory                                four usual sizes
firstlayer memory 250000x1024 --dtype bfloat16 --optimizer adamw --optimizer row-adamw
firstlayer memory model.safetensors --tokens 8192
firstlayer memory --plot memory.png
"""


@verb(examples=EXAMPLES)
@click.argument("tables", nargs=-1, metavar="[ROWSxWIDTH|PATH]...")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Of the table; may be repeated.  [default: float32, a checkpoint's its own]",
)
@click.option(
    "--optimizer",
    "optimizers",
    type=click.Choice(OPTIMIZERS),
    multiple=True,
    help=f"What trains the table; may be repeated.  [default: {', '.join(USUAL)}]",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Ids in a batch.",
)
@click.option(
    "--head-dim",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Width of a head, for rotary positions.",
)
@click.option(
    "--allow",
    type=click.FloatRange(min=0.0),
    default=2.0,
    show_default=True,
    metavar="GB",
    help="Memory that measuring may take.",
)
@picture_option(*FORMATS)
@force_option
def command(
    tables: tuple[str, ...],
    dtypes: tuple[str, ...],
    optimizers: tuple[str, ...],
    tokens: int,
    head_dim: int,
    allow: float,
    picture: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Count what tables cost to train: parameters, gradient, optimizer state, activations.

    A table is given by its size, or by a safetensors file or a folder that holds it. Bytes
    are "allocated" if they were counted while a training step ran, "virtual" if it ran on
    tensors without memory, and "computed" if they follow from the sizes alone. Optimizers
    named row- take the gradient of the rows in the batch alone. A second table compares
    what position schemes keep.
    """
    format = checked_picture(picture, force=force)
    from ..analysis import memory, plot

    found, wanted = (
        [],
        [
            (table, dtype, optimizer)
            for table in _wanted(tables)
            for dtype in dtypes or (table.dtype,)
            for optimizer in optimizers or USUAL
        ],
    )
    kept = memory.position_tables(wanted[0][0].width, head_dim=head_dim)
    with progress("tables", total=len(wanted), quiet=quiet) as tell:
        for table, dtype, optimizer in wanted:
            cost = memory.footprint(
                table.rows,
                table.width,
                name=table.name,
                dtype=dtype,
                optimizer=optimizer,
                tokens=tokens,
                allowed=round(allow * 1e9),
            )
            found.append(cost)
            tell(len(found))
    if picture and format:
        write_picture(picture, plot.render(plot.memory(found), format), force=force)
    lines = [
        *_costs(found),
        "",
        f"positions of width {wanted[0][0].width:,}, rotary on heads of {head_dim}:",
        *_positions(kept),
    ]
    emit({"tables": found, "positions": kept}, lines, as_json=as_json)


class Table(NamedTuple):
    """A table that was asked for."""

    name: str
    rows: int
    width: int
    dtype: str = "float32"


def _wanted(tables: tuple[str, ...]) -> Iterator[Table]:
    """Yield the tables that arguments name, those of usual sizes without any."""
    from ..analysis.memory import SCENARIOS

    if not tables:
        for name, (rows, width) in SCENARIOS.items():
            yield Table(name, rows, width)
    for argument in tables:
        size = re.fullmatch(r"([0-9][0-9_,]*)[x×]([0-9][0-9_,]*)", argument)
        if size and not os.path.lexists(argument):
            rows, width = (int(re.sub("[_,]", "", part)) for part in size.groups())
            if not rows or not width:
                raise click.UsageError(
                    f"a table must have rows and width, got {argument!r}"
                )
            yield Table("", rows, width)
        else:
            yield from _in_checkpoint(argument)


def _in_checkpoint(path: str) -> Iterator[Table]:
    from ..files.checkpoint import DTYPES as CODES
    from ..files.checkpoint import open_checkpoint

    tables = [table for table in open_checkpoint(path).tables() if all(table.shape)]
    if not tables:
        raise click.ClickException(f"{path} has no embedding table")
    for table in tables:
        dtype = CODES[table.dtype]
        rows, width = table.shape
        # What is kept in eight bits is not trained in them.
        yield Table(table.name, rows, width, dtype if dtype in DTYPES else "bfloat16")


def _costs(found: list["Footprint"]) -> list[str]:
    rows = [
        (
            " ".join(filter(None, [cost.name, f"{cost.rows:,} × {cost.width:,}"])),
            cost.dtype,
            cost.optimizer,
            *(amount(getattr(cost.best, part)) for part in PARTS),
            cost.how or "computed",
        )
        for cost in found
    ]
    return columns(rows, head=["table", "dtype", "optimizer", *PARTS, "how"])


def _positions(kept: tuple["PositionTable", ...]) -> list[str]:
    rows = [
        (
            table.scheme,
            f"{table.length:,}",
            amount(table.kept),
            amount(table.trained),
            amount(table.whole),
        )
        for table in kept
    ]
    head = ["scheme", "length", "kept", "gradient and adamw", "with a row for each"]
    return columns(rows, head=head)
