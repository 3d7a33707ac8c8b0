"""One table under a row optimizer: its state, and how far each row has been brought.

A step moves the rows that have a gradient and leaves the others behind. Whoever is about
to read rows says so (:meth:`TableState.catch_up`), and those that are behind catch up, each in
one pass however many steps it has missed. Only rows that are behind are written: a row that
somebody has read stays what it was until the next step.

``last`` holds the step that each row was brought to. At the step ``floor`` all rows were up
to date, so no row counts as further behind than that.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from .. import kernels
from .._array import compute_dtype
from .rule import Chosen, Options, Past, Rule, State

# How many rows are taken at a time when all are: no array has the table's size.
CHUNK = 1 << 14


class TableState:
    """What the rows of a table have yet to do.

    The state's arrays are made here, of the table's shape and full of zeros: memory that
    takes no room until a row of it is written.

    Args:
        rule: What moves the rows.
        table: Returns the table, whose memory may move.
        options: The rule's options, as they are now.
        exact: Whether rows without a gradient move too, as in a dense optimizer.
        dither: Whether bfloat16 tables are rounded up or down at random, which keeps on
            average what is too small to be kept each time.
        state: Arrays to go on with.
        step: How many steps were taken with them.
    """

    def __init__(
        self,
        rule: Rule,
        table: Callable[[], Float[np.ndarray, "rows width"]],
        *,
        options: Options,
        exact: bool = True,
        dither: bool = False,
        state: State | None = None,
        step: int = 0,
    ) -> None:
        rule.check(options, exact=exact)
        self.rule, self.table, self.exact, self.dither = rule, table, exact, dither
        weight = table()
        self.shape, self.dtype = weight.shape, np.dtype(compute_dtype(weight.dtype))
        self.state: State = {} if state is None else state
        # What is given may be of rows that have been seen, all of them.
        self.seen = np.full(self.shape[0], state is not None)
        self.last = np.zeros(self.shape[0], np.int32)
        self.now = self.floor = step
        self.past, self.fixed = Past(rule.kinds), rule.fixed(options)
        self.has_moved = False
        self._grow(options)
        self.past.begin(rule.line(options, step))
        self.lock = threading.RLock()

    @property
    def is_caught_up(self) -> bool:
        """Whether every row is up to date."""
        return self.floor == self.now

    @property
    def is_readable(self) -> bool:
        """Whether every row can be read: it is up to date, or none of them has moved."""
        return self.floor == self.now or not self.has_moved

    def catch_up(
        self,
        ids: Int64[np.ndarray, " n"] | None = None,
        *,
        table: Float[np.ndarray, "rows width"] | None = None,
    ) -> None:
        """Bring rows up to date: those of ``ids``, which may repeat, or all.

        Args:
            ids: Which rows; None is all of them.
            table: A copy of the table to do it in, which becomes the table.
        """
        if self.is_caught_up:
            return
        with self.lock:
            table = self._checked(self.table() if table is None else table)
            if ids is not None:
                self._catch_up(table, *kernels.stale_rows(ids, self.last, self.now))
                return
            for lo in range(0, self.shape[0], CHUNK):
                hi = min(lo + CHUNK, self.shape[0])
                self._catch_up(table, *kernels.stale_range(lo, hi, self.last, self.now))
            self.floor = self.now

    def behind(self, ids: Int64[np.ndarray, " n"] | None = None) -> int | None:
        """Return a row among ``ids``, or among all, that would have been read too early."""
        if self.is_readable:
            return None
        late = np.flatnonzero((self.last if ids is None else self.last[ids]) != self.now)
        if not late.size:
            return None
        return int(late[0] if ids is None else ids[late[0]])

    def step(
        self,
        ids: Int64[np.ndarray, " n"] | None,
        values: Float[np.ndarray, "n width"],
        *,
        options: Options,
    ) -> None:
        """Take a step.

        Args:
            ids: The rows that have a gradient, each once; None for all rows.
            values: Their gradients.
            options: The rule's options in this step.
        """
        with self.lock:
            self._prepare(options, ids)
            table, step = self._checked(self.table()), self.now + 1
            if self.exact and ids is not None and not self._rests(options):
                self.rule.miss(self.past, options, step)
                self.has_moved = self.has_moved or self.rule.moves(options)
            else:
                # Nobody is left behind.
                self.floor = step
            self.now = step
            for rows, part in _parts(ids, values):
                self._move(table, rows, part, options=options)
            if self.is_caught_up:
                self._begin(options)

    def _prepare(self, options: Options, ids: Any) -> None:
        self.rule.check(options, exact=self.exact)
        fixed = self.rule.fixed(options)
        if self.past.is_full or fixed != self.fixed or ids is None:
            self.catch_up()
        if self.is_caught_up:
            self.fixed = fixed
            self._begin(options)
        self._grow(options)
        # Where reading needs nobody up to date, this does.
        self.catch_up(ids)

    def _begin(self, options: Options) -> None:
        self.past.begin(self.rule.line(options, self.now))
        self.has_moved = False

    def _rests(self, options: Options) -> bool:
        return self.is_caught_up and self.rule.rests(options)

    def _catch_up(self, table: np.ndarray, rows: np.ndarray, since: np.ndarray) -> None:
        if not rows.size:
            return
        since = np.maximum(since - self.floor, 0)

        def catch_up(chosen: Chosen) -> None:
            self.rule.catch_up(
                chosen,
                self.state,
                since=since,
                seen=self.seen,
                past=self.past,
                fixed=self.fixed,
            )

        self._on(table, rows, catch_up, noise=2 * self.now)

    def _move(
        self, table: np.ndarray, rows: np.ndarray, values: np.ndarray, *, options: Options
    ) -> None:
        values = np.ascontiguousarray(values, self.dtype)

        def update(chosen: Chosen) -> None:
            self.rule.update(
                chosen, self.state, values=values, options=options, step=self.now
            )

        self.seen[rows] = True
        self.last[rows] = self.now
        self._on(table, rows, update, noise=2 * self.now + 1)

    def _on(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        do: Callable[[Chosen], None],
        *,
        noise: int,
    ) -> None:
        """Do something to rows of the table, in the dtype of the work."""
        if table.dtype == self.dtype:
            do(Chosen(table, rows, rows))
            return
        wide = kernels.upcast_rows(table, rows)
        do(Chosen(wide, np.arange(rows.size), rows))
        kernels.store_rows(wide, table, rows, noise=noise if self.dither else None)

    def _checked(self, weight: np.ndarray) -> np.ndarray:
        if weight.shape != self.shape or compute_dtype(weight.dtype) != self.dtype.name:
            raise ValueError(
                f"the table must stay {self.shape} in {self.dtype.name} as its state is, "
                f"got {weight.shape} in {weight.dtype.name}; make a new optimizer"
            )
        return weight

    def _grow(self, options: Options) -> None:
        """Make the arrays that the state does not have yet."""
        rows, width = self.shape
        for name, value in self.rule.arrays(options).items():
            if name not in self.state:
                shape = rows, self.rule.width(name, width)
                made = np.full(shape, value, self.dtype) if value else None
                self.state[name] = np.zeros(shape, self.dtype) if made is None else made


def _parts(ids: Any, values: np.ndarray) -> Any:
    """Yield rows and their gradients, few enough at a time."""
    if ids is not None:
        yield ids, values
        return
    for lo in range(0, len(values), CHUNK):
        part = values[lo : lo + CHUNK]
        yield np.arange(lo, lo + len(part)), part
