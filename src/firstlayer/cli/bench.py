"""``firstlayer bench``: time lookups against other libraries."""

from typing import TYPE_CHECKING, Any

import click

from ._figures import FORMATS, checked_picture, picture_option, write_picture
from ._output import (
    COUNT,
    cli_command,
    columns,
    counted,
    emit,
    force_option,
    progress,
    seed_option,
    value_option,
)

if TYPE_CHECKING:
    from ..analysis.lookup import Lookups

EXAMPLES = """
firstlayer bench            four numbers of rows and of ids, three widths
firstlayer bench --rows 250000 --width 1024
firstlayer bench --plot lookups.png
"""


@cli_command(examples=EXAMPLES)
@click.option(
    "--rows",
    type=COUNT,
    multiple=True,
    help="Number of rows; may be repeated.  [default: 1000, 10000, 100000, 400000]",
)
@click.option(
    "--batch",
    "batches",
    type=COUNT,
    multiple=True,
    help="Sequences per lookup; may be repeated.  [default: 1, 16, 64, 256]",
)
@click.option(
    "--width",
    "widths",
    type=COUNT,
    multiple=True,
    help="Width of each row; may be repeated.  [default: 64, 256, 1024]",
)
@value_option("--length", 128, "Ids per sequence.", type=COUNT)
@value_option("--rounds", 5, "Timed rounds per library.", type=COUNT)
@seed_option
@picture_option(*FORMATS)
@force_option
def command(
    rows: tuple[int, ...],
    batches: tuple[int, ...],
    widths: tuple[int, ...],
    picture: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **sizes: Any,
) -> None:
    """Time lookups of float32 rows.

    Rows, batch and width vary one at a time, while the others have their middle
    values. The plot shows how the time grows with each.

    Prints the speed of each library in million tokens per second and, in parentheses, the
    used fraction of the memory bandwidth; above 1, rows come from the cache. Libraries that
    are not installed are omitted.
    """
    format = checked_picture(picture, force=force)
    from ..analysis import lookup, plot

    with progress("lookups", total=1.0, quiet=quiet) as draw:
        found = lookup.measure(
            rows or lookup.ROWS,
            batches=batches or lookup.BATCHES,
            widths=widths or lookup.WIDTHS,
            progress=lambda done, total: draw(done / total),
            **sizes,
        )
    if picture and format:
        write_picture(picture, plot.render(plot.lookups(found), format), force=force)
    emit(found.as_dict(), _lines(found), as_json=as_json)


def _lines(found: "Lookups") -> list[str]:
    libraries = list(dict.fromkeys(reading.library for reading in found.readings))
    cells: dict[tuple[str, ...], list[str]] = {}
    for reading in found.readings:
        table = f"{reading.rows:,}", f"{reading.width:,}"
        key = *table, f"{reading.batch} × {reading.length}"
        speed = f"{reading.tokens_per_second / 1e6:.2f} ({found.fraction(reading):.2f})"
        cells.setdefault(key, []).append(speed)
    rows = [(*key, *speeds) for key, speeds in cells.items()]
    lines = columns(rows, head=["rows", "width", "ids", *libraries])
    lines += ["", "million tokens per second (fraction of the memory bandwidth);"]
    used = counted(found.threads, "thread")
    lines.append(f"memory bandwidth: {found.bandwidth / 1e9:.1f} GB/s with {used}")
    missing = [name for name in found.missing if not name.startswith("firstlayer.")]
    lines += [f"{name} is not installed" for name in missing]
    return lines
