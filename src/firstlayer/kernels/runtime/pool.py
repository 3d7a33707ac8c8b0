"""Thread pool that shares the range of a compiled loop between cores.

Python code calls :func:`run`, which decides on the number of threads and calls a kernel.
The kernel loops over :func:`pieces`. The number of threads is set in ``threads``.

Numba's threading layers abort a process that forks, or that calls them from two threads at
once. The threads of a ``ThreadPoolExecutor`` need the GIL for every task and stop the
caller's Python to get it; the rows ``threads: …`` of ``python -m benchmarks`` compare the
two. Helpers of this pool never leave compiled code, so they never need the GIL.

Protocol:
    1. ``run`` starts missing helpers and calls the kernel with a ticket.
    2. The kernel sets ``BUSY`` in the block, the memory shared with the helpers. Its thread
       is now the owner of the job. It stores the kernel's arguments in the block, resets
       the counters, sets ``OPEN``, adds to ``JOBS`` and wakes sleeping helpers, on other
       cores than its own.
    3. A helper that sees ``JOBS`` change adds itself to ``INSIDE``. If the job is ``OPEN``
       and one of its ``SEATS`` is free, the helper calls the same kernel with the same
       arguments. Then it leaves ``INSIDE``.
    4. Owner and helpers claim pieces by adding to ``CLAIMED`` until the range is used up,
       and add the length of each finished piece to ``DONE``. A helper that wakes late
       leaves more pieces to the others. The owner takes its pieces from the beginning of
       the range and helpers from the end: in kernels that follow each other on the same
       rows, a core then finds most of its rows in its own caches. Cores may have no cache
       in common, and reading a line that another has written takes longer than from
       memory. Pieces write to disjoint memory, so results do not depend on which thread
       processes which.
    5. The owner waits until ``DONE`` is the whole range, clears ``OPEN``, waits until
       no helper is ``INSIDE``, clears ``BUSY`` and returns.

    The pool is claimed and released in compiled code, where no signal handler of Python
    can run: an exception such as KeyboardInterrupt never leaves it claimed.

Memory order:
    All counters are sequentially consistent atomics, each in its own cache line. Arguments
    are stored before ``OPEN`` is set and read after it was seen; results are stored before
    ``DONE`` is increased and read after it was seen. A helper enters ``INSIDE`` before it
    reads ``OPEN``, and the owner clears ``OPEN`` before it reads ``INSIDE``: at least one
    sees the other. The atomic add to ``DONE`` also orders streaming stores.

Limits:
    - One job at a time. If the pool is busy, a caller runs its kernel alone.
    - A forked child has no helpers and starts its own.
    - If the system cannot start a thread, kernels use the helpers that there are.
    - Without POSIX threads, or with a Numba that fails the checks of ``numba_abi``, kernels
      run on one thread, and the first that could use more warns.
    - A kernel's arguments take at most ``ARGUMENT_BYTES`` of ``numba_abi``.
    - A kernel allocates or raises before its first piece only, and calls ``pieces`` once.
"""

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVarTuple

import numpy as np
from numba import types

from .affinity import (
    CPU_SET_BYTES,
    CPU_SET_WORDS,
    current_core,
    exclude_core,
    restore_cores,
)
from .atomics import atomic_add, atomic_load, atomic_store, fence
from .compile import inlined, internal, kernel
from .numba_abi import (
    BUSY,
    SIZE,
    Ticket,
    call_kernel,
    call_worker,
    compiled_function,
    offer,
    single_thread_reason,
)
from .scratch import free_row, is_allocated, scratch_row
from .system import (
    condition_broadcast,
    condition_wait,
    mutex_lock,
    mutex_unlock,
    sleep_us,
)
from .threads import current_num_threads, get_num_threads

# Offsets into the block, a cache line each, after the kernel's arguments and ``BUSY``. Of a
# job: the number of items claimed, how many of them by helpers, the number of items done,
# whether the job is open, how many helpers are inside, how many more may join, and the
# address of the worker.
CLAIMED, BY_HELPERS, DONE, OPEN, INSIDE, SEATS, WORKER = range(BUSY + 64, BUSY + 8 * 64, 64)
# Of the pool: the number of jobs so far, the number of helpers, how many of them sleep, the
# system's numbers of the first, the address of ``_wake``, and the mutex and the condition
# variable that helpers sleep on.
JOBS, STARTED, SLEEPERS, THREADS, WAKE, MUTEX, CONDITION, BLOCK_BYTES = range(
    WORKER + 64, WORKER + 9 * 64, 64
)
# Only the first helpers, whose numbers fill one cache line, are kept off their caller's
# core. With more helpers, one that starts late matters less.
PLACED = 8

# Enough pieces to balance the load, few enough to cost little.
PIECES_PER_THREAD = 8
# A helper polls for about 400 µs before it sleeps: waking takes longer than a short job.
HELPER_POLLS = 1_200_000
# The owner polls for the helpers' last pieces before it sleeps between polls.
OWNER_POLLS, NAP_MICROSECONDS = 600_000, 20

