"""Part of a row held in vector registers, for sums that should not go through memory.

A loop that adds row after row to an array writes the sum back after every row, and one
that adds up a single row waits for each addition before the next. ``Lanes`` is a value that
a loop carries instead: 256 bytes of float32 or float64, which LLVM spreads over whatever
registers the machine has. It is added, subtracted and multiplied like a number, with
another or with a number.

Contiguous arrays are read and written by the place of the first number, counted from their
beginning; halves are widened as they are read and rounded as they are written. All of this
works on single numbers too, so that what is done to a row is written once: for lanes, and
for the numbers that are left at its end.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from ._numba import I32, LINE, narrowed, widened

#: Bytes in a value of type Lanes: eight registers of AVX2, half of what there are.
WIDTH = 256
# Bytes that are written past the caches at a time: what every array begins at.
STREAM = 16
# Arrays of so many bytes are not in the caches any more when somebody reads them.
LARGE = 1 << 24


def is_streamed(out: np.ndarray) -> bool:
    """Tell whether rows of ``out`` are better written past the caches, and can be."""
    if out.nbytes < LARGE:
        return False
    return (out.ctypes.data | out.strides[0]) % STREAM == 0


class Lanes(types.Type):
    """The Numba type of ``WIDTH`` bytes of ``dtype``, float32 or float64."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        number = ir.DoubleType() if lanes.dtype == types.float64 else ir.FloatType()
        super().__init__(manager, lanes, ir.VectorType(number, _count(lanes)))


def _zeros(typingctx, like):
    """Return zeros of the type of the number ``like``."""
    lanes = Lanes(like)

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(lanes), None)

    return lanes(like), codegen


def _load(typingctx, like, numbers, start):
    """Return what ``numbers`` has at ``start``: lanes or one number, as ``like`` is."""

    def codegen(context, builder, signature, args):
        kind = signature.args[1].dtype
        pointer = _pointer(context, builder, signature, args)
        pointer = builder.bitcast(pointer, _kept(context, like, kind).as_pointer())
        return widened(builder, builder.load(pointer, align=_bytes(kind)), kind)

    return like(like, numbers, types.int64), codegen


def _total(typingctx, lanes):
    """Return the sum of all lanes, halves of them added to each other until one is left."""

    def codegen(context, builder, signature, args):
        sums, count = args[0], _count(lanes)
        while count > 1:
            count //= 2
            lower, upper = (
                _taken(builder, sums, range(start, start + count)) for start in (0, count)
            )
            sums = builder.fadd(lower, upper)
        return builder.extract_element(sums, I32(0))

    return lanes.dtype(lanes), codegen


def _store(typingctx, value, numbers, start):
    """Write lanes or a number to ``numbers`` at ``start``, rounded to its type."""

    def codegen(context, builder, signature, args):
        kind = signature.args[1].dtype
        bits = narrowed(builder, args[0], kind)
        pointer = _pointer(context, builder, signature, args)
        pointer = builder.bitcast(pointer, bits.type.as_pointer())
        builder.store(bits, pointer, align=_bytes(kind))
        return context.get_dummy_value()

    return types.void(value, numbers, types.int64), codegen


def _stream(typingctx, lanes, numbers, start):
    """Write lanes as ``store`` does, but past the caches; ``start`` is at 16 bytes.

    The next atomic operation of this thread lets others see them.
    """

    def codegen(context, builder, signature, args):
        kind = signature.args[1].dtype
        bits, step = narrowed(builder, args[0], kind), STREAM // _bytes(kind)
        pointer = _pointer(context, builder, signature, args)
        mark = builder.module.add_metadata([I32(1)])
        for first in range(0, bits.type.count, step):
            part = _taken(builder, bits, range(first, first + step))
            place = builder.gep(pointer, [I32(first)])
            place = builder.bitcast(place, part.type.as_pointer())
            builder.store(part, place, align=STREAM).set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(lanes, numbers, types.int64), codegen


def _fetch(typingctx, lanes, numbers, start):
    """Ask for the memory that ``load`` will read there, a hint that changes nothing."""

    def codegen(context, builder, signature, args):
        i8p = ir.IntType(8).as_pointer()
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [i8p], ir.FunctionType(ir.VoidType(), [i8p, I32, I32, I32])
        )
        pointer = builder.bitcast(_pointer(context, builder, signature, args), i8p)
        for offset in range(0, _count(lanes) * _bytes(signature.args[1].dtype), LINE):
            # A read (0), to be kept in every level of cache (3), of data (1).
            line = builder.gep(pointer, [I32(offset)])
            builder.call(hint, [line, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(lanes, numbers, types.int64), codegen


def _bytes(dtype):
    return dtype.bitwidth // 8


def _count(lanes):
    return WIDTH // _bytes(lanes.dtype)


def _pointer(context, builder, signature, args):
    view = context.make_array(signature.args[1])(context, builder, args[1])
    return builder.gep(view.data, [args[2]])


def _kept(context, like, dtype):
    """Return the type of what ``like`` is, as it is kept in memory."""
    number = context.get_value_type(dtype)
    return ir.VectorType(number, _count(like)) if isinstance(like, Lanes) else number


def _repeated(builder, number, wide):
    first = builder.insert_element(ir.Constant(wide, ir.Undefined), number, I32(0))
    return _taken(builder, first, [0] * wide.count)


def _taken(builder, lanes, places):
    unset = ir.Constant(lanes.type, ir.Undefined)
    which = ir.Constant(ir.VectorType(I32, len(places)), list(places))
    return builder.shuffle_vector(lanes, unset, which)


def _operator(symbol: Callable[..., Any], instruction: str) -> None:
    """Let ``symbol`` work on lanes, with a number on either side taken for all of them."""

    def both(typingctx, a, b):
        lanes = a if isinstance(a, Lanes) else b

        def codegen(context, builder, signature, args):
            wide = context.get_value_type(lanes)
            x, y = (
                value if isinstance(kind, Lanes) else _repeated(builder, value, wide)
                for value, kind in zip(args, signature.args, strict=True)
            )
            return getattr(builder, instruction)(x, y)

        return lanes(a, b), codegen

    apply: Any = intrinsic(both)

    @overload(symbol)
    def _(a, b):
        if isinstance(a, Lanes) or isinstance(b, Lanes):
            return lambda a, b: apply(a, b)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")

# Typed as Any: a type checker sees the typing context that Numba passes itself.
zeros: Any = intrinsic(_zeros)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
stream: Any = intrinsic(_stream)
fetch: Any = intrinsic(_fetch)
total: Any = intrinsic(_total)
