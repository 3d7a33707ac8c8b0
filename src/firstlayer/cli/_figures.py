"""The option to draw what a verb found, which three verbs share."""

import importlib.util
import os
from pathlib import Path

import click

from ._output import free_to_write

FORMATS = ("png", "svg", "pdf")


def picture_option(*formats: str):
    """Return the option ``--plot``, for files of these formats."""
    names = [f".{format}" for format in formats]
    return click.option(
        "--plot",
        "picture",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help=f"Draw the result into a file: {', '.join(names[:-1])} or {names[-1]}.",
    )


def checked_picture(
    path: str | None, *, force: bool, formats: tuple[str, ...] = FORMATS
) -> str | None:
    """Return the format of a picture that can be drawn, None if none is wanted.

    To be asked before long work: it looks at the name, at the folder, at what is there
    already and at whether matplotlib is installed.

    Args:
        path: Where to draw to, or None.
        force: Whether what is there may be replaced.
        formats: What the name may end in.
    """
    if path is None:
        return None
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in formats:
        names = ", ".join(f".{format}" for format in formats)
        raise click.UsageError(
            f"--plot must end in one of {names}, got {path!r}", click.get_current_context()
        )
    free_to_write(path, force=force)
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")
    return suffix


def write_picture(path: str, data: bytes, *, force: bool) -> None:
    """Write the bytes of a picture, all of them or none."""
    from ..files.safetensors import replacing

    free_to_write(path, force=force)
    with replacing(os.path.realpath(path)) as file:
        file.write(data)
