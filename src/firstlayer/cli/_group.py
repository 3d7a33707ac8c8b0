"""The click group ``firstlayer``: lazy commands, one-line errors, exit codes."""

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

import click

from . import COMMANDS, INTERRUPTED
from ._output import printable

#: Extra to install for a missing package.
EXTRAS = {"matplotlib": "plot", "rich": "cli", "tokenizers": "cli", "torch": "torch"}
EXAMPLES = """\b
Examples:
  firstlayer train                        train on Python's own source code
  firstlayer neighbors vectors TypeError  nearest neighbors of a word
  firstlayer inspect model.safetensors    describe the tables of a checkpoint
  firstlayer COMMAND --help               options of a command, with examples
"""


class LazyGroup(click.Group):
    """Click group that imports the module of a command when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f".{cmd_name}", __package__).command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"no command {name!r}{hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run and exit with 0 on success, 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if the shell closed it
                stream.reconfigure(errors="backslashreplace")  # pyright: ignore
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except Exception as error:
            code = _report(error)
        sys.exit(code if isinstance(code, int) else 0)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="firstlayer", message="%(package)s %(version)s")
@click.pass_context
def firstlayer(ctx: click.Context) -> None:
    """Train, inspect, measure and compare embeddings."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _report(error: Exception) -> int:
    """Print a one-line error message to stderr and return the exit code."""
    if os.environ.get("FIRSTLAYER_TRACEBACK"):
        for line in "".join(traceback.format_exception(error)).splitlines():
            click.echo(printable(line), err=True)
    _discard_unwritable_stdout()
    click.echo(f"firstlayer: {message(error)}", err=True)
    if isinstance(error, click.Abort):
        return INTERRUPTED
    return error.exit_code if isinstance(error, click.ClickException) else 1


def message(error: Exception) -> str:
    """Return a one-line error message for users of the command line."""
    match error:
        case click.Abort():
            text = "interrupted"
        case click.UsageError(ctx=click.Context() as ctx):
            text = f"{error.format_message().rstrip('.')} (see {ctx.command_path} --help)"
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
            hint = "set FIRSTLAYER_TRACEBACK=1 for a traceback"
            text = f"{type(error).__name__}: {error} ({hint})"
    return printable(" ".join(text.split()))


def _discard_unwritable_stdout() -> None:
    # Unwritten output would fail again when the interpreter flushes its streams.
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
