"""The hashes of n-gram schemes: ids of an n-gram in, rows of a joined table out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from .._array import cast, namespace_of
from . import history as windows

#: Stands for no id in a history if negative ids are hashed.
NEVER_AN_ID = -(2**31)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The table of one layer: a joined table with a range of rows for each column.

    Args:
        sizes: Number of rows that each column hashes to.
        offsets: First row of each column.
        multipliers: Multiplier of each id of an n-gram, newest first; or one such tuple for
            each column, with 0 for ids that the column does not read.
        rows: Number of rows of the joined table.

    Example:
        >>> Layout.of([5, 7], [3, 1], multiple_of=8)
        Layout(sizes=(5, 7), offsets=(0, 5), multipliers=(3, 1), rows=16)
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    multipliers: tuple[int, ...] | tuple[tuple[int, ...], ...]
    rows: int

    @classmethod
    def of(
        cls, sizes: Sequence[int], multipliers: Sequence[Any], *, multiple_of: int = 1
    ) -> "Layout":
        """Return the layout of columns that follow one another in the table.

        Args:
            sizes: Number of rows of each column.
            multipliers: As in the class.
            multiple_of: The number of rows is rounded up to a multiple of this.
        """
        ends = tuple(accumulate(sizes))
        return cls(
            sizes=tuple(sizes),
            offsets=(0, *ends[:-1]),
            multipliers=tuple(multipliers),
            rows=-(-ends[-1] // multiple_of) * multiple_of,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Hashing:
    """The ids that an n-gram consists of, and the arithmetic that combines them.

    Args:
        span: Number of ids in the longest n-gram.
        bound: Name and value of the number of ids, or None for ids of any size.
        fill: Number that is hashed in place of an id that is not there.
        stop: Id of an earlier position at which an n-gram ends.
        negative: Meaning of negative ids: ``"dead"``, ``"fill"`` or ``"hashed"``.
        numbers: Number that is hashed for each id, or None for the id itself.
        heads: Number of rows for each n if ids are combined by xor; None if their products
            with the multipliers are added.
        dtype: Dtype of the integers.
    """

    span: int
    bound: tuple[str, int] | None = None
    fill: int = 0
    stop: int | None = None
    negative: str = "dead"
    numbers: np.ndarray | None = None
    heads: int | None = None
    dtype: str = "int64"

    @property
    def no_id(self) -> int:
        """Id in a history that stands for no id."""
        return NEVER_AN_ID if self.negative == "hashed" else windows.NO_ID

    def numbers_of(self, ids: Any) -> tuple[Any, Any]:
        """Return the number that is hashed for each id, and whether the id is there."""
        xp, numbers = namespace_of(ids), ids
        if self.numbers is not None and self.bound is not None:
            table = windows.constant(self.numbers, ids)
            numbers = table[xp.clip(ids, 0, self.bound[1] - 1)]
        if self.negative == "dead":
            return numbers, ids >= 0
        if self.negative == "hashed":
            return xp.where(ids < 0, ids, numbers), ids != self.no_id
        numbers = xp.where(ids < 0, windows.filled((), self.fill, ids), numbers)
        return numbers, numbers >= 0

    def rows(self, slots: list[Any], layout: Layout) -> Any:
        """Return the rows of n-grams, given their numbers, newest first."""
        if self.heads is None:
            return _sum_hash(slots, layout)
        return _xor_hash(slots, layout, heads=self.heads, dtype=self.dtype)

    def column_orders(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of ids that each column of a layout reads."""
        if self.heads is not None:
            return tuple(c // self.heads + 2 for c in range(len(layout.sizes)))
        columns: Any = layout.multipliers
        return tuple(len(column) - _trailing_zeros(column) for column in columns)


def _trailing_zeros(values: Sequence[int]) -> int:
    return next((i for i, value in enumerate(reversed(values)) if value), len(values))


def _sum_hash(slots: list[Any], layout: Layout) -> Any:
    """Return the rows of n-grams whose products with the multipliers are added."""
    columns: Any = layout.multipliers
    total = None
    for slot, multipliers in zip(slots, zip(*columns, strict=True), strict=True):
        term = slot[..., None] * windows.like(multipliers, slot)
        total = term if total is None else total + term
    rows = total % windows.like(layout.sizes, total)
    return rows + windows.like(layout.offsets, total)


def _xor_hash(slots: list[Any], layout: Layout, *, heads: int, dtype: str) -> Any:
    """Return the rows of n-grams of order 2 and up, ``heads`` for each order.

    The hash of an n-gram continues the one of the n-gram without its oldest id.
    """
    multipliers: Any = layout.multipliers
    mix, rows = cast(slots[0], dtype) * multipliers[0], []
    for n, slot in enumerate(slots[1:]):
        mix = mix ^ cast(slot, dtype) * multipliers[n + 1]
        part = slice(n * heads, (n + 1) * heads)
        local = mix[..., None] % cast(windows.like(layout.sizes[part], mix), dtype)
        rows.append(cast(local, "int64") + windows.like(layout.offsets[part], slot))
    return namespace_of(mix).concat(rows, axis=-1)
