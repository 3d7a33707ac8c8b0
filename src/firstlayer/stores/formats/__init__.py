"""Formats of rows: the bytes that hold a vector, and how to read and write them.

:func:`format_by_name` returns a format. Formats are values: two of the same kind with the
same options are equal.
"""

from .by_name import format_by_name
from .row_format import RowFormat

__all__ = ["RowFormat", "format_by_name"]
