"""The ``--plot`` option."""

import importlib.util
import os
from pathlib import Path

import click

from ._output import check_output

FORMATS = ("png", "svg", "pdf")


def picture_option(*formats: str):
    """Return the ``--plot`` option for these file formats."""
    names = [f".{format}" for format in formats]
    return click.option(
        "--plot",
        "picture",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help=f"Plot the result to a file: {', '.join(names[:-1])} or {names[-1]}.",
    )


def checked_picture(
    path: str | None, *, force: bool, formats: tuple[str, ...] = FORMATS
) -> str | None:
    """Return the format of the plot, or None without a path.

    Called before long work starts. Checks the file name, the folder, existing files and
    whether matplotlib is installed.
    """
    if path is None:
        return None
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in formats:
        names = ", ".join(f".{format}" for format in formats)
        raise click.UsageError(
            f"--plot must end in one of {names}, got {path!r}", click.get_current_context()
        )
    check_output(path, force=force)
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")
    return suffix


def write_picture(path: str, data: bytes, *, force: bool) -> None:
    """Write a plot atomically."""
    from ..files.atomic import replacing

    check_output(path, force=force)
    with replacing(os.path.realpath(path)) as file:
        file.write(data)
