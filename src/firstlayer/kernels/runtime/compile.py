"""Decorators that compile kernels, half-precision numbers, and prefetches.

Numba has no float16 and bfloat16, so arrays of those are passed as integer views whose
dtype tells them apart: ``int16`` holds the bits of float16, ``uint16`` those of
bfloat16. ``upcast`` and ``downcast`` convert between bits and float32, rounding to nearest
even.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import for_range_slice
from numba.extending import intrinsic

from ..._check import float_dtype
from .aligned import LINE
from .cache import cached
from .compiler import InternalCompiler, KernelCompiler
from .numba_abi import array_struct

# Allows reordered sums and fused multiply-adds. Full fastmath would remove NaN checks.
REORDER = {"reassoc", "contract", "arcp"}
# Allows fused multiply-adds only: in another order products of three numbers overflow.
FUSE = {"contract"}
BFLOAT16 = float_dtype("bfloat16")
# NumPy has one object for each of these, but for other byte orders.
FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)
# Numba types of the views of half-precision arrays.
FLOAT16_BITS, BFLOAT16_BITS = HALF_BITS = types.int16, types.uint16
I32, I64, BYTE_POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()

F = TypeVar("F", bound=Callable[..., object])
# Any: decorated functions keep their own types for type checkers.
njit: Any = numba.njit
# Options of functions that only kernels call, not Python or C.
WITHOUT_WRAPPERS: Any = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "pipeline_class": InternalCompiler,
}


def kernel(*, reorder: bool = False) -> Callable[[F], F]:
    """Compile a function to code that releases the GIL, at its first call.

    It returns nothing or a number, and writes to arrays that are arguments. It creates no
    arrays, so its code does not count references; see
    :mod:`firstlayer.kernels.runtime.scratch` for scratch memory. Each of its variables has
    one type, and indices of arrays are not negative.

    The code is cached on disk; see :mod:`firstlayer.kernels.runtime.cache`.

    Args:
        reorder: Whether floating-point sums may be reordered for speed.
    """

    def compile_(function: F) -> F:
        options = {
            "nogil": True,
            "error_model": "numpy",
            "fastmath": REORDER if reorder else False,
            # Nothing calls kernels from C.
            "no_cfunc_wrapper": True,
            "_nrt": False,
            "pipeline_class": KernelCompiler,
        }
        return cached(njit(**options)(function))

    return compile_


def internal(function: F) -> F:
    """Compile a function that only kernels call."""
    return njit(error_model="numpy", **WITHOUT_WRAPPERS)(function)


def inlined(function: F) -> F:
    """Compile a function into each of its callers.

    Short loops are slower in a separate function, where the compiler knows less about the
    arrays' memory. Each call adds about 10 ms to the compilation of its caller; an
    intrinsic adds much less.
    """
    return njit(inline="always")(function)


def bits_of(x: np.ndarray) -> np.ndarray:
    """Return ``x`` as kernels take it: half precision as integers, others unchanged."""
    # First, because a comparison of dtypes takes longer than a small kernel.
    if x.dtype is FLOAT32 or x.dtype is INT64:
        return x
    if x.dtype == np.float16:
        return x.view(np.int16)
    if x.dtype == BFLOAT16:
        return x.view(np.uint16)
    return x


def _upcast(typingctx, bits):
    """Return half-precision bits as float32, and any other float unchanged."""

    def codegen(context, builder, signature, args):
        return build_upcast(builder, args[0], bits)

    return (types.float32 if bits in HALF_BITS else bits)(bits), codegen


def _downcast(typingctx, number, like):
    """Return ``number`` rounded to the type of ``like``, as bits for half precision."""

    def codegen(context, builder, signature, args):
        return build_downcast(builder, args[0], like)

    return like(types.float32 if like in HALF_BITS else like, like), codegen


def build_upcast(builder: Any, bits: Any, dtype: Any) -> Any:
    """Return the LLVM scalar or vector ``bits`` of Numba type ``dtype`` as floats."""
    if dtype == FLOAT16_BITS:
        halves = builder.bitcast(bits, shaped_like(bits, ir.HalfType()))
        return builder.fpext(halves, shaped_like(bits, ir.FloatType()))
    if dtype == BFLOAT16_BITS:
        integers = builder.zext(bits, shaped_like(bits, I32))
        return builder.bitcast(
            builder.shl(integers, constant_like(integers, 16)),
            shaped_like(bits, ir.FloatType()),
        )
    return bits


def build_downcast(builder: Any, number: Any, dtype: Any) -> Any:
    """Return an LLVM scalar or vector of floats rounded to ``dtype``, as its bits."""
    if dtype == FLOAT16_BITS:
        halves = builder.fptrunc(number, shaped_like(number, ir.HalfType()))
        return builder.bitcast(halves, shaped_like(number, ir.IntType(16)))
    if dtype != BFLOAT16_BITS:
        return number
    bits = builder.bitcast(number, shaped_like(number, I32))
    is_odd = builder.and_(
        builder.lshr(bits, constant_like(bits, 16)), constant_like(bits, 1)
    )
    rounded = builder.add(bits, builder.add(is_odd, constant_like(bits, 0x7FFF)))
    # Rounding could turn a NaN into another number; a quiet NaN keeps its sign.
    sign = builder.and_(bits, constant_like(bits, 0x80000000))
    quiet_nan = builder.or_(sign, constant_like(bits, 0x7FC00000))
    is_nan = builder.fcmp_unordered("uno", number, number)
    upper_half = builder.lshr(
        builder.select(is_nan, quiet_nan, rounded), constant_like(bits, 16)
    )
    return builder.trunc(upper_half, shaped_like(number, ir.IntType(16)))


def build_prefetch(builder: Any, pointer: Any, *, writes: bool = False) -> None:
    """Prefetch the cache line of an LLVM pointer to bytes.

    Lines prefetched to be read are the first to leave the caches again (``prefetchnta`` on
    x86): few rows are read again soon, and what they would evict, such as the arrays of
    other kernels and the objects of Python, is.

    Args:
        builder: LLVM's builder.
        pointer: The pointer.
        writes: Whether the line will be written. No other core has it then; after a
            prefetch to read, a write would have to wait for those that have it.
    """
    function_type = ir.FunctionType(ir.VoidType(), [BYTE_POINTER, I32, I32, I32])
    prefetch_ = builder.module.declare_intrinsic(
        "llvm.prefetch", [BYTE_POINTER], function_type
    )
    # LLVM counts from data that is used once (0) to data that is used again and again (3).
    # The last number says that it is data, and not code.
    reuse = I32(2 if writes else 0)
    builder.call(prefetch_, [pointer, I32(int(writes)), reuse, I32(1)])


def shaped_like(value: Any, element: Any) -> Any:
    """Return the type ``element``, or a vector of it if ``value`` is a vector."""
    if isinstance(value.type, ir.VectorType):
        return ir.VectorType(element, value.type.count)
    return element


def constant_like(value: Any, number: float) -> Any:
    """Return ``number`` as a constant of the type of ``value``."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [number] * value.type.count)
    return ir.Constant(value.type, number)


