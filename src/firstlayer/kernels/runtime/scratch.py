"""Scratch memory of a kernel, from malloc.

An array that Numba allocates makes a kernel count references to all of its arrays, which
doubles the time to compile it, and turns an interrupt that is pending into a SystemError. A
scratch row is not counted: the kernel frees it.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from .compile import BYTE_POINTER, I64
from .numba_abi import array_struct


def _scratch_row(typingctx, width, like):
    """Return ``width`` numbers of the type of ``like``; see :func:`is_allocated`.

    The numbers are not initialized. The kernel calls :func:`free_row` at its end.
    """
    row_type = types.Array(like, 1, "C")

    def codegen(context, builder, signature, args):
        # Here, because a process that finds kernels in the cache does not need it.
        from numba.np.arrayobj import populate_array

        itemsize = I64(like.bitwidth // 8)
        # One number more: malloc may return null for no bytes.
        size = builder.mul(builder.add(args[0], I64(1)), itemsize)
        malloc_type = ir.FunctionType(BYTE_POINTER, [I64])
        malloc = get_or_insert_function(builder.module, malloc_type, "malloc")
        row = context.make_array(row_type)(context, builder)
        populate_array(
            row,
            data=builder.bitcast(builder.call(malloc, [size]), row.data.type),
            shape=[args[0]],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return row._getvalue()

    return row_type(types.int64, like), codegen


def _is_allocated(typingctx, row):
    """Return whether there was memory for a scratch row."""

    def codegen(context, builder, signature, args):
        data = array_struct(context, builder, row, args[0]).data
        return builder.icmp_unsigned("!=", data, data.type(None))

    return types.boolean(row), codegen


def _free_row(typingctx, row):
    """Free a scratch row."""

    def codegen(context, builder, signature, args):
        free_type = ir.FunctionType(ir.VoidType(), [BYTE_POINTER])
        free = get_or_insert_function(builder.module, free_type, "free")
        data = array_struct(context, builder, row, args[0]).data
        builder.call(free, [builder.bitcast(data, BYTE_POINTER)])
        return context.get_dummy_value()

    return types.void(row), codegen


# Any: the declared signatures begin with the typing context that Numba passes itself.
scratch_row: Any = intrinsic(_scratch_row)
is_allocated: Any = intrinsic(_is_allocated)
free_row: Any = intrinsic(_free_row)
