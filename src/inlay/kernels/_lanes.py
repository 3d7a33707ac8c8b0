"""Part of a row held in vector registers, for sums that should not go through memory.

A loop that adds row after row to an array writes the sum back after every row, and one
that adds up a single row waits for each addition before the next. ``Lanes`` is a value that
a loop carries instead: 256 bytes of float32 or float64, which LLVM spreads over whatever
registers the machine has. It is added, subtracted and multiplied like a number, with
another or with a number. Rows are read from flat arrays by the place of their first number;
halves are widened as they are read.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from ._numba import LINE

#: Bytes in a value of type Lanes: eight registers of AVX2, half of what there are.
WIDTH = 256
I32 = ir.IntType(32)


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
    """Return ``numbers[start:]``, widened to the type of the number ``like``."""
    lanes = Lanes(like)

    def codegen(context, builder, signature, args):
        wide = context.get_value_type(lanes)
        dtype = signature.args[1].dtype
        kept = ir.VectorType(context.get_value_type(dtype), _count(lanes))
        pointer = _pointer(context, builder, signature.args[1], args[1], args[2])
        row = builder.load(builder.bitcast(pointer, kept.as_pointer()), align=_bytes(dtype))
        return _widened(builder, dtype, row, wide)

    return lanes(like, numbers, types.int64), codegen


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


def _store(typingctx, lanes, numbers, start):
    """Write ``lanes`` to ``numbers[start:]``, an array of the same type."""

    def codegen(context, builder, signature, args):
        wide = context.get_value_type(lanes).as_pointer()
        pointer = _pointer(context, builder, signature.args[1], args[1], args[2])
        builder.store(args[0], builder.bitcast(pointer, wide), align=_bytes(lanes.dtype))
        return context.get_dummy_value()

    return types.void(lanes, numbers, types.int64), codegen


def _fetch(typingctx, lanes, numbers, start):
    """Ask for the memory that ``load`` will read there, a hint that changes nothing."""

    def codegen(context, builder, signature, args):
        i8p = ir.IntType(8).as_pointer()
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [i8p], ir.FunctionType(ir.VoidType(), [i8p, I32, I32, I32])
        )
        pointer = _pointer(context, builder, signature.args[1], args[1], args[2])
        pointer = builder.bitcast(pointer, i8p)
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


def _pointer(context, builder, array_type, array, start):
    view = context.make_array(array_type)(context, builder, array)
    return builder.gep(view.data, [start])


def _widened(builder, dtype, row, wide):
    if dtype == types.int16:
        halves = ir.VectorType(ir.HalfType(), wide.count)
        return builder.fpext(builder.bitcast(row, halves), wide)
    if dtype == types.uint16:
        bits = ir.VectorType(I32, wide.count)
        sixteen = ir.Constant(bits, [16] * wide.count)
        return builder.bitcast(builder.shl(builder.zext(row, bits), sixteen), wide)
    return row


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
fetch: Any = intrinsic(_fetch)
total: Any = intrinsic(_total)
