"""How threads share a range inside compiled code, without asking Python for each piece.

A kernel is called once by every thread that works on it, with the thread's ticket, and
loops over ``pieces(ticket)``. Pieces are handed out by an atomic counter, so nobody waits
for the GIL between two of them. The caller leaves when all is done. A helper that has done
something looks for the next call for a while before it goes to sleep, as OpenMP's threads
do: waking it would take longer than its part of a short one.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# A ticket is a tuple of numbers: Numba never lets go of an array that it gave a generator.
Ticket = tuple[int, int, int, int, int, int]
# What is written on it. The first three are addresses of numbers that all threads share:
# the next place to be handed out, how much is done, and how many calls there were.
NEXT, DONE, BELL, SIZE, PIECE, IS_CALLER = range(6)
# Numbers in a line of cache: two counters in one would be fought over.
LINE = 8
# How often to look before giving up: about 400 µs for the next call, 150 µs for the others.
LINGER, PATIENCE = 1_500_000, 600_000


def alone(size: int) -> Ticket:
    """Return the ticket of a thread that does all of ``[0, size)`` itself."""
    return 0, 0, 0, size, 0, 0


class Shared:
    """A range ``[0, size)`` that several threads work on, and their tickets.

    Args:
        size: Length of the range.
        piece: How much is handed out at a time.
        bell: A number that is counted up with every call, see :func:`address`.
    """

    def __init__(self, size: int, piece: int, bell: int) -> None:
        self.size = size
        self._words = np.zeros(2 * LINE, np.int64)
        start = address(self._words)
        self._fields = start, start + LINE * 8, bell, size, piece

    @property
    def finished(self) -> bool:
        """Whether every piece is done."""
        return int(self._words[LINE]) >= self.size

    def ticket(self, *, is_caller: bool) -> Ticket:
        """Return what a thread passes to the kernel."""
        return *self._fields, int(is_caller)


def address(array: np.ndarray) -> int:
    """Return where an array's numbers are; the caller keeps the array."""
    return array.__array_interface__["data"][0]


def _plus(typingctx, address, amount):
    """Add to the number at an address and return what it was, in one step for all."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _look(typingctx, address):
    """Return the number at an address as it is now, never one that was read before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


# Typed as Any: a type checker sees the typing context that Numba passes itself.
plus: Any = intrinsic(_plus)
look: Any = intrinsic(_look)


@numba.njit
def pieces(ticket):
    """Yield ``(lo, hi)`` of one piece after the other until the range is used up."""
    size, piece = ticket[SIZE], ticket[PIECE]
    if not piece:
        yield np.int64(0), size
        return
    # Rung here, where the GIL is free: a helper that is looking can have it at once.
    calls = plus(ticket[BELL], ticket[IS_CALLER])
    done = np.int64(0)
    lo = plus(ticket[NEXT], piece)
    while lo < size:
        hi = min(size, lo + piece)
        yield lo, hi
        done = plus(ticket[DONE], hi - lo) + hi - lo
        lo = plus(ticket[NEXT], piece)
    looks = 0
    if ticket[IS_CALLER]:
        while looks < PATIENCE and look(ticket[DONE]) < size:
            looks += 1
    elif done:
        while looks < LINGER and look(ticket[BELL]) == calls:
            looks += 1
