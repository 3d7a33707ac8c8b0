"""Rows that have missed optimizer steps."""

import numpy as np

from ..runtime.compile import kernel


def stale_rows(
    ids: np.ndarray, last: np.ndarray, now: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows among ``ids`` that are not at step ``now``, and the step of each.

    Each is listed once, and ``last`` marks it as up to date. Ids out of range are ignored;
    the lookup reports them.
    """
    rows, since = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    count = _stale_rows(0, ids.size, ids, last, now, rows, since)
    return rows[:count], since[:count]


def stale_range(
    lo: int, hi: int, last: np.ndarray, now: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what :func:`stale_rows` does for the ids from ``lo`` up to ``hi``."""
    rows, since = np.empty(hi - lo, np.int64), np.empty(hi - lo, np.int64)
    count = _stale_range(lo, hi, last, now, rows, since)
    return rows[:count], since[:count]


@kernel()
def _stale_rows(lo, hi, ids, last, now, rows, since):
    count = 0
    for i in range(lo, hi):
        row = ids[i]
        if 0 <= row < last.size and last[row] != now:
            rows[count], since[count] = row, last[row]
            last[row] = now
            count += 1
    return count


@kernel()
def _stale_range(lo, hi, last, now, rows, since):
    count = 0
    for row in range(lo, hi):
        if last[row] != now:
            rows[count], since[count] = row, last[row]
            last[row] = now
            count += 1
    return count
