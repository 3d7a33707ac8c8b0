"""Write docs/reference/command_line.md from the help texts of the commands.

Run it after changing a command: ``python docs/command_line.py``.
"""

import importlib
from pathlib import Path

from firstlayer.cli import COMMANDS

PAGE = Path(__file__).parent / "reference" / "command_line.md"
INTRO = """\
# Command line

`pip install '.[cli]'` in a clone of the repository installs `firstlayer`. Each command is
shown with its `--help`. Commands exit with 0 on success, 1 on failure, 2 on wrong usage and
130 after Ctrl-C, and print errors as one line.

| command | does |
|---|---|
"""


def help_text(name: str) -> str:
    """Return the help of a command in 80 columns."""
    import click

    from firstlayer.cli._group import firstlayer

    program = click.Context(firstlayer, info_name="firstlayer", terminal_width=80)
    command = importlib.import_module(f"firstlayer.cli.{name}").command
    context = click.Context(
        command, parent=program, info_name=name, **command.context_settings
    )
    return command.get_help(context)


def page() -> str:
    """Return the page."""
    rows = [f"| [`{name}`](#{name}) | {does} |\n" for name, does in COMMANDS.items()]
    helps = [
        f"\n## {name}\n\n```text\n{help_text(name).strip()}\n```\n" for name in COMMANDS
    ]
    return "".join([INTRO, *rows, *helps])


if __name__ == "__main__":
    PAGE.write_text(page())
