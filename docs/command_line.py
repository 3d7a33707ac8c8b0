"""Write docs/reference/command_line.md from the help texts of the commands.

Run it after changing a command: ``python docs/command_line.py``.
"""

from pathlib import Path

import click

from firstlayer.cli import COMMANDS
from firstlayer.cli._group import firstlayer

PAGE = Path(__file__).parent / "reference" / "command_line.md"
INTRO = """\
# Command line

`pip install '.[cli]'` in a clone of the repository installs `firstlayer`. Each command below shows its `--help`. Commands exit with 0 on
success, 1 on failure and 2 on wrong usage, and print errors as one line. `--json` prints results for programs.

| command | does |
|---|---|
"""


def help_text(name: str | None) -> str:
    """Return the help of a command, or of the program, in 80 columns."""
    program = click.Context(firstlayer, info_name="firstlayer", max_content_width=80)
    program.terminal_width = 80
    if name is None:
        return firstlayer.get_help(program)
    command = firstlayer.get_command(program, name)
    assert command is not None, name
    context = click.Context(command, parent=program, info_name=name)
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
