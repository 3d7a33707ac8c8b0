"""List stale rows, and run kernel loops over rows."""

from collections.abc import Callable

import numpy as np

from ..group import group_private
from ..row_io import grain_of
from ..runtime.compile import kernel
from ..runtime.pool import Arguments, Ticket, run
from .row_slice import RowSlice


def stale_rows(
    ids: np.ndarray, row_steps: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows among ``ids`` that are not at ``step``, and the step each is at.

    The rows are ascending, each once. Ids out of range are skipped; the lookup reports
    them.
    """
    rows = np.empty(ids.size, np.int64)
    rows = rows[: _stale_rows(ids, row_steps, step, rows)]
    if rows.size > 1:
        # In the order of memory, rows are read and written faster.
        rows = group_private(rows)[2]
    return rows, row_steps[rows]


def stale_range(
    lo: int, hi: int, row_steps: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as :func:`stale_rows` for the ids from ``lo`` up to ``hi``."""
    rows, from_step = np.empty(hi - lo, np.int64), np.empty(hi - lo, np.int64)
    count = _stale_range(lo, hi, row_steps, step, rows, from_step)
    return rows[:count], from_step[:count]


def run_on_rows(
    loop: Callable[[Ticket, np.ndarray, np.ndarray, *Arguments], None],
    rows: RowSlice,
    *args: *Arguments,
) -> None:
    """Run a kernel loop over rows, on several threads if there are enough of them."""
    size, grain = rows.state_rows.size, grain_of(rows.weight)
    run(loop, size, rows.weight_rows, rows.state_rows, *args, grain=grain)


@kernel()
def _stale_rows(ids, row_steps, step, rows):
    count = 0
    for row in ids:
        if 0 <= row < row_steps.size and row_steps[row] != step:
            rows[count] = row
            count += 1
    return count


@kernel()
def _stale_range(lo, hi, row_steps, step, rows, from_step):
    count = 0
    for row in range(lo, hi):
        if row_steps[row] != step:
            rows[count], from_step[count] = row, row_steps[row]
            count += 1
    return count
