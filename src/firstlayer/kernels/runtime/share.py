"""How threads share a range inside compiled code, without ever asking for the GIL.

A kernel is called by one thread, with a ticket, and loops over ``pieces(ticket)``.
The kernel's own address and arguments are written down where helpers find them, and a
helper that is free calls the same kernel with the same arguments. Pieces are handed out by
an atomic counter; the caller leaves when all of them are done and nobody is inside.

What helpers look at is one block of memory (:data:`BLOCK` bytes), a line of cache for each
number: two in one line would be fought over.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compile import inlined, kernel
from .system import core_here, leave, lock, nap, unlock, wait, wake

# Where in the block is what. The next place to be handed out, how much is done, whether
# there is a job, how many helpers are looking at it, how many more may, how many jobs there
# were, how many helpers sleep, the address of what they call, the core of who offers it,
NEXT, DONE, OPEN, INSIDE, SEATS, BELL, SLEEPERS, WORKER, CORE = range(0, 9 * 64, 64)
# what they sleep on, and the arguments of the call.
MUTEX, CONDITION, ARGUMENTS = range(9 * 64, 12 * 64, 64)
ROOM = 4096
BLOCK = ARGUMENTS + ROOM

# A ticket is a tuple of numbers: Numba never lets go of an array that it gave a generator.
Ticket = tuple[int, int, int, int, int]
# What is written on it: the block's address, the length of the range and of a piece, how
# many helpers may join, and whether the kernel is called by one who offers it to them.
POOL, SIZE, PIECE, HELPERS, OFFERS = range(5)
# How often to look for the others' last pieces before taking naps of so many microseconds.
PATIENCE, NAP = 600_000, 20


def alone(size: int) -> Ticket:
    """Return the ticket of a thread that does all of ``[0, size)`` itself."""
    return 0, size, 0, 0, 0


def _plus(typingctx, address, amount):
    """Add to the number at an address and return what it was, in one step for all."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _put(typingctx, address, number):
    """Write the number at an address, after all that was written before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _look(typingctx, address):
    """Return the number at an address as it is now, never one that was read before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


def _fence(typingctx):
    """Let other threads see all that was written before, past the caches too."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _call(typingctx, worker, pool):
    """Call the function at an address with the address of the block."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _offer(typingctx, ticket):
    """Write down the arguments of the kernel this is in, and return the ticket.

    For who offers the kernel, the address of what helpers call is on it then; else 0.
    """

    def codegen(context, builder, signature, args):
        i64, given = ir.IntType(64), builder.function.args[2:]
        kept = ir.LiteralStructType([arg.type for arg in given])
        if kept.get_abi_size(context.target_data) > ROOM:
            raise TypeError(f"{builder.function.name} has too many arguments to share")
        worker = _worker(builder, kept)
        offers = builder.icmp_signed("!=", builder.extract_value(args[0], OFFERS), i64(0))
        with builder.if_then(offers):
            block = builder.add(builder.extract_value(args[0], POOL), i64(ARGUMENTS))
            place = builder.inttoptr(block, kept.as_pointer())
            for k, arg in enumerate(given):
                builder.store(arg, _field(builder, place, k))
        address = builder.select(offers, builder.ptrtoint(worker, i64), i64(0))
        return builder.insert_value(args[0], address, OFFERS)

    return ticket(ticket), codegen


def _worker(builder: Any, kept: Any) -> Any:
    """Return a function that calls this kernel as the block says, but offers nothing."""
    loop, i64 = builder.function, ir.IntType(64)
    made = ir.Function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [i64]),
        name=f"{loop.name}.helped",
    )
    made.linkage = "internal"
    inside = ir.IRBuilder(made.append_basic_block())
    block = inside.add(made.args[0], i64(ARGUMENTS))
    place = inside.inttoptr(block, kept.as_pointer())
    args: list[Any] = [
        inside.load(_field(inside, place, k)) for k in range(len(kept.elements))
    ]
    args[OFFERS] = i64(0)
    # What a kernel returns and why it failed: nothing, for it fails before its first piece.
    room = [inside.alloca(arg.type.pointee) for arg in loop.args[:2]]
    inside.call(loop, [*room, *args])
    inside.ret_void()
    return made


def _field(builder: Any, place: Any, k: int) -> Any:
    return builder.gep(place, [ir.IntType(32)(0), ir.IntType(32)(k)])


# Typed as Any: a type checker sees the typing context that Numba passes itself.
plus: Any = intrinsic(_plus)
put: Any = intrinsic(_put)
look: Any = intrinsic(_look)
fence: Any = intrinsic(_fence)
call: Any = intrinsic(_call)
offer: Any = intrinsic(_offer)


@inlined
def pieces(ticket):
    """Yield ``(lo, hi)`` of one piece after the other until the range is used up.

    To be called by a kernel itself: what is offered to the helpers is the function that
    this is in.
    """
    return _pieces(offer(ticket))


@numba.njit
def _pieces(ticket):
    pool, size, piece, helpers, worker = ticket
    if not piece:
        yield np.int64(0), size
        fence()
        return
    if worker:
        _open(pool, worker, helpers)
    lo = plus(pool + NEXT, piece)
    while lo < size:
        hi = min(size, lo + piece)
        yield lo, hi
        plus(pool + DONE, hi - lo)
        lo = plus(pool + NEXT, piece)
    if worker:
        _close(pool, size)


@numba.njit
def _open(pool, worker, helpers):
    """Let helpers in."""
    put(pool + NEXT, 0)
    put(pool + DONE, 0)
    put(pool + SEATS, helpers)
    put(pool + WORKER, worker)
    put(pool + CORE, core_here())
    put(pool + OPEN, 1)
    plus(pool + BELL, 1)
    if look(pool + SLEEPERS):
        lock(pool + MUTEX)
        wake(pool + CONDITION)
        unlock(pool + MUTEX)


@numba.njit
def _close(pool, size):
    """Wait until all is done and nobody is inside."""
    looks = 0
    while look(pool + DONE) < size:
        looks += 1
        if looks > PATIENCE:
            nap(NAP)
    put(pool + OPEN, 0)
    while look(pool + INSIDE):
        looks += 1
        if looks > PATIENCE:
            nap(NAP)


@kernel()
def help_forever(pool, linger):
    """Join one job after the other, as a thread that does nothing else.

    Args:
        pool: The block's address.
        linger: How often to look for the next job before going to sleep: to be woken takes
            longer than a helper's part of a short one.
    """
    heard = look(pool + BELL)
    while True:
        looks = 0
        while looks < linger and look(pool + BELL) == heard:
            looks += 1
        if looks == linger:
            lock(pool + MUTEX)
            plus(pool + SLEEPERS, 1)
            while look(pool + BELL) == heard:
                wait(pool + CONDITION, pool + MUTEX)
            plus(pool + SLEEPERS, -1)
            unlock(pool + MUTEX)
        heard = look(pool + BELL)
        # In this order: whoever closes the job waits for those inside, and who comes in
        # later finds it closed.
        plus(pool + INSIDE, 1)
        if look(pool + OPEN) and plus(pool + SEATS, -1) > 0:
            leave(look(pool + CORE))
            call(look(pool + WORKER), pool)
        plus(pool + INSIDE, -1)
