"""The command ``firstlayer`` itself: finds verbs, and turns every failure into one sentence."""

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

import click

from . import VERBS

#: What to install for a package that is not there.
EXTRAS = {
    "matplotlib": "plot",
    "rich": "cli",
    "tokenizers": "cli",
    "torch": "torch",
}
EXAMPLES = """\b
Examples:
  firstlayer train                            learn from Python's own source, in half a minute
  firstlayer neighbors vectors TypeError      what is near a word
  firstlayer inspect model.safetensors        what a checkpoint's tables are like
  firstlayer VERB --help                      what a verb takes, with examples
"""


class Verbs(click.Group):
    """A group that imports a verb's module when it is chosen."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(f".{cmd_name}", __package__).command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            close = difflib.get_close_matches(name, VERBS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"no verb {name!r}{hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run, and exit: 0 if all went well, 1 if it failed, 2 if it was asked wrongly."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as it is where a shell has closed it
                stream.reconfigure(errors="backslashreplace")  # pyright: ignore
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except Exception as error:
            code = _explained(error)
        sys.exit(code if isinstance(code, int) else 0)


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="firstlayer", message="%(package)s %(version)s")
@click.pass_context
def firstlayer(ctx: click.Context) -> None:
    """Learn, look at, measure and choose embeddings."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _explained(error: Exception) -> int:
    """Say on stderr in one sentence what went wrong, and return the exit code."""
    if os.environ.get("FIRSTLAYER_TRACEBACK"):
        traceback.print_exception(error)
    _forget_what_stdout_holds()
    click.echo(f"firstlayer: {sentence(error)}", err=True)
    return error.exit_code if isinstance(error, click.ClickException) else 1


def sentence(error: Exception) -> str:
    """Return what went wrong in one line, for a reader who cannot see the source."""
    match error:
        case click.Abort():
            text = "interrupted"
        case click.UsageError(ctx=click.Context() as ctx):
            text = f"{error.format_message()} (see {ctx.command_path} --help)"
        case click.ClickException():
            text = error.format_message()
        case ModuleNotFoundError(name=str(name)) if name in EXTRAS:
            text = f"this needs {name}: pip install 'firstlayer[{EXTRAS[name]}]'"
        case OSError(strerror=str(reason), filename=None):
            text = reason.lower()
        case OSError(strerror=str(reason), filename=filename):
            text = f"{os.fsdecode(filename)}: {reason.lower()}"
        case MemoryError():
            text = f"not enough memory: {error}"
        case ValueError() | TypeError() | IndexError() | OSError() | ImportError():
            text = str(error)
        case _:
            text = f"{type(error).__name__}: {error} (FIRSTLAYER_TRACEBACK=1 shows where)"
    return " ".join(text.split())


def _forget_what_stdout_holds() -> None:
    # What could not be written would fail again when the interpreter closes its streams.
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
