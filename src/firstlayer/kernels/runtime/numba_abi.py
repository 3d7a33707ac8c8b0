"""Every assumption about Numba's internals that its public extension API does not cover.

The thread pool calls a compiled kernel again, through a pointer, with the arguments it was
called with. That relies on the following:

1. A compiled function is ``status f(result *, exception **, *arguments)``.
2. A tuple is passed as its elements. The ticket, a kernel's first argument, is therefore
   its first five arguments, each an int64.
3. Inside a function the ticket is an LLVM array of five int64.
4. A function with ``inline="always"`` is lowered into its caller, so that ``offer`` sees
   the LLVM function of the kernel.
5. The struct of an array has the fields ``data`` and ``strides``.
6. An array is passed as two pointers to its owner, which may be null, its number of items,
   the size of an item, its address, its shape and its strides.

A ticket is a tuple because Numba's generators never release an array argument.

:func:`single_thread_reason` compares the layouts of 1 to 3 and of 6, which takes
microseconds. For a version outside :data:`KNOWN_VERSIONS` it also compiles a small kernel,
offers it and calls it through its pointer, which checks 1 to 4 together. If a check fails,
kernels run on one thread, and every call goes through Numba's dispatcher.
"""

from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
from numba.extending import intrinsic

from .system import HAS_POSIX_THREADS

#: Versions of Numba whose call check has passed.
KNOWN_VERSIONS = frozenset(f"0.{minor}" for minor in range(61, 69))
#: Versions whose compiler :mod:`.compiler` changes. Older ones cannot exclude a function
#: from optimization.
COMPILER_VERSIONS = frozenset(f"0.{minor}" for minor in range(66, 69))

#: Shared-memory address, size of the range, size of a piece, number of helpers that may
#: join, and 1 if the kernel is to be offered to helpers.
Ticket = tuple[int, int, int, int, int]
BLOCK, SIZE, PIECE, HELPERS, OFFER = range(5)
#: End of the name of a function that calls a kernel with stored arguments.
WORKER_SUFFIX = ".helped"
#: Bytes at the beginning of the shared memory that hold a kernel's arguments.
ARGUMENT_BYTES = 4096
#: Offset of the number that is 1 while a kernel uses the shared memory.
BUSY = ARGUMENT_BYTES

I64 = ir.IntType(64)
TICKET_TYPE = types.UniTuple(types.int64, 5)
#: Places of the number of items, the address and the length in the words of an array.
COUNT, DATA, LENGTH = 2, 4, 5


def array_words(array: np.ndarray) -> list[int]:
    """Return the numbers that an array is passed as."""
    owners = [0, 0]
    return [
        *owners, array.size, array.itemsize, array.ctypes.data, *array.shape, *array.strides
    ]  # fmt: skip


def compiled_function(kernel: Any, argument_types: tuple[Any, ...]) -> tuple[int, Any]:
    """Return the address and the LLVM type of a kernel's code for these arguments.

    The code is compiled, or read from the cache, if there is none yet.
    """
    kernel.compile(argument_types)
    compiled = kernel.overloads[argument_types]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    function_type = kernel.targetctx.call_conv.get_function_type(
        compiled.fndesc.restype, compiled.fndesc.argtypes
    )
    return address, function_type


def array_struct(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Return the fields of an array's struct by name, such as ``data`` and ``strides``."""
    return _Fields(builder, context.data_model_manager[array_type], array)


class _Fields:
    """Fields of a struct, each read when it is asked for.

    Numba's own view of a struct copies it to memory first.
    """

    def __init__(self, builder: Any, model: Any, struct: Any) -> None:
        self._builder, self._model, self._struct = builder, model, struct

    def __getattr__(self, name: str) -> Any:
        position = self._model.get_field_position(name)
        return self._builder.extract_value(self._struct, position)


def _offer(typingctx, ticket):
    """Store the arguments of the kernel this is lowered into, and return the ticket.

    If the ticket says to offer the kernel and ``BUSY`` was 0, ``BUSY`` becomes 1 and the
    ticket's last field the address of a function that calls the kernel with the stored
    arguments. If ``BUSY`` was 1, the returned ticket is that of the whole range in one
    piece.
    """

    def codegen(context, builder, signature, args):
        arguments = builder.function.args[2:]
        stored = ir.LiteralStructType([arg.type for arg in arguments])
        if stored.get_abi_size(context.target_data) > ARGUMENT_BYTES:
            raise TypeError(
                f"the arguments of {builder.function.name} must fit in"
                f" {ARGUMENT_BYTES} bytes"
            )
        worker = _build_worker(builder, stored)
        block = builder.extract_value(args[0], BLOCK)
        offers = builder.icmp_signed("!=", builder.extract_value(args[0], OFFER), I64(0))
        result = alloca_once(builder, args[0].type)
        builder.store(builder.insert_value(args[0], I64(0), OFFER), result)
        with builder.if_then(offers):
            busy = builder.inttoptr(builder.add(block, I64(BUSY)), I64.as_pointer())
            claimed = builder.cmpxchg(busy, I64(0), I64(1), "seq_cst", "seq_cst")
            with builder.if_else(builder.extract_value(claimed, 1)) as (is_ours, is_taken):
                with is_ours:
                    struct = builder.inttoptr(block, stored.as_pointer())
                    for index, arg in enumerate(arguments):
                        builder.store(arg, _field(builder, struct, index))
                    address = builder.ptrtoint(worker, I64)
                    builder.store(builder.insert_value(args[0], address, OFFER), result)
                with is_taken:
                    alone = builder.insert_value(args[0], I64(0), OFFER)
                    builder.store(builder.insert_value(alone, I64(0), PIECE), result)
        return builder.load(result)

    return ticket(ticket), codegen


def _build_worker(builder: Any, stored: Any) -> Any:
    """Return a function of the block's address that calls the kernel being built."""
    kernel = builder.function
    worker = ir.Function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [I64]),
        name=kernel.name + WORKER_SUFFIX,
    )
    worker.linkage = "internal"
    body = ir.IRBuilder(worker.append_basic_block())
    struct = body.inttoptr(worker.args[0], stored.as_pointer())
    args: list[Any] = [
        body.load(_field(body, struct, index)) for index in range(len(stored.elements))
    ]
    args[OFFER] = I64(0)
    # The result and the exception are ignored: kernels return nothing, and raise before
    # their first piece if at all.
    ignored = [body.alloca(arg.type.pointee) for arg in kernel.args[:2]]
    body.call(kernel, [*ignored, *args])
    body.ret_void()
    return worker


