"""Options, output, progress and file checks shared by all commands.

Results go to stdout, everything else to stderr. Progress is a bar on a terminal, a line
every ten seconds elsewhere, and nothing with ``-q``.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from . import INTERRUPTED

Decorator = Callable[[Callable[..., Any]], Any]

#: Seconds between lines of progress where there is no terminal.
SECONDS_PER_LINE = 10.0
#: Width of a progress bar, in columns.
MIN_BAR, MAX_BAR = 8, 40
#: Widest option in a help text with its description on the same line, as in click.
MAX_FORM = 30
#: Space and hyphen at which a line is not broken.
NO_BREAK, NO_BREAK_HYPHEN = "\u00a0", "\u2011"


class Number(click.ParamType):
    """Type of an option that is a number within limits.

    Args:
        kind: ``int`` or ``float``.
        minimum: Smallest number.
        maximum: Largest number.
        above: Number that all are larger than, instead of ``minimum``.

    Example:
        >>> Number(int, 1, 16).rule, Number(float, above=0).rule
        ('an integer from 1 to 16', 'a number above 0')
    """

    name = "n"

    def __init__(
        self,
        kind: type[int] | type[float],
        minimum: float = -math.inf,
        maximum: float = math.inf,
        *,
        above: float = -math.inf,
    ) -> None:
        self.kind = kind
        self.minimum, self.maximum, self.above = minimum, maximum, above
        noun = "an integer" if kind is int else "a number"
        if math.isfinite(above):
            self.rule = f"{noun} above {above}"
        elif math.isinf(maximum):
            self.rule = f"{noun} of at least {minimum}"
        else:
            self.rule = f"{noun} from {minimum} to {maximum}"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """Return the number, or raise a UsageError that names the option."""
        option = param.opts[-1] if param is not None else "value"
        try:
            number = self.kind(value)
        except ValueError:
            raise click.UsageError(
                f"{option} must be {self.rule}, got {value!r}", ctx
            ) from None
        if not (self.minimum <= number <= self.maximum and self.above < number < math.inf):
            raise click.UsageError(f"{option} must be {self.rule}, got {number}", ctx)
        return number


#: Type of options that count something.
COUNT = Number(int, 1)


def value_option(name: str, default: Any, help: str, **settings: Any) -> Decorator:
    """Return a click option that shows its default in the help text."""
    return click.option(name, default=default, show_default=True, help=help, **settings)


seed_option = value_option("--seed", 0, "Seed of all random draws.", type=Number(int, 0))
force_option = click.option("--force", is_flag=True, help="Replace existing output.")


class HelpfulCommand(click.Command):
    """Command whose help has sections, and breaks no line within a name or default.

    Args:
        sections: Names of options by heading, separated by spaces. The heading of all
            others is ``Options``.
    """

    def __init__(self, *args: Any, sections: dict[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and what they do, each default on one line."""
        records: dict[str, tuple[str, str]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if isinstance(option, click.Option) and record is not None:
                records[str(option.name)] = record
        width = min(MAX_FORM, max(len(form) for form, _ in records.values()))
        # Two spaces before the option, and two after it.
        room = formatter.width - width - 4
        sections = {
            heading: [records.pop(name) for name in names.split()]
            for heading, names in self.sections.items()
        }
        for heading, rows in (sections | {"Options": list(records.values())}).items():
            with formatter.section(heading):
                # The descriptions of all sections are aligned.
                formatter.write_dl([
                    (form.ljust(width), _unbroken(does, room)) for form, does in rows
                ])
        plain = {ord(NO_BREAK): " ", ord(NO_BREAK_HYPHEN): "-"}
        formatter.buffer = [text.translate(plain) for text in formatter.buffer]


def _unbroken(does: str, room: int) -> str:
    """Return a description with names and its default unbroken.

    A default that is longer than a line of ``room`` columns is broken at spaces.
    """
    does = re.sub(r"(?<=\w)-(?=\w)", NO_BREAK_HYPHEN, does)
    return re.sub(
        r"\[default: .{1,24}\]$",
        lambda found: (
            found[0].replace(" ", NO_BREAK) if len(found[0]) <= room else found[0]
        ),
        does,
    )


def cli_command(*, examples: str, sections: dict[str, str] | None = None) -> Decorator:
    """Turn a function into the click command of its module, with ``--json`` and ``-q``.

    The function also takes ``as_json`` and ``quiet``. Its docstring is the help text.

    Args:
        examples: Example command lines for the end of the help text.
        sections: Names of options by heading of the help text, separated by spaces; None
            for one list.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        lines = [line.strip() for line in examples.strip().splitlines()]
        for option in (
            click.option("-q", "--quiet", is_flag=True, help="Print only the result."),
            click.option(
                "--json", "as_json", is_flag=True, help="Print the result as JSON."
            ),
        ):
            function = option(function)
        return click.command(
            function.__module__.rpartition(".")[2],
            cls=HelpfulCommand,
            sections=sections or {},
            epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines),
            context_settings={"help_option_names": ["-h", "--help"]},
        )(function)

    return decorate


def emit(result: Any, text: str | Iterable[str], *, as_json: bool) -> None:
    """Print a result to stdout as JSON or as text.

    Args:
        result: A dataclass or JSON value; arrays and NumPy scalars are converted.
        text: The result as text, whole or in lines.
        as_json: Print JSON instead of text.
    """
    if as_json:
        click.echo(json_text(plain(result), indent=2))
    else:
        lines = text.splitlines() if isinstance(text, str) else text
        click.echo("".join(f"{printable(line)}\n" for line in lines), nl=False)


def json_text(value: Any, *, indent: int | None = None) -> str:
    r"""Return a JSON value as text, with characters that are not printable escaped.

    Example:
        >>> json_text("café\u009b2J")
        '"café\\u009b2J"'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    # Outside of strings, the only characters that are not printable are line feeds.
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def printable(line: str) -> str:
    r"""Return a line with control characters escaped.

    Example:
        >>> printable("a name\x1b[2J")
        'a name\\x1b[2J'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in line
    )


def counted(count: int, noun: str) -> str:
    """Return a count with a noun in the right number.

    Example:
        >>> counted(1, "file"), counted(2000, "file")
        ('1 file', '2,000 files')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plain(value: Any) -> Any:
    """Return ``value`` as a JSON value; non-finite numbers become null.

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
    # Arrays and NumPy scalars, without importing NumPy.
    return plain(value.tolist())


def columns(rows: Iterable[Sequence[Any]], *, head: Sequence[str] = ()) -> list[str]:
    """Return rows as lines with aligned columns, numbers aligned right.

    Example:
        >>> columns([("a", 1), ("bc", 20)], head=["word", "n"])
        ['word   n', 'a      1', 'bc    20']
        >>> columns([("語", 1), ("word", 20)])
        ['語     1', 'word  20']
    """
    from rich.cells import cell_len

    rows = [list(row) for row in rows]
    cells = [[str(cell) for cell in row] for row in ([list(head)] if head else []) + rows]
    if not cells:
        return []
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    right = [
        bool(rows)
        and all(isinstance(row[i], int | float) or _numeric(row[i]) for row in rows)
        for i in range(len(widths))
    ]
    return [
        "  ".join(
            (" " * (width - cell_len(cell)) + cell)
            if to_right
            else (cell + " " * (width - cell_len(cell)))
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]


def _numeric(cell: Any) -> bool:
    """Return whether a cell is a number, with an optional unit or share, or missing."""
    number = r"[-+]?[\d,]+(\.\d+)?( [kMGT]?B| \(\d+\.\d+\))?|–"
    return re.fullmatch(number, str(cell)) is not None


def amount(size: int) -> str:
    """Return a number of bytes with a unit.

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


class InterruptedCommand(click.ClickException):
    """Ctrl-C in a command that kept a part of its work."""

    exit_code = INTERRUPTED


def say(text: str, *, quiet: bool) -> None:
    """Print a message to stderr unless ``quiet``."""
    if not quiet:
        click.echo(printable(text), err=True)


@contextlib.contextmanager
def progress(
    what: str, *, total: float | None = None, quiet: bool
) -> Generator[Callable[..., None], None, None]:
    """Report progress on stderr unless ``quiet``: a bar on a terminal, otherwise lines.

    Yields a function of the completed amount, with an optional ``note`` shown after it, and
    an optional ``what`` in earlier phases of the work.
    """
    if quiet:
        yield lambda done, note="", what="": None
    elif not sys.stderr.isatty():
        yield _lines_of_progress(what, total)
    else:
        with _bar(what, total) as draw:
            yield draw


def _lines_of_progress(what: str, total: float | None) -> Callable[..., None]:
    """Return a function that prints a line now and then, for logs."""
    due = time.monotonic() + SECONDS_PER_LINE

    def draw(done: float, note: str = "", what: str = what) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + SECONDS_PER_LINE
        amount = f"{done:,.0f}" if total is None else f"{done / max(total, 1e-9):.0%}"
        say(", ".join(filter(None, [f"{what} {amount}", note])), quiet=False)

    return draw


@contextlib.contextmanager
def _bar(what: str, total: float | None) -> Generator[Callable[..., None], None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    # Rich drops columns that do not fit. The bar gives way to the note down to its least
    # width, then the note is cut.
    room = console.width - len(what) - len(" 100 % 0:00:00  ")
    bar_column = BarColumn(bar_width=max(MIN_BAR, min(MAX_BAR, room)))
    of_total = (
        bar_column,
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(
        TextColumn("{task.description}"),
        *(of_total if total is not None else [TextColumn("{task.completed:,}")]),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=True,
    )
    task = bar.add_task(what, total=total, note="")
    phase = what

    def draw(done: float, note: str = "", what: str = what) -> None:
        nonlocal phase
        if what != phase:
            # The time left is that of the phase.
            phase = what
            bar.reset(task, description=what)
        bar_column.bar_width = max(MIN_BAR, min(MAX_BAR, room - len(note) - 1))
        left = max(0, room - bar_column.bar_width - 1)
        # Parts of a note are separated by commas.
        while note and len(note) > left:
            note = note.rpartition(", ")[0]
        bar.update(task, completed=done, note=note)
        bar.start()  # started late, so that earlier messages keep their own lines

    try:
        yield draw
    finally:
        bar.stop()


def check_output(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Return ``path`` if it can be written: it is new or forced, in a writable folder.

    Called before long work starts, and again before writing.
    """
    # No option replaces these, so none is suggested.
    if os.path.isdir(path):
        raise click.ClickException(f"{os.fspath(path)} is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise click.ClickException(f"{os.fspath(path)} is a device or pipe")
    if os.path.lexists(path) and not force:
        raise click.ClickException(f"{os.fspath(path)} exists; use --force to replace it")
    from ..files.atomic import check_writable

    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise click.ClickException(f"no folder {folder} to write {os.fspath(path)} in")
    check_writable(folder)
    return Path(path)


def check_output_folder(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Return ``path`` if a folder of vectors can be written there.

    The folder is new or empty, or forced and a folder of vectors.
    """
    from ..vector_files.folder import check_output_folder as check

    if os.path.isdir(path) and os.listdir(path) and not force:
        # Raises for a folder that is not replaced in any case.
        check(path, replace=True)
        raise click.ClickException(f"{os.fspath(path)} exists; use --force to replace it")
    check(path, replace=force)
    return Path(path)
