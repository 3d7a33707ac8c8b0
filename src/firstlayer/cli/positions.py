"""``firstlayer positions``: compare position schemes on a text."""

import sys
from typing import TYPE_CHECKING, Any

import click

from ..analysis import SCHEMES
from ._figures import FORMATS, checked_picture, picture_option, write_picture
from ._output import (
    COUNT,
    InterruptedCommand,
    Number,
    cli_command,
    columns,
    counted,
    emit,
    force_option,
    progress,
    say,
    seed_option,
)

if TYPE_CHECKING:
    from ..analysis.position_study import Setting, Study

QUICK_SCHEMES = ("none", "learned", "sinusoidal", "rotary", "alibi", "kerple")
EXAMPLES = """
firstlayer positions --quick    on Python's own source, in two minutes
firstlayer positions book.txt --plot report.html
firstlayer positions *.md --scheme rotary --scheme alibi --length 256
cat logs | firstlayer positions - --quick --json
"""


@cli_command(examples=EXAMPLES)
@click.argument("files", nargs=-1, type=click.Path(allow_dash=True))
@click.option(
    "--scheme",
    "schemes",
    type=click.Choice(SCHEMES),
    multiple=True,
    help="Scheme; may be repeated.  [default: all]",
)
@click.option("--quick", is_flag=True, help="Smaller model, six schemes, two seeds.")
@click.option("--length", type=COUNT, help="Training length in bytes.  [default: 128]")
@click.option("--steps", type=COUNT, help="Training steps.  [default: 600]")
@click.option("--layers", type=COUNT, help="Number of layers.  [default: 3]")
@click.option("--width", type=COUNT, help="Width of the model.  [default: 96]")
@click.option("--heads", type=COUNT, help="Number of heads.  [default: 4]")
@click.option("--batch", type=COUNT, help="Sequences per step.  [default: 16]")
@click.option(
    "--stretch",
    "stretches",
    type=Number(float, 1),
    multiple=True,
    help="Test at this multiple of the length; may be repeated.  [default: 1 to 8]",
)
@click.option("--seeds", type=COUNT, help="Models per scheme.  [default: 3]")
@seed_option
@picture_option(*FORMATS, "html")
@force_option
def command(
    files: tuple[str, ...],
    schemes: tuple[str, ...],
    quick: bool,
    picture: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **sizes: Any,
) -> None:
    """Compare position schemes on your text, read as bytes.

    Trains a few small causal transformers per scheme on short pieces of FILES (- is
    standard input; the default is the source of Python's standard library) and tests them
    on the same bytes with longer and longer context. Prints the average loss in nats per
    byte at each length; a scheme that extrapolates keeps its loss. Rotary is also tested
    with position interpolation (linear), NTK and YaRN, and learned positions with a resized
    table, all without retraining. Ctrl-C prints the schemes completed so far.
    """
    format = checked_picture(picture, force=force, formats=(*FORMATS, "html"))
    setting = _setting(quick, sizes)
    schemes = tuple(dict.fromkeys(schemes)) or (QUICK_SCHEMES if quick else SCHEMES)
    text = _text(files)
    say(_plan(schemes, setting, len(text)), quiet=quiet)
    found = _compare(text, schemes, setting=setting, quiet=quiet)
    if picture and format:
        write_picture(picture, _rendered(found, format), force=force)
    emit(found.as_dict(), _lines(found), as_json=as_json)
    if left := schemes[len(found.trained) :]:
        raise InterruptedCommand(f"interrupted before {', '.join(left)}")


def _setting(quick: bool, sizes: dict[str, Any]) -> "Setting":
    from dataclasses import replace

    from ..analysis.position_study import QUICK, Setting

    given = {name: value for name, value in sizes.items() if value not in (None, ())}
    if "stretches" in given:
        given["stretches"] = tuple(sorted(set(given["stretches"])))
    setting = QUICK if quick else Setting()
    length = given.get("length", setting.length)
    return replace(setting, targets=min(setting.targets, length), **given)


def _text(files: tuple[str, ...]) -> bytes:
    from ..analysis.position_study import python_source

    if not files:
        return python_source()
    parts = []
    for name in files:
        if name == "-":
            parts.append(sys.stdin.buffer.read())
        else:
            with open(name, "rb") as file:
                parts.append(file.read())
        if not parts[-1]:
            raise click.ClickException(f"{name} is empty")
    return b"".join(parts)


def _plan(schemes: tuple[str, ...], setting: "Setting", size: int) -> str:
    return (
        f"{counted(len(schemes), 'scheme')}, each {setting.seeds} × {setting.steps} "
        f"steps of {setting.batch} × {setting.length} bytes out of {size:,}, tested up to "
        f"{max(setting.lengths)}"
    )


def _compare(
    text: bytes, schemes: tuple[str, ...], *, setting: "Setting", quiet: bool
) -> "Study":
    """Return the results of all schemes, or of those completed before Ctrl-C."""
    from ..analysis.position_study import Study, measure

    trained = []
    with progress("training", total=len(schemes), quiet=quiet) as draw:

        def report(scheme: str, step: int, of: int, loss: float) -> None:
            draw(len(trained) + step / of, note=f"{scheme}, loss {loss:.2f}")

        try:
            for scheme in schemes:
                trained.append(measure(text, scheme, setting=setting, progress=report))
        except KeyboardInterrupt:
            if not trained:
                raise
    return Study(setting, len(text), tuple(trained))


def _rendered(found: "Study", format: str) -> bytes:
    from ..analysis import plot, report

    if format == "html":
        return report.html(found).encode()
    return plot.render(plot.positions(found), format)


def _lines(found: "Study") -> list[str]:
    from ..analysis.report import number

    setting = found.setting
    head = [
        f"{length} ({stretch:g}×)"
        for length, stretch in zip(setting.lengths, setting.stretches, strict=True)
    ]
    rows = [
        (curve.name, *map(number, curve.losses), number(curve.rise, "+.3f"))
        for curve in found.curves
    ]
    lines = columns(rows, head=["scheme", *head, "rise"])
    return [*lines, "", *found.conclusion()]
