"""Encoded numbers in memory, at any address, as float32.

Rows of quantized tables lie in mapped files and between other fields, at addresses that are
multiples of nothing. Everything here takes an address as an integer, and reads without
alignment. Values come as a :class:`~.lanes.Lanes` of 32.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from .compile import BFLOAT16_BITS, BYTE_POINTER, FLOAT16_BITS, build_prefetch, build_upcast
from .lanes import Lanes

#: Values in the lanes of this module.
COUNT = 32
LANES = Lanes(types.float32, 4 * COUNT)
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()


def _zeros(typingctx):
    """Return 32 zeros."""

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(LANES), None)

    return LANES(), codegen


def _unsigned_bytes(typingctx, address):
    """Return 32 bytes as numbers from 0 to 255."""

    def codegen(context, builder, signature, args):
        return builder.uitofp(_loaded(builder, args[0], I8, COUNT), _vector(FLOAT, COUNT))

    return LANES(types.int64), codegen


def _signed_bytes(typingctx, address):
    """Return 32 bytes as numbers from -128 to 127."""

    def codegen(context, builder, signature, args):
        return builder.sitofp(_loaded(builder, args[0], I8, COUNT), _vector(FLOAT, COUNT))

    return LANES(types.int64), codegen


def _nibbles(typingctx, address):
    """Return the halves of 16 bytes, the lower half of each byte first."""

    def codegen(context, builder, signature, args):
        lower, upper = _halves(builder, args[0], COUNT // 2)
        order = [index for i in range(COUNT // 2) for index in (i, i + COUNT // 2)]
        return _unsigned(builder, _shuffled(builder, lower, upper, order))

    return LANES(types.int64), codegen


def _split_nibbles(typingctx, address):
    """Return the lower halves of 16 bytes, then their upper halves."""

    def codegen(context, builder, signature, args):
        lower, upper = _halves(builder, args[0], COUNT // 2)
        return _unsigned(builder, _shuffled(builder, lower, upper, range(COUNT)))

    return LANES(types.int64), codegen


def _shifted_nibbles(typingctx, address, shift):
    """Return the lower halves of 32 bytes (``shift`` 0) or the upper ones (4)."""

    def codegen(context, builder, signature, args):
        values = _loaded(builder, args[0], I8, COUNT)
        shift = builder.trunc(args[1], I8)
        values = builder.lshr(values, _repeated(builder, shift, COUNT))
        return _unsigned(builder, builder.and_(values, _constant(I8, [15] * COUNT)))

    return LANES(types.int64, types.int64), codegen


def _packed(typingctx, address, bits):
    """Return 32 numbers of 2 to 8 ``bits``, in ``4 * bits`` little-endian bytes."""

    def codegen(context, builder, signature, args):
        address, bits = args
        lanes = [builder.mul(bits, I64(i)) for i in range(8)]
        mask = builder.sub(builder.shl(I64(1), bits), I64(1))
        eights = []
        for eight in range(COUNT // 8):
            # Eight values take `bits` bytes. The 8 bytes read end within the 32 values.
            wanted, last = (
                builder.mul(bits, I64(eight)),
                builder.sub(builder.mul(bits, I64(4)), I64(8)),
            )
            is_inside = builder.icmp_signed("<=", wanted, last)
            start = builder.select(is_inside, wanted, last)
            skipped = builder.mul(builder.sub(wanted, start), I64(8))
            word = _loaded(builder, builder.add(address, start), I64, 1)
            words = _repeated(builder, builder.extract_element(word, I32(0)), 8)
            shifts = _built(builder, [builder.add(skipped, lane) for lane in lanes])
            values = builder.and_(builder.lshr(words, shifts), _repeated(builder, mask, 8))
            eights.append(builder.trunc(values, _vector(I8, 8)))
        first, second = (
            _shuffled(builder, eights[i], eights[i + 1], range(16)) for i in (0, 2)
        )
        return _unsigned(builder, _shuffled(builder, first, second, range(COUNT)))

    return LANES(types.int64, types.int64), codegen


def _e4m3(typingctx, address):
    """Return 32 e4m3fn numbers."""

    def codegen(context, builder, signature, args):
        codes = _loaded(builder, args[0], I8, COUNT)
        codes = builder.zext(codes, _vector(I16, COUNT))
        seven = _constant(I16, [7] * COUNT)
        sign = builder.and_(codes, _constant(I16, [0x80] * COUNT))
        size = builder.and_(codes, _constant(I16, [0x7F] * COUNT))
        # With its exponent and mantissa in the places of float16's, a code is 2 ** -8 of
        # its value, subnormal numbers included.
        bits = builder.shl(size, seven)
        is_nan = builder.icmp_unsigned("==", size, _constant(I16, [0x7F] * COUNT))
        bits = builder.select(is_nan, _constant(I16, [0x7E00] * COUNT), bits)
        bits = builder.or_(bits, builder.shl(sign, _constant(I16, [8] * COUNT)))
        values = build_upcast(builder, bits, FLOAT16_BITS)
        return builder.fmul(values, _constant(FLOAT, [256.0] * COUNT))

    return LANES(types.int64), codegen


def _multiply_add(typingctx, lanes, scale, bias):
    """Return ``lanes * scale + bias``, rounded once."""

    def codegen(context, builder, signature, args):
        vector = args[0].type
        function = get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [vector] * 3),
            f"llvm.fma.v{COUNT}f32",
        )
        scale, bias = (_repeated(builder, number, COUNT) for number in args[1:])
        return builder.call(function, [args[0], scale, bias])

    return LANES(LANES, types.float32, types.float32), codegen


def _number_at(stored: Any, dtype: Any = None) -> Any:
    """Return an intrinsic that reads one number at an address as float32."""

    def read(typingctx, address):
        def codegen(context, builder, signature, args):
            number = _loaded(builder, args[0], stored, 1)
            number = builder.extract_element(number, I32(0))
            return build_upcast(builder, number, dtype)

        return types.float32(types.int64), codegen

    return intrinsic(read)


def _byte_at(typingctx, address):
    """Return the byte at an address as an integer."""

    def codegen(context, builder, signature, args):
        byte = _loaded(builder, args[0], I8, 1)
        return builder.zext(builder.extract_element(byte, I32(0)), I64)

    return types.int64(types.int64), codegen


def _prefetch_at(typingctx, address):
    """Prefetch the cache line of an address, which need not be valid."""

    def codegen(context, builder, signature, args):
        build_prefetch(builder, builder.inttoptr(args[0], BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _vector(element: Any, count: int) -> Any:
    return ir.VectorType(element, count)


def _constant(element: Any, numbers: Sequence[float]) -> Any:
    return ir.Constant(_vector(element, len(numbers)), list(numbers))


def _loaded(builder: Any, address: Any, element: Any, count: int) -> Any:
    """Return ``count`` numbers at an address, as a vector."""
    pointer = builder.inttoptr(address, _vector(element, count).as_pointer())
    return builder.load(pointer, align=1)


def _built(builder: Any, numbers: list[Any]) -> Any:
    """Return a vector of LLVM numbers."""
    vector = ir.Constant(_vector(numbers[0].type, len(numbers)), ir.Undefined)
    for index, number in enumerate(numbers):
        vector = builder.insert_element(vector, number, I32(index))
    return vector


def _repeated(builder: Any, number: Any, count: int) -> Any:
    return _built(builder, [number] * count)


def _shuffled(builder: Any, a: Any, b: Any, indices: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, _constant(I32, indices))


def _halves(builder: Any, address: Any, count: int) -> tuple[Any, Any]:
    """Return the lower and the upper halves of ``count`` bytes."""
    values = _loaded(builder, address, I8, count)
    lower = builder.and_(values, _constant(I8, [15] * count))
    return lower, builder.lshr(values, _constant(I8, [4] * count))


def _unsigned(builder: Any, values: Any) -> Any:
    return builder.uitofp(values, _vector(FLOAT, values.type.count))


# Any: the declared signatures begin with the typing context that Numba passes itself.
zeros: Any = intrinsic(_zeros)
unsigned_bytes: Any = intrinsic(_unsigned_bytes)
signed_bytes: Any = intrinsic(_signed_bytes)
nibbles: Any = intrinsic(_nibbles)
split_nibbles: Any = intrinsic(_split_nibbles)
shifted_nibbles: Any = intrinsic(_shifted_nibbles)
packed: Any = intrinsic(_packed)
e4m3: Any = intrinsic(_e4m3)
multiply_add: Any = intrinsic(_multiply_add)
byte_at: Any = intrinsic(_byte_at)
prefetch_at: Any = intrinsic(_prefetch_at)
float32_at: Any = _number_at(FLOAT)
float16_at: Any = _number_at(I16, FLOAT16_BITS)
bfloat16_at: Any = _number_at(I16, BFLOAT16_BITS)
