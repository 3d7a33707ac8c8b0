"""Calls of compiled kernels without Numba's dispatcher.

The dispatcher finds the type of every argument and unpacks it, which takes longer than a
kernel that reads one row. :func:`bind` does both once. Arguments that stay the same become
words of a block of memory, which calls only read, so several threads may call at once. The
others are passed as numbers: an array as its address and its length.

A small function, which LLVM compiles in milliseconds, passes them on to the code that the
dispatcher would call. A kernel is therefore compiled, and cached, as in any other call.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core.compiler_lock import global_compiler_lock

from .numba_abi import (
    COUNT,
    DATA,
    I64,
    LENGTH,
    TICKET_TYPE,
    array_words,
    compiled_function,
)

#: Stands for an array of one int64, which is 0 before each call. Calls return its value.
FLAG = np.zeros(1, np.int64)
# Sources of a word that are no parameter of the call.
_BLOCK, _FLAG = -1, -2


def bind(
    kernel: Any, *, varying: Sequence[str] = (), **arguments: Any
) -> Callable[..., int]:
    """Return a function that calls a kernel with these arguments.

    It takes the five numbers of a ticket, then the address and the length of each array in
    ``varying``. It returns 0, or the value of the argument that is :data:`FLAG`, or -1 if
    the kernel failed, as it does if it cannot allocate memory.

    Args:
        kernel: Kernel whose first argument is a ticket.
        varying: Names of arrays that differ from call to call, in the order in which they
            are passed. Those in ``arguments`` are examples: calls pass arrays of the same
            dtype and shape, but for the length of the first axis.
        arguments: Further arguments of the kernel by name. Arrays are contiguous. Only
            their addresses are kept, so the caller keeps their memory.

    Example:
        >>> from firstlayer.kernels.phases import _digit_phases
        >>> from firstlayer.kernels.runtime.pool import whole_range
        >>> tables, at, out = np.zeros((2, 3, 256, 1)), np.array([7]), np.zeros((1, 2))
        >>> tables[0] = 1
        >>> call = bind(
        ...     _digit_phases, varying=["positions"], positions=at, tables=tables, out=out
        ... )
        >>> call(*whole_range(1), at.ctypes.data, len(at)), out.tolist()
        (0, [[1.0, 0.0]])
    """
    names = list(inspect.signature(kernel.py_func).parameters)[1:]
    if sorted(names) != sorted(arguments) or not set(varying) <= set(names):
        raise TypeError(f"arguments must be {names}, got {list(arguments)}")
    argument_types, words = [TICKET_TYPE], [(1, parameter) for parameter in range(5)]
    for name in names:
        value = arguments[name]
        first = 5 + 2 * varying.index(name) if name in varying else None
        argument_types.append(numba.typeof(value))
        words += _words(name, value, first)
    entry = _entry(kernel, tuple(argument_types), tuple(source for _, source in words))
    block = (ctypes.c_int64 * len(words))(*(word for word, _ in words))
    return functools.partial(entry, block)


def _words(name: str, value: Any, first: int | None) -> list[tuple[int, int]]:
    """Return the words of an argument: a number of the block, and the source of the word.

    A word is the number itself, or its product with a parameter of the call.

    Args:
        name: Name of the argument.
        value: Its value, or an example.
        first: Number of the parameter with its address, before that with its length; None
            if the argument stays the same.
    """
    if not isinstance(value, np.ndarray):
        return [(_bits(value), _BLOCK)]
    if not value.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous, got strides {value.strides}")
    words = [(word, _BLOCK) for word in array_words(value)]
    if value is FLAG:
        words[DATA] = 1, _FLAG
    elif first is not None:
        words[DATA], words[LENGTH] = (1, first), (1, first + 1)
        words[COUNT] = int(np.prod(value.shape[1:])), first + 1
    return words


def _bits(value: Any) -> int:
    """Return a number, a bool or None as a word."""
    if type(value) is np.float32:
        return int(value.view(np.int32))
    if isinstance(value, float):
        return int(np.float64(value).view(np.int64))
    return int(value or 0)


@global_compiler_lock
@functools.cache
def _entry(kernel: Any, argument_types: tuple[Any, ...], sources: tuple[int, ...]) -> Any:
    """Return a C function of a block and of the parameters that calls the kernel."""
    address, kernel_type = compiled_function(kernel, argument_types)
    count, module = 1 + max(sources), ir.Module()
    function_type = ir.FunctionType(I64, [I64] * (1 + count))
    function = ir.Function(module, function_type, name="call_kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.inttoptr(function.args[0], I64.as_pointer())
    flag = builder.alloca(I64)
    builder.store(I64(0), flag)
    # The kernel's result, which is none, and its exception, which only its status tells.
    passed = [builder.alloca(pointer.pointee) for pointer in kernel_type.args[:2]]
    for index, (source, type_) in enumerate(
        zip(sources, kernel_type.args[2:], strict=True)
    ):
        word = builder.load(builder.gep(block, [I64(index)]))
        if source == _FLAG:
            word = builder.ptrtoint(flag, I64)
        elif source != _BLOCK:
            word = builder.mul(word, function.args[1 + source])
        passed.append(_converted(builder, word, type_))
    target = builder.inttoptr(I64(address), kernel_type.as_pointer())
    status = builder.call(target, passed)
    has_failed = builder.icmp_signed("!=", status, status.type(0))
    builder.ret(builder.select(has_failed, I64(-1), builder.load(flag)))
    code, engine = machine_code(function)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * count)
    entry = prototype(code)
    entry.engine = engine  # pyright: ignore  # keeps the code
    return entry


def machine_code(function: ir.Function) -> tuple[int, Any]:
    """Return the address of a small LLVM function, and the object that keeps its code."""
    # Not Numba's code generator, whose optimizations take ten times as long.
    target = llvm.Target.from_default_triple().create_target_machine(opt=1, jit=True)
    module = llvm.parse_assembly(str(function.module))
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine.get_function_address(function.name), engine


def _converted(builder: Any, word: Any, type_: Any) -> Any:
    """Return a word as a value of an LLVM type."""
    if isinstance(type_, ir.PointerType):
        return builder.inttoptr(word, type_)
    if isinstance(type_, ir.DoubleType):
        return builder.bitcast(word, type_)
    if isinstance(type_, ir.FloatType):
        return builder.bitcast(builder.trunc(word, ir.IntType(32)), type_)
    return word if type_ == I64 else builder.trunc(word, type_)
