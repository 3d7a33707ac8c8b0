"""Atomic operations on int64 numbers in memory, sequentially consistent."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _atomic_add(typingctx, address, amount):
    """Add to the number at an address and return its previous value."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _atomic_store(typingctx, address, number):
    """Write the number at an address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _atomic_load(typingctx, address):
    """Return the number at an address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


def _fence(typingctx):
    """Make all earlier writes visible to other threads, streaming stores included."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


# Any: the declared signatures begin with the typing context that Numba passes itself.
atomic_add: Any = intrinsic(_atomic_add)
atomic_store: Any = intrinsic(_atomic_store)
atomic_load: Any = intrinsic(_atomic_load)
fence: Any = intrinsic(_fence)