_REASON = single_thread_reason()
Arguments = TypeVarTuple("Arguments")


def run(
    loop: Callable[[Ticket, *Arguments], None], size: int, *args: *Arguments, grain: int
) -> None:
    """Call ``loop(ticket, *args)`` on as many threads as ``grain`` allows.

    Args:
        loop: Kernel that loops over ``pieces(ticket)``.
        size: Number of items in the range.
        args: Further arguments of the kernel.
        grain: Minimum number of items per thread; see :func:`grain_for`.
    """
    loop(ticket_for(size, grain), *args)


def ticket_for(size: int, grain: int) -> Ticket:
    """Return the ticket of a kernel, and start missing helpers.

    Args:
        size: Number of items in the range.
        grain: Minimum number of items per thread.
    """
    threads = _num_threads(size, grain)
    helpers = _pool.start_helpers(threads - 1) if threads > 1 else 0
    if not helpers:
        return whole_range(size)
    piece = -(-size // ((helpers + 1) * PIECES_PER_THREAD))
    return _pool.block, size, piece, helpers, 1


def _num_threads(size: int, grain: int) -> int:
    """Decide how many threads share a range, the calling one included."""
    threads = min(current_num_threads(), size // max(grain, 1))
    if threads > 1 and _REASON is not None:
        _pool.warn_once(_REASON)
        return 1
    return threads


def grain_for(least: int, work: int, size: int = 1) -> int:
    """Return the minimum number of items per thread, the ``grain`` of :func:`run`.

    A sleeping helper joins after about 50 µs, so a thread needs at least that much work.

    Args:
        least: Minimum work per thread, in any unit: the ``GRAIN`` of the kernel's module.
        work: Work of ``size`` items, in the same unit.
        size: Number of items.

    Example:
        >>> grain_for(1 << 16, 512)
        128
    """
    return max(1, least * size // max(1, work))


def shared_block() -> int:
    """Return the address of the block, for calls of kernels that Python does not make.

    Helpers for the current number of threads are started here. In a forked child, programs
    compiled before the fork run on one thread.
    """
    _pool.start_helpers(get_num_threads() - 1)
    return _pool.block


def has_known_layout() -> bool:
    """Return whether compiled functions have the layout that this library relies on."""
    return _REASON is None


def whole_range(size: int) -> Ticket:
    """Return the ticket of a kernel that does all of ``[0, size)`` in one thread."""
    return 0, size, 0, 0, 0


class _Pool:
    """The helpers and the block of memory shared with them."""

    def __init__(self) -> None:
        self.has_warned, self.block, self.wake = False, 0, 0
        self.reset()

    def reset(self) -> None:
        """Drop the helpers, which do not exist in a forked child."""
        if self.block:
            # Programs of XLA still use the block of the parent.
            self._write(STARTED, 0)
        self.block = _allocate_block() if _REASON is None else 0
        self.helpers, self.max_helpers = 0, sys.maxsize
        self.lock = threading.Lock()

    def start_helpers(self, count: int) -> int:
        """Start helpers until there are ``count``, and return how many may be used."""
        if self.helpers < min(count, self.max_helpers):
            with self.lock:
                self._start_missing(count)
        return min(count, self.max_helpers)

    def _start_missing(self, count: int) -> None:
        while self.helpers < min(count, self.max_helpers):
            helper = threading.Thread(
                target=self._help,
                args=(self.block,),
                name="firstlayer",
                daemon=True,
            )
            try:
                helper.start()
            except RuntimeError as error:
                self.max_helpers = self.helpers
                self.warn_once(f"a thread could not be started ({error})")
                return
            if self.helpers < PLACED:
                self._write(THREADS + 8 * self.helpers, helper.native_id or 0)
            self.helpers += 1
            self._write(STARTED, self.helpers)

    def _help(self, block: int) -> None:
        """Join jobs until the process ends; the function of a helper thread."""
        # A forked child reuses the address: another thread of the parent may have held the
        # compiler's lock at the fork, and nothing in the child would release it.
        if not self.wake:
            self.wake = compiled_function(_wake, (types.int64,))[0]
        ctypes.c_int64.from_address(block + WAKE).value = self.wake
        help_forever(block, HELPER_POLLS)

    def _write(self, offset: int, number: int) -> None:
        """Write a number to the block."""
        ctypes.c_int64.from_address(self.block + offset).value = number

    def warn_once(self, reason: str) -> None:
        """Warn that kernels use fewer threads than they could."""
        if not self.has_warned:
            self.has_warned = True
            threads = "one thread" if not self.helpers else f"{self.helpers + 1} threads"
            message = f"Firstlayer's kernels run on {threads}: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)


def _allocate_block() -> int:
    """Return the address of memory that is never freed: helpers may outlive Python."""
    c = ctypes.CDLL(None)
    c.calloc.restype = ctypes.c_void_p
    # 64 bytes more, to align the block to a cache line.
    start = c.calloc(1, BLOCK_BYTES + 64) or 0
    block = -(-start // 64) * 64
    c.pthread_mutex_init(ctypes.c_void_p(block + MUTEX), None)
    c.pthread_cond_init(ctypes.c_void_p(block + CONDITION), None)
    return block


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.reset)


@inlined
def _in_one_piece(ticket):
    return np.int64(0), ticket[SIZE], np.int64(0), np.int64(0), np.int64(0)


_prepared: Any = offer if _REASON is None else _in_one_piece


@inlined
def pieces(ticket: Ticket) -> Iterator[tuple[int, int]]:
    """Yield ``(lo, hi)`` of one piece after the other until the range is used up.

    A kernel calls this itself and not through a function that is not inlined: helpers call
    the function that this is compiled into.
    """
    return _pieces(_prepared(ticket))


@internal
def _pieces(ticket) -> Iterator[tuple[Any, Any]]:
    block, size, piece, helpers, worker = ticket
    if not piece:
        yield np.int64(0), size
        fence()
        return
    if worker:
        _open_job(block, worker, helpers)
    first, last = np.int64(0), (size - 1) // piece * piece
    while atomic_add(block + CLAIMED, piece) < size:
        if worker:
            lo, first = first, first + piece
        else:
            lo = last - atomic_add(block + BY_HELPERS, piece)
        hi = lo + piece if lo + piece < size else size
        yield lo, hi
        atomic_add(block + DONE, hi - lo)
    if worker:
        _close_job(block, size)


@inlined
def _open_job(block, worker, helpers):
    """Let helpers join."""
    atomic_store(block + CLAIMED, 0)
    atomic_store(block + BY_HELPERS, 0)
    atomic_store(block + DONE, 0)
    atomic_store(block + SEATS, helpers)
    atomic_store(block + WORKER, worker)
    atomic_store(block + OPEN, 1)
    atomic_add(block + JOBS, 1)
    if atomic_load(block + SLEEPERS):
        call_kernel(atomic_load(block + WAKE), block)


@inlined
def _close_job(block, size):
    """Wait until every item is done and no helper is inside."""
    polls = 0
    while atomic_load(block + DONE) < size:
        polls += 1
        if polls > OWNER_POLLS:
            sleep_us(NAP_MICROSECONDS)
    atomic_store(block + OPEN, 0)
    while atomic_load(block + INSIDE):
        polls += 1
        if polls > OWNER_POLLS:
            sleep_us(NAP_MICROSECONDS)
    atomic_store(block + BUSY, 0)


@kernel()
def _wake(block):
    """Wake all helpers that sleep, on other cores than the caller's.

    The scheduler often wakes a thread on the core of the thread that wakes it, where it
    would wait until the caller is done: an idle core of a virtual machine may not look
    idle. It chooses the core at once, so a helper's cores can be restored right after.
    """
    threads, core = min(PLACED, atomic_load(block + STARTED)), current_core()
    sets = scratch_row(PLACED * CPU_SET_WORDS, np.int64(0))
    placed = np.int64(0)
    if is_allocated(sets):
        for i in range(threads):
            cores = sets.ctypes.data + i * CPU_SET_BYTES
            is_placed = exclude_core(atomic_load(block + THREADS + 8 * i), core, cores)
            placed |= np.int64(is_placed) << i
    # A helper that holds the mutex waits before it is released, or sees the new job.
    mutex_lock(block + MUTEX)
    mutex_unlock(block + MUTEX)
    condition_broadcast(block + CONDITION)
    for i in range(threads):
        if placed >> i & 1:
            thread = atomic_load(block + THREADS + 8 * i)
            restore_cores(thread, sets.ctypes.data + i * CPU_SET_BYTES)
    free_row(sets)


@kernel()
def help_forever(block, max_polls):
    """Join one job after the other; the body of a helper thread.

    Args:
        block: Address of the block.
        max_polls: Number of times to poll for the next job before sleeping.
    """
    last = atomic_load(block + JOBS)
    while True:
        polls = 0
        while polls < max_polls and atomic_load(block + JOBS) == last:
            polls += 1
        if polls == max_polls:
            mutex_lock(block + MUTEX)
            atomic_add(block + SLEEPERS, 1)
            while atomic_load(block + JOBS) == last:
                condition_wait(block + CONDITION, block + MUTEX)
            atomic_add(block + SLEEPERS, -1)
            mutex_unlock(block + MUTEX)
        last = atomic_load(block + JOBS)
        # INSIDE before OPEN: the owner clears OPEN before it waits for INSIDE.
        atomic_add(block + INSIDE, 1)
        if atomic_load(block + OPEN) and atomic_add(block + SEATS, -1) > 0:
            call_worker(atomic_load(block + WORKER), block)
        atomic_add(block + INSIDE, -1)
