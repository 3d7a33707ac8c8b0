"""Compiling loops: one decorator, and the intrinsics that Numba lacks.

Numba refuses float16 and bfloat16, so tables of those travel as integer views whose type
says which they are: ``int16`` holds the bits of a float16, ``uint16`` those of a bfloat16.
``widen`` and ``narrow`` turn bits into numbers and back, rounding to nearest even.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Sums may be reordered and multiply-adds fused. Never all of fastmath, which would delete
# tests for NaN.
REORDER = {"reassoc", "contract", "arcp"}
# Bytes that memory hands over at a time.
LINE = 64


def kernel(*, reorder: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop over ``[lo, hi)`` to code that releases the GIL.

    The result is kept on disk for the next process; where no folder can be written it is
    compiled again each time, which ``cache=True`` alone would refuse to do.

    Args:
        reorder: Whether floating-point sums may be reordered for speed.
    """

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {
            "nogil": True,
            "error_model": "numpy",
            "fastmath": REORDER if reorder else False,
        }
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            return numba.njit(**options)(function)

    return compile_


def bits_of(x: np.ndarray) -> np.ndarray:
    """Return ``x`` as the loops take it: halves as integers, the rest as it is."""
    # Asked first: a dtype takes microseconds to say its name.
    if x.dtype.itemsize != 2:
        return x
    if x.dtype == np.float16:
        return x.view(np.int16)
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16)
    return x


def _widen(typingctx, bits):
    """Return the number that ``bits`` stand for: float32 for halves, floats as they are."""
    if bits == types.int16:

        def codegen(context, builder, signature, args):
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.int16), codegen
    if bits == types.uint16:

        def codegen(context, builder, signature, args):
            wide = builder.zext(args[0], ir.IntType(32))
            return builder.bitcast(
                builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType()
            )

        return types.float32(types.uint16), codegen

    def codegen(context, builder, signature, args):
        return args[0]

    return bits(bits), codegen


def _narrow(typingctx, number, like):
    """Return ``number`` rounded to the type of ``like``, as bits for the halves."""
    if like == types.int16:

        def codegen(context, builder, signature, args):
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

        return types.int16(types.float32, types.int16), codegen
    if like == types.uint16:

        def codegen(context, builder, signature, args):
            i32 = ir.IntType(32)
            bits = builder.bitcast(args[0], i32)
            odd = builder.and_(
                builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1)
            )
            rounded = builder.add(bits, builder.add(odd, ir.Constant(i32, 0x7FFF)))
            # Rounding would carry a NaN's payload away; a quiet NaN keeps its sign.
            quiet = builder.or_(
                builder.and_(bits, ir.Constant(i32, 0x80000000)),
                ir.Constant(i32, 0x7FC00000),
            )
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            chosen = builder.select(is_nan, quiet, rounded)
            return builder.trunc(builder.lshr(chosen, ir.Constant(i32, 16)), ir.IntType(16))

        return types.uint16(types.float32, types.uint16), codegen

    def codegen(context, builder, signature, args):
        return args[0]

    return like(like, like), codegen


def _prefetch_line(typingctx, array, row, byte):
    """Ask for the memory ``byte`` bytes into ``array[row]``; a hint, no more."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(view.strides, 0)
        i8p, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.add(builder.mul(args[1], stride), args[2])
        pointer = builder.gep(builder.bitcast(view.data, i8p), [place])
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [i8p], ir.FunctionType(ir.VoidType(), [i8p, i32, i32, i32])
        )
        # A read (0), to be kept in every level of cache (3), of data (1).
        builder.call(hint, [pointer, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


# Typed as Any: a type checker sees the typing context that Numba passes itself.
widen: Any = intrinsic(_widen)
narrow: Any = intrinsic(_narrow)
prefetch_line: Any = intrinsic(_prefetch_line)

# Called as functions, short loops are slower: what is known of the arrays' memory does not
# reach into a call.
inlined: Any = numba.njit(inline="always")


@inlined
def prefetch(array, row):
    """Ask for the beginning of ``array[row]``; the machine often guesses the rest."""
    prefetch_line(array, row, 0)


@inlined
def prefetch_row(array, row):
    """Ask for all of ``array[row]``."""
    for byte in range(0, array.shape[1] * array.itemsize, LINE):
        prefetch_line(array, row, byte)
