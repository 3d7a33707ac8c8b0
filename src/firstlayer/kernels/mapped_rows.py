"""Rows at addresses: of mapped files, whose pages may or may not be in memory.

:func:`locate_rows` checks ids and turns them into addresses once. The other functions take
these addresses, so they never see an id that another thread changed in the meantime.

A page that is not in memory costs its reader a wait for the disk. :func:`request_rows`
starts reading all pages of many rows before the first of them is needed, which fills the
queue of the disk: about ten times as fast as waiting for one page after the other.
"""

import mmap

import numpy as np

from .runtime.compile import is_row, kernel, prefetch_bytes
from .runtime.pool import grain_for, pieces, run
from .runtime.system import copy_bytes, page_states, request_pages

PAGE = mmap.PAGESIZE
# Rows that are looked up in the page table before a read, evenly spaced.
SAMPLE = 128
# Number of bytes between the row that is copied and the one that is prefetched.
AHEAD_BYTES = 1 << 12
# Minimum number of bytes per thread.
GRAIN = 1 << 19


def locate_rows(
    ids: np.ndarray,
    starts: np.ndarray,
    bases: np.ndarray,
    row_bytes: int,
    offsets: np.ndarray,
) -> np.ndarray | None:
    """Return the address of each row, or None if an id or an offset is out of range.

    Args:
        ids: Flat ids.
        starts: First row of each segment, and the number of rows.
        bases: Address of the first row of each segment.
        row_bytes: Bytes of a row, and between two rows of a segment.
        offsets: Empty, or the offset of each row from the address ``bases[0]``; all rows
            are then in the ``bases[1]`` bytes that begin there.
    """
    addresses = np.empty(ids.size, np.int64)
    if offsets.size:
        found = _locate_offsets(ids, offsets, bases, row_bytes, addresses)
    else:
        found = _locate(ids, starts, bases, row_bytes, addresses)
    return addresses if found else None


def copy_rows_at(addresses: np.ndarray, out: np.ndarray) -> None:
    """Copy a row from each address to ``out``, an array of C-contiguous rows."""
    row_bytes = out.strides[0]
    ahead = 1 + AHEAD_BYTES // max(1, row_bytes)
    grain = grain_for(GRAIN, row_bytes)
    run(_copy, addresses.size, addresses, out.ctypes.data, row_bytes, ahead, grain=grain)


def rows_missing(addresses: np.ndarray, row_bytes: int) -> bool:
    """Return whether a row of a sample may not be in memory.

    Up to ``SAMPLE`` rows may always be missing: requesting them is faster than asking.
    """
    if addresses.size <= SAMPLE:
        return True
    step = -(-addresses.size // SAMPLE)
    states = np.empty(row_bytes // PAGE + 2, np.uint8)
    return _is_any_missing(addresses, step, row_bytes, PAGE, states)


def request_rows(addresses: np.ndarray, row_bytes: int, *, wait: bool = False) -> None:
    """Start reading the pages of rows that are not in memory, each page once.

    Args:
        addresses: Addresses of the rows.
        row_bytes: Bytes of a row.
        wait: Wait until the pages are read and mapped, so that a copy of the rows is as
            fast as from any memory.
    """
    in_order = np.sort(addresses)
    _request(in_order, row_bytes, PAGE)
    if wait:
        byte = np.empty(1, np.uint8)
        _touch(in_order, row_bytes, PAGE, byte.ctypes.data)


@kernel()
def _locate(ids, starts, bases, row_bytes, addresses):
    num_segments = bases.size
    num_rows = starts[num_segments]
    for i in range(ids.size):
        id_ = ids[i]
        if not is_row(id_, num_rows):
            return False
        lo, hi = 0, num_segments
        while hi - lo > 1:
            middle = (lo + hi) // 2
            if id_ < starts[middle]:
                hi = middle
            else:
                lo = middle
        addresses[i] = bases[lo] + (id_ - starts[lo]) * row_bytes
    return True


@kernel()
def _locate_offsets(ids, offsets, bases, row_bytes, addresses):
    for i in range(ids.size):
        id_ = ids[i]
        if not is_row(id_, offsets.size):
            return False
        offset = offsets[id_]
        # Offsets come from a file that anybody may have written.
        if offset < 0 or offset > bases[1] - row_bytes:
            return False
        addresses[i] = bases[0] + offset
    return True


@kernel()
def _copy(ticket, addresses, out, row_bytes, ahead):
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            prefetch_bytes(addresses[min(i + ahead, hi - 1)], row_bytes)
            copy_bytes(out + i * row_bytes, addresses[i], row_bytes)


@kernel()
def _is_any_missing(addresses, step, row_bytes, page, states):
    for i in range(0, addresses.size, step):
        start = addresses[i] & -page
        size = addresses[i] + row_bytes - start
        if page_states(start, size, states.ctypes.data) != 0:
            continue
        for p in range((size + page - 1) // page):
            if not states[p] & 1:
                return True
    return False


@kernel()
def _request(addresses, row_bytes, page):
    # The pages of rows that follow each other are one request.
    start = end = np.int64(0)
    for i in range(addresses.size):
        first = addresses[i] & -page
        if first > end or start == end:
            if end > start:
                request_pages(start, end - start)
            start = first
        end = max(end, addresses[i] + row_bytes)
        end = (end + page - 1) & -page
    if end > start:
        request_pages(start, end - start)


@kernel()
def _touch(addresses, row_bytes, page, byte):
    # Reading a byte maps its page, where MADV_POPULATE_READ takes several times as long.
    for i in range(addresses.size):
        for offset in range(0, row_bytes, page):
            copy_bytes(byte, addresses[i] + offset, 1)
        copy_bytes(byte, addresses[i] + row_bytes - 1, 1)
