"""``firstlayer map``: a table as a map in an HTML page."""

import os
import time
from pathlib import Path

import click

from ._output import (
    COUNT,
    amount,
    check_output,
    cli_command,
    emit,
    force_option,
    progress,
    say,
    seed_option,
    value_option,
)

EXAMPLES = """
firstlayer map vectors                   writes map.html
firstlayer map model_dir -o tokens.html --max-rows 100000
firstlayer map bert/ --positions         similarity of the position rows
"""


@cli_command(examples=EXAMPLES)
@click.argument("table")
@click.option(
    "-o",
    "--output",
    default="map.html",
    show_default=True,
    metavar="PATH",
    help="Page to write.",
)
@value_option("--max-rows", 30_000, "Largest number of rows on the map.", type=COUNT)
@click.option("--positions", is_flag=True, help="Show the position rows of a checkpoint.")
@seed_option
@force_option
def command(
    table: str,
    output: str,
    max_rows: int,
    positions: bool,
    seed: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Draw TABLE as a map with similar words close together, in one HTML file.

    The page works offline, can be searched and zoomed, and shows the nearest words of a
    word or of a sum of words. TABLE is anything that firstlayer neighbors reads. The first
    rows are shown, in most tables those of frequent words. Every pair of rows is compared:
    30,000 rows take seconds, 100,000 rows a few minutes.
    """
    path = check_output(output, force=force)
    begin = time.perf_counter()
    if positions:
        page, rows = _positions(table)
    else:
        page, rows = _words(table, max_rows=max_rows, seed=seed, quiet=quiet)
    from ..files.atomic import replacing

    check_output(path, force=force)
    with replacing(os.path.realpath(path)) as file:
        file.write(page.encode())
    seconds = time.perf_counter() - begin
    size = len(page.encode())
    result = {"path": str(path), "rows": rows, "bytes": size, "seconds": round(seconds, 1)}
    say(f"took {seconds:.1f} s", quiet=quiet)
    emit(result, f"{path}: {rows:,} rows, {amount(size)}", as_json=as_json)


def _words(table: str, *, max_rows: int, seed: int, quiet: bool) -> tuple[str, int]:
    from ..analysis.map_page import map_page
    from ..analysis.table_map import table_map
    from ..word_vectors.vectors import open_vectors

    vectors = open_vectors(table)
    parts = ("neighbors", "layout")
    with progress("drawing", total=len(parts), quiet=quiet) as draw:
        found = table_map(
            vectors,
            max_rows=max_rows,
            seed=seed,
            report=lambda part, share: draw(parts.index(part) + share, part),
        )
    return map_page(found, title=_name(table)), len(found.words)


def _positions(table: str) -> tuple[str, int]:
    from ..analysis.map_page import positions_page
    from ..analysis.position_rows import position_rows

    found = position_rows(table)
    return positions_page(found, title=_name(table)), len(found.norms)


def _name(path: str) -> str:
    return Path(path).resolve().name
