"""Part of a row in vector registers, for sums that should not go through memory.

A loop that adds row after row to an array writes the sum back after every row, and one that
adds up a single row waits for each addition before the next. ``Lanes`` is a value that a
loop carries instead: 256 bytes of float32, float64 or int64, which LLVM spreads over the
available registers. It supports ``+``, ``-``, ``*`` and, for floats, ``/`` with other lanes
or a number. Integers wrap around.

Contiguous arrays are read and written at a flat index. Half precision is upcast when it is
read and rounded when it is written. Everything here also works on single numbers, so that
an operation on a row is written once for lanes and for the entries left at the row's end.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    register_model,
    type_callable,
)

from .aligned import LINE
from .compile import (
    BYTE_POINTER,
    FLOAT16_BITS,
    I32,
    I64,
    build_downcast,
    build_prefetch,
    build_upcast,
    constant_like,
    shaped_like,
)
from .numba_abi import array_struct

#: Bytes in a value of type Lanes: eight AVX2 registers, half of all; and in a short one,
#: for short rows and for loops that carry several.
LANES_BYTES, SHORT_LANES_BYTES = 256, 64
# Bytes of the smallest streaming store. NumPy and torch align arrays to at least this.
STREAM_BYTES = 16
# Outputs from this size on use streaming stores: they would evict the tables from the cache
# and are evicted themselves before they are read.
STREAMING_BYTES = 1 << 24
# A float64 between 2**52 and 2**53 is an integer.
ROUNDING_SHIFT = 1.5 * 2**52


def is_streamed(out: np.ndarray, min_bytes: int | None = None, *, has_rest: bool) -> bool:
    """Return whether ``out`` is large enough for streaming stores, and its rows fit them.

    A line that is written partly by streaming stores and partly through the caches takes
    several times as long, so rows are whole lines.

    Args:
        out: Contiguous array.
        min_bytes: Size from which on to stream.
        has_rest: Whether entries at the end of a row may not be streamed. They begin a line
            if the array does.
    """
    if out.nbytes < (STREAMING_BYTES if min_bytes is None else min_bytes):
        return False
    return fits_streams(out.ctypes.data, out.strides[0], has_rest=has_rest)


def fits_streams(address: int, row_bytes: int, *, has_rest: bool) -> bool:
    """Return whether rows fit streaming stores; see :func:`is_streamed`.

    Args:
        address: Address of the array.
        row_bytes: Size of a row.
        has_rest: As in :func:`is_streamed`.
    """
    start = address % (LINE if has_rest else STREAM_BYTES)
    return start == 0 and row_bytes % LINE == 0


class Lanes(types.Type):
    """Numba type of ``size`` bytes of ``dtype``, float32, float64 or int64."""

    def __init__(self, dtype, size=LANES_BYTES):
        self.dtype, self.size = dtype, size
        super().__init__(f"Lanes({dtype}, {size})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        element = manager.lookup(lanes.dtype).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(element, _count(lanes)))


def _zeros(typingctx, like):
    """Return lanes of zeros of the type of the number ``like``."""
    return _zero_lanes(Lanes(like), like)


def _short_zeros(typingctx, like):
    """Return short lanes of zeros of the type of the number ``like``."""
    return _zero_lanes(Lanes(like, SHORT_LANES_BYTES), like)


def _zero_lanes(lanes, like):
    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(lanes), None)

    return lanes(like), codegen


def _load(typingctx, like, array, start):
    """Return the entries of ``array`` from ``start``: lanes or one number, as ``like``."""

    def codegen(context, builder, signature, args):
        dtype = signature.args[1].dtype
        pointer = _pointer(context, builder, signature, args)
        stored = _stored_type(context, like, dtype)
        pointer = builder.bitcast(pointer, stored.as_pointer())
        value = build_upcast(builder, builder.load(pointer, align=_bytes(dtype)), dtype)
        return _converted(builder, value, context.get_value_type(like))

    return like(like, array, types.int64), codegen


def _total(typingctx, lanes):
    """Return the sum of all lanes, halving their number until one is left."""

    def codegen(context, builder, signature, args):
        sums, count = args[0], _count(lanes)
        while count > 1:
            count //= 2
            lower, upper = (
                _selected(builder, sums, range(start, start + count))
                for start in (0, count)
            )
            sums = builder.fadd(lower, upper)
        return builder.extract_element(sums, I32(0))

    return lanes.dtype(lanes), codegen


def _store(typingctx, value, array, start):
    """Write lanes or a number to ``array`` from ``start``, rounded to its dtype."""
    return types.void(value, array, types.int64), _build_store


def _stream(typingctx, lanes, array, start):
    """Write lanes like ``store``, but past the caches, to an address aligned to 16 bytes.

    They are visible to other threads after this thread's next atomic operation.
    """
    return types.void(lanes, array, types.int64), _build_stream


def _store_or_stream(typingctx, lanes, array, start, streams):
    """Write ``lanes`` past the caches if ``streams``, else through them."""

    def codegen(context, builder, signature, args):
        with builder.if_else(args[3]) as (is_streamed, is_stored):
            with is_streamed:
                _build_stream(context, builder, signature, args)
            with is_stored:
                _build_store(context, builder, signature, args)
        return context.get_dummy_value()

    return types.void(lanes, array, types.int64, types.boolean), codegen


def _add_to(typingctx, value, array, start):
    """Add lanes or a number to the entries of ``array`` from ``start``."""
    signature, load = _load(typingctx, value, array, start)

    def codegen(context, builder, signature, args):
        total = builder.fadd(load(context, builder, signature, args), args[0])
        return _build_store(context, builder, signature, (total, *args[1:]))

    return types.void(*signature.args), codegen


def _build_store(context, builder, signature, args):
    dtype = signature.args[1].dtype
    bits = build_downcast(builder, args[0], dtype)
    pointer = _pointer(context, builder, signature, args)
    pointer = builder.bitcast(pointer, bits.type.as_pointer())
    builder.store(bits, pointer, align=_bytes(dtype))
    return context.get_dummy_value()


def _build_stream(context, builder, signature, args):
    lanes, dtype = signature.args[0], signature.args[1].dtype
    line = min(LINE, _count(lanes) * _bytes(dtype))
    address = builder.ptrtoint(_pointer(context, builder, signature, args), I64)
    offset = builder.and_(address, I64(line - 1))
    is_aligned = builder.icmp_unsigned("==", offset, I64(0))
    # A whole line at once takes a tenth less time than its parts.
    with builder.if_else(is_aligned) as (lines, parts):
        with lines:
            _build_stores(context, builder, signature, args, line)
        with parts:
            _build_stores(context, builder, signature, args, STREAM_BYTES)
    return context.get_dummy_value()


def _build_stores(context, builder, signature, args, size):
    """Build streaming stores of ``size`` bytes each."""
    lanes, dtype = signature.args[0], signature.args[1].dtype
    step = size // _bytes(dtype)
    # float16 is rounded part by part: LLVM would share the vector of all lanes with the
    # branch that stores them, and then store its parts through the caches. Lines that are
    # written in both ways take twenty times as long.
    by_part = dtype == FLOAT16_BITS
    whole = args[0] if by_part else build_downcast(builder, args[0], dtype)
    start = _pointer(context, builder, signature, args)
    nontemporal = builder.module.add_metadata([I32(1)])
    for first in range(0, _count(lanes), step):
        part = _selected(builder, whole, range(first, first + step))
        part = build_downcast(builder, part, dtype) if by_part else part
        pointer = builder.gep(start, [I32(first)])
        pointer = builder.bitcast(pointer, part.type.as_pointer())
        instruction = builder.store(part, pointer, align=size)
        instruction.set_metadata("nontemporal", nontemporal)


def _prefetch_lanes(typingctx, like, array, start):
    """Prefetch what ``load`` would read with the same arguments."""
    return _prefetch(like, array, writes=False)


def _prefetch_target(typingctx, like, array, start):
    """Prefetch what ``store`` would write to an array, given lanes like ``like``."""
    return _prefetch(like, array, writes=True)


def _prefetch(like, array, *, writes):
    def codegen(context, builder, signature, args):
        count = _count(like) if isinstance(like, Lanes) else 1
        start = _pointer(context, builder, signature, args)
        pointer = builder.bitcast(start, BYTE_POINTER)
        size = count * _bytes(signature.args[1].dtype)
        # Lanes that begin within a cache line end in one more: the first line of the next
        # lanes of the row, which is prefetched with them. If rows are read in random
        # order, the caller also prefetches their last entry.
        for offset in range(0, size, LINE):
            build_prefetch(builder, builder.gep(pointer, [I32(offset)]), writes=writes)
        return context.get_dummy_value()

    return types.void(like, array, types.int64), codegen


def _nearest_integer(typingctx, x):
    """Return float64 between -2**51 and 2**51 as int64, rounded to nearest.

    Adding 1.5 * 2**52 leaves the integer in the low bits of the sum. Only AVX-512 has an
    instruction that converts a vector.
    """

    def codegen(context, builder, signature, args):
        integer_type = shaped_like(args[0], I64)
        shift = constant_like(args[0], ROUNDING_SHIFT)
        bits = builder.bitcast(builder.fadd(args[0], shift), integer_type)
        return builder.sub(bits, builder.bitcast(shift, integer_type))

    return _with_dtype(x, types.int64)(x), codegen


def _as_float64(typingctx, x):
    """Return int64 as float64."""

    def codegen(context, builder, signature, args):
        return builder.sitofp(args[0], shaped_like(args[0], ir.DoubleType()))

    return _with_dtype(x, types.float64)(x), codegen


def _add_if_negative(typingctx, x, y):
    """Return ``x + y`` where int64 ``x`` is negative, else ``x``."""

    def codegen(context, builder, signature, args):
        mask = builder.ashr(args[0], constant_like(args[0], 63))
        return builder.add(args[0], builder.and_(args[1], mask))

    return x(x, x), codegen


def _with_dtype(like, dtype):
    return Lanes(dtype, like.size) if isinstance(like, Lanes) else dtype


def _bytes(dtype):
    return dtype.bitwidth // 8


def _count(lanes):
    return lanes.size // _bytes(lanes.dtype)


def _pointer(context, builder, signature, args):
    array_type = signature.args[1]
    if array_type.layout != "C":
        raise TypeError(f"lanes need a contiguous array, got {array_type}")
    struct = array_struct(context, builder, array_type, args[1])
    return builder.gep(struct.data, [args[2]])


def _converted(builder, value, wanted):
    """Return an LLVM scalar or vector of floats as the type ``wanted``."""
    if value.type == wanted:
        return value
    element = getattr(wanted, "element", wanted)
    is_double = isinstance(element, ir.DoubleType)
    return (builder.fpext if is_double else builder.fptrunc)(value, wanted)


def _stored_type(context, like, dtype):
    """Return the LLVM type that ``like`` has in an array of ``dtype``."""
    element = context.get_value_type(dtype)
    return ir.VectorType(element, _count(like)) if isinstance(like, Lanes) else element


def _repeated(builder, number, vector_type):
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, number, I32(0))
    return _selected(builder, first, [0] * vector_type.count)


def _selected(builder, lanes, indices: Sequence[int]):
    undefined = ir.Constant(lanes.type, ir.Undefined)
    mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
    return builder.shuffle_vector(lanes, undefined, mask)


def _shuffle(indices: Callable[[int], Sequence[int]]) -> Any:
    """Return an intrinsic that selects lanes from the concatenation of two values.

    Args:
        indices: Function of the number of lanes in each.
    """

    def shuffle(typingctx, a, b):
        def codegen(context, builder, signature, args):
            selected = list(indices(_count(a)))
            mask = ir.Constant(ir.VectorType(I32, len(selected)), selected)
            return builder.shuffle_vector(*args, mask)

        return a(a, b), codegen

    return intrinsic(shuffle)


def _interleaved(start: int, end: int, count: int) -> list[int]:
    return [index for i in range(start, end) for index in (i, i + count)]


def _define_operator(symbol: Callable[..., Any], instruction: str) -> None:
    """Define ``symbol`` on lanes; a number on either side is broadcast.

    ``instruction`` is that of integers; that of floats begins with an f.

    The instruction is built in the caller: Numba would compile an ``overload`` as a
    function of its own, for each pair of types and each process.
    """

    @type_callable(symbol)
    def _(context):
        def typer(a, b):
            lanes = a if isinstance(a, Lanes) else b
            if isinstance(lanes, Lanes) and {a, b} <= {lanes, lanes.dtype}:
                return lanes

        return typer

    def build(context, builder, signature, args):
        vector_type = context.get_value_type(signature.return_type)
        x, y = (
            value if isinstance(operand, Lanes) else _repeated(builder, value, vector_type)
            for value, operand in zip(args, signature.args, strict=True)
        )
        is_float = isinstance(signature.return_type.dtype, types.Float)
        return getattr(builder, f"f{instruction}" if is_float else instruction)(x, y)

    for number in (types.Float, types.Integer):
        for operands in ((Lanes, number), (number, Lanes)):
            lower_builtin(symbol, *operands)(build)
    lower_builtin(symbol, Lanes, Lanes)(build)


_define_operator(operator.add, "add")
_define_operator(operator.sub, "sub")
_define_operator(operator.mul, "mul")
_define_operator(operator.truediv, "div")

# Any: the declared signatures begin with the typing context that Numba passes itself.
zeros: Any = intrinsic(_zeros)
short_zeros: Any = intrinsic(_short_zeros)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
stream: Any = intrinsic(_stream)
store_or_stream: Any = intrinsic(_store_or_stream)
add_to: Any = intrinsic(_add_to)
prefetch_lanes: Any = intrinsic(_prefetch_lanes)
prefetch_target: Any = intrinsic(_prefetch_target)
total: Any = intrinsic(_total)
nearest_integer: Any = intrinsic(_nearest_integer)
as_float64: Any = intrinsic(_as_float64)
add_if_negative: Any = intrinsic(_add_if_negative)
evens: Any = _shuffle(lambda count: range(0, 2 * count, 2))
odds: Any = _shuffle(lambda count: range(1, 2 * count, 2))
interleave_lower: Any = _shuffle(lambda count: _interleaved(0, count // 2, count))
interleave_upper: Any = _shuffle(lambda count: _interleaved(count // 2, count, count))
