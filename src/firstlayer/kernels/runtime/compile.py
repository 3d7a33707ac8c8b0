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

from ..._check import float_dtype

# Sums may be reordered and multiply-adds fused. Never all of fastmath, which would delete
# tests for NaN.
REORDER = {"reassoc", "contract", "arcp"}
BFLOAT16 = float_dtype("bfloat16")
# What the bits of halves travel as.
FLOAT16_BITS, BFLOAT16_BITS = HALVES = types.int16, types.uint16
I32, BYTES = ir.IntType(32), ir.IntType(8).as_pointer()
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
    if x.dtype == np.float16:
        return x.view(np.int16)
    if x.dtype == BFLOAT16:
        return x.view(np.uint16)
    return x


def _widen(typingctx, bits):
    """Return the number that ``bits`` stand for: float32 for halves, floats as they are."""

    def codegen(context, builder, signature, args):
        return upcast(builder, args[0], bits)

    return (types.float32 if bits in HALVES else bits)(bits), codegen


def _narrow(typingctx, number, like):
    """Return ``number`` rounded to the type of ``like``, as bits for the halves."""

    def codegen(context, builder, signature, args):
        return narrowed(builder, args[0], like)

    return like(types.float32 if like in HALVES else like, like), codegen


def upcast(builder: Any, bits: Any, kind: Any) -> Any:
    """Return LLVM's value of ``bits``, one or many, which Numba calls ``kind``."""
    if kind == FLOAT16_BITS:
        halves = builder.bitcast(bits, _each(bits, ir.HalfType()))
        return builder.fpext(halves, _each(bits, ir.FloatType()))
    if kind == BFLOAT16_BITS:
        wide = builder.zext(bits, _each(bits, I32))
        return builder.bitcast(
            builder.shl(wide, _same(wide, 16)), _each(bits, ir.FloatType())
        )
    return bits


def narrowed(builder: Any, number: Any, kind: Any) -> Any:
    """Return the bits of LLVM's ``number``, one or many, rounded to ``kind``."""
    if kind == FLOAT16_BITS:
        halves = builder.fptrunc(number, _each(number, ir.HalfType()))
        return builder.bitcast(halves, _each(number, ir.IntType(16)))
    if kind != BFLOAT16_BITS:
        return number
    bits = builder.bitcast(number, _each(number, I32))
    odd = builder.and_(builder.lshr(bits, _same(bits, 16)), _same(bits, 1))
    rounded = builder.add(bits, builder.add(odd, _same(bits, 0x7FFF)))
    # Rounding would carry a NaN's payload away; a quiet NaN keeps its sign.
    sign = builder.and_(bits, _same(bits, 0x80000000))
    quiet = builder.or_(sign, _same(bits, 0x7FC00000))
    is_nan = builder.fcmp_unordered("uno", number, number)
    chosen = builder.lshr(builder.select(is_nan, quiet, rounded), _same(bits, 16))
    return builder.trunc(chosen, _each(number, ir.IntType(16)))


def ask_for(builder: Any, pointer: Any) -> None:
    """Ask for the line of memory that LLVM's pointer to bytes is in; a hint, no more."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES, I32, I32, I32])
    hint = builder.module.declare_intrinsic("llvm.prefetch", [BYTES], kind)
    # A read (0), to be kept in every level of cache (3), of data (1).
    builder.call(hint, [pointer, I32(0), I32(3), I32(1)])


def _each(like: Any, kind: Any) -> Any:
    """Return the type of as many of ``kind`` as there are numbers in ``like``."""
    if isinstance(like.type, ir.VectorType):
        return ir.VectorType(kind, like.type.count)
    return kind


def _same(like: Any, number: int) -> Any:
    """Return ``number`` as a constant of the type of ``like``, for each if it has many."""
    if isinstance(like.type, ir.VectorType):
        return ir.Constant(like.type, [number] * like.type.count)
    return ir.Constant(like.type, number)


def _prefetch_line(typingctx, array, row, byte):
    """Ask for the memory ``byte`` bytes into ``array[row]``; a hint, no more."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(view.strides, 0)
        place = builder.add(builder.mul(args[1], stride), args[2])
        ask_for(builder, builder.gep(builder.bitcast(view.data, BYTES), [place]))
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