def _prefetch_line(typingctx, array, row, byte):
    """Prefetch the cache line ``byte`` bytes into ``array[row]``."""

    def codegen(context, builder, signature, args):
        struct = array_struct(context, builder, signature.args[0], args[0])
        stride = builder.extract_value(struct.strides, 0)
        offset = builder.add(builder.mul(args[1], stride), args[2])
        data = builder.bitcast(struct.data, BYTE_POINTER)
        build_prefetch(builder, builder.gep(data, [offset]))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


def _prefetch_row(typingctx, array, row):
    """Prefetch all of ``array[row]``."""

    def codegen(context, builder, signature, args):
        struct = array_struct(context, builder, signature.args[0], args[0])
        start = builder.mul(args[1], builder.extract_value(struct.strides, 0))
        size = builder.mul(builder.extract_value(struct.shape, 1), struct.itemsize)
        row = builder.gep(builder.bitcast(struct.data, BYTE_POINTER), [start])
        lines = for_range_slice(builder, I64(0), size, I64(LINE), I64)
        with lines as (byte, _):
            build_prefetch(builder, builder.gep(row, [byte]))
        # NumPy aligns arrays to 16 bytes, so a row may end in a line in which no step
        # begins.
        last = builder.sub(size, I64(1))
        build_prefetch(builder, builder.gep(row, [last]))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def _is_row(typingctx, id_, num_rows):
    """Return whether ``0 <= id_ < num_rows``.

    One comparison: as an unsigned number, a negative id is larger than any number of rows.
    """

    def codegen(context, builder, signature, args):
        return builder.icmp_unsigned("<", *args)

    return types.boolean(types.int64, types.int64), codegen


def _prefetch_address(typingctx, address):
    """Prefetch the cache line of an address."""

    def codegen(context, builder, signature, args):
        build_prefetch(builder, builder.inttoptr(args[0], BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


# Any: the declared signatures begin with the typing context that Numba passes itself.
upcast: Any = intrinsic(_upcast)
downcast: Any = intrinsic(_downcast)
prefetch_line: Any = intrinsic(_prefetch_line)
prefetch_row: Any = intrinsic(_prefetch_row)
prefetch_address: Any = intrinsic(_prefetch_address)
is_row: Any = intrinsic(_is_row)


@inlined
def prefetch(array, row):
    """Prefetch the beginning of ``array[row]``; the hardware often predicts the rest."""
    prefetch_line(array, row, 0)


@inlined
def prefetch_bytes(address, size):
    """Prefetch ``size`` bytes at an address, which need not begin a cache line."""
    for byte in range(0, size, LINE):
        prefetch_address(address + byte)
    prefetch_address(address + size - 1)
