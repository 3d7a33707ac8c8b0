"""``firstlayer memory``: measure the memory of training a table."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ._figures import FORMATS, checked_picture, picture_option, write_picture
from ._output import (
    COUNT,
    Number,
    amount,
    cli_command,
    columns,
    emit,
    force_option,
    progress,
    value_option,
)

if TYPE_CHECKING:
    from ..analysis.memory import Footprint, PositionTable

#: Copied from :mod:`firstlayer.analysis.memory`, so that help needs no import.
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
DEFAULT_OPTIMIZERS = ("sgd", "adamw", "row-adamw", "rowwise-adagrad")
EXAMPLES = """
firstlayer memory                   four common sizes
firstlayer memory 250000x1024 --dtype bfloat16 --optimizer row-adamw
firstlayer memory model.safetensors --tokens 8192
firstlayer memory --plot memory.png
"""


@cli_command(examples=EXAMPLES)
@click.argument("tables", nargs=-1, metavar="[ROWSxWIDTH|PATH]...")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Dtype; may be repeated.  [default: float32, or that of the checkpoint]",
)
@click.option(
    "--optimizer",
    "optimizers",
    type=click.Choice(OPTIMIZERS),
    multiple=True,
    metavar="NAME",
    help=f"One of {', '.join(OPTIMIZERS)}; may be repeated.  "
    f"[default: {', '.join(DEFAULT_OPTIMIZERS)}]",
)
@value_option("--tokens", 4096, "Ids per batch.", type=COUNT)
@value_option("--head-dim", 64, "Head width, for rotary positions.", type=Number(int, 2))
@value_option(
    "--allow",
    2.0,
    "Largest memory to use for measuring.",
    type=Number(float, 0),
    metavar="GB",
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
    """Measure the memory of training: parameters, gradient, optimizer state, activations.

    Tables are given by size, or by a file or folder as for firstlayer neighbors. Bytes are
    "allocated" if counted during a real training step, "virtual" if counted on tensors
    without memory, and "computed" if derived from the sizes. Row optimizers (row-…) use row
    gradients. A second table compares the memory of position schemes.
    """
    format = checked_picture(picture, force=force)
    from ..analysis import memory, plot

    costs = []
    cases = [
        (table, dtype, optimizer)
        for table in _tables(tables)
        for dtype in dtypes or (table.dtype,)
        for optimizer in optimizers or DEFAULT_OPTIMIZERS
    ]
    kept = memory.position_tables(cases[0][0].width, head_dim=head_dim)
    with progress("tables", total=len(cases), quiet=quiet) as draw:
        for table, dtype, optimizer in cases:
            cost = memory.footprint(
                table.rows,
                table.width,
                name=table.name,
                dtype=dtype,
                optimizer=optimizer,
                tokens=tokens,
                allowed=round(allow * 1e9),
            )
            costs.append(cost)
            draw(len(costs))
    if picture and format:
        write_picture(picture, plot.render(plot.memory(costs), format), force=force)
    lines = [
        *_costs(costs),
        "",
        f"positions of width {cases[0][0].width:,}, rotary on heads of {head_dim}:",
        *_positions(kept),
    ]
    emit({"tables": costs, "positions": kept}, lines, as_json=as_json)


class Table(NamedTuple):
    """Name, size and dtype of a table."""

    name: str
    rows: int
    width: int
    dtype: str = "float32"


def _tables(tables: tuple[str, ...]) -> Iterator[Table]:
    """Yield the tables named by the arguments, or common sizes without arguments."""
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
        elif os.path.lexists(argument):
            yield from _in_checkpoint(argument)
        else:
            raise FileNotFoundError(
                f"no file or folder {argument}; a size is written as ROWSxWIDTH, "
                "such as 250000x1024"
            )


def _in_checkpoint(path: str) -> Iterator[Table]:
    from ..files.checkpoint import DTYPES as CODES
    from ..files.checkpoint import open_checkpoint
    from ..vector_files.rows import is_checkpoint, open_rows

    if os.path.isfile(path) and not is_checkpoint(Path(path)):
        rows = open_rows(Path(path))
        known = rows.dtype if rows.dtype in DTYPES else "bfloat16"
        yield Table(rows.name, *rows.shape, known)
        return
    tables = [table for table in open_checkpoint(path).tables() if all(table.shape)]
    if not tables:
        raise click.ClickException(f"{path} has no embedding table")
    for table in tables:
        dtype = CODES[table.dtype]
        rows, width = table.shape
        # 8-bit tables are trained in bfloat16.
        yield Table(table.name, rows, width, dtype if dtype in DTYPES else "bfloat16")


def _costs(costs: list["Footprint"]) -> list[str]:
    """Return a heading and lines for each table, which fit into 80 columns."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for cost in costs:
        size = f"{cost.name} {cost.rows:,} × {cost.width:,}, {cost.dtype}:".lstrip()
        amounts = (amount(getattr(cost.best, part)) for part in PARTS)
        row = (cost.optimizer, *amounts, cost.how or "computed")
        tables.setdefault(size, []).append(row)
    lines = []
    for size, rows in tables.items():
        lines += ["", size, *columns(rows, head=["optimizer", *PARTS, "how"])]
    return lines[1:]


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
    head = ["scheme", "length", "buffers", "gradient + adamw", "full table"]
    return columns(rows, head=head)
