"""Griffe extension for the reference: writes docstrings as Markdown.

Docstrings use roles such as ``:class:`Name```, which Markdown does not know, and the
heading ``Example:``, which griffe calls ``Examples:``.
"""

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`~?\.?([^`]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", text)
