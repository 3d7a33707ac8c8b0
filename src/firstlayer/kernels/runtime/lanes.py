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

from .compile import BYTES, I32, LINE, ask_for, inlined, narrowed, upcast

#: Bytes in a value of type Lanes: eight registers of AVX2, half of what there are; and in a
#: short one, for rows that are not long.
WIDTH, SHORT = 256, 64
# Bytes written past the caches at a time; NumPy and torch begin arrays at a multiple.
STREAM = 16
# Arrays of so many bytes are not in the caches any more when somebody reads them.
LARGE = 1 << 24


def is_streamed(out: np.ndarray, least: int | None = None) -> bool:
    """Tell whether rows of ``out`` are better written past the caches, and can be.

    Args:
        out: What is written to.
        least: From how many bytes on they are; None is from :data:`LARGE`.
    """
    if out.nbytes < (LARGE if least is None else least):
        return False
    return (out.ctypes.data | out.strides[0]) % STREAM == 0


class Lanes(types.Type):
    """The Numba type of ``size`` bytes of ``dtype``, float32 or float64."""

    def __init__(self, dtype, size=WIDTH):
        self.dtype, self.size = dtype, size
        super().__init__(f"Lanes({dtype}, {size})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        number = ir.DoubleType() if lanes.dtype == types.float64 else ir.FloatType()
        super().__init__(manager, lanes, ir.VectorType(number, _count(lanes)))


def _zeros(typingctx, like):
    """Return zeros of the type of the number ``like``."""
    return _constant(Lanes(like), like)


def _short_zeros(typingctx, like):
    """Return few zeros of the type of the number ``like``."""
    return _constant(Lanes(like, SHORT), like)


def _constant(lanes, like):
    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(lanes), None)

    return lanes(like), codegen


def _load(typingctx, like, numbers, start):
    """Return what ``numbers`` has at ``start``: lanes or one number, as ``like`` is."""

    def codegen(context, builder, signature, args):
        kind = signature.args[1].dtype
        pointer = _pointer(context, builder, signature, args)
        pointer = builder.bitcast(pointer, _kept(context, like, kind).as_pointer())
        found = upcast(builder, builder.load(pointer, align=_bytes(kind)), kind)
        return _as_wide(builder, found, context.get_value_type(like))

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
    """Write lanes as ``store`` does, but past the caches, to a multiple of 16 bytes.

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


def _fetch(typingctx, like, numbers, start):
    """Ask for the memory that ``load`` will read there, a hint that changes nothing."""

    def codegen(context, builder, signature, args):
        count = _count(like) if isinstance(like, Lanes) else 1
        pointer = builder.bitcast(_pointer(context, builder, signature, args), BYTES)
        for offset in range(0, count * _bytes(signature.args[1].dtype), LINE):
            ask_for(builder, builder.gep(pointer, [I32(offset)]))
        return context.get_dummy_value()

    return types.void(like, numbers, types.int64), codegen


def _bytes(dtype):
    return dtype.bitwidth // 8


def _count(lanes):
    return lanes.size // _bytes(lanes.dtype)


def _pointer(context, builder, signature, args):
    if signature.args[1].layout != "C":
        raise TypeError(f"lanes need a contiguous array, got {signature.args[1]}")
    view = context.make_array(signature.args[1])(context, builder, args[1])
    return builder.gep(view.data, [args[2]])


def _as_wide(builder, number, wanted):
    """Return a float32 or float64, one or many, as the type that is wanted."""
    if number.type == wanted:
        return number
    one = getattr(wanted, "element", wanted)
    longer = isinstance(one, ir.DoubleType)
    return (builder.fpext if longer else builder.fptrunc)(number, wanted)


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


def _shuffled(places: Callable[[int], Any]) -> Any:
    """Return a function that takes lanes from two: which, of both one after the other."""

    def shuffled(typingctx, a, b):
        def codegen(context, builder, signature, args):
            which = list(places(_count(a)))
            kind = ir.VectorType(I32, len(which))
            return builder.shuffle_vector(*args, ir.Constant(kind, which))

        return a(a, b), codegen

    return intrinsic(shuffled)


def _zipped(start: int, end: int, count: int) -> list[int]:
    return [place for i in range(start, end) for place in (i, i + count)]


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
short_zeros: Any = intrinsic(_short_zeros)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
stream: Any = intrinsic(_stream)
fetch: Any = intrinsic(_fetch)
total: Any = intrinsic(_total)
evens: Any = _shuffled(lambda count: range(0, 2 * count, 2))
odds: Any = _shuffled(lambda count: range(1, 2 * count, 2))
lower_zipped: Any = _shuffled(lambda count: _zipped(0, count // 2, count))
upper_zipped: Any = _shuffled(lambda count: _zipped(count // 2, count, count))


@inlined
def write(lanes, numbers, start, streams):
    """Write ``lanes`` past the caches if it ``streams``, else through them."""
    if streams:
        stream(lanes, numbers, start)
    else:
        store(lanes, numbers, start)
