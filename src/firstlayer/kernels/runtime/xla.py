"""Kernels as functions that programs compiled by XLA call on the CPU.

XLA passes a call frame, a struct of its foreign function interface, which has the addresses
and shapes of its buffers. A small function, made by LLVM, reads them and calls a kernel,
which shares its work with the helpers of the thread pool. Nothing here imports JAX.

The layout of the frame is that of ``xla/ffi/api/c_api.h``. XLA asks a function for the
version that it was written for, and refuses one that it does not support.
"""

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock

from .bind import machine_code
from .numba_abi import COUNT, I64, LENGTH, TICKET_TYPE, compiled_function
from .pool import PIECES_PER_THREAD, STARTED, shared_block
from .threads import address_of_num_threads

#: Oldest version of the interface with this layout. XLA accepts it as long as that is so.
MAJOR, MINOR = 0, 1
I32, POINTER = ir.IntType(32), ir.IntType(8).as_pointer()

# Offsets in bytes. Frame: the first extension, the addresses of arguments and of results.
_EXTENSION, _ARGUMENTS, _RESULTS = 8, 72, 112
# Extension: its type, and for the type METADATA the address of the metadata.
_TYPE, _METADATA_ADDRESS, METADATA = 8, 24, 1
# Metadata: the version, and traits, of which there are none.
_MAJOR, _MINOR, _TRAITS = 24, 28, 32
# Buffer: the address of its entries, and of its shape.
_DATA, _SHAPE = 24, 40


class Range(NamedTuple):
    """The range of a kernel that threads share: an axis of one of its arguments.

    Args:
        argument: Number of the argument.
        axis: The axis.
        least: Minimum number of items per thread.
        grain: Minimum number of entries of the argument per thread.
        pieces: Pieces per thread.
    """

    argument: int
    grain: int
    axis: int = 0
    least: int = 1
    pieces: int = PIECES_PER_THREAD


@global_compiler_lock
@functools.cache
def xla_function(
    kernel: Any, arguments: tuple[types.Array, ...], *, results: int, shared: Range
) -> int:
    """Return the address of a function of a call frame that calls a kernel.

    A call uses at most :func:`firstlayer.get_num_threads` threads, and no more than the
    pool has started so far.

    Args:
        kernel: Kernel of a ticket and contiguous arrays, which cannot fail.
        arguments: Types of the arrays: the arguments of the call, then its results.
        results: Number of results.
        shared: The range of the kernel.
    """
    address, kernel_type = compiled_function(kernel, (TICKET_TYPE, *arguments))
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), name="call")
    builder: Any = ir.IRBuilder(function.append_basic_block())
    frame = _Struct(builder, function.args[0])
    extension = frame.pointer(_EXTENSION)
    null = POINTER(None)
    has_extension = builder.icmp_unsigned("!=", extension.address, null)
    with builder.if_then(has_extension):
        is_metadata = builder.icmp_signed("==", extension.load(_TYPE, I32), I32(METADATA))
        with builder.if_then(is_metadata):
            metadata = extension.pointer(_METADATA_ADDRESS)
            for offset, number in ((_MAJOR, MAJOR), (_MINOR, MINOR), (_TRAITS, 0)):
                metadata.store(offset, I32(number))
            builder.ret(null)
    # The kernel's result, which is none, and its exception.
    passed = [builder.alloca(pointer.pointee) for pointer in kernel_type.args[:2]]
    num_arguments, words = len(arguments) - results, []
    for index, array in enumerate(arguments):
        is_result = index >= num_arguments
        buffers = frame.pointer(_RESULTS if is_result else _ARGUMENTS)
        place = index - num_arguments if is_result else index
        words.append(_array_words(buffers.pointer(8 * place), array))
    range_words = words[shared.argument]
    size, entries = range_words[LENGTH + shared.axis], range_words[COUNT]
    passed += _ticket_words(builder, size, entries, shared)
    for array_words in words:
        passed += array_words
    wanted = kernel_type.args[2:]
    passed[2:] = [
        builder.inttoptr(word, type_) if isinstance(type_, ir.PointerType) else word
        for word, type_ in zip(passed[2:], wanted, strict=True)
    ]
    target = builder.inttoptr(I64(address), kernel_type.as_pointer())
    builder.call(target, passed)
    builder.ret(null)
    code, engine = machine_code(function)
    # Compiled programs may call the function as long as the process lives.
    _engines.append(engine)
    return code


# Module state: the code of functions.
_engines: list[Any] = []


class _Struct:
    """Memory at an address, whose fields are at known offsets."""

    def __init__(self, builder: Any, address: Any) -> None:
        self.builder, self.address = builder, address

    def _at(self, offset: int, type_: Any) -> Any:
        place = self.builder.gep(self.address, [I64(offset)])
        return self.builder.bitcast(place, type_.as_pointer())

    def load(self, offset: int, type_: Any) -> Any:
        return self.builder.load(self._at(offset, type_))

    def store(self, offset: int, value: Any) -> None:
        self.builder.store(value, self._at(offset, value.type))

    def pointer(self, offset: int) -> "_Struct":
        """Return the memory whose address is in a field."""
        return _Struct(self.builder, self.load(offset, POINTER))


def _ticket_words(builder: Any, size: Any, entries: Any, shared: Range) -> list[Any]:
    """Return the words of a ticket; see :func:`firstlayer.kernels.runtime.pool.run`."""
    block = shared_block()

    def number_at(address: int) -> Any:
        return builder.load(builder.inttoptr(I64(address), I64.as_pointer()))

    def smaller(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed("<", a, b), a, b)

    threads = smaller(
        number_at(address_of_num_threads()),
        builder.add(number_at(block + STARTED), I64(1)),
    )
    threads = smaller(threads, builder.udiv(entries, I64(shared.grain)))
    threads = smaller(threads, builder.udiv(size, I64(shared.least)))
    is_shared = builder.icmp_signed(">", threads, I64(1))
    pieces = builder.mul(threads, I64(shared.pieces))
    # Not a division by zero if the range is not shared.
    pieces = builder.select(is_shared, pieces, I64(1))
    whole = builder.add(size, builder.sub(pieces, I64(1)))
    shares = {
        0: I64(block),
        2: builder.udiv(whole, pieces),
        3: builder.sub(threads, I64(1)),
        4: I64(1),
    }
    words = {word: builder.select(is_shared, n, I64(0)) for word, n in shares.items()}
    return [words.get(word, size) for word in range(5)]


def _array_words(buffer: _Struct, array: Any) -> list[Any]:
    """Return the words that a contiguous array is passed as; see ``numba_abi``."""
    builder, item = buffer.builder, I64(array.dtype.bitwidth // 8)
    sizes = buffer.pointer(_SHAPE)
    shape: list[Any] = [sizes.load(8 * axis, I64) for axis in range(array.ndim)]
    strides: list[Any] = [item]
    count: Any = I64(1)
    # Bytes from one entry to the next, from the last axis to the first.
    for size in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], size))
    for size in shape:
        count = builder.mul(count, size)
    return [I64(0), I64(0), count, item, buffer.load(_DATA, I64), *shape, *strides]