def _field(builder: Any, struct: Any, index: int) -> Any:
    return builder.gep(struct, [ir.IntType(32)(0), ir.IntType(32)(index)])


def _call_worker(typingctx, worker, block):
    """Call the worker at an address with the address of the block."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _call_kernel(typingctx, kernel, block):
    """Call the compiled kernel at an address, whose argument is the block's address."""

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        hidden = [alloca_once(builder, pointer) for _ in range(2)]
        arguments = [place.type for place in hidden] + [I64]
        function = ir.FunctionType(ir.IntType(32), arguments).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [*hidden, args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


# Any: the declared signatures begin with the typing context that Numba passes itself.
offer: Any = intrinsic(_offer)
call_worker: Any = intrinsic(_call_worker)
call_kernel: Any = intrinsic(_call_kernel)


def is_known_version() -> bool:
    """Return whether this version of Numba is one that Firstlayer was tested with."""
    return _minor_version() in KNOWN_VERSIONS


def has_known_compiler() -> bool:
    """Return whether kernels may be compiled by a changed compiler of this Numba."""
    return _minor_version() in COMPILER_VERSIONS


def _minor_version() -> str:
    return numba.__version__.rpartition(".")[0]


def single_thread_reason() -> str | None:
    """Return why kernels cannot share their work, or None if they can."""
    if not HAS_POSIX_THREADS:
        return "this system has no POSIX threads"
    problem = layout_problem()
    if problem is None and not is_known_version():
        problem = call_problem()
    return problem and f"Numba {numba.__version__} is not supported: {problem}"


# Fields of the struct of an array, in the order in which they are passed.
_ARRAY_FIELDS = "meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides"


def layout_problem() -> str | None:
    """Return which layout differs from the one assumed here, or None."""
    # Broad, because an unknown version may lack any of these names.
    try:
        from numba.core.callconv import CPUCallConv
        from numba.core.datamodel.registry import default_manager

        ticket = default_manager[TICKET_TYPE]
        function: Any = SimpleNamespace(args=("result", "exception", "argument"))
        visible = CPUCallConv.get_arguments(None, function)  # pyright: ignore
        if visible != ("argument",):
            return "compiled functions do not have two hidden arguments"
        if ticket.get_argument_type() != (I64,) * 5:
            return "tuples are not passed as their elements"
        if ticket.get_value_type() != ir.ArrayType(I64, 5):
            return "tuples are not arrays"
        members = default_manager[types.Array(types.int64, 2, "C")]._fields
        if tuple(members) != _ARRAY_FIELDS:
            return f"arrays have the fields {', '.join(members)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@numba.njit(inline="always")
def _offer_inlined(ticket):
    return offer(ticket)


@numba.njit
def _probe(ticket, floats, nothing, pair, log):
    """Log the arguments, then call itself once through the worker's pointer."""
    offered = _offer_inlined(ticket)
    call = log[0, 0]
    log[0, 0] += 1
    log[1 + call, 0] = offered[OFFER] != 0
    log[1 + call, 1] = offered[SIZE]
    log[1 + call, 2] = int(floats[1])
    log[1 + call, 3] = nothing is None
    log[1 + call, 4] = pair[0]
    log[1 + call, 5] = int(pair[1])
    if call == 0 and offered[OFFER]:
        call_worker(offered[OFFER], ticket[BLOCK])


def call_problem() -> str | None:
    """Return what goes wrong when a kernel is called through its pointer, or None."""
    block, log = np.zeros(ARGUMENT_BYTES + 8, np.uint8), np.zeros((3, 6), np.int64)
    ticket = block.ctypes.data, 17, 0, 0, 1
    # Broad, because an unknown version may fail to compile this in any way.
    try:
        _probe(ticket, np.array([3.0, 5.0]), None, (7, 11.0), log)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want = [[2, 0, 0, 0, 0, 0], [1, 17, 5, 1, 7, 11], [0, 17, 5, 1, 7, 11]]
    if log.tolist() != want:
        return f"a kernel's arguments were passed on as {log[1:].tolist()}"
    return None
