"""What every verb does alike: its options, its output, its progress, its files.

Data goes to stdout, everything else to stderr, and only if it is wanted there: progress is
drawn on a terminal alone and never with ``-q``.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Any]

seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The same seed gives the same result.",
)
force_option = click.option("--force", is_flag=True, help="Replace what is there already.")


def verb(*, examples: str) -> Decorator:
    """Make a function the click command of its module, with ``--json`` and ``-q``.

    The function takes ``as_json`` and ``quiet`` beside its own arguments. Its docstring is
    the help.

    Args:
        examples: Lines for the end of the help, as they should be typed.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        lines = [line.strip() for line in examples.strip().splitlines()]
        for option in (
            click.option("-q", "--quiet", is_flag=True, help="Print the result alone."),
            click.option(
                "--json", "as_json", is_flag=True, help="Print the result as JSON."
            ),
        ):
            function = option(function)
        return click.command(
            function.__module__.rpartition(".")[2],
            epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines),
            context_settings={"help_option_names": ["-h", "--help"]},
        )(function)

    return decorate


def emit(result: Any, text: str | Iterable[str], *, as_json: bool) -> None:
    """Print a result to stdout: as JSON, or the text that a reader would rather have.

    Args:
        result: A dataclass, or what JSON can say; arrays and NumPy's numbers too.
        text: The same for people, whole or in lines.
        as_json: Which of the two.
    """
    if as_json:
        click.echo(json.dumps(plain(result), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        lines = text.splitlines() if isinstance(text, str) else text
        click.echo("\n".join(map(printable, lines)))


def printable(line: str) -> str:
    r"""Return a line in which nothing can move a terminal's cursor.

    Example:
        >>> printable("a name\x1b[2J")
        'a name\\x1b[2J'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in line
    )


def counted(count: int, what: str) -> str:
    """Return a number of things in words.

    Example:
        >>> counted(1, "file"), counted(2000, "file")
        ('1 file', '2,000 files')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can say it; numbers that are not finite become null.

    Example:
        >>> plain({"path": Path("a"), "loss": float("nan"), "ids": (1, 2)})
        {'path': 'a', 'loss': None, 'ids': [1, 2]}
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case os.PathLike():
            return os.fspath(value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    # Arrays and their scalars, without importing NumPy to ask.
    return plain(value.tolist())


def columns(rows: Iterable[Sequence[Any]], *, head: Sequence[str] = ()) -> list[str]:
    """Return rows as lines whose columns stand under each other, numbers to the right.

    Example:
        >>> columns([("a", 1), ("bc", 20)], head=["word", "n"])
        ['word   n', 'a      1', 'bc    20']
    """
    rows = [list(row) for row in rows]
    cells = [[str(cell) for cell in row] for row in ([list(head)] if head else []) + rows]
    if not cells:
        return []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [
        bool(rows)
        and all(isinstance(row[i], int | float) or _numeric(row[i]) for row in rows)
        for i in range(len(widths))
    ]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]


def _numeric(cell: Any) -> bool:
    """Tell whether a cell is a number, one with its unit or its share, or missing."""
    number = r"[-+]?[\d,]+(\.\d+)?( [kMGT]?B| \(\d+\.\d+\))?|–"
    return re.fullmatch(number, str(cell)) is not None


def amount(size: int) -> str:
    """Return a number of bytes as people say it.

    Example:
        >>> amount(999), amount(10_240_000), amount(9_880_928_256)
        ('999 B', '10.2 MB', '9.88 GB')
    """
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"


def say(text: str, *, quiet: bool) -> None:
    """Print a remark to stderr, unless it should be quiet."""
    if not quiet:
        click.echo(text, err=True)


@contextlib.contextmanager
def progress(
    what: str, *, total: float | None = None, quiet: bool
) -> Generator[Callable[..., None], None, None]:
    """Draw how far something is: on stderr, if that is a terminal, and not if quiet.

    Yields a function of how much is done, which may also be given ``note``, a few words to
    stand beside the bar (``1.2M tokens/s, loss 0.31``).

    Args:
        what: The work, a word or two.
        total: How much there is to do; None if nobody knows.
        quiet: Draw nothing.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    of_total = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(
        TextColumn("{task.description}"),
        *(of_total if total is not None else [TextColumn("{task.completed:,}")]),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=total, note="")

    def draw(done: float, note: str = "") -> None:
        bar.update(task, completed=done, note=note)
        bar.start()  # here, so that what is said before stands on lines of its own

    try:
        yield draw
    finally:
        bar.stop()


def free_to_write(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Return ``path`` if nothing is there or ``force`` says to replace it.

    Its folder must be there and writable. To be asked before long work begins, and once
    more when it is written.
    """
    if os.path.lexists(path) and not force:
        raise click.ClickException(f"{os.fspath(path)} exists; --force replaces it")
    from ..word_vectors.folder import check_writable

    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise click.ClickException(f"no folder {folder} to write {os.fspath(path)} in")
    check_writable(folder)
    return Path(path)
